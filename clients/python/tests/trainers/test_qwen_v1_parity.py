"""Qwen v1 of random shapes against transformers, which has its decoder as Qwen2: log-probabilities in float32."""

from __future__ import annotations

import json
import shutil
import sys

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file

from serving import FIXTURES, server

sys.path.append(str(FIXTURES))

import make_fixtures
import make_qwen_v1_fixtures as qwen_v1

SHAPES = 20
PROMPTS = 4
TOLERANCE = 1e-4
TEXT_FILES = ["qwen.tiktoken", "tokenizer_config.json", "generation_config.json"]


@pytest.mark.parametrize("shape", range(SHAPES))
def test_random_shapes(pytestconfig, tmp_path, rng, shape):
    own, model = random_model(rng)
    print(json.dumps(own))
    for name in TEXT_FILES:
        shutil.copy(FIXTURES / "qwen_v1" / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(own))
    save_file(qwen_v1.own_weights(model.state_dict()), tmp_path / "model.safetensors", metadata=dict(format="pt"))
    prompts = [rng.integers(0, own["vocab_size"], rng.integers(2, 150)).tolist() for _ in range(PROMPTS)]
    with server(pytestconfig.getoption("--server"), tmp_path, "--dtype", "float32") as client:
        scores = client.score(prompts)
    for prompt, score in zip(prompts, scores, strict=True):
        expected, _ = make_fixtures.logprobs(model, torch.tensor([prompt]))
        apart = np.abs(np.array(score.raw_logprobs[1:]) - expected[0].numpy()).max()
        assert apart < TOLERANCE, apart


def random_model(rng):
    """The configuration of a Qwen v1, and the Qwen2 that has its weights under other names."""
    heads, head_dim = int(rng.integers(1, 7)), int(16 * rng.integers(1, 5))
    width = int(rng.integers(3, 20) * 8)
    own = qwen_v1.own_config() | dict(
        vocab_size=qwen_v1.VOCAB + int(rng.integers(0, 60)),
        hidden_size=heads * head_dim,
        num_attention_heads=heads,
        kv_channels=head_dim,
        intermediate_size=2 * width,
        num_hidden_layers=int(rng.integers(1, 4)),
        layer_norm_epsilon=float(rng.choice([1e-5, 1e-6])),
        rotary_emb_base=int(rng.choice([10_000, 1_000_000])),
    )
    config = transformers.Qwen2Config(
        vocab_size=own["vocab_size"],
        hidden_size=own["hidden_size"],
        intermediate_size=width,
        num_hidden_layers=own["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=heads,
        rms_norm_eps=own["layer_norm_epsilon"],
        rope_parameters=dict(rope_type="default", rope_theta=own["rotary_emb_base"]),
        max_position_embeddings=own["seq_length"],
        bos_token_id=None,
        eos_token_id=None,
    )
    model = transformers.Qwen2ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    make_fixtures.randomize(model, int(rng.integers(2**32)))
    return own, model
