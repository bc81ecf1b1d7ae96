"""Chat templates that requests bring, with `--trust-request-chat-template`."""

from __future__ import annotations

import pytest

from rollout_client import Chat, InvalidArgument, SamplingParams, ServerProcess
from scripted import write_scripted
from serving import FIXTURES, SMALL_CACHE, assert_idle
from test_http_tools import TOOLS
from vllm_answers import ask

CHAT, RENDER, TOKENIZE = "/v1/chat/completions", "/v1/chat/completions/render", "/tokenize"
QUESTION = [{"role": "user", "content": "Say hi."}]
SHOUTING = "{{ bos_token }}{% for m in messages %}{{ m.content | upper }}!{% endfor %}{{ mood }}{{ '\\n' }}"
"""Of a request; the model's own shows the messages as they are."""
CALLS, THINKS = "{# <tool_call> #}", "{# <think></think> #}"
ANSWER = ["<think>Hm.", "</think>", "<tool_call>", '{"name": "add", "arguments": {"a": 1}}', "</tool_call>"]


@pytest.fixture(scope="module")
def trusting(binary, tmp_path_factory):
    """A server of a model whose own template knows neither calls nor reasoning; it answers with both."""
    model = tmp_path_factory.mktemp("models") / "scripted"
    write_scripted(model, "{% for m in messages %}{{ m.content }}{% endfor %}{{ '\\n' }}", [ANSWER])
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--trust-request-chat-template"]
    with ServerProcess(binary, model, flags) as server:
        yield server
        assert_idle(server.client)


def tokens(server, text, **members):
    answer = ask(server.http_address, "POST", TOKENIZE, {"prompt": text, "add_special_tokens": False, **members})
    return answer.body["tokens"]


def test_each_route_renders_by_the_template_of_the_request(trusting):
    own = {"messages": QUESTION, "chat_template": SHOUTING, "chat_template_kwargs": {"mood": "Now"}}
    bos = ask(trusting.http_address, "GET", "/tokenizer_info").body.get("bos_token") or ""
    expected = tokens(trusting, f"{bos}SAY HI.!Now\n")
    assert ask(trusting.http_address, "POST", TOKENIZE, own).body["tokens"] == expected
    assert ask(trusting.http_address, "POST", RENDER, own).body["token_ids"] == expected
    answer = ask(trusting.http_address, "POST", CHAT, {**own, "max_tokens": 1, "return_token_ids": True})
    assert answer.body["prompt_token_ids"] == expected
    chat = Chat(QUESTION, chat_template=SHOUTING, template_arguments={"mood": "Now"})
    (group,) = trusting.client.generate([chat], sampling=SamplingParams(max_tokens=1))
    assert group.prompt_token_ids == expected
    plain = tokens(trusting, "Say hi.\n")
    for none in (None, ""):
        body = {"messages": QUESTION, "chat_template": none}
        assert ask(trusting.http_address, "POST", TOKENIZE, body).body["tokens"] == plain


def test_answers_are_read_as_the_template_of_the_request_says(trusting):
    def answered(comments):
        template = "{{ messages[0].content }}{{ '\\n' }}" + comments
        body = {"messages": QUESTION, "tools": TOOLS, "temperature": 0, "chat_template": template}
        message = ask(trusting.http_address, "POST", CHAT, body).body["choices"][0]["message"]
        calls = [call["function"]["name"] for call in message.get("tool_calls") or []]
        return message.get("reasoning"), message["content"], calls

    text = "".join(ANSWER)
    call = "".join(ANSWER[2:])
    assert answered("") == (None, text, [])
    assert answered(CALLS) == (None, "<think>Hm.</think>", ["add"])
    assert answered(THINKS) == ("Hm.", call, [])
    assert answered(CALLS + THINKS) == ("Hm.", None, ["add"])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% if %}", "chat_template: the chat template cannot be compiled"),
        ("{% if a %}" * 20_000, "more than 10000 tags"),
        ("{% if a %}" * 400 + "{% endif %}" * 400, "maximum recursion"),
        ("a" * (1 << 20) + "a", "the chat template has 1048577 bytes"),
        ("{{ '-' * 100000000 }}", "constants multiplied"),
        ("{% set r = range(100000) %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}", "instructions"),
        ("{{ raise_exception('no hi') }}", "the chat template refuses them: no hi"),
    ],
    ids=["malformed", "tags", "nested", "large", "constants", "endless", "refuses"],
)
def test_a_wrong_template_ends_only_its_request(trusting, template, says):
    for route in (CHAT, TOKENIZE):
        body = {"messages": QUESTION, "chat_template": template}
        answer = ask(trusting.http_address, "POST", route, body)
        assert answer.status == 400 and says in answer.body["error"]["message"], answer.body
    assert tokens(trusting, "a")


def test_templates_of_requests_leave_nothing_behind(trusting):
    """A thousand templates of half a megabyte, and a thousand with a hundred tags."""

    def send(count, template):
        for i in range(count):
            body = {"messages": QUESTION, "chat_template": template.replace("NUMBER", str(i))}
            assert ask(trusting.http_address, "POST", TOKENIZE, body).status == 200

    def resident():
        return trusting.client.status().memory.resident_bytes

    texts = "{# " + "long " * 100_000 + "#}NUMBER"
    tags = "{% if NUMBER == messages %}{{ NUMBER }}{% endif %}" * 100 + "NUMBER"
    send(50, texts)
    send(50, tags)
    before = resident()
    send(1000, texts)
    send(1000, tags)
    grown = resident() - before
    assert grown < 64 << 20, f"{grown >> 20} MiB more than before 2,000 templates"
    assert_idle(trusting.client)


def test_a_server_that_does_not_trust_requests_names_the_flag(binary):
    with ServerProcess(binary, FIXTURES / "llama", [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        for route in (CHAT, RENDER, TOKENIZE):
            answer = ask(server.http_address, "POST", route, {"messages": QUESTION, "chat_template": SHOUTING})
            error = answer.body["error"]
            assert (answer.status, error["param"]) == (400, "chat_template")
            assert error["message"].endswith("start the server with --trust-request-chat-template"), error
        with pytest.raises(InvalidArgument, match=r"prompts\[0\]\.chat\.chat_template: .*--trust-request"):
            server.client.generate([Chat(QUESTION, chat_template=SHOUTING)])
