"""`/v1/responses`: OpenAI's Responses beside the same chats, and through the `openai` package."""

from __future__ import annotations

import json

import openai
import pytest

from scripted import biased
from serving import FIXTURES
from vllm_answers import ask

RESPONSES = "/v1/responses"
TEMPLATE = (FIXTURES / "chat_template" / "qwen2.5_tools.jinja").read_text()
ANSWERS = {
    "plain": ["The sum", " is 3."],
    "call": ["Let me see.", "\n<tool_call>\n", '{"name": "add", "arguments": ', '{"a": 1, "b": 2}}', "\n</tool_call>"],
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "name": "add", "description": "add two numbers", "parameters": SCHEMA, "strict": True}]
CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "description": "add two numbers", "parameters": SCHEMA}}]
QUESTION = "What is 1 + 2?"


@pytest.fixture
def send(scripted):
    """Sends a body, and makes the model give one of its answers."""
    server, starts = scripted

    def send(name, **members):
        return ask(server.http_address, "POST", RESPONSES, {"input": QUESTION, **biased(starts, name), **members})

    return send


@pytest.fixture
def ai(scripted):
    with openai.OpenAI(base_url=f"http://{scripted[0].http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def events(text):
    """The events of a stream: the name of each is its type, and they are numbered."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}" and found[-1]["sequence_number"] == len(found) - 1
    return found


def text_of(item):
    assert item["type"] == "message" and item["role"] == "assistant" and item["id"].startswith("msg_")
    (part,) = item["content"]
    assert part | {"text": ""} == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return part["text"]


def test_a_response_is_the_answer_of_a_chat(scripted, send):
    answer = send("call", tools=TOOLS, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=20)
    body = answer.body
    assert answer.status == 200 and "x-ignored-members" not in answer.headers
    assert (body["object"], body["status"], body["incomplete_details"]) == ("response", "completed", None)
    message, call = body["output"]
    assert (text_of(message), message["status"]) == ("Let me see.", "completed")
    assert (call["type"], call["name"], call["arguments"], call["status"]) == (
        "function_call", "add", '{"a": 1, "b": 2}', "completed",
    )  # fmt: skip
    assert call["call_id"] and call["id"].startswith("fc_")
    echoed = {"instructions": "Be brief.", "metadata": {"a": "b"}, "tools": TOOLS, "tool_choice": "auto", "text": None}
    assert {name: body[name] for name in echoed} == echoed
    assert (body["temperature"], body["top_p"], body["max_output_tokens"], body["store"]) == (0, 1, 20, False)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    chat = {"messages": messages, "tools": CHAT_TOOLS, "max_tokens": 20, **biased(scripted[1], "call")}
    usage = ask(scripted[0].http_address, "POST", "/v1/chat/completions", chat).body["usage"]
    assert body["usage"] == {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": body["usage"]["input_tokens_details"],
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def test_an_unfinished_message_is_continued(scripted, send):
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The sum"}]
    items = [messages[0], messages[1] | {"type": "message", "id": "msg_1", "status": "incomplete"}]
    chat = {"messages": messages, "max_tokens": 20, **biased(scripted[1], "plain"), "continue_final_message": True}
    answer = ask(scripted[0].http_address, "POST", "/v1/chat/completions", chat).body
    body = send("plain", input=items, max_output_tokens=20).body
    assert text_of(body["output"][0]) == answer["choices"][0]["message"]["content"]
    assert body["usage"]["input_tokens"] == answer["usage"]["prompt_tokens"]
    new = send("plain", input=[items[0], items[1] | {"status": "completed"}], max_output_tokens=20).body
    assert new["usage"]["input_tokens"] > body["usage"]["input_tokens"], "a new answer has a header of its own"


def test_a_streams_events(send):
    whole = send("call", tools=TOOLS).body
    stream = events(send("call", tools=TOOLS, stream=True).body)
    kinds = [event["type"].removeprefix("response.") for event in stream]
    assert kinds == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    created, final = stream[0]["response"], stream[-1]["response"]
    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert final["status"] == "completed" and final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    added, done = stream[2]["item"], stream[7]["item"]
    assert (added["content"], added["status"], text_of(done), done["status"]) == (
        [], "in_progress", "Let me see.", "completed",
    )  # fmt: skip
    assert stream[4]["delta"] == stream[5]["text"] == "Let me see."
    assert {event["item_id"] for event in stream[3:7]} == {done["id"]} and stream[8]["output_index"] == 1
    assert (stream[10]["name"], stream[10]["arguments"]) == ("add", '{"a": 1, "b": 2}')
    assert final["output"] == [done, stream[11]["item"]]
    assert [item["type"] for item in final["output"]] == [item["type"] for item in whole["output"]]


def test_the_end_says_why(send):
    body = send("plain", max_output_tokens=1).body
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (text_of(body["output"][0]), body["output"][0]["status"]) == ("The sum", "incomplete")
    stream = events(send("plain", max_output_tokens=1, stream=True).body)
    assert stream[-1]["type"] == "response.incomplete" and stream[-1]["response"]["status"] == "incomplete"
    stopped = send("plain", stop=" is").body
    assert (stopped["status"], text_of(stopped["output"][0])) == ("completed", "The sum")


def test_openais_package(scripted, ai):
    def giving(name):
        return {"extra_body": biased(scripted[1], name)}

    first = ai.responses.create(model="", input=QUESTION, tools=TOOLS, store=False, **giving("call"))
    assert first.output_text == "Let me see."
    call = first.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    items = [{"role": "user", "content": QUESTION}, *(item.model_dump() for item in first.output), result]
    final = ai.responses.create(model="", input=items, tools=TOOLS, **giving("plain"))
    assert (final.output_text, final.status) == ("The sum is 3.", "completed")
    function = {"name": "add", "arguments": call.arguments}
    chat = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [{"id": call.call_id, "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
    ]
    body = {"messages": chat, "tools": CHAT_TOOLS}
    assert final.usage.input_tokens == ask(scripted[0].http_address, "POST", "/tokenize", body).body["count"]
    with ai.responses.stream(model="", input=QUESTION, tools=TOOLS, **giving("call")) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_text == "Let me see."
    assert {"response.output_text.delta", "response.function_call_arguments.delta"} <= kinds


def test_text_of_a_schema(send):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "a", "schema": schema, "strict": True}}
    body = send("plain", text=text, max_output_tokens=200, temperature=1, seed=1).body
    assert body["text"] == text
    if body["status"] == "completed":
        assert json.loads(text_of(body["output"][0])) == {"a": 1}


def test_a_forced_call(send):
    choice = {"type": "function", "name": "add"}
    body = send("plain", tools=TOOLS, tool_choice=choice, max_output_tokens=300, temperature=1, seed=5).body
    assert [item["type"] for item in body["output"]] == ["function_call"] and body["tool_choice"] == choice
    if body["status"] == "completed":
        assert isinstance(json.loads(body["output"][0]["arguments"]), dict)


def test_without_parallel_calls_a_response_has_its_first_call(send):
    body = send("call", tools=TOOLS, parallel_tool_calls=False).body
    assert [item["type"] for item in body["output"]] == ["message", "function_call"]
    assert body["parallel_tool_calls"] is False


def test_members_without_effect_are_listed(send):
    answer = send("plain", store=True, include=["reasoning.encrypted_content"], user="u")
    assert answer.status == 200
    assert {"store", "include", "user"} <= set(answer.headers["x-ignored-members"].split(", "))
    assert (
        "x-ignored-members"
        not in send("plain", store=False, parallel_tool_calls=True, previous_response_id=None).headers
    )


@pytest.mark.parametrize(
    "members, param, said",
    [
        ({"input": None}, "input", "is missing"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "stores no responses"),
        ({"background": True}, "background", "stores no responses"),
        ({"truncation": "auto"}, "truncation", "shorter input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
         "messages[0].content[0].type", "this model takes text"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "item_reference"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice", "sub"),
        ({"n": 2}, "n", "/v1/chat/completions"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(send, members, param, said):
    answer = send("plain", **members)
    assert (answer.status, answer.body["error"]["param"]) == (400, param), answer.body
    assert said in answer.body["error"]["message"]


def test_an_unknown_model_is_not_found(send):
    assert send("plain", model="none").status == 404
