"""Rollout routing replay (R3): in the trainer's forward pass, tokens take the experts that they took in the server.

The trainer's own routers weigh them, and so get gradients. Two implementations round differently, so that their routers
may choose other experts where two are nearly equal; with the replay both compute the same function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from rollout_client import PromptOutput, join_routing


def routers(model: torch.nn.Module) -> list[Qwen3MoeTopKRouter]:
    """The routers of a Qwen3-MoE, by layer; none in any other model."""
    return [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]


def sampled_experts(groups: Sequence[PromptOutput], width: int) -> torch.Tensor | None:
    """`[S, width, layers, k]`: the experts that the tokens of all samples took; None if the server returned none.

    The padding takes the first `k`, as does the last token of a sample, which the server does not run: none of the
    log-probabilities depends on these.
    """
    if groups[0].routing is None:
        return None
    taken = [join_routing(group.routing, one.routing).experts for group in groups for one in group.samples]
    layers, top_k = taken[0].shape[1:]
    experts = torch.arange(top_k).repeat(len(taken), width, layers, 1)
    for row, of_sample in zip(experts, taken, strict=True):
        row[: len(of_sample)] = torch.from_numpy(of_sample)
    return experts


@contextlib.contextmanager
def replay(model: torch.nn.Module, experts: torch.Tensor | None) -> Iterator[None]:
    """Inside, the tokens that the model gets take these experts, `[S, T, layers, k]`; None leaves it to the routers."""

    def hook(router: Qwen3MoeTopKRouter, chosen: torch.Tensor) -> torch.utils.hooks.RemovableHandle:
        def take(_router: torch.nn.Module, _inputs: object, output: tuple[torch.Tensor, ...]) -> tuple:
            logits, weights, _own = output
            taken = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
            if router.norm_topk_prob:
                taken = taken / taken.sum(-1, keepdim=True)
            return logits, taken.to(weights.dtype), chosen

        return router.register_forward_hook(take)

    if experts is None:
        yield
        return
    handles = [hook(*pair) for pair in zip(routers(model), experts.flatten(0, 1).unbind(1), strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
