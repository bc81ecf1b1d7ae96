"""From arguments to messages: what a call puts on the wire, and what it refuses to put there."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import grpc
import numpy as np
import pytest

from fake_server import completion, scores, summary
from rollout_client import Chat, FinishReason, InvalidArgument, RolloutClient, SamplingParams, _parts, _proto
from rollout_client._seeds import prompt_seed


@pytest.fixture
def echo(fake):
    """Answers whatever is asked with as many one-token samples."""

    def generate(request, context):
        for prompt in range(len(request.prompts)):
            for sample in range(request.n):
                yield completion(prompt, sample)
        yield summary()

    fake.answers["Generate"] = generate
    fake.answers["Score"] = lambda request, context: scores(request)
    fake.answers["Abort"] = lambda request, context: _proto.ABORT.response()
    return fake


def test_generate_sends_every_argument(call, echo):
    sampling = SamplingParams(
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.125,
        repetition_penalty=1.25,
        presence_penalty=-0.5,
        frequency_penalty=0.25,
        logit_bias={3: -1.5, 9: 2.0},
        allowed_token_ids=[1, 2, 3],
        min_tokens=2,
        max_tokens=8,
        stop_token_ids=[7],
        stop=["\n\n", "stop"],
        ignore_eos=True,
        seed=2**64 - 1,
        skip_special_tokens=False,
        bad_words=["no", " no"],
        thinking_token_budget=0,
    )
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    out = call(
        lambda client: client.generate(
            ["text", [1, 2], (3,), np.array([4, 5], dtype=np.int64), chat],
            n=2,
            sampling=sampling,
            top_logprobs=5,
            top_logprobs_of="processed",
            logprob_token_ids=[9, 3],
            prompt_logprobs=True,
            prompt_logprob_token_ids=[[], [[5, 6]], np.array([[7]]), (), [[], (8,)]],
            return_text=False,
            request_id="mine",
            adapter="a",
            if_weight_version=0,
            min_weight_version=3,
        )
    )
    assert [len(output.samples) for output in out] == [2] * 5
    assert echo.requests == [
        _proto.GENERATE.request(
            request_id="mine",
            prompts=[
                {"text": "text"},
                {"tokens": {"ids": [1, 2]}, "logprob_token_ids": [{"ids": [5, 6]}]},
                {"tokens": {"ids": [3]}, "logprob_token_ids": [{"ids": [7]}]},
                {"tokens": {"ids": [4, 5]}},
                {"chat": {"messages": chat}, "logprob_token_ids": [{}, {"ids": [8]}]},
            ],
            n=2,
            sampling={
                "temperature": 0.5,
                "top_k": 40,
                "top_p": 0.75,
                "min_p": 0.125,
                "repetition_penalty": 1.25,
                "presence_penalty": -0.5,
                "frequency_penalty": 0.25,
                "logit_bias": {3: -1.5, 9: 2.0},
                "allowed_token_ids": [1, 2, 3],
                "min_tokens": 2,
                "max_tokens": 8,
                "stop_token_ids": [7],
                "stop": ["\n\n", "stop"],
                "ignore_eos": True,
                "seed": 2**64 - 1,
                "skip_special_tokens": False,
                "bad_words": ["no", " no"],
                "thinking_token_budget": 0,
            },
            top_logprobs=5,
            top_logprobs_of=2,
            logprob_token_ids=[9, 3],
            prompt_logprobs=True,
            adapter="a",
            if_weight_version=0,
            min_weight_version=3,
        )
    ]


def test_chats_are_sent_with_all_that_the_template_shows(call, echo):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"b": 1, "a": "é"}]},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]
    chat = Chat(messages, tools, [{"title": "t"}], {"x": [1]}, add_generation_prompt=False, continue_final_message=True)
    chat = replace(chat, chat_template="{{ x }}")
    call(lambda client: client.generate([messages, chat, Chat(messages[:1])]))
    as_json = (
        '[{"role": "user", "content": "a"}, {"role": "assistant", "content": null, "tool_calls": [{"b": 1, "a": "é"}]}]'
    )
    whole = {
        "messages_json": as_json,
        "tools_json": '[{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}]',
        "documents_json": '[{"title": "t"}]',
        "template_arguments_json": '{"x": [1]}',
        "add_generation_prompt": False,
        "continue_final_message": True,
        "chat_template": "{{ x }}",
    }
    sent = [{"messages_json": as_json}, whole, {"messages": messages[:1]}]
    assert echo.requests[0].prompts == _proto.GENERATE.request(prompts=[{"chat": chat} for chat in sent]).prompts


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"json": {"type": "object"}}, {"json_schema": '{"type": "object"}'}),
        ({"json": '{"type":"array"}'}, {"json_schema": '{"type":"array"}'}),
        ({"json": True}, {"json_schema": "true"}),
        ({"choice": ["a", "b"]}, {"choice": {"choices": ["a", "b"]}}),
        ({"choice": ()}, {"choice": {}}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json_object": True}, {"json_object": True}),
    ],
)
def test_structured_outputs_are_sent(call, echo, given, sent):
    call(lambda client: client.generate(["a"], sampling=SamplingParams(structured_outputs=given)))
    structured = echo.requests[0].sampling.structured_outputs
    assert structured == _proto.SamplingParamsMessage(structured_outputs=sent).structured_outputs
    assert structured.WhichOneof("kind") == next(iter(sent))


def test_defaults_are_sent_as_the_dataclass_shows_them(call, echo):
    call(lambda client: client.generate(["a"]))
    (request,) = echo.requests
    assert request.n == 1 and request.return_text and not request.prompt_logprobs and not request.stream_tokens
    assert not request.HasField("if_weight_version") and not request.HasField("min_weight_version")
    assert request.adapter == "" and request.request_id
    shown = SamplingParams()
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        assert request.sampling.HasField(name) and getattr(request.sampling, name) == getattr(shown, name)
    for name in ("frequency_penalty", "min_tokens", "max_tokens"):
        assert request.sampling.HasField(name) and getattr(request.sampling, name) == getattr(shown, name)
    assert not request.sampling.HasField("seed") and not request.sampling.allowed_token_ids


def test_each_prompt_may_have_sampling_of_its_own(call, echo):
    budgets = [SamplingParams(max_tokens=5, seed=1), SamplingParams(max_tokens=9, stop=["x"], top_k=-1)]
    call(lambda client: client.generate(["a", [2]], sampling=budgets))
    call(lambda client: client.generate(["a", [2]], sampling=tuple(budgets)))
    for request in echo.requests:
        first, second = (prompt.sampling for prompt in request.prompts)
        assert (first.max_tokens, first.seed, second.max_tokens, second.stop, second.top_k) == (5, 1, 9, ["x"], -1)
        assert not request.HasField("sampling") and not second.HasField("seed")
    call(lambda client: client.generate(["a", [2]], sampling=budgets[0]))
    assert echo.requests[-1].sampling.max_tokens == 5
    assert not any(prompt.HasField("sampling") for prompt in echo.requests[-1].prompts)


def test_random_prompts_arrive_as_they_are(call, echo):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [[rng.randrange(2**32) for _ in range(rng.randint(1, 50))] for _ in range(20)]
    as_given = [rng.choice([list, tuple, lambda ids: np.array(ids, dtype=np.uint32)])(ids) for ids in prompts]
    call(lambda client: client.generate(as_given))
    call(lambda client: client.score(as_given))
    assert [list(prompt.tokens.ids) for prompt in echo.requests[0].prompts] == prompts
    assert [list(sequence.ids) for sequence in echo.requests[1].sequences] == prompts


def test_request_ids_are_made_and_differ(call, echo):
    for _ in range(2):
        call(lambda client: client.generate(["a"]))
    first, second = (request.request_id for request in echo.requests)
    assert first and second and first != second


def test_score_sends_every_argument(call, echo):
    call(
        lambda client: client.score(
            [[1, 2], [3]],
            top_logprobs=2,
            sampling=SamplingParams(temperature=0.5),
            adapter="a",
            if_weight_version=1,
            min_weight_version=1,
            prompt_logprob_token_ids=[[[5, 6]], []],
        )
    )
    (request,) = echo.requests
    assert [[list(row.ids) for row in named.rows] for named in request.logprob_token_ids] == [[[5, 6]], []]
    assert [list(sequence.ids) for sequence in request.sequences] == [[1, 2], [3]]
    assert (request.top_logprobs, request.adapter, request.sampling.temperature) == (2, "a", 0.5)
    assert (request.if_weight_version, request.min_weight_version) == (1, 1)


def test_score_sends_what_describes_the_distribution_and_what_the_caller_changed(call, echo):
    call(lambda client: client.score([[1]], sampling=SamplingParams(temperature=0.5, allowed_token_ids=[1])))
    call(lambda client: client.score([[1]], sampling=SamplingParams(presence_penalty=0.5, max_tokens=5, seed=1)))
    distribution = {"temperature", "top_k", "top_p", "min_p"}
    sent = [{field.name for field, _ in request.sampling.ListFields()} for request in echo.requests]
    assert sent == [
        distribution | {"allowed_token_ids"},
        distribution | {"presence_penalty", "max_tokens", "seed"},
    ]


def test_abort_takes_one_some_or_all(call, echo):
    call(lambda client: client.abort("one"))
    call(lambda client: client.abort(["one", "two"]))
    call(lambda client: client.abort(all=True))
    assert [(list(request.request_ids), request.all) for request in echo.requests] == [
        (["one"], False),
        (["one", "two"], False),
        ([], True),
    ]


def test_empty_token_list_reaches_the_server_as_tokens(call, echo):
    """The server answers it, so that the message is the same for every client."""
    call(lambda client: client.generate([[]]))
    assert echo.requests[0].prompts[0].WhichOneof("kind") == "tokens"


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"prompts": "text"}, "prompts: "),
        ({"prompts": [1, 2]}, "prompts: "),
        ({"prompts": np.array([1, 2])}, "prompts: "),
        ({"prompts": {"role": "user", "content": "a"}}, "prompts: "),
        ({"prompts": ["a", 3.5]}, "prompts[1]: "),
        ({"prompts": [None]}, "prompts[0]: "),
        ({"prompts": [[1, -1]]}, "prompts[0]: "),
        ({"prompts": [[1, 2**32]]}, "prompts[0]: "),
        ({"prompts": [["a"]]}, "prompts[0]: "),
        ({"prompts": [np.array([1.5])]}, "prompts[0]: "),
        ({"prompts": [[{"content": "a"}]]}, "prompts[0][0].role: "),
        ({"prompts": [[{"role": "user", "content": "a"}, "b"]]}, "prompts[0][1]: "),
        ({"prompts": [[{"role": "user", "content": {1, 2}}]]}, "prompts[0][0].content: Object of type set"),
        ({"prompts": ["a", Chat([{"role": "tool", "content": "a", 3: 4}])]}, "prompts[1][0]: 3 is not a string"),
        ({"prompts": [[{"role": "user", "content": "a"}, {"role": 3}]]}, "prompts[0][1].role: "),
        ({"prompts": [[{"role": "user", "content": "\udcff"}]]}, "prompts[0][0].content: 'utf-8' codec"),
        ({"prompts": [[{"role": "\udcff", "content": "a"}]]}, "prompts[0][0].role: 'utf-8' codec"),
        ({"prompts": [[{"role": "tool", "content": "a", "name": "\udcff"}]]}, "prompts[0][0].name: 'utf-8' codec"),
        ({"prompts": [Chat("Hi")]}, "prompts[0]: expected a list of messages, got str"),
        ({"prompts": [Chat({"role": "user", "content": "a"})]}, "prompts[0]: expected a list of messages, got dict"),
        ({"prompts": [Chat([{"role": "user", "content": "a"}], tools={"a": 1})]}, "prompts[0].tools: expected a list"),
        ({"prompts": [Chat([{"role": "user", "content": "a"}], tools="add")]}, "prompts[0].tools: expected a list"),
        (
            {"prompts": [Chat([{"role": "user", "content": "a"}], template_arguments=[1])]},
            "prompts[0].template_arguments: expected a dict, got list",
        ),
        ({"prompts": [Chat([{"role": "user", "content": "a"}], tools=[{"a": math.nan}])]}, "prompts[0].tools: "),
        ({"prompts": [Chat([{"role": "user", "content": "a"}], add_generation_prompt=3.5)]}, "prompts[0].add_gen"),
        ({"n": -1}, "n: "),
        ({"n": 1.5}, "n: "),
        ({"top_logprobs": -1}, "top_logprobs: "),
        ({"top_logprobs_of": "cooked"}, "top_logprobs_of: 'cooked'"),
        ({"if_weight_version": -1}, "if_weight_version: "),
        ({"min_weight_version": 2**64}, "min_weight_version: "),
        ({"sampling": SamplingParams(temperature="hot")}, "sampling.temperature: "),
        ({"sampling": SamplingParams(top_k="5")}, "sampling.top_k: "),
        ({"sampling": SamplingParams(top_k=5.0)}, "sampling.top_k: "),
        ({"sampling": SamplingParams(ignore_eos="no")}, "sampling.ignore_eos: "),
        ({"sampling": SamplingParams(max_tokens=None)}, "sampling.max_tokens: "),
        ({"sampling": SamplingParams(seed=-1)}, "sampling.seed: "),
        ({"sampling": SamplingParams(seed=2**64)}, "sampling.seed: "),
        ({"sampling": SamplingParams(allowed_token_ids=[])}, "sampling.allowed_token_ids: "),
        ({"sampling": SamplingParams(allowed_token_ids=[-1])}, "sampling.allowed_token_ids: "),
        ({"sampling": SamplingParams(stop_token_ids=[2**32])}, "sampling.stop_token_ids: "),
        ({"sampling": SamplingParams(stop="a")}, "sampling.stop: "),
        ({"sampling": SamplingParams(stop=[1])}, "sampling.stop: "),
        ({"sampling": SamplingParams(allowed_token_ids=3)}, "sampling.allowed_token_ids: "),
        ({"sampling": SamplingParams(stop_token_ids=None)}, "sampling.stop_token_ids: "),
        ({"sampling": SamplingParams(logit_bias=[(1, 1.0)])}, "sampling.logit_bias: expected a dict"),
        ({"sampling": {"temperature": 0.5}}, "sampling: expected SamplingParams, got dict"),
        ({"sampling": [SamplingParams()] * 2}, "sampling: 2 for 1 prompts"),
        ({"sampling": [None]}, "sampling[0]: expected SamplingParams, got NoneType"),
        ({"sampling": [SamplingParams(stop="a")]}, "sampling[0].stop: "),
        ({"sampling": [SamplingParams(structured_outputs={})]}, "sampling[0].structured_outputs: "),
        ({"sampling": SamplingParams(logit_bias={-1: 1.0})}, "sampling.logit_bias[-1]: "),
        ({"sampling": SamplingParams(logit_bias={1: "a"})}, "sampling.logit_bias[1]: "),
        ({"sampling": SamplingParams(structured_outputs="a+")}, "sampling.structured_outputs: "),
        ({"sampling": SamplingParams(structured_outputs={})}, "sampling.structured_outputs: "),
        ({"sampling": SamplingParams(structured_outputs={"regexp": "a"})}, "sampling.structured_outputs: 'regexp'"),
        (
            {"sampling": SamplingParams(structured_outputs={"regex": "a", "choice": ["a"]})},
            "sampling.structured_outputs: ",
        ),
        ({"sampling": SamplingParams(structured_outputs={"regex": 3})}, "sampling.structured_outputs.regex: "),
        ({"sampling": SamplingParams(structured_outputs={"choice": "a"})}, "sampling.structured_outputs.choice: "),
        ({"sampling": SamplingParams(structured_outputs={"choice": [1]})}, "sampling.structured_outputs.choice: "),
        ({"sampling": SamplingParams(structured_outputs={"json": {"a": {1}}})}, "sampling.structured_outputs.json: "),
    ],
)
def test_what_does_not_fit_its_field_is_refused_by_name(call, echo, arguments, field):
    with pytest.raises(InvalidArgument) as error:
        call(lambda client: client.generate(**{"prompts": ["a"], **arguments}))
    assert str(error.value).startswith(field)
    assert isinstance(error.value, ValueError)
    assert echo.requests == []


@pytest.mark.parametrize("sequences", [["text"], [1, 2], [[1, -2]]])
def test_score_refuses_what_are_not_token_ids(call, echo, sequences):
    with pytest.raises(InvalidArgument, match=r"^sequences\[0\]: "):
        call(lambda client: client.score(sequences))


@pytest.mark.parametrize("rows", [[[[1]], [[2]]], [[1, 2]], [[[-1]]]])
def test_rows_of_named_tokens_are_lists_of_lists_for_each_prompt(call, echo, rows):
    for method in ("generate", "score"):
        with pytest.raises(InvalidArgument, match=r"^prompt_logprob_token_ids(: 2 for 1 prompts|\[0\]\[0\]: )"):
            call(lambda client, method=method: getattr(client, method)([[1, 2, 3]], prompt_logprob_token_ids=rows))


def test_abort_refuses_nothing_and_both(call, echo):
    for use in (lambda client: client.abort(), lambda client: client.abort("a", all=True)):
        with pytest.raises(InvalidArgument, match="request_ids"):
            call(use)


def test_numbers_that_only_the_server_can_judge_are_sent(call, echo):
    call(lambda client: client.generate(["a"], sampling=SamplingParams(temperature=math.nan, top_p=7.0)))
    assert math.isnan(echo.requests[0].sampling.temperature) and echo.requests[0].sampling.top_p == 7.0


def test_token_goes_with_every_call(call, echo):
    call(lambda client: client.generate(["a"]), token="secret")
    call(lambda client: client.score([[1]]), token="secret")
    call(lambda client: client.score([[1]]))
    assert [metadata.get("authorization") for metadata in echo.metadata] == ["Bearer secret", "Bearer secret", None]


def test_large_requests_and_replies_pass(fake):
    """More than gRPC's default limit of 4 MiB each way."""
    ids = list(range(2**21 - 10**6, 2**21)) * 2
    fake.answers["Generate"] = lambda request, context: iter(
        [completion(token_ids=request.prompts[0].tokens.ids), summary()]
    )
    with RolloutClient(fake.address) as client:
        assert client.generate([ids])[0].samples[0].token_ids == ids


@pytest.fixture
def small(monkeypatch):
    """Messages hold two prompts with an image, or many without."""
    monkeypatch.setattr(_parts, "MAX_MESSAGE_BYTES", _parts._OTHER_BYTES + 20_000)
    return {"prompts": [[i] for i in range(5)], "images": [[bytes(8_000)]] * 5, "request_id": "mine"}


def test_a_call_larger_than_a_message_is_sent_in_parts(call, echo, small):
    sampling = SamplingParams(seed=7, temperature=0.5)
    outputs = call(lambda client: client.generate(**small, n=2, sampling=sampling, top_logprobs=3, timeout=30))
    assert [[prompt.tokens.ids for prompt in r.prompts] for r in echo.requests] == [[[0], [1]], [[2], [3]], [[4]]]
    assert [output.prompt_token_ids for output in outputs] == small["prompts"]
    assert [(s.prompt_index, s.sample_index) for o in outputs for s in o.samples] == [
        (i, j) for i in range(5) for j in range(2)
    ]
    assert {(r.request_id, r.n, r.top_logprobs, r.sampling.seed) for r in echo.requests} == {("mine", 2, 3, 7)}
    limits = [request.time_limit_seconds for request in echo.requests]
    assert limits[0] == 30 and limits == sorted(limits, reverse=True) and limits[2] > 0
    first, *others = [prompt.sampling for request in echo.requests for prompt in request.prompts][1:]
    assert not first.ByteSize()
    assert [(other.seed, other.temperature) for other in others] == [(prompt_seed(7, i), 0.5) for i in (2, 3, 4)]


def test_parts_keep_the_sampling_of_each_prompt_and_draw_seeds_without_one(call, echo, small):
    each = [SamplingParams(seed=i, max_tokens=9) for i in range(5)]
    call(lambda client: client.generate(**small, sampling=each))
    assert [prompt.sampling.seed for request in echo.requests for prompt in request.prompts] == [0, 1, 2, 3, 4]
    echo.requests.clear()
    call(lambda client: client.generate(**small))
    assert len(echo.requests) == 3
    assert not any(prompt.HasField("sampling") for request in echo.requests for prompt in request.prompts)
    assert not any(request.HasField("time_limit_seconds") for request in echo.requests)


def test_the_parts_after_one_that_was_ended_end_at_once(call, fake, small):
    def generate(request, context):
        reason = 4 if len(fake.requests) == 1 else 5
        return [*(completion(i, finish_reason=reason) for i in range(len(request.prompts))), summary()]

    fake.answers["Generate"] = generate
    outputs = call(lambda client: client.generate(**small))
    assert [request.HasField("time_limit_seconds") for request in fake.requests] == [False, False, True]
    assert fake.requests[2].time_limit_seconds == 0
    assert [output.samples[0].finish_reason for output in outputs] == [FinishReason.LENGTH] * 2 + [
        FinishReason.ABORTED
    ] * 3


def test_errors_name_the_prompts_of_the_whole_call(call, fake, small):
    def generate(request, context):
        if len(fake.requests) == 2:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompts[1].tokens: no")
        return [*map(completion, range(len(request.prompts))), summary()]

    fake.answers["Generate"] = generate
    with pytest.raises(InvalidArgument, match=r"^prompts\[3\]\.tokens: no$"):
        call(lambda client: client.generate(**small))
    fake.requests.clear()
    small["images"] = [*small["images"][:4], [bytes(30_000)]]
    with pytest.raises(InvalidArgument, match=r"^prompts\[4\]: has 30.* bytes with its images"):
        call(lambda client: client.generate(**small))
    assert not fake.requests
