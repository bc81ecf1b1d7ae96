"""Reasoning in chats, responses and messages: what stands in `<think>`, apart from the answer and from calls."""

from __future__ import annotations

import json
import re
import subprocess

import numpy as np
import openai
import pytest

from rollout_client import InvalidArgument, SamplingParams, ServerProcess
from scripted import PREFERRED, biased, write_scripted
from serving import FIXTURES, SMALL_CACHE
from test_http_messages import MESSAGES
from test_http_messages import TOOLS as MESSAGES_TOOLS
from test_http_messages import events as message_events
from test_http_responses import RESPONSES
from test_http_responses import TOOLS as RESPONSES_TOOLS
from test_http_responses import events as response_events
from test_http_tools import TOOLS
from vllm_answers import ask, events

CHAT = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]
# Written like Qwen3's, which closes the reasoning for enable_thinking=false; with `opens`, like DeepSeek-R1's.
TEMPLATE = """
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endfor -%}
{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n' }}
{%- elif opens %}{{ '<think>\n' }}{% endif %}
{%- if reasoning_effort %}{{ reasoning_effort + '\n' }}{% endif %}{# calls are <tool_call>{}</tool_call> #}
"""
ANSWERS = {
    "marked": ["<think>", "\nOne and", " two.\n", "</think>", "\n\nThree."],
    "opened": [" One plus two.\n</th", "ink>", "\nIt is three."],
    "call": ["<think>Add", " them.", "</think>\n<tool", '_call>{"name": "add", "arguments": {"a": 1}}', "</tool_call>"],
    "early": ["<think>Hm. ", '<tool_call>{"name": "sub"}', " </tool_call>"],
    "plain": ["Three it", " is."],
    "endless": ["<think>And so", " on and on"],
}
SPLIT = {
    "marked": ("\nOne and two.\n", "\n\nThree.", []),
    "opened": (None, " One plus two.\n</think>\nIt is three.", []),
    "call": ("Add them.", None, [("add", '{"a": 1}')]),
    "early": ("Hm. ", None, [("sub", "{}")]),
    "plain": (None, "Three it is.", []),
    "endless": ("And so on and on", None, []),
}
"""The reasoning, content and calls of each answer, where neither a flag nor the prompt says more."""


@pytest.fixture
def model(scripted_model):
    return scripted_model


@pytest.fixture
def address(scripted):
    return scripted[0].http_address


def body(model, name, **members):
    return {"messages": QUESTION, "tools": TOOLS, "max_tokens": 30, **biased(model[1], name), **members}


def choice_of(address, request):
    answer = ask(address, "POST", CHAT, request)
    assert answer.status == 200, answer.body
    (choice,) = answer.body["choices"]
    return choice


def parts(choice):
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    assert message.get("reasoning_content") == message["reasoning"]
    return message["reasoning"], message["content"], calls


def streamed(address, request):
    """The parts of a streamed message, its finish reason, and its tokens and their log-probabilities."""
    reasoning, content, calls, ids, logprobs, reason = "", "", [], [], [], None
    for event in events(ask(address, "POST", CHAT, request | {"stream": True}).body):
        (choice,) = event["choices"]
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        assert not (content or calls) or "reasoning" not in delta, "reasoning comes first"
        reasoning += delta.get("reasoning") or ""
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                calls.append((call["function"]["name"], ""))
            else:
                calls[-1] = (calls[-1][0], calls[-1][1] + call["function"]["arguments"])
        ids += choice.get("token_ids") or []
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        reason = choice["finish_reason"] or reason
    return (reasoning or None, content or None, calls), reason, ids, logprobs


@pytest.mark.parametrize("name", ANSWERS)
def test_reasoning_stands_apart_and_no_token_is_lost(address, model, name):
    request = body(model, name, logprobs=True, top_logprobs=1, return_token_ids=True)
    choice = choice_of(address, request)
    assert parts(choice) == SPLIT[name]
    assert choice["finish_reason"] == ("tool_calls" if SPLIT[name][2] else "stop")
    found, reason, ids, logprobs = streamed(address, request)
    assert (found, reason) == (SPLIT[name], choice["finish_reason"])
    assert ids == choice["token_ids"] and len(ids) == len(ANSWERS[name]) + 1
    assert logprobs == choice["logprobs"]["content"]
    assert streamed(address, body(model, name))[0] == SPLIT[name]


def test_the_prompt_opens_or_closes_it(address, model):
    opened = {"chat_template_kwargs": {"opens": True}}
    closed = {"chat_template_kwargs": {"enable_thinking": False}}
    reasoning, answer = " One plus two.\n", "\nIt is three."
    for name, members, expected in (
        ("opened", opened, (reasoning, answer, [])),
        ("marked", opened, SPLIT["marked"]),
        ("plain", opened, ("Three it is.", None, [])),
        ("opened", closed, (None, "".join(ANSWERS["opened"]), [])),
        ("opened", {"reasoning_effort": "none"} | opened, (None, "".join(ANSWERS["opened"]), [])),
        ("opened", {"reasoning_effort": "low"} | opened, (reasoning, answer, [])),
    ):
        request = body(model, name, **members)
        assert parts(choice_of(address, request)) == expected, (name, members)
        assert streamed(address, request)[0] == expected, (name, members)


def test_the_effort_is_a_variable_of_the_template(address):
    prompt = "<|im_start|>user\nWhat is 1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    for members, rest in (
        ({}, ""),
        ({"reasoning_effort": "high"}, "high\n"),
        ({"reasoning_effort": "none"}, "<think>\n\n</think>\nnone\n"),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "none\n"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"opens": True}}, "<think>\nlow\n"),
    ):
        tokens = ask(address, "POST", "/tokenize", {"messages": QUESTION, **members}).body["tokens"]
        assert ask(address, "POST", "/detokenize", {"tokens": tokens}).body["prompt"] == prompt + rest, members
        assert ask(address, "POST", f"{CHAT}/render", {"messages": QUESTION, **members}).body["token_ids"] == tokens
    refused = ask(address, "POST", CHAT, {"messages": QUESTION, "reasoning_effort": "much"})
    assert (refused.status, refused.body["error"]["param"]) == (400, "reasoning_effort"), refused.body


def test_reasoning_can_be_left_out(address, model):
    for name, (_, content, calls) in SPLIT.items():
        request = body(model, name, include_reasoning=False, logprobs=True, return_token_ids=True)
        choice = choice_of(address, request)
        assert parts(choice) == (None, content, calls) and "reasoning_content" not in choice["message"]
        found, _, ids, logprobs = streamed(address, request)
        assert found == (None, content, calls)
        assert (ids, logprobs) == (choice["token_ids"], choice["logprobs"]["content"]), "all tokens are reported"


def test_the_tokens_of_the_reasoning_are_counted(address, model):
    for name, kwargs, count in (("marked", {}, 2), ("plain", {}, 0), ("plain", {"opens": True}, 3)):
        request = body(model, name, chat_template_kwargs=kwargs)
        for n in (1, 2):
            usage = ask(address, "POST", CHAT, request | {"n": n}).body["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": n * count}, (name, kwargs)
        options = {"include_usage": True, "continuous_usage_stats": True}
        stream = events(ask(address, "POST", CHAT, request | {"stream": True, "stream_options": options}).body)
        counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in stream]
        assert counts == sorted(counts) and (counts[0], counts[-1]) == (0, count)
    usage = ask(address, "POST", CHAT, body(model, "marked", include_reasoning=False)).body["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}, "whether it is shown or not"


GRAMMAR = {"structured_outputs": {"choice": ["Three it is.", "Four"]}}


@pytest.mark.parametrize(
    "name, members, expected",
    [
        ("marked", {}, (SPLIT["marked"][0], "Three it is.", [])),
        ("marked", {"chat_template_kwargs": {"opens": True}}, (SPLIT["marked"][0], "Three it is.", [])),
        ("plain", {}, (None, "Three it is.", [])),
        ("plain", {"chat_template_kwargs": {"opens": True}}, ("Three it is.", None, [])),
        ("marked", {"chat_template_kwargs": {"enable_thinking": False}}, (None, "Three it is.", [])),
        ("marked", {"include_reasoning": False}, (None, "Three it is.", [])),
        ("marked", {"thinking_token_budget": 1}, ("\nOne and", "Three it is.", [])),
        ("marked", {"structured_outputs": {"regex": "<think>[^<]*</think>[^<]*"}}, SPLIT["marked"]),
        (
            "marked",
            {
                "chat_template_kwargs": {"enable_thinking": False},
                "structured_outputs": {"choice": ["a<think>b"]},
                "thinking_token_budget": 0,
            },
            (None, "a<think>b", []),
        ),
    ],
)
def test_a_grammar_is_for_the_text_after_the_reasoning(address, model, name, members, expected):
    request = body(model, name, logprobs=True, return_token_ids=True, **GRAMMAR | members)
    # Ties go to the lowest token id.
    request["logit_bias"] |= {str(model[1]["plain"]): PREFERRED}
    for count in (1, 3):
        answered = ask(address, "POST", CHAT, request | {"n": count})
        assert answered.status == 200, answered.body
        for choice in answered.body["choices"]:
            assert (parts(choice), choice["finish_reason"]) == (expected, "stop")
    found, reason, ids, logprobs = streamed(address, request)
    assert (found, reason) == (expected, "stop")
    assert (ids, logprobs) == (choice["token_ids"], choice["logprobs"]["content"])


def test_the_reasoning_is_what_it_is_without_a_grammar(address, model):
    """Whether it is drawn or not, and whatever the log-probabilities are of."""
    close = model[1]["marked"] + 3
    for members in ({"temperature": 0}, {"temperature": 1, "seed": 3}):
        request = body(model, "marked", logprobs=True, return_token_ids=True, chat_template_kwargs={"opens": True})
        request |= members
        constrained, free = choice_of(address, request | GRAMMAR), choice_of(address, request)
        length = free["token_ids"].index(close) + 1
        assert constrained["token_ids"][:length] == free["token_ids"][:length]
        assert constrained["logprobs"]["content"][:length] == free["logprobs"]["content"][:length]
        assert constrained["message"]["content"] in GRAMMAR["structured_outputs"]["choice"]


def test_drafts_change_neither_the_reasoning_nor_the_text(binary, address, model):
    digits = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 4, "x-guidance": {"whitespace_flexible": False}}
    request = body(model, "marked", n=6, temperature=0.7, seed=2, logprobs=True, return_token_ids=True, max_tokens=24)
    request |= {"structured_outputs": {"json": digits}, "chat_template_kwargs": {"opens": True}}
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--speculation", "off"]
    with ServerProcess(binary, model[0], flags) as server:
        plain = ask(server.http_address, "POST", CHAT, request).body["choices"]
    drafted = ask(address, "POST", CHAT, request).body["choices"]
    assert drafted == plain
    assert {parts(choice)[0] for choice in drafted} == {SPLIT["marked"][0]}
    (count,) = re.findall(
        r"^rollout:spec_decode_num_drafts_total\S* (\d+)", ask(address, "GET", "/metrics").body, re.MULTILINE
    )
    assert int(count) > 0


def test_a_call_is_forced_after_the_reasoning(address, model):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_flexible": False}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    named = {"type": "function", "function": {"name": "add"}}
    request = body(model, "marked", tools=tools, tool_choice=named)
    expected = (SPLIT["marked"][0], None, [("add", '{"a":1}')])
    reasoning, text, calls = parts(choice_of(address, request))
    assert (reasoning, text or None, calls) == expected
    assert streamed(address, request)[:2] == (expected, "stop")
    required = body(model, "marked", tools=tools, tool_choice="required", max_tokens=300)
    choice = choice_of(address, required | {"temperature": 1, "seed": 5})
    assert parts(choice)[0] == SPLIT["marked"][0]
    if choice["finish_reason"] == "tool_calls":
        assert {(name, json.loads(arguments)["a"]) for name, arguments in parts(choice)[2]} == {("add", 1)}


def texts_of(output):
    """The reasoning, the message and the calls among the items of a response."""
    reasoning, text, calls = None, None, []
    for item in output:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
            continue
        (part,) = item["content"]
        if item["type"] == "reasoning":
            assert (reasoning, text, calls) == (None, None, []), "reasoning comes first"
            assert item["id"].startswith("rs_") and item["summary"] == [] and set(part) == {"type", "text"}
            assert part["type"] == "reasoning_text"
            reasoning = part["text"]
        else:
            assert text is None
            text = part["text"]
    return reasoning, text, calls


@pytest.mark.parametrize("name", ANSWERS)
def test_a_response_has_an_item_of_reasoning(address, model, name):
    request = {"input": "What is 1 + 2?", "tools": RESPONSES_TOOLS, **biased(model[1], name)}
    tools = [{"type": "function", "name": "sub"}]
    request["tools"] = RESPONSES_TOOLS + tools
    answer = ask(address, "POST", RESPONSES, request)
    assert answer.status == 200, answer.body
    assert texts_of(answer.body["output"]) == SPLIT[name]
    stream = response_events(ask(address, "POST", RESPONSES, request | {"stream": True}).body)
    final = stream[-1]["response"]
    assert texts_of(final["output"]) == SPLIT[name] and final["usage"] == answer.body["usage"]
    if name == "marked":
        assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
        kinds = [event["type"].removeprefix("response.") for event in stream]
        assert kinds == [
            "created", "in_progress",
            "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
            "reasoning_text.done", "content_part.done", "output_item.done",
            "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
            "output_item.done",
            "completed",
        ]  # fmt: skip
        added, part, first, second, done = stream[2]["item"], stream[3]["part"], *stream[4:7]
        assert (added["content"], added["status"], part["text"]) == ([], "in_progress", "")
        assert first["delta"] + second["delta"] == done["text"] == SPLIT[name][0] and "logprobs" not in done
        assert stream[8]["item"] == final["output"][0] and final["output"][0]["status"] == "completed"
        hidden = ask(address, "POST", RESPONSES, request | {"include_reasoning": False}).body
        assert texts_of(hidden["output"]) == (None, *SPLIT[name][1:]) and hidden["usage"] == final["usage"]
    if name == "endless":
        cut = ask(address, "POST", RESPONSES, request | {"max_output_tokens": 1}).body
        assert (cut["status"], cut["output"][0]["status"]) == ("incomplete", "incomplete")


def test_the_effort_of_a_response(address, model):
    request = {"input": "What is 1 + 2?", **biased(model[1], "opened")}
    whole = "".join(ANSWERS["opened"])
    for reasoning, expected in (({"effort": "none"}, (None, whole, [])), ({"effort": "low"}, (None, whole, []))):
        body = ask(address, "POST", RESPONSES, request | {"reasoning": reasoning}).body
        assert texts_of(body["output"]) == expected and body["reasoning"] == reasoning
    opened = {"chat_template_kwargs": {"opens": True}, "reasoning": {"effort": "low"}}
    body = ask(address, "POST", RESPONSES, request | opened).body
    assert texts_of(body["output"]) == (" One plus two.\n", "\nIt is three.", [])


def test_a_response_of_a_schema_reasons_first(address, model):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_flexible": False}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    body = ask(address, "POST", RESPONSES, {"input": "Add.", "text": text, **biased(model[1], "marked")}).body
    assert texts_of(body["output"]) == (SPLIT["marked"][0], '{"a":1}', [])


def blocks_of(stream):
    """The blocks of a streamed message. A block of thinking ends with its signature."""
    blocks = []
    for event in stream[1:-2]:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            assert "signature" not in blocks[-1]
            continue
        if event["type"] == "content_block_stop":
            if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = json.loads(blocks[-1].pop("partial_json"))
            continue
        kind, *values = event["delta"].values()
        assert kind in ("thinking_delta", "signature_delta", "text_delta", "input_json_delta")
        (member,) = event["delta"].keys() - {"type"}
        assert "signature" not in blocks[-1], "it comes last"
        blocks[-1][member] = blocks[-1].get(member, "") + values[0]
    return blocks


def message_parts(blocks):
    reasoning, text, calls = None, None, []
    for block in blocks:
        if block["type"] == "thinking":
            assert (reasoning, text, calls) == (None, None, []), "thinking comes first"
            assert re.fullmatch("[0-9a-f]{32}", block["signature"]) and len(block) == 3
            reasoning = block["thinking"]
        elif block["type"] == "text":
            text = block["text"]
        else:
            calls.append((block["name"], json.dumps(block["input"])))
    return reasoning, text, calls


@pytest.mark.parametrize("name", ANSWERS)
def test_a_message_has_a_block_of_thinking(address, model, name):
    request = {"messages": QUESTION, "tools": MESSAGES_TOOLS, "max_tokens": 30, **biased(model[1], name)}
    answer = ask(address, "POST", MESSAGES, request)
    assert answer.status == 200, answer.body
    assert message_parts(answer.body["content"]) == SPLIT[name]
    stream = message_events(ask(address, "POST", MESSAGES, request | {"stream": True}).body)
    assert message_parts(blocks_of(stream)) == SPLIT[name]
    assert stream[-2]["delta"]["stop_reason"] == answer.body["stop_reason"]


def test_how_long_a_message_thinks(address, model):
    def asked(name, **members):
        body = {"messages": QUESTION, "max_tokens": 2000, **biased(model[1], name), **members}
        answer = ask(address, "POST", MESSAGES, body)
        assert answer.status == 200, answer.body
        return message_parts(answer.body["content"])

    whole, opens = "".join(ANSWERS["opened"]), {"chat_template_kwargs": {"opens": True}}
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert asked("opened", thinking={"type": "disabled"}, **opens) == (None, whole, [])
    assert asked("opened", thinking=enabled, **opens) == (" One plus two.\n", "\nIt is three.", [])
    assert asked("opened", thinking=enabled, output_config={"effort": "low"}) == (None, whole, [])
    assert asked("marked", thinking=enabled) == SPLIT["marked"]
    assert asked("marked", thinking_token_budget=1) == ("\nOne and", "\n\nThree.", [])
    again = [*QUESTION, {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]}]
    assert asked("plain", messages=[*again, *QUESTION]) == SPLIT["plain"]


def test_a_forced_call_takes_the_place_of_the_response_format(address, model):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    for form in (schema, {"type": "json_object"}, {"type": "text"}):
        for forced in ("required", {"type": "function", "function": {"name": "add"}}):
            members = {"tool_choice": forced, "max_tokens": 300, "seed": 5, "temperature": 1}
            alone = choice_of(address, body(model, "plain", **members))
            both = choice_of(address, body(model, "plain", response_format=form, **members))
            assert parts(both) == parts(alone) and both["finish_reason"] == alone["finish_reason"]
    refused = ask(address, "POST", CHAT, body(model, "plain", tool_choice="required", response_format={"type": "xml"}))
    assert (refused.status, refused.body["error"]["param"]) == (400, "response_format.type")


def test_openais_package(address, model):
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as ai:
        request = {"model": "", "messages": QUESTION, **biased(model[1], "marked")}
        message = ai.chat.completions.create(**request).choices[0].message
        assert (message.reasoning, message.reasoning_content, message.content) == (
            *[SPLIT["marked"][0]] * 2,
            "\n\nThree.",
        )
        deltas = [chunk.choices[0].delta for chunk in ai.chat.completions.create(**request, stream=True)]
        assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == message.reasoning
        assert "".join(delta.content or "" for delta in deltas) == message.content
        history = [*QUESTION, message.model_dump(), *QUESTION]
        assert ai.chat.completions.create(**request | {"messages": history}).choices[0].message.content


def test_openais_package_reads_responses(address, model):
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as ai:
        request = {"model": "", "input": "What is 1 + 2?", "extra_body": biased(model[1], "marked")}
        whole = ai.responses.create(**request)
        reasoning, message = whole.output
        assert (reasoning.type, reasoning.content[0].text, message.type) == ("reasoning", SPLIT["marked"][0], "message")
        assert whole.output_text == SPLIT["marked"][1]
        with ai.responses.stream(**request) as stream:
            deltas = [event.delta for event in stream if event.type == "response.reasoning_text.delta"]
            final = stream.get_final_response()
        assert "".join(deltas) == final.output[0].content[0].text == SPLIT["marked"][0]
        history = [{"role": "user", "content": "Add."}, *(item.model_dump() for item in final.output)]
        history.append({"role": "user", "content": "Again."})
        assert ai.responses.create(**request | {"input": history}).output_text == SPLIT["marked"][1]


def test_the_budget_closes_the_reasoning(scripted, address, model):
    server = scripted[0]
    open_, first, second, close, answer = (model[1]["marked"] + i for i in range(5))
    start, opened = model[1]["opened"], {"chat_template_kwargs": {"opens": True}}
    for budget, members, ids, expected in (
        (-1, {}, [open_, first, second, close, answer], SPLIT["marked"]),
        (2, {}, [open_, first, second, close, answer], SPLIT["marked"]),
        (1, {}, [open_, first, close, answer], ("\nOne and", "\n\nThree.", [])),
        (0, {}, [open_, close, answer], (None, "\n\nThree.", [])),
        # The line feed behind the prompt's mark counts.
        (2, opened, [start, close, answer], (" One plus two.\n</th", "\n\nThree.", [])),
        (1, opened, [close, answer], (None, "\n\nThree.", [])),
    ):
        name = "opened" if members else "marked"
        request = body(model, name, logprobs=True, return_token_ids=True, thinking_token_budget=budget, **members)
        answered = ask(address, "POST", CHAT, request | {"n": 2}).body
        for choice in answered["choices"]:
            assert (choice["token_ids"][:-1], parts(choice)) == (ids, expected), (budget, members)
        found, _, streamed_ids, logprobs = streamed(address, request)
        assert (found, streamed_ids[:-1]) == (expected, ids) and logprobs == choice["logprobs"]["content"]
        # The forced token has the policy's own log-probability, as each other one.
        sequence = answered["prompt_token_ids"] + streamed_ids
        scored = server.client.score([sequence])[0].raw_logprobs[-len(streamed_ids) :]
        assert [np.float32(entry["logprob"]) for entry in logprobs] == list(scored)


def test_the_budget_is_the_same_on_every_route(scripted, address, model):
    server = scripted[0]
    open_, first, _, close, answer = (model[1]["marked"] + i for i in range(5))
    prompt = ask(address, "POST", "/tokenize", {"messages": QUESTION}).body["tokens"]
    chosen = {"max_tokens": 4, "temperature": 1.0, "seed": 7, "logit_bias": {str(open_): 4 * PREFERRED}}
    chosen |= {"thinking_token_budget": 1}
    ids = [open_, first, close, answer]
    completed = ask(address, "POST", "/v1/completions", {"prompt": prompt, "return_token_ids": True, **chosen}).body
    assert completed["choices"][0]["token_ids"] == ids
    generated = ask(address, "POST", "/inference/v1/generate", {"token_ids": prompt, "sampling_params": chosen}).body
    assert generated["choices"][0]["token_ids"] == ids
    chosen["logit_bias"] = {open_: 4 * PREFERRED}
    sample = server.client.generate([prompt], sampling=SamplingParams(**chosen))[0].samples[0]
    assert sample.token_ids == ids
    assert sample.logprobs[2] == pytest.approx(sample.raw_logprobs[2], abs=1e-3) and sample.raw_logprobs[2] < -30

    def render(**members):
        return ask(address, "POST", f"{CHAT}/render", {"messages": QUESTION, **members}).body

    for members, ended in (({}, False), ({"include_reasoning": False}, True)):
        assert render(**GRAMMAR, **members)["reasoning_ended"] is ended
    assert "reasoning_ended" not in render()
    rendered = render(thinking_token_budget=3)
    assert rendered["sampling_params"]["thinking_token_budget"] == 3


def test_a_wrong_budget_is_named(scripted, address, binary):
    server = scripted[0]
    for members, param in (
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": True}, "thinking_token_budget"),
        ({"thinking_token_budget": 1, "include_reasoning": False, **GRAMMAR}, "thinking_token_budget"),
        ({"thinking_token_budget": 1, "allowed_token_ids": [1]}, "allowed_token_ids"),
    ):
        refused = ask(address, "POST", CHAT, {"messages": QUESTION, **members})
        assert (refused.status, refused.body["error"]["param"]) == (400, param), refused.body
    with pytest.raises(InvalidArgument, match=r"sampling\.thinking_token_budget: has no meaning in Score"):
        server.client.score([[1, 2]], sampling=SamplingParams(thinking_token_budget=1))
    with ServerProcess(binary, FIXTURES / "llama", [*SMALL_CACHE, "--mem-util", "0.2"]) as other:
        budget = SamplingParams(thinking_token_budget=1)
        with pytest.raises(InvalidArgument, match=r"sampling\.thinking_token_budget: .* does not have <think>"):
            other.client.generate([[1, 2]], sampling=budget)


@pytest.mark.parametrize("parser", ["none", "deepseek_r1", "qwen3"])
def test_the_flag_says_which_text_is_reasoning(binary, model, parser):
    whole = {name: "".join(texts) for name, texts in ANSWERS.items()}
    unmarked = {
        "opened": (" One plus two.\n", "\nIt is three.", []),
        "plain": (whole["plain"], None, []),
    }
    expected = {
        "none": {
            "marked": (None, whole["marked"], []),
            "opened": (None, whole["opened"], []),
            "call": (None, "<think>Add them.</think>", SPLIT["call"][2]),
            "early": (None, "<think>Hm.", SPLIT["early"][2]),
            "plain": SPLIT["plain"],
            "endless": (None, whole["endless"], []),
        },
        "deepseek_r1": SPLIT | unmarked | {"early": (whole["early"].removeprefix("<think>"), None, [])},
        "qwen3": SPLIT | unmarked,
    }[parser]
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--reasoning-parser", parser]
    with ServerProcess(binary, model[0], flags) as server:
        for name, parts_ in expected.items():
            request = body(model, name)
            assert parts(choice_of(server.http_address, request)) == parts_, name
            assert streamed(server.http_address, request)[0] == parts_, name
        closed = {"chat_template_kwargs": {"enable_thinking": False}}
        answer = choice_of(server.http_address, body(model, "plain", **closed))
        assert parts(answer) == SPLIT["plain"], "the prompt has closed it"


def test_marks_that_texts_leave_out_are_refused(binary, tmp_path):
    write_scripted(tmp_path / "model", TEMPLATE, [["<think>", "</think>", "Three"]], special=["<think>", "</think>"])
    flags = [*SMALL_CACHE, "--mem-util", "0.2"]
    with ServerProcess(binary, tmp_path / "model", flags) as server:
        choice = choice_of(server.http_address, {"messages": QUESTION, "temperature": 0})
        assert parts(choice) == (None, "Three", []), "without the flag the text is the answer"
    command = [binary, tmp_path / "model", *flags, "--port", "0", "--http-port", "0", "--reasoning-parser", "qwen3"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1, ended
    assert "--reasoning-parser qwen3: <think> and </think> are special tokens of this model" in ended.stderr
