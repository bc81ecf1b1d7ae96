"""Chat prompts of the Python client: rendered as transformers does it, and as over HTTP; errors name their place."""

from __future__ import annotations

import json
import shutil

import pytest
from openai.types.chat import ChatCompletionMessage

from rollout_client import Chat, InvalidArgument, SamplingParams, ServerProcess
from serving import FIXTURES, SMALL_CACHE
from vllm_answers import ask

TEMPLATES = FIXTURES / "chat_template"
CASES = json.loads((TEMPLATES / "cases.json").read_text())
"""What transformers makes of chats; `make.py` beside it wrote them."""
ONE = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module", params=["qwen2.5_tools.jinja", "qwen3.jinja", "parts.jinja"])
def templated(request, binary, tmp_path_factory):
    """A server whose model has one of the templates, and the template's cases."""
    model = tmp_path_factory.mktemp("models") / "templated"
    shutil.copytree(FIXTURES / "llama", model)
    shutil.copy(TEMPLATES / request.param, model / "chat_template.jinja")
    with ServerProcess(binary, model, [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        yield server, [case for case in CASES if case["template"] == request.param]


def test_prompts_are_those_of_transformers_and_of_the_http_door(templated):
    server, cases = templated
    good = [case for case in cases if "error" not in case]
    assert len(good) > 10
    members = [
        {name: case[name] for name in ("messages", "tools", "documents", "continue_final_message") if name in case}
        | {"add_generation_prompt": case.get("add_generation_prompt", False)}
        for case in good
    ]
    chats = [Chat(template_arguments=case["variables"], **given) for case, given in zip(good, members, strict=True)]
    outputs = server.client.generate(chats, sampling=ONE)
    for case, given, output in zip(good, members, outputs, strict=True):
        text = {"prompt": case["text"], "add_special_tokens": False}
        expected = ask(server.http_address, "POST", "/tokenize", text).body["tokens"]
        assert output.prompt_token_ids == expected, case
        given["chat_template_kwargs"] = case["variables"]
        rendered = ask(server.http_address, "POST", "/v1/chat/completions/render", given)
        assert rendered.status == 200 and rendered.body["token_ids"] == expected, case


@pytest.mark.parametrize("templated", ["qwen2.5_tools.jinja"], indirect=True)
def test_parts_and_messages_of_openais_package_are_the_same_as_plain_ones(templated):
    server, _ = templated
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    plain = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in plain]
    given = [plain[0], ChatCompletionMessage.model_validate(plain[1]), plain[2]]
    outputs = server.client.generate([plain, Chat(parts), given, Chat(given)], sampling=ONE)
    first, *others = [output.prompt_token_ids for output in outputs]
    assert others == [first] * 3
    text = ask(server.http_address, "POST", "/detokenize", {"tokens": first}).body["prompt"]
    for part in ("What is 1 + 2?", '{"name": "add", "arguments": {"a": 1, "b": 2}}', "<tool_response>\n3\n"):
        assert part in text


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages_json[1].content[0].type: image_url"),
        ({"role": "user", "content": 3}, "messages_json[1].content: "),
        ({"role": "user", "content": None}, "messages_json[1].content: is null"),
        ({"role": "assistant", "tool_calls": "add"}, "messages_json[1].tool_calls: "),
    ],
)
def test_what_the_server_refuses_is_named_by_message_and_field(client, message, says):
    with pytest.raises(InvalidArgument) as error:
        client.generate([[1], [{"role": "user", "content": "a"}, message]], sampling=ONE)
    assert str(error.value).startswith("prompts[1].chat.messages_json[1].") and says in str(error.value)
