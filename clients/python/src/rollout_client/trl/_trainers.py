"""TRL's trainers with `RolloutGeneration` instead of vLLM."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import trl
import trl.generation.vllm_generation as trl_generation

from ..client import RolloutClient
from ._generation import RolloutGeneration
from ._references import TRLS_INITIAL, computes_reference, is_lora, reference_logprobs

Trainer = TypeVar("Trainer", bound=type)

_NAME = "VLLMGeneration"
_SWAPPED = threading.Lock()
"""Held while a trainer is created, because the replaced name belongs to TRL's modules."""


def use_rollout_server(trainer: Trainer) -> Trainer:
    """Returns a subclass of a trainer that generates with rollout-server instead of vLLM.

    Args:
        trainer: a class of TRL that has `use_vllm` (GRPO, RLOO, and others that generate through `VLLMGeneration`),
            or a subclass of one.

    Returns:
        The class. Its constructor also takes `client=RolloutClient(...)`, for a server with tokens or TLS, and
        `server_reference=True`, with which the server computes the reference of a LoRA for `beta` above 0.
    """

    class OnRolloutServer(trainer):
        def __init__(
            self,
            *args: Any,
            client: RolloutClient | None = None,
            server_reference: bool | str = False,
            **options: Any,
        ) -> None:
            make = functools.partial(RolloutGeneration, client=client, server_reference=server_reference)
            with _generation_of(trainer, make):
                super().__init__(*args, **options)
            if not isinstance(getattr(self, "vllm_generation", None), RolloutGeneration):
                raise ValueError(
                    f"{trainer.__name__} on rollout-server: set use_vllm=True, vllm_mode='server' and "
                    f"vllm_server_base_url in its {type(self.args).__name__}"
                )
            self._completions: list[list[int]] = []
            if server_reference:
                _check_reference(self)

        def _generate(self, *args: Any, **options: Any) -> Any:
            with self.vllm_generation.rollout():
                generated = super()._generate(*args, **options)
            if self.vllm_generation.server_reference:
                self._completions = generated[1]
            return generated

        def _get_per_token_logps_and_entropies(
            self,
            model: Any,
            input_ids: torch.Tensor,
            attention_mask: torch.Tensor,
            logits_to_keep: int,
            *args: Any,
            **options: Any,
        ) -> tuple:
            if self.vllm_generation.server_reference and computes_reference(self.accelerator.unwrap_model(model)):
                return reference_logprobs(self._completions, input_ids[:, -logits_to_keep:]), None, None
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **options
            )

    for name in ("__name__", "__qualname__", "__doc__"):
        setattr(OnRolloutServer, name, getattr(trainer, name))
    return OnRolloutServer


def _check_reference(trainer: Any) -> None:
    """Raises ValueError if the server cannot compute what the trainer would use as its reference."""
    if not getattr(trainer, "beta", 0.0) or not hasattr(trainer, "ref_model"):
        raise ValueError(
            "server_reference: this trainer uses no reference, because its beta is 0 or it has none; set beta in "
            "GRPOConfig or RLOOConfig, or leave server_reference out"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not is_lora(model):
        raise ValueError(
            "server_reference: a push of the whole policy replaces the base, so that the server has no reference; "
            "train a LoRA (peft_config=LoraConfig(...)), or leave server_reference out, so that TRL loads a reference"
        )
    generation = trainer.vllm_generation
    needed = 1 + (isinstance(generation.server_reference, str) or TRLS_INITIAL in model.peft_config)
    if trainer.accelerator.is_main_process and generation.vllm_client.client.info().max_adapters < needed:
        raise ValueError(
            "server_reference: the policy must be a resident adapter, so that its base stays beside it: "
            f"start the server with --max-adapters {needed}, or leave server_reference out, so that the trainer "
            "computes the reference"
        )


@contextmanager
def _generation_of(trainer: type, make: Callable[..., RolloutGeneration]) -> Iterator[None]:
    """Replaces `VLLMGeneration` in the modules of a trainer and its bases."""
    modules = {sys.modules[base.__module__] for base in trainer.__mro__ if base.__module__ in sys.modules}
    modules = {module for module in modules if hasattr(module, _NAME)} | {trl_generation}
    with _SWAPPED:
        kept = {module: getattr(module, _NAME) for module in modules}
        try:
            for module in modules:
                setattr(module, _NAME, make)
            yield
        finally:
            for module, original in kept.items():
                setattr(module, _NAME, original)


GRPOTrainer = use_rollout_server(trl.GRPOTrainer)
RLOOTrainer = use_rollout_server(trl.RLOOTrainer)
