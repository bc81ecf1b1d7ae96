"""The experts that tokens take: returned, equal in every batch, those of transformers, and given back."""

from __future__ import annotations

import concurrent.futures
import json
from dataclasses import replace

import numpy as np
import pytest

from models import read_model, read_safetensors, write_model
from rollout_client import (
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    PromptRouting,
    PromptTokens,
    Routing,
    RoutingInfo,
    Sample,
    SamplingParams,
    join_routing,
)
from rollout_client.fleet import Fleet
from rollout_client.replay import Recorder, Verdict, read_receipts, replay
from serving import FIXTURES, LONG, PUSH_MODEL, bits, server, wait_for

FLAGS = ["--dtype", "float32", "--return-routing"]
INFO = {
    "qwen3_moe": RoutingInfo([0, 2], 2, 8, True),
    "qwen3_moe_60": RoutingInfo([1], 4, 60, True),
    "qwen2_moe": RoutingInfo([0, 1], 3, 16, True),
    "mixtral": RoutingInfo([0, 1], 2, 8, True),
}
WIDE = 300
"""Experts of a model whose experts take two bytes."""
SAMPLING = SamplingParams(max_tokens=20, seed=5, ignore_eos=True)
GREEDY = replace(SAMPLING, temperature=0, max_tokens=300)
# A prefix of several blocks that two prompts share, one block less a token, and a single token.
SHARED = [(7 * i * i + 3) % 500 for i in range(70)]
PROMPTS = [[*SHARED, 5, 6, 7], [*SHARED, 8], SHARED[:15], [9]]


def write_wide_model(directory):
    """The model `qwen3_moe` with more experts, which are copies of its own."""
    rng, own = np.random.default_rng(7), INFO["qwen3_moe"].experts
    base = read_model(FIXTURES / "qwen3_moe")
    state = {}
    for name, array in base.items():
        if name.endswith("mlp.gate.weight"):
            state[name] = rng.standard_normal((WIDE, array.shape[1]), np.float32).astype(array.dtype)
        elif ".experts.0." in name:
            copies = [name.replace(".experts.0.", f".experts.{i}.") for i in range(WIDE)]
            state |= {copy: base[copies[i % own]] for i, copy in enumerate(copies)}
        elif ".experts." not in name:
            state[name] = array
    config = write_model(directory, FIXTURES / "qwen3_moe", state) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts": WIDE}))
    return directory


@pytest.fixture(scope="module", params=[*INFO, "wide"])
def model(request, tmp_path_factory):
    """Name and directory of a model with experts."""
    if request.param == "wide":
        return request.param, write_wide_model(tmp_path_factory.mktemp("wide") / "model")
    return request.param, FIXTURES / request.param


@pytest.fixture(scope="module")
def served(binary, model):
    """A client of a server that returns experts, which tests of a model share."""
    with server(binary, model[1], *FLAGS) as client:
        yield client


@pytest.fixture(scope="module")
def small(binary):
    """A client of a server of the model `qwen3_moe` that returns experts."""
    with server(binary, FIXTURES / "qwen3_moe", *FLAGS) as client:
        yield client


def whole(output, sample):
    """The experts of a prompt and its sample, of which the last token was not run."""
    prompt, tokens = len(output.prompt_token_ids), len(sample.token_ids)
    assert output.routing.first_token == 0 and len(output.routing.experts) == prompt
    assert sample.routing.first_token == prompt and len(sample.routing.experts) == tokens - 1
    return join_routing(output.routing, sample.routing)


def ask(client, prompts=PROMPTS, n=3, sampling=SAMPLING, **options):
    """What a sample and its experts are, for every sample."""
    outputs = client.generate(prompts, n, sampling, return_text=False, return_routing=True, **options)
    return [(bits(sample), whole(output, sample).hash) for output in outputs for sample in output.samples]


def score_bits(score):
    return np.float64(score.raw_logprobs[1:]).tobytes(), np.float64(score.logprobs[1:]).tobytes()


def others(experts, count, shift=1):
    """Experts that no router has chosen, as many different ones for each token."""
    return ((experts.astype(int) + shift) % count).astype(experts.dtype)


def test_a_model_says_which_layers_have_experts(model, served):
    assert served.info().routing == INFO.get(model[0], RoutingInfo([0, 2], 2, WIDE, True))


@pytest.mark.parametrize("name", INFO)
def test_tokens_take_the_experts_that_transformers_takes(binary, name):
    reference = read_safetensors(FIXTURES / name / "reference.safetensors")
    tokens, expected = reference["tokens"].tolist(), reference["routing"]
    with server(binary, FIXTURES / name, *FLAGS) as client:
        outputs = client.generate(tokens, sampling=SamplingParams(max_tokens=1), return_text=False, return_routing=True)
        scores = client.score(tokens, return_routing=True)
    for output, score, experts in zip(outputs, scores, expected, strict=True):
        assert output.routing.experts.dtype == np.uint8
        assert np.array_equal(output.routing.experts, experts)
        assert np.array_equal(score.routing.experts, experts[:-1])


def test_experts_are_the_same_alone_in_a_batch_in_a_group_cached_and_scored(served):
    outputs = served.generate(PROMPTS, 3, SAMPLING, return_text=False, return_routing=True)
    assert max(output.routing.experts.max() for output in outputs) < served.info().routing.experts
    sequences = [output.prompt_token_ids + s.token_ids for output in outputs for s in output.samples]
    routings = [whole(output, sample) for output in outputs for sample in output.samples]
    scores = served.score(sequences, return_routing=True)
    assert [score.routing.hash for score in scores] == [routing.hash for routing in routings]
    for output in outputs:
        for sample in output.samples:
            served.reset_prefix_cache()
            alone = ask(served, [output.prompt_token_ids], 1, replace(SAMPLING, seed=sample.seed))
            cached = ask(served, [output.prompt_token_ids], 1, replace(SAMPLING, seed=sample.seed))
            assert alone == cached == [(bits(sample), whole(output, sample).hash)]
    for _ in range(2):
        (again,) = served.generate([PROMPTS[0]], 1, SAMPLING, return_text=False, return_routing=True)
    assert again.samples[0].cached_tokens >= 64 and again.routing.hash == outputs[0].routing.hash


def test_experts_take_two_bytes_if_there_are_many(model, served):
    (score,) = served.score([SHARED], return_routing=True)
    assert score.routing.experts.dtype == (np.uint16 if model[0] == "wide" else np.uint8)
    assert (score.routing.experts.max() > 255) == (model[0] == "wide")


@pytest.mark.parametrize("flags", [["--tp", "2"], ["--max-batch-tokens", "32"], ["--speculation", "off"]], ids=" ".join)
def test_experts_depend_on_no_flag(binary, small, flags):
    # A greedy sample of a tiny model repeats itself, which drafts foresee.
    greedy = {"prompts": [[5, 6, 7] * 20], "n": 1, "sampling": GREEDY}
    with server(binary, FIXTURES / "qwen3_moe", *FLAGS, *flags) as client:
        found = ask(client), ask(client, **greedy), [score.routing.hash for score in _scores(client)]
    accepted = small.status().accepted_tokens
    assert found == (ask(small), ask(small, **greedy), [score.routing.hash for score in _scores(small)])
    assert small.status().accepted_tokens > accepted


def _scores(client):
    return client.score(PROMPTS, return_routing=True)


def test_experts_that_are_given_back_change_no_bit(served):
    outputs = served.generate(PROMPTS, 2, SAMPLING, return_text=False, return_routing=True)
    again = served.generate(
        PROMPTS, 2, SAMPLING, return_text=False, return_routing=True, routing=[output.routing for output in outputs]
    )
    for first, second in zip(outputs, again, strict=True):
        assert [bits(s) for s in first.samples] == [bits(s) for s in second.samples]
        assert [whole(first, s).hash for s in first.samples] == [whole(second, s).hash for s in second.samples]
    pairs = [(output, sample) for output in outputs for sample in output.samples]
    sequences = [output.prompt_token_ids + sample.token_ids for output, sample in pairs]
    routings = [whole(output, sample) for output, sample in pairs]
    free = served.score(sequences, return_routing=True)
    # First all tokens are forced, then some in the middle.
    part = [Routing(r.first_token + 3, r.experts[3:9]) if len(r.experts) > 9 else None for r in routings]
    for given in (routings, part):
        scores = served.score(sequences, return_routing=True, routing=given)
        assert [score_bits(score) for score in scores] == [score_bits(score) for score in free]
        assert [score.routing.hash for score in scores] == [score.routing.hash for score in free]
    for (output, sample), score in zip(pairs, free, strict=True):
        raw = np.float32(score.raw_logprobs[len(output.prompt_token_ids) :])
        assert raw.tobytes() == sample.raw_logprobs.tobytes()


def test_other_experts_change_log_probabilities_from_their_token_on(served):
    sequence, first, last = SHARED, 20, 40
    count = served.info().routing.experts
    (free,) = served.score([sequence], return_routing=True)
    given = Routing(first, others(free.routing.experts[first:last], count))
    (forced,) = served.score([sequence], return_routing=True, routing=[given])
    # The same experts, in the order of the weights that the routers give them.
    assert np.array_equal(np.sort(forced.routing.experts[first:last]), np.sort(given.experts))
    assert np.array_equal(forced.routing.experts[:first], free.routing.experts[:first])
    # The log-probability of a token follows from the tokens before it.
    assert forced.raw_logprobs[: first + 1] == free.raw_logprobs[: first + 1]
    assert forced.raw_logprobs[first + 1] != free.raw_logprobs[first + 1]
    assert np.abs(np.subtract(forced.raw_logprobs[first + 1 :], free.raw_logprobs[first + 1 :])).max() > 1e-3
    # All tokens take the experts of the reply, and say the same.
    (again,) = served.score([sequence], return_routing=True, routing=[forced.routing])
    assert score_bits(again) == score_bits(forced) and again.routing.hash == forced.routing.hash


def test_a_prefix_with_given_experts_is_not_that_of_the_routers(served):
    count, block = served.info().routing.experts, served.info().block_size
    first = 2 * block + 3
    served.reset_prefix_cache()
    (free,) = _cached(served, None)
    given = Routing(first, others(free.routing.experts[first:], count))
    other = Routing(first, others(free.routing.experts[first:], count, 2))
    found = {}
    for name, routing, cached in [
        ("free", None, len(SHARED) // block * block),
        ("given", given, first // block * block),
        ("given", given, len(SHARED) // block * block),
        ("other", other, first // block * block),
        ("free", None, len(SHARED) // block * block),
        ("other", other, len(SHARED) // block * block),
    ]:
        (output,) = _cached(served, routing)
        assert output.samples[0].cached_tokens == cached, name
        this = bits(output.samples[0]), whole(output, output.samples[0]).hash
        assert found.setdefault(name, this) == this, name
    assert len({logprobs for (_, _, logprobs, _), _ in found.values()}) == 3
    assert found["free"] == (bits(free.samples[0]), whole(free, free.samples[0]).hash)


def _cached(client, routing):
    return client.generate([[*SHARED, 5]], 1, SAMPLING, return_text=False, return_routing=True, routing=[routing])


def test_a_stream_has_the_experts_of_each_prompt_once(small):
    prompts, seen = set(), {}
    for event in small.generate_stream(PROMPTS, 2, SAMPLING, return_text=False, return_routing=True):
        if isinstance(event, PromptTokens):
            prompts.add(event.prompt_index)
        elif isinstance(event, PromptRouting):
            assert event.prompt_index in prompts and event.prompt_index not in seen
            seen[event.prompt_index] = event.routing.hash
        elif isinstance(event, Sample):
            assert event.prompt_index in seen
    outputs = small.generate(PROMPTS, 2, SAMPLING, return_text=False, return_routing=True)
    assert seen == {output.prompt_index: output.routing.hash for output in outputs}


def test_a_sample_that_was_cut_has_the_experts_of_its_tokens(small):
    asked = {"return_text": False, "return_routing": True, "request_id": "cut"}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        start = small.status().generated_tokens
        running = pool.submit(small.generate, PROMPTS[:2], 16, LONG, **asked)
        wait_for(small, lambda status: status.generated_tokens > start + 20, "generating")
        small.abort("cut")
        outputs = running.result(120)
    samples = [(output, sample) for output in outputs for sample in output.samples if sample.token_ids]
    assert {sample.finish_reason for _, sample in samples} == {FinishReason.ABORTED}
    scores = small.score([o.prompt_token_ids + s.token_ids for o, s in samples], return_routing=True)
    assert [whole(o, s).hash for o, s in samples] == [score.routing.hash for score in scores]


def test_experts_are_those_of_the_policy_that_a_push_brought(small):
    state = read_model(FIXTURES / "qwen3_moe")
    before = ask(small)
    gates = {name: np.roll(array, 1, 0) for name, array in state.items() if name.endswith("mlp.gate.weight")}
    small.push_full(state | gates)
    after = ask(small)
    assert not {digest for _, digest in before} & {digest for _, digest in after}
    small.push_full(state)
    assert ask(small) == before
    small.sleep(1)
    small.wake()
    assert ask(small) == before


def test_a_fleet_passes_experts_on(small):
    outputs = small.generate(PROMPTS, 2, SAMPLING, return_text=False, return_routing=True)
    with Fleet([small.address]) as fleet:
        assert ask(fleet) == ask(small)
        assert ask(fleet, routing=[o.routing for o in outputs]) == ask(small)
        routings = [outputs[0].routing, None]
        scores = fleet.score(PROMPTS[:2], return_routing=True, routing=routings)
        with pytest.raises(InvalidArgument, match=r"^routing\[1\]"):
            fleet.score(PROMPTS[:2], routing=[None, Routing(0, np.full((1, 2, 2), 8, np.uint8))])
        with pytest.raises(InvalidArgument, match=r"^routing\[1\]\.experts: expected"):
            fleet.score(PROMPTS[:2], routing=[None, Routing(0, np.zeros((1, 2, 2)))])
    alone = small.score(PROMPTS[:2], return_routing=True, routing=routings)
    assert [(score_bits(s), s.routing.hash) for s in scores] == [(score_bits(s), s.routing.hash) for s in alone]


def test_receipts_have_a_digest_of_the_experts(binary, small, tmp_path):
    path = tmp_path / "samples.jsonl"
    with Recorder(small, path) as recorder:
        (output,) = recorder.generate([SHARED], 2, SAMPLING, return_text=False, return_routing=True)
        recorder.generate([SHARED], 1, SAMPLING, return_text=False)
        with pytest.raises(InvalidArgument, match=r"^routing: receipts have no experts"):
            recorder.generate([SHARED], routing=[output.routing])
    receipts = list(read_receipts(path))
    assert [receipt.routing for receipt in receipts] == [*(whole(output, s).hash for s in output.samples), None]
    assert replay(small, receipts).same
    wrong = replay(small, [replace(receipts[0], routing="0f" * 32)]).results[0]
    assert wrong.verdict is Verdict.DIFFERS and "experts" in wrong.difference
    with server(binary, FIXTURES / "qwen3_moe", "--dtype", "float32") as client:
        assert replay(client, receipts).same, "as far as the server returns them"


def _with(experts, value):
    """The experts with another one first, of one token in one layer."""
    changed = experts.copy()
    changed[30, 1, 0] = value
    return changed


@pytest.mark.parametrize(
    ("first_token", "change"),
    [
        (0, lambda experts: experts[:, :1]),
        (0, lambda experts: np.repeat(experts, 2, axis=1)),
        (0, lambda experts: experts[:, :, :1]),
        (0, lambda experts: np.concatenate([experts, experts[:1]])),
        (1, lambda experts: experts),
        (len(SHARED), lambda experts: experts[:1]),
        (2**32 - 1, lambda experts: experts[:1]),
        (0, lambda experts: _with(experts, 8)),
        (0, lambda experts: _with(experts, 255)),
        (0, lambda experts: _with(experts, experts[30, 1, 1])),
        (0, lambda experts: experts.astype(np.uint16)),
    ],
    ids=["layers", "layers", "top_k", "tokens", "beyond", "behind", "far", "expert", "expert", "twice", "two bytes"],
)
def test_what_is_wrong_with_given_experts_is_named(small, first_token, change):
    (free,) = small.generate([SHARED], 1, SAMPLING, return_text=False, return_routing=True)
    routing = Routing(first_token, change(free.routing.experts))
    with pytest.raises(InvalidArgument, match=r"^prompts\[1\]\.routing"):
        small.generate([SHARED, SHARED], sampling=SAMPLING, return_text=False, routing=[None, routing])
    with pytest.raises(InvalidArgument, match=r"^routing\[1\]"):
        small.score([SHARED, SHARED], routing=[None, routing])


def test_a_dense_model_has_no_experts(binary):
    with server(binary, PUSH_MODEL) as client:
        assert client.info().routing is None
        routing = Routing(0, np.zeros((1, 1, 1), np.uint8))
        for use in (client.score, lambda prompts, **options: client.generate(prompts, return_text=False, **options)):
            with pytest.raises(InvalidArgument, match=r"^return_routing: this model has no experts"):
                use([SHARED], return_routing=True)
            with pytest.raises(InvalidArgument, match=r"routing(\[0\])?: this model has no experts"):
                use([SHARED], routing=[routing])


def test_a_server_without_the_flag_returns_no_experts_but_takes_them(binary, small):
    (free,) = small.score([SHARED], return_routing=True)
    routing = Routing(5, others(free.routing.experts[5:30], 8))
    (expected,) = small.score([SHARED], routing=[routing])
    with server(binary, FIXTURES / "qwen3_moe", "--dtype", "float32") as client:
        assert client.info().routing == replace(INFO["qwen3_moe"], returned=False)
        for use in (client.score, lambda prompts, **options: client.generate(prompts, return_text=False, **options)):
            with pytest.raises(FailedPrecondition, match=r"^return_routing: .*--return-routing"):
                use([SHARED], return_routing=True)
        (score,) = client.score([SHARED], routing=[routing])
    assert score_bits(score) == score_bits(expected) != score_bits(free)
