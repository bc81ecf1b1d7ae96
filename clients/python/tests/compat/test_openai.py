"""The `openai` package against a real model: what its users send to vLLM, with vLLM's members in `extra_body`."""

from __future__ import annotations

import asyncio
import json
import re

import openai
import pydantic
import pytest

CAPITAL = "The capital of France is"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "maximum": 9}, "b": {"type": "integer", "maximum": 9}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


class City(pydantic.BaseModel):
    # A model as small as this one would not stop writing white space.
    model_config = pydantic.ConfigDict(json_schema_extra={"x-guidance": {"whitespace_flexible": False}})

    name: str = pydantic.Field(max_length=12)
    is_capital: bool


@pytest.fixture
def ai(smollm2):
    with openai.OpenAI(base_url=f"{smollm2}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models(ai):
    (model,) = ai.models.list().data
    assert (model.id, model.object, model.model_extra["max_model_len"]) == ("smollm2", "model", 8192)
    assert ai.models.retrieve("smollm2") == model
    with pytest.raises(openai.NotFoundError, match=r"does not exist.*smollm2"):
        ai.completions.create(model="gpt-4", prompt=CAPITAL)


def test_a_completion_and_its_stream(ai):
    options = {"model": "smollm2", "prompt": CAPITAL, "max_tokens": 6, "temperature": 0}
    whole = ai.completions.create(**options)
    assert whole.choices[0].text.startswith(" Paris") and whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (5, 6, 11)
    chunks = list(ai.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.total_tokens == 11
    assert len({chunk.id for chunk in chunks}) == 1


def test_prompts_of_every_kind_and_their_samples(ai):
    tokens = ai.post("/../tokenize", body={"model": "smollm2", "prompt": CAPITAL}, cast_to=dict)["tokens"]
    same = [
        ai.completions.create(model="smollm2", prompt=prompt, max_tokens=3, temperature=0).choices
        for prompt in (CAPITAL, tokens, [CAPITAL, CAPITAL], [tokens, tokens])
    ]
    assert [len(choices) for choices in same] == [1, 1, 2, 2]
    assert len({choice.text for choices in same for choice in choices}) == 1
    answer = ai.completions.create(model="smollm2", prompt=[CAPITAL, "Once upon"], n=2, seed=3, max_tokens=4)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]


def test_token_ids_and_log_probabilities(ai):
    """What trainers read: the ids of both, a log-probability for each token, and the prompt's."""
    extra = {"return_token_ids": True, "prompt_logprobs": 0, "return_tokens_as_token_ids": True, "top_k": 20}
    (choice,) = ai.completions.create(
        model="smollm2", prompt=CAPITAL, max_tokens=4, seed=1, logprobs=2, extra_body=extra
    ).choices
    reported = choice.model_extra
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in reported["token_ids"]]
    assert all(value <= 0 for value in choice.logprobs.token_logprobs) and len(choice.logprobs.token_logprobs) == 4
    prompt = reported["prompt_logprobs"]
    assert prompt[0] is None and [int(next(iter(entry))) for entry in prompt[1:]] == reported["prompt_token_ids"][1:]
    text = ai.post("/../detokenize", body={"tokens": reported["token_ids"]}, cast_to=dict)["prompt"]
    assert text == choice.text


def test_an_echo_scores_a_text(ai):
    scored = ai.completions.create(model="smollm2", prompt=CAPITAL, echo=True, max_tokens=0, logprobs=0)
    (choice,) = scored.choices
    assert choice.text == CAPITAL and "".join(choice.logprobs.tokens) == CAPITAL
    assert choice.logprobs.token_logprobs[0] is None and len(choice.logprobs.token_logprobs) == 5


def test_where_a_sample_ends(ai):
    options = {"model": "smollm2", "prompt": CAPITAL, "temperature": 0, "max_tokens": 20}
    full = ai.completions.create(**options).choices[0].text
    stopped = ai.completions.create(**options, stop=["\n"]).choices[0]
    assert (stopped.text, stopped.finish_reason) == (full.partition("\n")[0], "stop")
    kept = ai.completions.create(**options, stop="\n", extra_body={"include_stop_str_in_output": True}).choices[0]
    assert kept.text == stopped.text + "\n" and kept.model_extra["stop_reason"] == "\n"


def test_a_chat_and_its_stream(ai):
    options = {"model": "smollm2", "messages": QUESTION, "max_completion_tokens": 12, "temperature": 0}
    whole = ai.chat.completions.create(**options).choices[0]
    assert whole.message.role == "assistant" and "Paris" in whole.message.content
    with ai.chat.completions.stream(**options) as stream:
        seen = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion().choices[0]
    assert "".join(seen) == final.message.content == whole.message.content
    assert final.finish_reason == whole.finish_reason == "stop"


def test_a_streams_events_are_those_that_vllm_sends(ai):
    """The role comes first, no event but the first is empty, and the last token's event has the finish reason."""
    chunks = list(
        ai.chat.completions.create(model="smollm2", messages=QUESTION, max_tokens=3, temperature=0, stream=True)
    )
    first, *others = [choice for chunk in chunks for choice in chunk.choices]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert [choice.finish_reason for choice in others] == [None, None, "length"]
    assert all(choice.delta.content for choice in others)


def test_log_probabilities_of_a_chat(ai):
    answer = ai.chat.completions.create(
        model="smollm2", messages=QUESTION, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    assert all(entry.top_logprobs[0].token == entry.token and len(entry.top_logprobs) == 2 for entry in content)


def test_parts_and_several_turns(ai):
    messages = [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]},
        {"role": "assistant", "content": "Blue"},
        {"role": "user", "content": "Another."},
    ]
    assert ai.chat.completions.create(model="smollm2", messages=messages, max_tokens=4).choices[0].message.content
    with pytest.raises(openai.BadRequestError, match="image_url"):
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        ai.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": [image]}])


def test_structured_output(ai):
    parsed = ai.chat.completions.parse(
        model="smollm2", messages=QUESTION, response_format=City, temperature=0, max_tokens=60
    )
    assert isinstance(parsed.choices[0].message.parsed, City)
    options = {"model": "smollm2", "messages": QUESTION, "max_tokens": 20}
    text = ai.chat.completions.create(**options, extra_body={"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}})
    assert re.fullmatch("[a-z]{3}-[0-9]{2}", text.choices[0].message.content)
    text = ai.chat.completions.create(**options, extra_body={"structured_outputs": {"choice": ["Paris", "Rome"]}})
    assert text.choices[0].message.content in ("Paris", "Rome")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_forced_calls_follow_the_schema(ai, choice):
    answer = ai.chat.completions.create(
        model="smollm2", messages=QUESTION, tools=[ADD], tool_choice=choice, max_tokens=200, temperature=0
    )
    (call,) = answer.choices[0].message.tool_calls[:1]
    assert call.function.name == "add" and json.loads(call.function.arguments).keys() == {"a", "b"}


def test_many_requests_at_once(smollm2):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{smollm2}/v1", api_key="none", max_retries=0) as client:
            calls = [
                client.completions.create(model="smollm2", prompt=CAPITAL, max_tokens=4, temperature=0)
                for _ in range(32)
            ]
            return await asyncio.gather(*calls)

    assert len({answer.choices[0].text for answer in asyncio.run(run())}) == 1


def test_a_client_that_leaves_a_stream(ai):
    """The fixture fails if the request still runs afterwards."""
    with ai.completions.create(
        model="smollm2", prompt=CAPITAL, max_tokens=4000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        assert next(iter(stream)).choices[0].finish_reason is None


def test_raw_answers_and_headers(ai):
    raw = ai.chat.completions.with_raw_response.create(
        model="smollm2",
        messages=QUESTION,
        max_tokens=1,
        extra_body={"temprature": 0},
        extra_headers={"X-Request-Id": "mine"},
    )
    assert raw.headers["x-ignored-members"] == "temprature"
    assert raw.parse().id == "chatcmpl-mine"
