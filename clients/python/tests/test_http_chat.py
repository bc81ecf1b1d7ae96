"""`/v1/chat/completions`, its render, `/tokenize` and `/detokenize`: beside vLLM's recorded answers, beside gRPC, and
through the `openai` package."""

from __future__ import annotations

import asyncio
import json
from typing import Literal

import numpy as np
import openai
import pydantic
import pytest

from rollout_client import Chat, SamplingParams, ServerProcess
from serving import FIXTURES, SMALL_CACHE
from vllm_answers import RECORDED, ask, assert_like_vllm, events, recorded, same_request

MODEL = str(FIXTURES / "llama")
VOCABULARY = 512
CHAT = "/v1/chat/completions"
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hi."}]

OTHER_TEXT = "another model: the stop did not come"
FEWER = "what vLLM says to itself"
DIFFERENCES = {
    "bytes": {"choices.0.logprobs.content": OTHER_TEXT},
    "eos": {"choices.0.*.bytes": OTHER_TEXT},
    "json_object": {"choices.0.finish_reason": OTHER_TEXT},
    "plain-tools-named": {"choices.0.finish_reason": OTHER_TEXT},
    "plain-tools-named-stream": {
        "events?0?.3.choices.0.finish_reason": OTHER_TEXT,
        "events?0?.3.choices.0.delta.*": OTHER_TEXT,
    },
    "plain-tools-required": {"choices.0.message.tool_calls": OTHER_TEXT, "choices.0.finish_reason": OTHER_TEXT},
    "stream-logprobs": {
        "events?0?.*.usage.completion_tokens_details": "is null in answers alone",
    },
    "render-chat": {
        "output_mode": FEWER,
        "re*": FEWER,
        "stream_options": FEWER,
        "*_transfer_params": FEWER,
        "sampling_params.*": FEWER,
    },
}
"""Differences that are meant, by the exchange's name."""
OTHER_STATUS = {
    "continue-both": "continue_final_message alone says what is meant",
    "tools-absent-choice": "the format of calls is told by the template, not by a flag",
    "tools-auto": "the format of calls is told by the template, not by a flag",
    "tools-named": "a call can be forced without a flag",
    "tools-required": "a call can be forced without a flag",
    "top_logprobs-21": "up to 100 are reported",
}
"""Exchanges that we answer with another status than vLLM, and why."""


@pytest.fixture(scope="module")
def http(binary):
    with ServerProcess(binary, FIXTURES / MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        yield server


@pytest.fixture
def ai(http):
    with openai.OpenAI(base_url=f"http://{http.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def names(family):
    return [json.loads(line)["name"] for line in (RECORDED / f"{family}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", [*names("chat"), *names("tokens")])
def test_answers_are_like_vllms(http, name):
    exchange = recorded(name)
    short = name.partition("/")[2]
    ours, theirs = same_request(http.http_address, exchange, MODEL), exchange.answer
    if short in OTHER_STATUS:
        assert ours.status != theirs.status and {ours.status, theirs.status} == {200, 400}, ours
    elif ours.status == 200 and theirs.status == 200:
        assert_like_vllm(ours, exchange, DIFFERENCES.get(short))
    else:
        # Our errors all have one type, and name the member by its path where vLLM often names none.
        assert (ours.status, list(ours.body)) == (theirs.status, list(theirs.body)), ours
        assert list(ours.body["error"]) == list(theirs.body["error"]) and ours.body["error"]["code"] == ours.status
        assert ours.body["error"]["param"], ours.body


def chat(http, **members):
    answer = ask(http.http_address, "POST", CHAT, {"messages": HELLO, **members})
    assert answer.status == 200, answer.body
    return answer


def tokens_of(http, **members):
    return ask(http.http_address, "POST", "/tokenize", members).body["tokens"]


def test_http_and_grpc_give_the_same_bits(http):
    for temperature in (0.0, 0.8):
        sampling = SamplingParams(max_tokens=12, temperature=temperature, top_p=0.9, seed=7, min_tokens=2, stop=["qu"])
        (group,) = http.client.generate([HELLO], n=3, sampling=sampling, top_logprobs=2)
        members = {
            "n": 3,
            "max_tokens": 12,
            "temperature": temperature,
            "top_p": 0.9,
            "seed": 7,
            "min_tokens": 2,
            "stop": "qu",
            "return_token_ids": True,
            "logprobs": True,
        }
        for mode, of in (("processed", "logprobs"), ("raw", "raw_logprobs")):
            answer = chat(http, logprobs_mode=mode, **members).body
            assert answer["prompt_token_ids"] == tokens_of(http, messages=HELLO)
            for choice, sample in zip(answer["choices"], group.samples, strict=True):
                assert (choice["token_ids"], choice["message"]["content"]) == (sample.token_ids, sample.text)
                assert logprobs_of(choice).tobytes() == getattr(sample, of).tobytes()
        stream = events(chat(http, stream=True, logprobs_mode="raw", **members).body)
        for index, sample in enumerate(group.samples):
            parts = [event["choices"][0] for event in stream if event["choices"][0]["index"] == index]
            assert parts[0]["delta"] == {"role": "assistant", "content": ""}
            assert [token for part in parts[1:] for token in part["token_ids"]] == sample.token_ids
            assert "".join(part["delta"].get("content", "") for part in parts) == sample.text
            values = np.concatenate([logprobs_of(part) for part in parts if part["logprobs"]])
            assert values.tobytes() == sample.raw_logprobs.tobytes()
            assert parts[-1]["finish_reason"] == ("length" if sample.finish_reason.name == "LENGTH" else "stop")


def logprobs_of(choice):
    values = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return np.float32([-np.inf if value == -9999 else value for value in values])


def test_the_prompt_is_what_the_members_say(http):
    """SmolLM2's template without its system message: roles, trimmed contents, and the generation prompt."""
    turns = [{"role": "user", "content": "Say hi."}, {"role": "assistant", "content": "Hello, my"}]
    user = "<|im_start|>user\nSay hi.<|im_end|>\n"
    for members, text in (
        ({}, user + "<|im_start|>assistant\nHello, my<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, user + "<|im_start|>assistant\nHello, my<|im_end|>\n"),
        ({"continue_final_message": True}, user + "<|im_start|>assistant\nHello, my"),
    ):
        tokens = tokens_of(http, messages=turns, **members)
        assert tokens == tokens_of(http, prompt=text)
        assert ask(http.http_address, "POST", "/detokenize", {"tokens": tokens}).body == {"prompt": text}
        rendered = ask(http.http_address, "POST", f"{CHAT}/render", {"messages": turns, **members}).body
        assert rendered["token_ids"] == tokens and rendered["model"] == MODEL
        given = Chat(turns, **members)
        through_grpc = http.client.generate([given], sampling=SamplingParams(max_tokens=1), prompt_logprobs=True)
        assert through_grpc[0].prompt_logprobs.token_ids == tokens


@pytest.mark.parametrize(
    "members",
    [
        {"n": 3, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
        {"logit_bias": {"300": 9.0}, "presence_penalty": 0.5, "frequency_penalty": 0.1, "repetition_penalty": 1.1},
        {"allowed_token_ids": [300, 301, 302], "ignore_eos": True, "min_tokens": 2},
        {"logprobs": True, "top_logprobs": 2, "prompt_logprobs": 1},
        {"logprobs": True, "logprob_token_ids": [5, 6], "stop_token_ids": [7], "bad_words": ["a"]},
        {"structured_outputs": {"regex": "[ab]{4}"}, "include_stop_str_in_output": True, "stop": ["bb"]},
    ],
)
def test_a_rendered_chat_is_a_body_with_the_chats_samples(http, members):
    body = {"messages": HELLO, "max_tokens": 6, "seed": 3, **members}
    expected = chat(http, return_token_ids=True, **body).body
    rendered = ask(http.http_address, "POST", f"{CHAT}/render", body).body
    answer = ask(http.http_address, "POST", "/inference/v1/generate", rendered).body
    tokens = [choice["token_ids"] for choice in expected["choices"]]
    assert [choice["token_ids"] for choice in answer["choices"]] == tokens
    if "logprobs" in members:
        logprobs = [entry["logprob"] for entry in expected["choices"][0]["logprobs"]["content"]]
        assert [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]] == logprobs
    assert (answer["prompt_logprobs"] is None) == ("prompt_logprobs" not in members)


def test_a_stream_is_rendered_as_one_and_an_unknown_model_is_not(http):
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    rendered = ask(http.http_address, "POST", f"{CHAT}/render", body).body
    assert rendered["stream"] and rendered["return_token_ids"] and rendered["stream_options"]["include_usage"]
    assert ask(http.http_address, "POST", f"{CHAT}/render", {**body, "model": "other"}).status == 404


def test_openais_package(http, ai):
    plain = ai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, n=2, seed=3, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in plain.choices] == [0, 1] and plain.usage.completion_tokens <= 12
    assert all(len(entry.top_logprobs) == 3 for entry in plain.choices[0].logprobs.content)
    whole = plain.choices[0].message.content
    stream = ai.chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=6, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens and chunks[-1].choices == []
    with ai.chat.completions.stream(model=MODEL, messages=HELLO, max_tokens=6, seed=3) as helper:
        assert "".join(event.delta for event in helper if event.type == "content.delta") == whole

    async def main():
        address = f"http://{http.http_address}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            calls = (
                client.chat.completions.create(model=MODEL, messages=HELLO, max_tokens=6, seed=3) for _ in range(8)
            )
            return [answer.choices[0].message.content for answer in await asyncio.gather(*calls)]

    assert asyncio.run(main()) == [whole] * 8


def test_parsed_answers(http, ai):
    """`.parse()` sends the model's JSON schema, and the grammar makes every answer one of it."""

    class Sum(pydantic.BaseModel):
        left: Literal[1, 2]
        right: bool

    # JSON may have any white space, and this model would go on with it.
    texts = [ask(http.http_address, "POST", "/detokenize", {"tokens": [i]}).body["prompt"] for i in range(VOCABULARY)]
    bias = {str(i): -100 for i, text in enumerate(texts) if text.isspace()}
    parse = ai.chat.completions.parse
    answer = parse(
        model=MODEL, messages=HELLO, max_tokens=200, temperature=1, seed=1, response_format=Sum, n=4, logit_bias=bias
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Sum) and choice.finish_reason == "stop", choice
    choices = {"structured_outputs": {"choice": ["yes", "no"]}}
    answer = ai.chat.completions.create(model=MODEL, messages=HELLO, temperature=1, n=8, extra_body=choices)
    assert {choice.message.content for choice in answer.choices} <= {"yes", "no"}


def test_errors_are_those_of_openais_package(ai):
    for error, members in (
        (openai.NotFoundError, {"model": "none"}),
        (openai.BadRequestError, {"messages": []}),
        (openai.BadRequestError, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"extra_body": {"chat_template": "{{ messages }}"}}),
        (openai.ConflictError, {"extra_body": {"if_weight_version": 7}}),
    ):
        with pytest.raises(error) as caught:
            ai.chat.completions.create(**{"model": MODEL, "messages": HELLO, "max_tokens": 2, **members})
        assert caught.value.body["message"], members
        with pytest.raises(error):
            ai.chat.completions.create(**{"model": MODEL, "messages": HELLO, "stream": True, **members})


@pytest.mark.parametrize(
    "members, param",
    [
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "tool_calls": {"name": "f"}}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "middle"}, "truncation_side"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"documents": [1]}, "documents[0]"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_is_wrong_is_named(http, members, param):
    answer = ask(http.http_address, "POST", CHAT, {"messages": HELLO, **members})
    assert (answer.status, answer.body["error"]["param"]) == (400, param), answer.body


def test_an_echo_begins_with_the_last_message(http):
    begun = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Well"}]}]
    members = {"max_tokens": 4, "seed": 1, "n": 2, "continue_final_message": True}

    def contents(**more):
        choices = chat(http, **members | more).body["choices"]
        stream = events(chat(http, stream=True, **members | more).body)
        for choice in choices:
            parts = [e["choices"][0]["delta"] for e in stream if e["choices"][0]["index"] == choice["index"]]
            assert "".join(part.get("content") or "" for part in parts) == choice["message"]["content"]
        return [choice["message"]["content"] for choice in choices]

    plain = contents(messages=begun)
    assert contents(messages=begun, echo=True) == [f"Well{content}" for content in plain]
    asked = {"add_generation_prompt": True, "continue_final_message": False}
    assert contents(echo=True, **asked) == contents(**asked), "the last message is the user's"


def test_members_that_ask_for_nothing_are_taken_and_others_are_named(http):
    nothing = {"functions": None, "function_call": "none", "modalities": ["text"], "audio": None, "echo": False}
    answer = chat(http, max_tokens=1, user="me", service_tier="auto", **nothing)
    assert answer.headers["x-ignored-members"] == "user, service_tier"


def test_a_chat_goes_on_until_the_context_is_full(http):
    answer = chat(http, ignore_eos=True).body
    assert answer["usage"]["total_tokens"] == http.client.info().max_model_len
    assert answer["choices"][0]["finish_reason"] == "length"


def test_tokens_of_texts_and_back(http):
    text = "One \U0001f600 <|im_end|>"
    answer = ask(http.http_address, "POST", "/tokenize", {"prompt": text, "return_token_strs": True}).body
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["token_strs"][-1] == "<|im_end|>" and answer["max_model_len"] == http.client.info().max_model_len
    assert ask(http.http_address, "POST", "/detokenize", {"tokens": answer["tokens"]}).body == {"prompt": text}
    for path, body, param in (
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [0] * (1 << 20 | 1)}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ):
        refused = ask(http.http_address, "POST", path, body)
        assert (refused.status, refused.body["error"]["param"]) == (400, param)


def test_the_tokenizers_configuration(http):
    """What vLLM answers with --enable-tokenizer-info-endpoint."""
    info = ask(http.http_address, "GET", "/tokenizer_info")
    config = json.loads((FIXTURES / MODEL / "tokenizer_config.json").read_text())
    assert info.status == 200 and info.content_type == "application/json"
    assert info.body["tokenizer_class"] == config["tokenizer_class"]
    template = FIXTURES / MODEL / "chat_template.jinja"
    expected = template.read_text() if template.exists() else config["chat_template"]
    assert info.body["chat_template"] == expected
