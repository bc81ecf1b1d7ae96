"""`/v1/messages`: Anthropic's protocol beside the same chats."""

from __future__ import annotations

import json
import signal

import pytest

from raw_http import Wire, post
from rollout_client import ServerProcess
from scripted import biased, write_scripted
from serving import FIXTURES, SMALL_CACHE
from vllm_answers import ask

MESSAGES = "/v1/messages"
CHAT = "/v1/chat/completions"
TEMPLATE = (FIXTURES / "chat_template" / "qwen2.5_tools.jinja").read_text()
ANSWERS = {
    "plain": ["The sum", " is 3."],
    "call": ["Let me see.", "\n<tool_call>\n", '{"name": "add", "arguments": ', '{"a": 1, "b": 2}}', "\n</tool_call>"],
    "two": ["<tool_call>", '{"name": "sub"}', "</tool_call>\n<tool_call>", '{"name": "add"}', "</tool_call> Well."],
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"name": name, "description": f"{name} two numbers", "input_schema": SCHEMA} for name in ("add", "sub")]
CHAT_TOOLS = [
    {
        "type": "function",
        "function": {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]},
    }
    for tool in TOOLS
]
QUESTION = [{"role": "user", "content": "What is 1 + 2?"}]


@pytest.fixture
def send(scripted):
    """Sends a body, and makes the model give one of its answers."""
    server, starts = scripted

    def send(name, path=MESSAGES, **members):
        body = {"messages": QUESTION, "max_tokens": 20, **biased(starts, name), **members}
        return ask(server.http_address, "POST", path, body)

    return send


def events(text):
    """The events of a stream: the name of each is its type."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def blocks_of(stream):
    """The blocks of a stream, whose framing must be Anthropic's."""
    blocks = []
    for event in stream[1:-2]:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            text = ""
        elif kind == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            text += event["delta"].get("text", "") + event["delta"].get("partial_json", "")
        else:
            assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
            if blocks[-1]["type"] == "text":
                blocks[-1]["text"] = text
            else:
                blocks[-1]["input"] = json.loads(text)
    assert [event["type"] for event in (stream[0], *stream[-2:])] == ["message_start", "message_delta", "message_stop"]
    return blocks


def without_ids(blocks):
    return [{name: value for name, value in block.items() if name != "id"} for block in blocks]


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("plain", [{"type": "text", "text": "The sum is 3."}], "end_turn"),
        (
            "call",
            [
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "name": "add", "input": {"a": 1, "b": 2}},
            ],
            "tool_use",
        ),
        (
            "two",
            [
                {"type": "text", "text": "Well."},
                {"type": "tool_use", "name": "sub", "input": {}},
                {"type": "tool_use", "name": "add", "input": {}},
            ],
            "tool_use",
        ),
    ],
)
def test_a_message_is_the_answer_of_a_chat(send, name, content, reason):
    answer = send(name, tools=TOOLS)
    chat = send(name, CHAT, tools=CHAT_TOOLS).body
    body = answer.body
    assert answer.status == 200 and list(body) == [
        "id", "type", "role", "content", "model", "stop_reason", "stop_sequence", "usage",
    ]  # fmt: skip
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", chat["model"])
    assert without_ids(body["content"]) == content
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, None)
    usage = body["usage"]
    assert usage == {
        "input_tokens": chat["usage"]["prompt_tokens"],
        "output_tokens": chat["usage"]["completion_tokens"],
    }
    streamed = send(name, tools=TOOLS, stream=True)
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    stream = events(streamed.body)
    blocks = without_ids(blocks_of(stream))
    assert sorted(blocks, key=json.dumps) == sorted(content, key=json.dumps)
    start = stream[0]["message"]
    assert start["id"].startswith("msg_") and start["content"] == [] and start["stop_reason"] is None
    assert start["usage"] == {"input_tokens": chat["usage"]["prompt_tokens"], "output_tokens": 0}
    assert stream[-2]["delta"] == {"stop_reason": reason, "stop_sequence": None}
    assert stream[-2]["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]


def test_the_end_says_why(send):
    for stream in (False, True):
        for members, ending, text in (
            ({"max_tokens": 1}, ("max_tokens", None), "The sum"),
            ({"stop_sequences": [" is"]}, ("stop_sequence", " is"), "The sum"),
            ({"stop_sequences": [" is"], "include_stop_str_in_output": True}, ("stop_sequence", " is"), "The sum is"),
        ):
            body = send("plain", stream=stream, **members).body
            if stream:
                found = events(body)
                body = {"content": blocks_of(found), **found[-2]["delta"]}
            assert (body["stop_reason"], body["stop_sequence"]) == ending
            assert body["content"] == [{"type": "text", "text": text}]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "sub"}])
def test_a_forced_call(send, choice):
    body = send("plain", tools=TOOLS, tool_choice=choice, max_tokens=300, temperature=1, seed=5).body
    if body["stop_reason"] == "max_tokens":
        assert body["content"][-1]["type"] == "text", "what was cut off is no call"
        return
    assert body["stop_reason"] == "tool_use" and {block["type"] for block in body["content"]} == {"tool_use"}
    assert all(isinstance(block["input"], dict) for block in body["content"])


def test_what_is_cut_off_is_no_call(send):
    choice = {"type": "tool", "name": "sub"}
    body = send("plain", tools=TOOLS, tool_choice=choice, max_tokens=1).body
    assert body["stop_reason"] == "max_tokens" and [block["type"] for block in body["content"]] == ["text"]


def test_a_round_with_the_result_is_that_of_a_chat(scripted, send):
    address, call = scripted[0].http_address, {"id": "t1", "name": "add", "input": {"a": 1, "b": 2}}
    messages = [
        *QUESTION,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, {"type": "tool_use", **call}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "3"}]},
    ]
    function = {"name": "add", "arguments": json.dumps(call["input"])}
    chat = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": "t1", "function": function}]},
        {"role": "tool", "tool_call_id": "t1", "content": "3"},
    ]
    tokens = ask(address, "POST", "/tokenize", {"messages": chat, "tools": CHAT_TOOLS}).body["count"]
    body = {"messages": messages, "system": "Be brief.", "tools": TOOLS}
    counted = ask(address, "POST", f"{MESSAGES}/count_tokens", body)
    assert (counted.status, counted.body) == (
        200,
        {"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}},
    )
    final = send("plain", **body).body
    assert final["content"] == [{"type": "text", "text": "The sum is 3."}]
    assert final["usage"]["input_tokens"] == tokens


def test_a_message_of_the_system_among_others(scripted, binary, tmp_path):
    """It stays in its place, or becomes part of the first if the template takes it nowhere else."""
    body = {"messages": [*QUESTION, {"role": "system", "content": "Add."}, *QUESTION], "system": "Be brief."}
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "{{ m.content }}\n{% endfor %}"
    )
    write_scripted(tmp_path / "model", strict, list(ANSWERS.values()))
    with ServerProcess(binary, tmp_path / "model", [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        for address, system, rest in (
            (scripted[0].http_address, "Be brief.", [*QUESTION, {"role": "system", "content": "Add."}, *QUESTION]),
            (server.http_address, "Be brief.Add.", QUESTION * 2),
        ):
            counted = ask(address, "POST", f"{MESSAGES}/count_tokens", body)
            chat = {"messages": [{"role": "system", "content": system}, *rest]}
            assert counted.body["input_tokens"] == ask(address, "POST", "/tokenize", chat).body["count"]


def test_without_parallel_calls_a_message_has_its_first_call(send):
    def names(**members):
        return [block["name"] for block in send("two", tools=TOOLS, **members).body["content"] if "name" in block]

    assert names() == ["sub", "add"]
    assert names(tool_choice={"type": "auto", "disable_parallel_tool_use": True}) == ["sub"]


def test_members_that_nothing_reads_are_listed(send):
    content = [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}]
    answer = send(
        "plain",
        messages=[{"role": "user", "content": content}],
        metadata={"user_id": "a"},
    )
    listed = answer.headers["x-ignored-members"]
    assert answer.status == 200
    for name in ("cache_control", "metadata"):
        assert name in listed


@pytest.mark.parametrize(
    "members, status, kind, said",
    [
        ({"messages": None}, 400, "invalid_request_error", "messages"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": 3}, 400, "invalid_request_error", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "base64", "data": ""}}]}]},
            400,
            "invalid_request_error",
            "messages[0].content[0].type: image_url: this model takes text",
        ),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 2000}},
            400,
            "invalid_request_error",
            "thinking.budget_tokens: 2000 is not below max_tokens 20",
        ),
        ({"model": "none"}, 404, "not_found_error", "The model `none` does not exist"),
        ({"if_weight_version": 7}, 409, "invalid_request_error", "7"),
    ],
)
def test_errors_have_anthropics_form(send, members, status, kind, said):
    for stream in (False, True):
        answer = send("plain", stream=stream, **members)
        assert (answer.status, answer.body["type"], answer.body["error"]["type"]) == (status, "error", kind), answer
        assert said in answer.body["error"]["message"]


def test_other_errors_have_the_same_form(scripted, send):
    address = scripted[0].http_address
    assert ask(address, "GET", MESSAGES).body["error"]["type"] == "invalid_request_error"
    assert ask(address, "POST", f"{MESSAGES}/count_tokens", "{").body["type"] == "error"
    assert ask(address, "POST", f"{MESSAGES}/none", {}).body["error"]["type"] == "not_found_error"
    assert ask(address, "POST", "/pause").status == 200
    try:
        paused = send("plain")
    finally:
        ask(address, "POST", "/resume")
    assert (paused.status, paused.body["error"]["type"]) == (503, "overloaded_error")


def test_a_stream_that_breaks_ends_with_an_error(binary):
    body = {"messages": QUESTION, "max_tokens": 1000, "ignore_eos": True, "stream": True, "temperature": 0}
    with (
        ServerProcess(binary, FIXTURES / "llama", [*SMALL_CACHE, "--mem-util", "0.2"]) as server,
        Wire(server.http_address, post(MESSAGES, body)) as stream,
    ):
        assert stream.head()[0] == 200
        for _ in range(2):  # the second ends what still runs
            server.process.send_signal(signal.SIGTERM)
        text = b"".join(stream.chunks()).decode()
    *_, last = events(text)
    assert last["type"] in ("error", "message_stop")
    if last["type"] == "error":
        assert last["error"]["type"] == "overloaded_error"
