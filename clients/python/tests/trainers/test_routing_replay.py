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
DENSE = FIXTURES / "mistral"
TOLERANCE = 1e-4
DENSE_RATIO = 1.5
"""Most times the mean difference of a dense model: the models differ in their random weights."""
BFLOAT16 = ["--dtype", "bfloat16"]
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


@pytest.mark.parametrize("name", experts.MODELS)
def test_a_trainer_in_bfloat16_is_as_near_with_the_replay_as_for_a_dense_model(pytestconfig, rng, name):
    """Without the replay, some tokens take other experts, and are much farther."""
    model = make_fixtures.cast(experts.load(FIXTURES / name), torch.bfloat16)
    with server(pytestconfig.getoption("--server"), FIXTURES / name, *BFLOAT16, "--return-routing") as client:
        made = list(samples(client, rng))
    free, replayed = (
        np.concatenate(
            [
                np.abs(trained_logprobs(model, tokens, prompt, routing if given else None) - logprobs)
                for tokens, prompt, routing, logprobs in made
            ]
        )
        for given in (False, True)
    )
    dense = dense_differences(pytestconfig.getoption("--server"), rng)
    for what, apart in (("without the replay", free), ("with it", replayed), ("Mistral, which is dense", dense)):
        print(f"{what}: mean difference {apart.mean():.4f}, 99.9th percentile {np.quantile(apart, 0.999):.3f}")
    assert replayed.mean() <= free.mean()
    assert replayed.mean() <= DENSE_RATIO * dense.mean()


def dense_differences(binary, rng):
    """Between server and trainer in bfloat16, for samples of a dense model with as many layers and columns."""
    model = make_fixtures.cast(make_fixtures.load(DENSE), torch.bfloat16)
    prompts = [rng.integers(3, make_fixtures.VOCAB, length).tolist() for length in rng.integers(1, 60, PROMPTS)]
    sampling = SamplingParams(max_tokens=TOKENS, seed=int(rng.integers(2**32)), ignore_eos=True)
    with server(binary, DENSE, *BFLOAT16) as client:
        outputs = client.generate(prompts, SAMPLES, sampling, return_text=False)
    pairs = ((output.prompt_token_ids, sample) for output in outputs for sample in output.samples)
    apart = [
        np.abs(trained_logprobs(model, prompt + sample.token_ids, len(prompt)) - sample.raw_logprobs)
        for prompt, sample in pairs
    ]
    return np.concatenate(apart)


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
