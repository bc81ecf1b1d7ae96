"""A trainer that replays the experts of samples (R3): transformers with the routing that the server returned."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from rollout_client import Routing, SamplingParams, join_routing
from serving import FIXTURES, server

sys.path.append(str(FIXTURES))

import make_expert_fixtures as experts
import make_fixtures

MODEL = FIXTURES / "qwen3_moe"
TOLERANCE = 1e-4
PROMPTS, TOKENS, SAMPLES = 6, 60, 4


def samples(client, rng):
    """Sequences, their prompts' lengths, the routing and the samples' log-probabilities."""
    lengths = rng.integers(1, 60, PROMPTS)
    prompts = [rng.integers(3, make_fixtures.VOCAB, length).tolist() for length in lengths]
    sampling = SamplingParams(max_tokens=TOKENS, seed=int(rng.integers(2**32)), ignore_eos=True)
    outputs = client.generate(prompts, SAMPLES, sampling, return_text=False, return_routing=True)
    for output in outputs:
        for sample in output.samples:
            tokens = output.prompt_token_ids + sample.token_ids
            routing = join_routing(output.routing, sample.routing).experts
            yield tokens, len(output.prompt_token_ids), routing, sample.raw_logprobs


def trained_logprobs(model, tokens, prompt, routing=None):
    """The log-probabilities that a trainer gives a sample; with `routing`, its tokens take these experts.

    The last token takes the first experts: none of the log-probabilities depends on them.
    """
    ids = torch.tensor([tokens])
    if routing is None:
        return make_fixtures.logprobs(model, ids)[0][0, prompt - 1 :].numpy()
    last = np.broadcast_to(np.arange(routing.shape[2], dtype=routing.dtype), (1, *routing.shape[1:]))
    rows = torch.from_numpy(np.concatenate([routing, last]).astype(np.int64))
    with experts.hooked(model, experts.replay(model.config, rows)):
        return make_fixtures.logprobs(model, ids)[0][0, prompt - 1 :].numpy()


@pytest.fixture
def model():
    return experts.load(MODEL)


def test_a_trainer_in_float32_computes_the_log_probabilities_of_the_server(pytestconfig, rng, model):
    flags = ["--dtype", "float32", "--return-routing"]
    with server(pytestconfig.getoption("--server"), MODEL, *flags) as client:
        made = list(samples(client, rng))
    for tokens, prompt, routing, logprobs in made:
        apart = np.abs(trained_logprobs(model, tokens, prompt, routing) - logprobs).max()
        assert apart < TOLERANCE, apart


def test_a_trainer_in_bfloat16_is_nearer_with_the_replay_than_without(pytestconfig, rng, model):
    with server(pytestconfig.getoption("--server"), MODEL, "--dtype", "bfloat16", "--return-routing") as client:
        made = list(samples(client, rng))
    make_fixtures.cast(model, torch.bfloat16)
    free, replayed = (
        np.concatenate(
            [
                np.abs(trained_logprobs(model, tokens, prompt, routing if given else None) - logprobs)
                for tokens, prompt, routing, logprobs in made
            ]
        )
        for given in (False, True)
    )
    print(f"mean difference {free.mean():.5f} without replay, {replayed.mean():.5f} with it")
    assert replayed.mean() <= free.mean()


def test_experts_that_the_trainer_gives_back_are_taken(pytestconfig, rng, model):
    """A trainer's own choice: the server computes what transformers does under other experts."""
    flags = ["--dtype", "float32", "--return-routing"]
    with server(pytestconfig.getoption("--server"), MODEL, *flags) as client:
        tokens, _, routing, _ = next(samples(client, rng))
        count = client.info().routing.experts
        choice = np.stack(
            [rng.permutation(count)[: routing.shape[2]] for _ in range(routing.shape[0] * routing.shape[1])]
        ).reshape(routing.shape)
        given = Routing(0, choice.astype(np.uint8))
        (score,) = client.score([tokens], routing=[given])
    apart = np.abs(trained_logprobs(model, tokens, 1, given.experts) - np.array(score.raw_logprobs[1:])).max()
    assert apart < TOLERANCE, apart
