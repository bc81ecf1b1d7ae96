"""Log-probabilities of the samples under a reference, which the server computes, and their way to TRL's loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer

from ..types import Sample

POLICY = "policy"
"""Name of the resident adapter that is trained."""
INITIAL = "policy-initial"
"""Name of the resident adapter with which the training began, if it continues that of an earlier one."""
TRLS_INITIAL = "ref"
"""TRL's name for the same in the model."""

_NOT_SAMPLED = -1e4
"""Stands for the reference of a tool's token. The loss leaves these tokens out, but by a factor of 0: their divergence,
exp(reference - policy) - (reference - policy) - 1, must be finite, so this is below what a policy gives any token."""


@dataclass(frozen=True)
class Resident:
    """The policy that is served as a resident adapter, and the one under which its samples are scored."""

    generation: int
    """Of the adapter `POLICY`."""
    reference: str | None
    """Another resident adapter; None is the base without one."""


class ScoredToken(int):
    """A sampled token id with its log-probability under the reference.

    The trainers of TRL cut completions, add a tool's tokens and distribute them over ranks. Whatever they do with the
    ids, these stay together with their references.
    """

    reference: float


def scored_tokens(sample: Sample) -> list[int]:
    """The tokens of a sample, with its scores under the first reference."""
    tokens = []
    for token_id, reference in zip(sample.token_ids, sample.references[0].logprobs.tolist(), strict=True):
        token = ScoredToken(token_id)
        token.reference = reference
        tokens.append(token)
    return tokens


def is_lora(model: Any) -> bool:
    """Whether a LoRA adapter of the model is trained."""
    return is_peft_model(model) and model.peft_config[model.active_adapters[0]].peft_type == "LORA"


def computes_reference(model: Any) -> bool:
    """Whether TRL has made the model compute the reference: without its adapters, or with the initial one."""
    layer = next(module for module in model.modules() if isinstance(module, BaseTunerLayer))
    return layer.disable_adapters or layer.active_adapters == [TRLS_INITIAL]


def reference_logprobs(completions: Sequence[Sequence[int]], tokens: torch.Tensor) -> torch.Tensor:
    """The log-probabilities of completions under the reference, as TRL pads them.

    Args:
        completions: tokens of each completion; those that were sampled are `ScoredToken`.
        tokens: `[B, T]`, the same completions with padding on the right.

    Returns:
        `[B, T]`, float32, on the device of `tokens`.

    Raises:
        ValueError: the completions are others than those that were sampled last, or the server scored none of one.
    """
    logprobs = torch.zeros(tokens.shape)
    padded = torch.zeros(tokens.shape, dtype=tokens.dtype)
    for row, completion in enumerate(completions):
        if not any(isinstance(token, ScoredToken) for token in completion):
            raise ValueError(
                f"server_reference: completion {row} has no log-probabilities under the reference. They come with the "
                "samples of rollout_client.trl; if a rollout_func of your own samples, leave server_reference out"
            )
        values = [getattr(token, "reference", _NOT_SAMPLED) for token in completion]
        logprobs[row, : len(completion)] = torch.tensor(values)
        padded[row, : len(completion)] = torch.tensor(completion)
    lengths = torch.tensor([len(completion) for completion in completions])
    is_completion = torch.arange(tokens.shape[1]) < lengths[:, None]
    if len(completions) != len(tokens) or not torch.equal(tokens.cpu().where(is_completion, 0), padded):
        raise ValueError(
            "server_reference: the reference is asked for other completions than were sampled last; leave "
            "server_reference out, so that the trainer computes it"
        )
    return logprobs.to(tokens.device)
