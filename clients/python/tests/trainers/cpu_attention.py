"""What AsyncGRPOTrainer takes from a GPU, in plain torch: TRL 1.16 has no other way to train on a CPU."""

from __future__ import annotations

import torch
from trl.experimental.async_grpo import async_grpo_trainer, packing


class PlainAttention:
    """Of the kernel package `flash-attn3`, what TRL calls."""

    @staticmethod
    def flash_attn_varlen_func(
        query, key, value, query_starts, key_starts, _longest_query, _longest_key, *, softmax_scale=None, **_
    ):
        """Causal attention of sequences that lie one after the other; `[tokens, heads, head_dim]`."""
        parts, groups = [], query.shape[1] // key.shape[1]
        for index in range(len(query_starts) - 1):
            q = query[query_starts[index] : query_starts[index + 1]]
            span = slice(key_starts[index], key_starts[index + 1])
            k, v = (tensor[span].repeat_interleave(groups, 1) for tensor in (key, value))
            seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
            scores = torch.einsum("qhd,khd->hqk", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
            parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v))
        return torch.cat(parts)


def train_on_cpu():
    """Replaces the two functions that need a GPU."""
    packing._flash_attn = lambda: PlainAttention
    async_grpo_trainer.get_peak_flops_per_device = lambda *_, **__: 1e12
