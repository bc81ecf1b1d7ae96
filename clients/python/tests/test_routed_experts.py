"""The experts of tokens between arrays and messages, and in the form of trainers: no server is needed here."""

from __future__ import annotations

import math

import numpy as np
import pytest

import rollout_client
from fake_server import GenerateResponse, completion, scores, summary
from rollout_client import Internal, InvalidArgument, PromptRouting, Routing, RoutingInfo, _proto, join_routing

DTYPES = {8: np.uint8, 256: np.uint8, 257: np.uint16, 1024: np.uint16}


def random_experts(rng, tokens, experts=8, layers=3, top_k=2):
    return rng.integers(0, experts, (tokens, layers, top_k)).astype(DTYPES[experts])


def message(first_token, experts):
    """As a server writes it."""
    _, layers, top_k = experts.shape
    wide = experts.dtype.newbyteorder("<")
    return {
        "first_token": first_token,
        "layers": layers,
        "top_k": top_k,
        "experts": experts.astype(wide).tobytes(),
    }


def same(routing, first_token, experts):
    return (
        routing.first_token == first_token
        and routing.experts.dtype == experts.dtype
        and np.array_equal(routing.experts, experts)
    )


def answer(fake, prompts, completions):
    """Generate answers with these experts of prompts, and of completions that have a token more."""
    routed = [GenerateResponse(prompt_routing={"prompt_index": i, "routing": r}) for i, r in enumerate(prompts)]
    sampled = [completion(i, token_ids=range(3, 3 + tokens), routing=r) for i, (tokens, r) in enumerate(completions)]
    fake.answers["Generate"] = lambda request, context: iter([*routed, *sampled, summary()])


@pytest.mark.parametrize("experts", DTYPES)
def test_experts_of_replies_are_arrays(call, fake, rng, experts):
    prompt, sampled = (random_experts(rng, tokens, experts) for tokens in (4, 2))
    last = random_experts(rng, 0, experts)
    answer(fake, [message(0, prompt), message(0, prompt[:1])], [(3, message(4, sampled)), (1, message(1, last))])
    outputs = call(lambda client: client.generate([[5, 6, 7, 8], [9]], return_routing=True))
    assert fake.requests[0].return_routing
    assert same(outputs[0].routing, 0, prompt) and same(outputs[0].samples[0].routing, 4, sampled)
    assert outputs[0].routing.experts.flags.writeable
    assert same(outputs[1].routing, 0, prompt[:1])
    # A completion of one token has no rows, so its bytes do not show how wide an expert is.
    assert outputs[1].samples[0].routing.experts.shape == (0, 3, 2)
    joined = join_routing(outputs[1].routing, outputs[1].samples[0].routing)
    assert same(joined, 0, prompt[:1])


def test_experts_that_were_not_asked_are_none(call, fake):
    fake.answers["Generate"] = lambda request, context: iter([completion(), summary()])
    fake.answers["Score"] = lambda request, context: scores(request)
    (output,) = call(lambda client: client.generate([[5]]))
    (score,) = call(lambda client: client.score([[5]]))
    assert output.routing is None and output.samples[0].routing is None and score.routing is None
    assert not fake.requests[0].return_routing and not fake.requests[0].prompts[0].HasField("routing")
    assert not fake.requests[1].return_routing and not fake.requests[1].routing


def test_a_stream_has_the_experts_of_a_prompt_as_an_event(fake, rng):
    experts = random_experts(rng, 2, 257)
    answer(fake, [message(0, experts)], [(1, message(2, experts[:0]))])
    with rollout_client.RolloutClient(fake.address) as client:
        _, event, sample, _ = client.generate_stream([[5, 6]], return_routing=True)
    assert isinstance(event, PromptRouting) and event.prompt_index == 0 and same(event.routing, 0, experts)
    assert sample.routing.first_token == 2


@pytest.mark.parametrize("experts", DTYPES)
def test_experts_of_scores_are_joined_from_parts(call, fake, rng, experts):
    whole = random_experts(rng, 6, experts)

    def part(index, start, tokens, rows):
        logprobs = [math.nan] * tokens
        score = {"raw_logprobs": logprobs, "logprobs": logprobs, "routing": message(start, rows)}
        return _proto.SCORE.response(sequence_index=index, start=start, score=score)

    # The last token of a sequence has none, unless it is the only one.
    parts = [part(0, 4, 3, whole[4:]), part(1, 0, 1, whole[:1]), part(0, 0, 4, whole[:4])]
    fake.answers["Score"] = lambda request, context: iter(parts)
    first, second = call(lambda client: client.score([[1] * 7, [1]], return_routing=True))
    assert fake.requests[0].return_routing
    assert same(first.routing, 0, whole) and same(second.routing, 0, whole[:1])
    # The last part has only the last token.
    parts[:] = [part(0, 0, 6, whole), part(0, 6, 1, whole[:0])]
    (score,) = call(lambda client: client.score([[1] * 7], return_routing=True))
    assert same(score.routing, 0, whole)


@pytest.mark.parametrize("size", [1, 35, 37, 108])
def test_experts_of_another_size_are_an_error(call, fake, rng, size):
    """Three tokens of three layers and two experts have 18 bytes or 36."""
    answer(fake, [message(0, random_experts(rng, 1)) | {"experts": bytes(size)}], [(1, {"layers": 3, "top_k": 2})])
    with pytest.raises(Internal, match=rf"sent {size} bytes for the experts \[3, 3, 2\]"):
        call(lambda client: client.generate([[5, 6, 7]], return_routing=True))


@pytest.mark.parametrize("experts", DTYPES)
def test_what_came_is_sent_as_it_came(call, fake, rng, experts):
    given = Routing(2, random_experts(rng, 3, experts))
    expected = message(2, given.experts)
    answer(fake, [], [(1, {})] * 4)
    nothing = Routing(0, given.experts[:0])
    call(lambda client: client.generate([[5] * 9] * 4, routing=[given, None, nothing, ()]))
    prompts = fake.requests[0].prompts
    assert prompts[0].routing == _proto.message("Routing")(**expected)
    assert all(prompt.routing == _proto.message("Routing")() for prompt in prompts[1:])
    fake.answers["Score"] = lambda request, context: scores(request)
    call(lambda client: client.score([[5] * 9] * 2, routing=[None, given]))
    first, second = fake.requests[1].routing
    assert first == _proto.message("Routing")() and second == _proto.message("Routing")(**expected)
    # Arrays of any layout.
    layouts = np.asfortranarray(given.experts), np.repeat(given.experts, 2, axis=1)[:, ::2]
    given = [Routing(2, layout) for layout in layouts]
    call(lambda client: client.generate([[5] * 9] * 4, routing=given * 2))
    assert [prompt.routing.experts for prompt in fake.requests[-1].prompts] == [expected["experts"]] * 4


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        ([np.zeros((1, 2, 2), np.uint8)], r"^routing\[0\]: expected a Routing, such as Sample.routing, got ndarray"),
        (
            [Routing(0, np.zeros((1, 4), np.uint8))],
            r"^routing\[0\]\.experts: expected \[tokens, .* shape \[1, 4\]",
        ),
        ([Routing(0, np.zeros((1, 2, 2), np.int64))], r"^routing\[0\]\.experts: .* got int64 of shape \[1, 2, 2\]"),
        ([Routing(0, np.zeros((1, 2, 2)))], r"^routing\[0\]\.experts: .* got float64"),
        ([Routing(0, [[[1, 2]]])], r"^routing\[0\]\.experts: .* got int64"),
        ([Routing(-1, np.zeros((1, 2, 2), np.uint8))], r"^routing\[0\]\.first_token: "),
        ([Routing("a", np.zeros((1, 2, 2), np.uint8))], r"^routing\[0\]\.first_token: "),
        ([None, None], r"^routing: 2 for 1 prompts; give a list for each"),
    ],
)
def test_what_is_no_routing_is_refused_by_its_name(call, fake, routing, words):
    with pytest.raises(InvalidArgument, match=words):
        call(lambda client: client.generate([[5, 6]], routing=routing))
    with pytest.raises(InvalidArgument, match=words):
        call(lambda client: client.score([[5, 6]], routing=routing))
    assert fake.requests == []


def test_parts_that_follow_one_another_are_joined(rng):
    experts = random_experts(rng, 9)
    parts = [Routing(2, experts[:4]), Routing(6, experts[4:4]), Routing(6, experts[4:5]), Routing(7, experts[5:])]
    assert same(join_routing(*parts), 2, experts)
    assert same(join_routing(parts[1]), 6, experts[:0])
    empty = Routing(0, np.zeros((0, 0, 0), np.uint8))
    assert same(join_routing(parts[0], empty), 2, experts[:4])
    with pytest.raises(InvalidArgument, match=r"^parts: none"):
        join_routing()
    with pytest.raises(InvalidArgument, match=r"^parts\[1\]\.first_token: 7, but the part before ends at 6"):
        join_routing(parts[0], parts[3])
    with pytest.raises(InvalidArgument, match=r"^parts\[1\]\.experts: \[layers, top_k\] are \[3, 1\], but \[3, 2\]"):
        join_routing(parts[0], Routing(6, experts[4:, :, :1]))


@pytest.mark.parametrize("experts", DTYPES)
def test_trainers_get_a_row_for_every_layer(rng, experts):
    routing = Routing(0, random_experts(rng, 5, experts))
    found = routing.routed_experts([1, 2, 4], 6)
    assert found.shape == (5, 6, 2) and found.dtype == DTYPES[experts]
    assert np.array_equal(found[:, [1, 2, 4]], routing.experts) and not found[:, [0, 3, 5]].any()
    with pytest.raises(InvalidArgument, match=r"^layers: 2 for experts of 3 layers"):
        routing.routed_experts([0, 1], 6)
    with pytest.raises(InvalidArgument, match=r"^num_hidden_layers: 4, but layer 4 has experts"):
        routing.routed_experts([1, 2, 4], 4)


def test_hashes_tell_routings_apart(rng):
    experts = random_experts(rng, 4)
    changed = experts.copy()
    changed[3, 2, 1] ^= 1
    others = [Routing(1, experts), Routing(0, changed), Routing(0, experts[:3]), Routing(0, experts.transpose(0, 2, 1))]
    hashes = {routing.hash for routing in (Routing(0, experts), *others)}
    assert len(hashes) == 5 and all(len(digest) == 64 for digest in hashes)
    assert Routing(0, experts.copy()).hash == Routing(0, experts).hash


def test_a_model_says_how_its_experts_are_returned(call, fake):
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response(
        routing={"layers": [0, 2], "top_k": 2, "experts": 8, "returned": True}
    )
    assert call(lambda client: client.info()).routing == RoutingInfo([0, 2], 2, 8, True)
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response()
    assert call(lambda client: client.info()).routing is None
