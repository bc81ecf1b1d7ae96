"""Tools in chats: shown to the model, and its calls found in what it writes, as OpenAI's own package sees them."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import openai
import pytest

from rollout_client import Chat, SamplingParams, ServerProcess
from scripted import PREFERRED, biased, write_scripted
from serving import FIXTURES, SMALL_CACHE
from vllm_answers import ask, assert_like_vllm, events, recorded

TEMPLATE = (FIXTURES / "chat_template" / "qwen2.5_tools.jinja").read_text()
ANSWERS = {
    "call": [
        "Let me see.",
        "\n<tool_call>\n",
        '{"name": "add", "argu',
        'ments": {"a": 1',
        ', "b": 2}}',
        "\n</tool_call>",
    ],
    "two": [
        "<tool_",
        'call>{"name": "add", "arguments": {"b": "<é>"}}</tool',
        '_call>\n<tool_call>{"name": "sub"}',
        "</tool_call>\n",
    ],
    "malformed": ["So: <tool_call>", '{"name": add}', "</tool_call> That", " was it."],
    "cut": ["Well. <tool_call>{", '"name": "add", ', "and no end "],
    "plain": ["The sum", " is 3."],
}
TEXTS = {name: "".join(parts) for name, parts in ANSWERS.items()}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} two numbers",
            "parameters": {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}},
        },
    }
    for name in ("add", "sub")
]
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture
def ai(scripted):
    with openai.OpenAI(base_url=f"http://{scripted[0].http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(ai, scripted, name, **members):
    return ai.chat.completions.create(model="", messages=QUESTION, tools=TOOLS, **biased(scripted[1], name), **members)


def joined(stream):
    """The message and the end of one streamed sample."""
    content, calls, reason = "", {}, None
    for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
                call["arguments"] += part.function.arguments or ""
            reason = choice.finish_reason or reason
    return content, list(calls.values()), reason


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_found_and_nothing_is_lost(ai, scripted, name):
    content, calls = {
        "call": ("Let me see.", [("add", '{"a": 1, "b": 2}')]),
        "two": (None, [("add", '{"b": "<é>"}'), ("sub", "{}")]),
    }.get(name, (TEXTS[name], []))
    (choice,) = create(ai, scripted, name).choices
    assert choice.message.content == content
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []] == calls
    assert choice.finish_reason == ("tool_calls" if calls else "stop")
    assert len({call.id for call in choice.message.tool_calls or []}) == len(calls)
    streamed, parts, reason = joined(create(ai, scripted, name, stream=True))
    assert (streamed or None, reason) == (content, choice.finish_reason)
    assert [(part["name"], part["arguments"]) for part in parts] == calls and all(part["id"] for part in parts)


def test_without_parallel_calls_a_message_has_its_first_call(ai, scripted):
    first = ("add", '{"b": "<é>"}')
    (choice,) = create(ai, scripted, "two", parallel_tool_calls=False, logprobs=True).choices
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [first]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    both = create(ai, scripted, "two", parallel_tool_calls=True, logprobs=True).choices[0]
    assert len(both.message.tool_calls) == 2 and choice.logprobs == both.logprobs
    _, parts, reason = joined(create(ai, scripted, "two", parallel_tool_calls=False, stream=True))
    assert [(part["name"], part["arguments"]) for part in parts] == [first] and reason == "tool_calls"


def test_without_tools_or_with_none_the_text_is_as_it_was_written(ai, scripted):
    chosen = biased(scripted[1], "call")
    bare = ai.chat.completions.create(model="", messages=QUESTION, **chosen).choices[0]
    none = create(ai, scripted, "call", tool_choice="none").choices[0]
    for choice in (bare, none):
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (
            TEXTS["call"],
            None,
            "stop",
        )


def test_a_round_with_the_tools_result(ai, scripted):
    """The message that came, sent back with the result, is rendered to the text that the model had written."""
    message = create(ai, scripted, "call").choices[0].message
    call = message.tool_calls[0]
    result = sum(json.loads(call.function.arguments).values())
    messages = [*QUESTION, message, {"role": "tool", "tool_call_id": call.id, "content": str(result)}]
    body = {"messages": [m if isinstance(m, dict) else m.model_dump() for m in messages], "tools": TOOLS}
    tokens = ask(scripted[0].http_address, "POST", "/tokenize", body).body["tokens"]
    text = ask(scripted[0].http_address, "POST", "/detokenize", {"tokens": tokens}).body["prompt"]
    assert f"<|im_start|>assistant\n{TEXTS['call']}<|im_end|>\n" in text
    assert "<tool_response>\n3\n</tool_response>" in text
    assert '{"type": "function", "function": {"name": "add", "description": "add two numbers", "parameters"' in text
    final = ai.chat.completions.create(model="", messages=messages, tools=TOOLS, **biased(scripted[1], "plain"))
    assert (final.choices[0].message.content, final.choices[0].finish_reason) == ("The sum is 3.", "stop")


def test_the_same_chat_through_grpc(ai, scripted):
    server, starts = scripted
    chat = Chat(QUESTION, TOOLS, template_arguments={"enable_thinking": False})
    sampling = SamplingParams(max_tokens=20, temperature=0, logit_bias={starts["call"]: 2 * PREFERRED})
    sample = server.client.generate([chat], sampling=sampling)[0].samples[0]
    assert sample.text == TEXTS["call"]
    extra = {"return_token_ids": True, "chat_template_kwargs": {"enable_thinking": False}}
    choice = create(ai, scripted, "call", extra_body=extra, logprobs=True).choices[0]
    assert choice.token_ids == sample.token_ids
    logprobs = np.float32([entry.logprob for entry in choice.logprobs.content])
    assert logprobs.tobytes() == sample.raw_logprobs.tobytes()


def test_openais_helpers(ai, scripted):
    with ai.chat.completions.stream(model="", messages=QUESTION, tools=TOOLS, **biased(scripted[1], "two")) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert [call.function.name for call in message.tool_calls] == ["add", "sub"]

    async def main():
        address = f"http://{scripted[0].http_address}/v1"
        async with openai.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            several = (
                client.chat.completions.create(
                    model="", messages=QUESTION, tools=TOOLS, n=2, **biased(scripted[1], name)
                )
                for name in ("call", "plain")
            )
            calls, plain = await asyncio.gather(*several)
            assert [choice.finish_reason for choice in calls.choices] == ["tool_calls"] * 2
            assert [choice.message.content for choice in plain.choices] == ["The sum is 3."] * 2
            stream = await client.chat.completions.create(
                model="", messages=QUESTION, tools=TOOLS, stream=True, **biased(scripted[1], "call")
            )
            return joined([chunk async for chunk in stream])

    content, calls, reason = asyncio.run(main())
    assert (content, calls[0]["name"], reason) == ("Let me see.", "add", "tool_calls")


def test_answers_with_calls_are_like_vllms(scripted):
    """vLLM's answer to `required` is compared, because its model never calls a tool of its own accord."""
    body = {"messages": QUESTION, "tools": TOOLS, "max_tokens": 20, **biased(scripted[1], "two")}
    ours = ask(scripted[0].http_address, "POST", "/v1/chat/completions", body)
    differences = {
        "choices.0.message.content": "null, as OpenAI's, where vLLM has an empty text for forced calls",
    }
    assert_like_vllm(ours, recorded("chat/plain-tools-required"), differences)
    stream = events(ask(scripted[0].http_address, "POST", "/v1/chat/completions", body | {"stream": True}).body)
    theirs = events(recorded("chat/plain-tools-named-stream").answer.body)
    deltas = [[event["choices"][0]["delta"] for event in side] for side in (stream, theirs)]
    for ours, vllms in zip(deltas[0][:3], deltas[1][:3], strict=True):
        assert list(ours) == list(vllms)
        for mine, other in zip(ours.get("tool_calls", []), vllms.get("tool_calls", []), strict=True):
            assert list(mine) == list(other) and list(mine["function"]) == list(other["function"])


NAMED = {"type": "function", "function": {"name": "sub"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_follow_the_schema(ai, scripted, choice):
    """Whatever the model would rather write."""
    members = {"model": "", "messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300, "n": 2}
    answer = ai.chat.completions.create(temperature=1, seed=5, **members)
    for choice_ in answer.choices:
        if choice_.finish_reason == "length":
            continue
        assert choice_.finish_reason == ("stop" if choice is NAMED else "tool_calls")
        assert choice_.message.content == "" and choice_.message.tool_calls
        for call in choice_.message.tool_calls:
            assert call.function.name in (["sub"] if choice is NAMED else ["add", "sub"])
            arguments = json.loads(call.function.arguments)
            assert all(isinstance(arguments.get(name, 0), int) for name in ("a", "b")), arguments
    stream = ai.chat.completions.create(temperature=1, seed=5, stream=True, **members | {"n": 1})
    content, calls, reason = joined(stream)
    first = answer.choices[0]
    assert reason == first.finish_reason
    if reason != "length":
        assert content == "" and [(call["name"], call["arguments"]) for call in calls] == [
            (call.function.name, call.function.arguments) for call in first.message.tool_calls
        ]


@pytest.mark.parametrize(
    "members, param",
    [
        ({"tools": TOOLS, "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "tool_choice"),
        ({"tools": [{"function": {}}]}, "tools[0].function"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
def test_what_is_wrong_is_named(scripted, members, param):
    answer = ask(scripted[0].http_address, "POST", "/v1/chat/completions", {"messages": QUESTION, **members})
    assert (answer.status, answer.body["error"]["param"]) == (400, param), answer.body


def test_mistrals_calls_begin_with_a_special_token(binary, tmp_path):
    template = "{{ '[TOOL_CALLS]' if false }}{% for m in messages %}{{ m.content }}\n{% endfor %}"
    answer = ["[TOOL_CALLS]", '[{"name": "add", ', '"arguments": {"a": 1}}]']
    write_scripted(tmp_path / "model", template, [answer], special=["[TOOL_CALLS]"])
    with ServerProcess(binary, tmp_path / "model", [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        body = {"messages": QUESTION, "tools": TOOLS, "temperature": 0}
        choice = ask(server.http_address, "POST", "/v1/chat/completions", body).body["choices"][0]
    call = choice["message"]["tool_calls"][0]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'} and choice["finish_reason"] == "tool_calls"
    assert len(call["id"]) == 9 and call["id"].isalnum(), "Mistral's templates take no other ids"
