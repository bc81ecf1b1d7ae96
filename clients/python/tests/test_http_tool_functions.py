"""Calls as Qwen3-Coder and Qwen 3.5 write them, typed by the tools' schemas, and the counts of calls by format."""

from __future__ import annotations

import json
import urllib.request

import openai
import pytest

from browsers import Watched, chromium
from scripted import biased
from test_http_tools import NAMED, QUESTION, joined
from test_observability import scrape, value
from vllm_answers import ask

TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments|items %}
{{- '<parameter=' + name + '>\n' }}
{{- value if value is string else value|tojson }}
{{- '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
ANSWERS = {
    "call": [
        "I look.",
        "\n<tool_call>\n<function=find>\n<para",
        "meter=code>\nif a < b:\n",
        "  '</parameter>'\n</param",
        "eter>\n<parameter=limit>\n3\n</parameter>\n",
        "</function>\n</tool_call>",
    ],
    "typed": [
        "<tool_call><function=find><parameter=where>{'a': [1, None]}</parameter>",
        "<parameter=exact>True</parameter><parameter=other>7",
        "</parameter></function></tool_call><tool_call><function=count></function>",
    ],
    "unknown": ["<tool_call><function=lose>", "</function></tool_call>!"],
    "invalid": ["<tool_call>{", '"name": "find"}</tool_call>?'],
    "unclosed": ["<tool_call><function=", "find><parameter=code>x = 1"],
    "plain": ["Nothing", " to call."],
}
TEXTS = {name: "".join(parts) for name, parts in ANSWERS.items()}
CALLS = {
    "call": [("find", {"code": "if a < b:\n  '</parameter>'", "limit": 3})],
    "typed": [("find", {"where": {"a": [1, None]}, "exact": True, "other": "7"}), ("count", {})],
    "unknown": [("lose", {})],
}
CONTENTS = {"call": "I look.", "typed": None, "unknown": "!"}
SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "where": {"type": "object"},
        "exact": {"type": "boolean"},
    },
}
TOOLS = [
    {"type": "function", "function": {"name": "find", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "count"}},
]


@pytest.fixture
def ai(scripted):
    with openai.OpenAI(base_url=f"http://{scripted[0].http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(ai, scripted, name, **members):
    return ai.chat.completions.create(model="", messages=QUESTION, tools=TOOLS, **biased(scripted[1], name), **members)


@pytest.mark.parametrize("name", ANSWERS)
def test_calls_are_found_and_typed_and_nothing_is_lost(ai, scripted, name):
    content, calls = CONTENTS.get(name, TEXTS[name]), CALLS.get(name, [])
    (choice,) = create(ai, scripted, name).choices
    assert choice.message.content == content
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls or []]
    assert found == calls and choice.finish_reason == ("tool_calls" if calls else "stop")
    streamed, parts, reason = joined(create(ai, scripted, name, stream=True))
    assert (streamed or None, reason) == (content, choice.finish_reason)
    assert [(part["name"], json.loads(part["arguments"])) for part in parts] == calls


def test_a_round_with_the_tools_result(ai, scripted):
    message = create(ai, scripted, "call").choices[0].message
    messages = [*QUESTION, message.model_dump(), {"role": "tool", "tool_call_id": message.tool_calls[0].id}]
    tokens = ask(scripted[0].http_address, "POST", "/tokenize", {"messages": messages, "tools": TOOLS}).body["tokens"]
    text = ask(scripted[0].http_address, "POST", "/detokenize", {"tokens": tokens}).body["prompt"]
    assert f"<|im_start|>assistant\n{TEXTS['call']}<|im_end|>\n" in text, "the text that the model had written"


@pytest.mark.parametrize("choice", ["required", {**NAMED, "function": {"name": "find"}}])
def test_forced_calls_are_json_whatever_the_format(ai, choice):
    """The grammar of a forced call is that of the tools' schemas, as in the other formats."""
    members = {"model": "", "messages": QUESTION, "tools": TOOLS, "tool_choice": choice, "max_tokens": 300, "n": 8}
    samples = ai.chat.completions.create(temperature=1, seed=5, **members).choices
    ended = [sample for sample in samples if sample.finish_reason != "length"]
    assert ended
    for call in (call for sample in ended for call in sample.message.tool_calls):
        assert call.function.name in ("find", "count") and isinstance(json.loads(call.function.arguments), dict)


def test_malformed_calls_are_counted_by_format(ai, scripted):
    server = scripted[0]

    def counts():
        samples = scrape(server)
        outcomes = ("parsed", "unknown_tool", "invalid", "unclosed")
        return [value(samples, "rollout:tool_calls_total", format="qwen3_coder", outcome=o) for o in outcomes]

    before = counts()
    for name in ("call", "typed", "typed", "unknown", "invalid", "unclosed", "plain"):
        list(create(ai, scripted, name, stream=True)) if name == "call" else create(ai, scripted, name)
    ai.chat.completions.create(model="", messages=QUESTION, **biased(scripted[1], "invalid"))
    create(ai, scripted, "invalid", tool_choice="none")
    assert [after - n for n, after in zip(before, counts(), strict=True)] == [5, 1, 1, 1]
    parsed, unknown, invalid, unclosed = counts()
    calls = server.client.status().tool_calls["qwen3_coder"]
    assert (calls.parsed, calls.malformed) == (parsed, unknown + invalid + unclosed)
    with chromium() as browser:
        watched = Watched(browser)
        watched.page.goto(f"http://{server.http_address}/")
        watched.wait_for_text("#calls-more", f"qwen3_coder: {calls.malformed} of {parsed + calls.malformed} malformed")
        watched.context.close()


def test_responses_and_messages_count_too(scripted):
    server, starts = scripted
    before = server.client.status().tool_calls.get("qwen3_coder")
    malformed = before.malformed if before else 0
    tools = [{"type": "function", "name": "find", "parameters": SCHEMA}]
    for path, body in [
        ("/v1/responses", {"input": "?", "tools": tools, **biased(starts, "invalid")}),
        (
            "/v1/messages",
            {
                "model": "",
                "max_tokens": 50,
                "messages": QUESTION,
                "tools": [{"name": "find", "input_schema": SCHEMA}],
                **biased(starts, "invalid"),
            },
        ),
    ]:
        request = urllib.request.Request(f"http://{server.http_address}{path}", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request) as answer:
            assert "<tool_call>" in answer.read().decode()
        malformed += 1
        assert server.client.status().tool_calls["qwen3_coder"].malformed == malformed, path
