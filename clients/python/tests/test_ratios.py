"""Log-probabilities for importance ratios: of the whole vocabulary, whatever tokens a request leaves out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollout_client import Returns, SamplingParams
from rollout_client._ratios import ratio_logprobs, ratio_returns
from serving import FIXTURES, assert_idle, server

PROMPTS = [[5, 6, 7], [9, 8]]
MOST = 1e-5
"""Rounding of the sum of two float32 numbers below 32."""


@pytest.fixture(scope="module")
def served(binary):
    """A client of a server that the tests share."""
    with server(binary, FIXTURES / "qwen2", "--dtype", "float32") as client:
        yield client
        assert_idle(client)


def sampled(client, rng, sampling):
    """For each sample its log-probabilities for a ratio and of the same weights in a trainer, and itself."""
    sampling = replace(sampling, max_tokens=8, seed=int(rng.integers(2**32)))
    returns = ratio_returns(sampling)
    outputs = client.generate(PROMPTS, 4, sampling, return_text=False, returns=returns)
    pairs = [(output.prompt_token_ids, sample) for output in outputs for sample in output.samples]
    scores = client.score(
        [[*prompt, *sample.token_ids] for prompt, sample in pairs],
        sampling=SamplingParams(temperature=sampling.temperature),
    )
    for (prompt, sample), score in zip(pairs, scores, strict=True):
        yield ratio_logprobs(sample, sampling), np.float32(score.logprobs[len(prompt) :]), sample


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize(
    "left_out",
    [
        {"top_p": 0.8},
        {"top_k": 10},
        {"min_p": 0.3},
        {"min_tokens": 8, "stop_token_ids": list(range(400))},
        {"allowed_token_ids": list(range(100))},
        {"bad_words": [chr(c) for c in range(ord("a"), ord("z") + 1)]},
        {"structured_outputs": {"regex": "[a-z ]{1,9}"}},
    ],
    ids=lambda left_out: next(iter(left_out)),
)
def test_they_are_of_all_tokens(served, rng, left_out, temperature):
    filtered = 0
    for found, expected, sample in sampled(served, rng, SamplingParams(temperature=temperature, **left_out)):
        assert np.abs(found - expected).max() < MOST
        filtered = max(filtered, np.abs(sample.logprobs - expected).max())
        if sample.returned is not None:
            assert not any(map(len, sample.returned.support_ids)), "the mass is enough"
    assert filtered > 100 * MOST, "nothing was left out"


def test_nothing_more_is_asked_for_where_nothing_is_left_out(served, rng):
    for temperature in (0.7, 1.0):
        assert ratio_returns(SamplingParams(temperature=temperature)) == Returns()
        for found, expected, _ in sampled(served, rng, SamplingParams(temperature=temperature)):
            assert np.array_equal(found, expected)
    assert ratio_returns(SamplingParams(temperature=1, top_p=0.8)) == Returns(), "raw_logprobs are enough"
    assert ratio_returns(SamplingParams(temperature=0, top_p=0.8)) == Returns()


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"logit_bias": {3: 5.0}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_changed_logits_have_no_mass(served, rng, changes):
    """At temperature 1 the raw ones are right; at another one those that were sampled from stay."""
    for found, expected, _ in sampled(served, rng, SamplingParams(top_p=0.8, **changes)):
        assert np.abs(found - expected).max() < MOST
    for found, _, sample in sampled(served, rng, SamplingParams(temperature=0.7, top_p=0.8, **changes)):
        assert np.array_equal(found, sample.logprobs)
