"""The experts of samples as ms-swift takes them for its routing replay (R3): on the choice, and batched by its code."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from swift.model import get_processor
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.utils import build_routed_experts_batch
from swift.template import get_template

from rollout_client.swift._encoder import TemplateEncoder
from rollout_client.types import FinishReason, Sample
from serving import FIXTURES

PROMPT_TOKENS, TOKENS, LAYERS, TOP_K = 7, 4, 3, 2


@pytest.fixture(scope="module")
def template():
    processor = get_processor(str(FIXTURES / "qwen3_moe"), model_type="qwen3_moe", torch_dtype=torch.float32)
    return get_template(processor, template_type="chatml")


def rolled_out(template, experts):
    """ms-swift's sample after a rollout whose tokens took these experts."""
    encoder = TemplateEncoder(template)
    assert encoder.num_hidden_layers == LAYERS
    messages = [{"role": "user", "content": "what is it"}]
    request = encoder.encode({"messages": messages})
    none = np.zeros(TOKENS, np.float32)
    sample = Sample(0, 0, [5, 6, 7, 8], none, none, None, FinishReason.LENGTH, [], 1, 0, [], [])
    output = encoder.output(request, [9] * PROMPT_TOKENS, sample, experts)
    made = OnPolicySample(messages=messages)
    made.apply_rollout_output(rollout_output=output)
    made.encoded = {"length": PROMPT_TOKENS + TOKENS}
    return made


@pytest.mark.parametrize("padding_free", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_ms_swift_aligns_experts_with_tokens(rng, template, dtype, padding_free):
    rows, length, longest = PROMPT_TOKENS + TOKENS - 1, PROMPT_TOKENS + TOKENS, 16
    experts = [rng.integers(0, 256, (rows, LAYERS, TOP_K)).astype(dtype) for _ in range(2)]
    samples = [rolled_out(template, given) for given in experts]
    layout = SimpleNamespace(padding_side="right", padding_free=padding_free)
    batch = build_routed_experts_batch(
        samples,
        seq_lengths=torch.tensor([length] * 2),
        max_seq_len=longest,
        template=layout,
        device=torch.device("cpu"),
        router_replay_mode="R3",
    )
    padded = batch.reshape(2, length, LAYERS, TOP_K) if padding_free else batch
    assert padded.shape == (2, length if padding_free else longest, LAYERS, TOP_K)
    for found, given in zip(padded, experts, strict=True):
        assert torch.equal(found[:rows], torch.from_numpy(given.astype(np.int64)))
        assert not found[rows:].any(), "the last token was not run"


def test_a_choice_without_experts_has_none(template):
    assert rolled_out(template, None).routed_experts is None
