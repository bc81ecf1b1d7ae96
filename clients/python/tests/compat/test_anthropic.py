"""The `anthropic` package: messages, streams, tools and errors. `/v1/messages` is beside OpenAI's routes."""

from __future__ import annotations

import asyncio

import anthropic
import pytest
from test_openai import ADD

# The package has no member for the temperature any more.
GREEDY = {"temperature": 0}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"name": "add", "description": "Adds two numbers.", "input_schema": ADD["function"]["parameters"]}


@pytest.fixture
def claude(smollm2):
    with anthropic.Anthropic(base_url=smollm2, auth_token="none", max_retries=0) as client:
        yield client


@pytest.fixture
def calling(caller):
    with anthropic.Anthropic(base_url=caller, auth_token="none", max_retries=0) as client:
        yield client


def test_a_message_and_its_stream(claude):
    options = {"model": "smollm2", "max_tokens": 20, "extra_body": GREEDY, "messages": QUESTION}
    options["system"] = "You are a helpful assistant."
    message = claude.messages.create(**options)
    (block,) = message.content
    assert (message.type, message.role, block.type, message.stop_reason) == ("message", "assistant", "text", "end_turn")
    assert "Paris" in block.text and message.usage.output_tokens == 8
    with claude.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == block.text == final.content[0].text and final.stop_reason == "end_turn"
    assert final.usage.output_tokens == 8

    async def run():
        async with anthropic.AsyncAnthropic(base_url=str(claude.base_url), auth_token="none") as client:
            return await client.messages.create(**options)

    assert asyncio.run(run()).content[0].text == block.text


def test_where_a_message_ends(claude):
    options = {"model": "smollm2", "extra_body": GREEDY, "messages": QUESTION}
    cut = claude.messages.create(**options, max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    stopped = claude.messages.create(**options, max_tokens=20, stop_sequences=[" is"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " is")
    assert stopped.content[0].text.endswith("France")


def test_turns_of_several_blocks(claude):
    messages = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "text", "text": "Paris."}]},
        {"role": "user", "content": [{"type": "text", "text": "And"}, {"type": "text", "text": "of Italy?"}]},
    ]
    count = claude.messages.count_tokens(model="smollm2", messages=messages)
    message = claude.messages.create(model="smollm2", max_tokens=2, messages=messages)
    usage = message.usage
    parts = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert count.input_tokens == parts > 20


def test_a_round_with_a_tool(calling):
    options = {"model": "caller", "max_tokens": 60, "extra_body": GREEDY, "tools": [TOOL]}
    message = calling.messages.create(**options, messages=QUESTION)
    (call,) = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, call.input, message.stop_reason) == ("add", {"a": 1, "b": 2}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
    turns = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    final = calling.messages.create(**options, messages=turns)
    assert (final.content[0].text, final.stop_reason) == (" is 3.", "end_turn")
    with calling.messages.stream(**options, messages=QUESTION) as stream:
        (streamed,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert (streamed.name, streamed.input) == (call.name, call.input)


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_forced_calls_follow_the_schema(claude, choice):
    message = claude.messages.create(
        model="smollm2", max_tokens=200, extra_body=GREEDY, messages=QUESTION, tools=[TOOL], tool_choice=choice
    )
    assert message.content[0].type == "tool_use" and message.content[0].input.keys() == {"a", "b"}


def test_errors(claude):
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as error:
        claude.messages.create(model="claude", max_tokens=1, messages=QUESTION)
    assert error.value.body["type"] == "error" and error.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="smollm2", max_tokens=1, messages=QUESTION, extra_body={"temperature": -1})
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(model="smollm2", max_tokens=1, messages=[{"role": "user", "content": [image]}])


def test_thinking(thinker):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    options = {"model": "thinker", "max_tokens": 2000, "extra_body": GREEDY, "thinking": thinking}
    with anthropic.Anthropic(base_url=thinker, auth_token="none", max_retries=0) as claude:
        message = claude.messages.create(**options, messages=QUESTION)
        thought, text = message.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "One and two.", "\n\nThree.")
        with claude.messages.stream(**options, messages=QUESTION) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_message()
        assert {"thinking", "signature", "text"} <= kinds
        assert (final.content[0].thinking, final.content[1].text) == (thought.thinking, text.text)
        assert final.content[0].signature and thought.signature
        turns = [*QUESTION, {"role": "assistant", "content": message.content}, *QUESTION]
        assert claude.messages.create(**options, messages=turns).content[1].text == text.text
