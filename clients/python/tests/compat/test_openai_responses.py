"""OpenAI's Responses through the `openai` package; test_agents.py has agents that use them."""

from __future__ import annotations

import json

import openai
import pytest
from test_openai import ADD, City

QUESTION = "What is the capital of France?"
TOOL = {"type": "function", "strict": True, **ADD["function"]}


@pytest.fixture
def ai(smollm2):
    with openai.OpenAI(base_url=f"{smollm2}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_a_response_and_its_stream(ai):
    options = {"model": "smollm2", "input": QUESTION, "max_output_tokens": 20, "temperature": 0}
    whole = ai.responses.create(**options)
    assert whole.status == "completed" and "Paris" in whole.output_text and whole.usage.output_tokens == 8
    with ai.responses.stream(**options) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert kinds.count("response.output_text.delta") > 1
    cut = ai.responses.create(**options | {"max_output_tokens": 3})
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_instructions_and_items(ai):
    items = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": [{"type": "input_text", "text": "And of Italy?"}]},
    ]
    plain = ai.responses.create(model="smollm2", input=items, max_output_tokens=1)
    instructed = ai.responses.create(model="smollm2", input=items, max_output_tokens=1, instructions="Be brief. " * 20)
    assert instructed.usage.input_tokens > plain.usage.input_tokens + 20


def test_structured_output(ai):
    parsed = ai.responses.parse(model="smollm2", input=QUESTION, text_format=City, temperature=0, max_output_tokens=60)
    assert isinstance(parsed.output_parsed, City)


def test_a_round_with_a_tool(caller):
    with openai.OpenAI(base_url=f"{caller}/v1", api_key="none", max_retries=0) as ai:
        options = {"model": "caller", "tools": [TOOL], "temperature": 0}
        first = ai.responses.create(**options, input=[{"role": "user", "content": "What is 1 + 2?"}])
        (call,) = [item for item in first.output if item.type == "function_call"]
        assert (call.name, json.loads(call.arguments)) == ("add", {"a": 1, "b": 2})
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        items = [{"role": "user", "content": "What is 1 + 2?"}, *first.output, result]
        assert ai.responses.create(**options, input=items).output_text == " is 3."


def test_what_needs_a_store_is_rejected(ai):
    with pytest.raises(openai.BadRequestError, match="previous_response_id"):
        ai.responses.create(model="smollm2", input=QUESTION, previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve("resp_1")


def test_reasoning(thinker):
    options = {"model": "thinker", "input": QUESTION, "temperature": 0, "reasoning": {"effort": "low"}}
    with openai.OpenAI(base_url=f"{thinker}/v1", api_key="none", max_retries=0) as ai:
        whole = ai.responses.create(**options)
        thought, message = whole.output
        assert (thought.type, thought.content[0].text, message.type) == ("reasoning", "One and two.", "message")
        assert whole.output_text == "\n\nThree." and whole.usage.output_tokens_details.reasoning_tokens == 2
        with ai.responses.stream(**options) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds.count("response.reasoning_text.delta") == 2
        assert (final.output[0].content[0].text, final.output_text) == ("One and two.", "\n\nThree.")
