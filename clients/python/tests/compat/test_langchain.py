"""`langchain-openai`: chats, streams, batches, tools, structured output and plain completions."""

from __future__ import annotations

import asyncio

import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from test_openai import CAPITAL, City

MESSAGES = [SystemMessage("You are a helpful assistant."), HumanMessage("What is the capital of France?")]


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def chat_model(url, name="smollm2", **options):
    options = {"max_tokens": 12, "temperature": 0, **options}
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=name, max_retries=0, **options)


def test_a_chat_its_stream_and_a_batch(smollm2):
    model = chat_model(smollm2)
    whole = model.invoke(MESSAGES)
    assert "Paris" in whole.content and whole.usage_metadata["output_tokens"] == 8
    parts = list(model.stream(MESSAGES, stream_usage=True))
    joined = parts[0]
    for part in parts[1:]:
        joined += part
    assert joined.content == whole.content and joined.usage_metadata["output_tokens"] == 8
    assert [message.content for message in model.batch([MESSAGES] * 4)] == [whole.content] * 4
    assert asyncio.run(model.ainvoke(MESSAGES)).content == whole.content


def test_log_probabilities_and_members_of_vllm(smollm2):
    model = chat_model(smollm2, logprobs=True, top_logprobs=1, extra_body={"return_token_ids": True, "min_tokens": 12})
    metadata = model.invoke(MESSAGES).response_metadata
    assert len(metadata["logprobs"]["content"]) == 12


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(smollm2, method):
    model = chat_model(smollm2, max_tokens=200).with_structured_output(City, method=method)
    assert isinstance(model.invoke(MESSAGES), City)


def test_a_round_with_a_tool(caller):
    model = chat_model(caller, "caller", max_tokens=None).bind_tools([add])
    question = HumanMessage("What is 1 + 2?")
    message = model.invoke([question])
    assert isinstance(message, AIMessage) and message.content == ""
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("add", {"a": 1, "b": 2})
    result = add.invoke(call)
    assert isinstance(result, ToolMessage) and result.content == "3"
    assert model.invoke([question, message, result]).content == " is 3."
    streamed = list(model.stream([question]))
    joined = streamed[0]
    for part in streamed[1:]:
        joined += part
    assert [(call["name"], call["args"]) for call in joined.tool_calls] == [("add", {"a": 1, "b": 2})]


def test_completions(smollm2):
    model = OpenAI(base_url=f"{smollm2}/v1", api_key="none", model="smollm2", max_tokens=4, temperature=0)
    text = model.invoke(CAPITAL)
    assert text.startswith(" Paris") and "".join(model.stream(CAPITAL)) == text
    assert model.batch([CAPITAL, CAPITAL]) == [text, text]


def test_errors(smollm2):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        chat_model(smollm2, "other").invoke(MESSAGES)
