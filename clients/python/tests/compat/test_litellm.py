"""LiteLLM, with the provider that it has for vLLM and with that for OpenAI's API."""

from __future__ import annotations

import asyncio
import json

import litellm
import pytest
from test_openai import ADD, CAPITAL, QUESTION

PROVIDERS = ["hosted_vllm", "openai"]


@pytest.fixture(params=PROVIDERS)
def real(request, smollm2):
    """The members by which LiteLLM finds the server."""
    return {"model": f"{request.param}/smollm2", "api_base": f"{smollm2}/v1", "api_key": "none", "num_retries": 0}


def test_a_chat_and_its_stream(real):
    options = {**real, "messages": QUESTION, "max_tokens": 10, "temperature": 0}
    whole = litellm.completion(**options)
    text = whole.choices[0].message.content
    assert "Paris" in text and whole.usage.completion_tokens == 8 and whole.choices[0].finish_reason == "stop"
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.choices[0].message.content == text and rebuilt.usage.completion_tokens == 8

    async def run():
        return await litellm.acompletion(**options)

    assert asyncio.run(run()).choices[0].message.content == text


def test_members_of_vllm_reach_the_server(real):
    answer = litellm.completion(
        **real,
        messages=QUESTION,
        max_tokens=12,
        top_k=5,
        min_p=0.1,
        seed=1,
        extra_body={"structured_outputs": {"regex": "[a-z]{4}"}},
    )
    assert len(answer.choices[0].message.content) == 4


def test_a_schema(real):
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = litellm.completion(**real, messages=QUESTION, max_tokens=40, response_format=form)
    assert json.loads(answer.choices[0].message.content).keys() == {"n"}


def test_a_completion(smollm2):
    answer = litellm.text_completion(
        model="text-completion-openai/smollm2",
        prompt=CAPITAL,
        api_base=f"{smollm2}/v1",
        api_key="none",
        max_tokens=3,
        temperature=0,
    )
    assert answer.choices[0].text.startswith(" Paris")


def test_errors_have_the_kind_that_callers_catch(real):
    with pytest.raises(litellm.NotFoundError, match="does not exist"):
        litellm.completion(**real | {"model": real["model"] + "-large"}, messages=QUESTION)
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**real, messages=QUESTION, temperature=-1)


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_round_with_a_tool(caller, provider):
    options = {
        "model": f"{provider}/caller",
        "api_base": f"{caller}/v1",
        "api_key": "none",
        "tools": [ADD],
        "temperature": 0,
    }
    message = litellm.completion(**options, messages=QUESTION).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": 2})
    result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    answer = litellm.completion(**options, messages=[*QUESTION, message, result]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (" is 3.", "stop")
