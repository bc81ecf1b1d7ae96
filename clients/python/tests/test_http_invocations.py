"""`/invocations`, the route of Amazon SageMaker: a body gets the answer of the route that it is for."""

from __future__ import annotations

import json

import pytest

from vllm_answers import ask

CHAT = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3, "seed": 1}
COMPLETION = {"prompt": "Say hi.", "max_tokens": 3, "seed": 1}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


def comparable(text):
    """A body or an event without what differs from one request to the next."""
    found = json.loads(text)
    assert found.pop("id") and found.pop("created")
    return found


@pytest.fixture
def invoke(scripted):
    """Sends a body to /invocations, or to another route."""
    return lambda body, path="/invocations": ask(scripted[0].http_address, "POST", path, body)


TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
ANSWERS = {"hello": ["Good day, ", "friend."]}


@pytest.mark.parametrize("path", ROUTES)
def test_the_answer_is_that_of_the_route(invoke, path):
    body = ROUTES[path]
    ours, theirs = invoke(body), invoke(body, path)
    assert (ours.status, ours.headers["content-type"]) == (theirs.status, theirs.headers["content-type"])
    assert ours.status == 200 and comparable(json.dumps(ours.body)) == comparable(json.dumps(theirs.body))
    streams = [invoke(body | {"stream": True}, route).body for route in ("/invocations", path)]
    *ours, end = streams[0].removesuffix("\n\n").split("\n\n")
    *theirs, other_end = streams[1].removesuffix("\n\n").split("\n\n")
    assert end == other_end == "data: [DONE]"
    found = [[comparable(event.removeprefix("data: ")) for event in events] for events in (ours, theirs)]
    assert found[0] == found[1] and len(found[0]) > 1
    listed = invoke(body | {"unheard": 1})
    assert listed.headers["x-ignored-members"] == "unheard"


def test_messages_make_a_body_a_chat(invoke):
    assert invoke(COMPLETION | CHAT).body["object"] == "chat.completion"
    assert invoke(COMPLETION | {"messages": None}).body["object"] == "text_completion"
    large = COMPLETION | CHAT | {"user": "a" * 100_000}
    assert invoke(large).body["object"] == "chat.completion"


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "prompt"),
        ({"messages": 3}, "messages"),
        (CHAT | {"temperature": "hot"}, "temperature"),
        (COMPLETION | {"n": -1}, "n"),
        ([], "body"),
        ("{", "body"),
    ],
)
def test_errors_are_those_of_the_route(invoke, body, param):
    answer = invoke(body)
    assert (answer.status, answer.body["error"]["param"]) == (400, param), answer.body


def test_an_unknown_model_is_not_found(invoke):
    for body in ROUTES.values():
        assert invoke(body | {"model": "none"}).status == 404
