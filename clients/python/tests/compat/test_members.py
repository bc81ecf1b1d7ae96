"""The tables of docs/http.md: each member and each route of vLLM 0.33, sent to the server, with what comes of it.

`make test-clients` compares the tables with what the server does. After a change that is meant, write them anew:

    .venv-clients/bin/python -m pytest clients/python/tests/compat/test_members.py --record
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil

import pytest
from members import CASES, Reply
from routes import ROUTES, send

from rollout_client import ServerProcess
from scripted import write_scripted
from serving import FIXTURES, REPOSITORY, SMALL_CACHE, assert_idle
from vllm_answers import ask

PAGE = REPOSITORY / "docs" / "http.md"
PATHS = {"C": "/v1/completions", "H": "/v1/chat/completions", "G": "/inference/v1/generate"}
QUESTION = [{"role": "user", "content": "Say hi."}]
BASE = {
    "C": {"prompt": "Say hi."},
    "H": {"messages": QUESTION},
    "G": {"token_ids": [5, 6, 7, 8]},
}
SAMPLING = {"max_tokens": 8, "seed": 1}
# Members of token-in-token-out that are not in its `sampling_params`.
TOP_LEVEL = {
    *("token_ids", "model", "request_id", "stream", "stream_options", "return_token_ids", "features", "content_parts"),
    *("token_offsets", "reasoning_ended", "reasoning_parser_kwargs", "output_mode", "parse_context", "cache_salt"),
    *("priority", "kv_transfer_params"),
}
# Variables that the chat template writes besides the messages.
SHOWN = "tools documents mood reasoning_effort"
WORKS, NO_EFFECT, IGNORED, REJECTED = "works", "no effect", "ignored", "rejected"


def make_probe(model):
    """A tiny model whose prompts show every member that a template can show."""
    shutil.copytree(FIXTURES / "llama", model)
    shown = "".join(f"{{% if {name} %}}{{{{ {name} | string }}}}{{% endif %}}" for name in SHOWN.split())
    template = model / "chat_template.jinja"
    template.write_text(shown + template.read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    begin = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": begin,
        "pair": [*begin, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))


def make_thinker(model):
    """A model that thinks before it answers."""
    template = (FIXTURES / "llama/chat_template.jinja").read_text() + "{# <think></think> #}"
    write_scripted(model, template, [["<think>", "one", "two", "three", "four", "</think>", "yes"]])


def make_experts(model):
    """A model with experts."""
    shutil.copytree(FIXTURES / "qwen3_moe", model)
    shutil.copy(FIXTURES / "llama/chat_template.jinja", model)


MODELS = {"probe": make_probe, "thinker": make_thinker, "experts": make_experts}
MODEL_FLAGS = {"experts": ["--return-routing"]}


@pytest.fixture(scope="module")
def servers(binary, tmp_path_factory):
    """A server of each of the models, by its name."""
    directory = tmp_path_factory.mktemp("models")
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--weights-dir", str(FIXTURES), "--max-adapters", "1"]
    flags += ["--trust-request-chat-template", "--enable-prompt-tokens-details"]
    with contextlib.ExitStack() as stack:
        found = {}
        for name, make in MODELS.items():
            make(directory / name)
            own = ["--served-model-name", name, *MODEL_FLAGS.get(name, [])]
            process = ServerProcess(binary, directory / name, [*flags, *own])
            found[name] = stack.enter_context(process)
        yield found
        for server in found.values():
            assert_idle(server.client)


def ask_with(server, route, members):
    """The answer to a request with these members."""
    body = dict(BASE[route])
    common = {**SAMPLING, "return_token_ids": True}
    if route != "G":
        body |= {**common, **members}
    else:
        inner = {name: value for name, value in {**common, **members}.items() if name not in TOP_LEVEL}
        body |= {name: value for name, value in {**common, **members}.items() if name in TOP_LEVEL}
        body["sampling_params"] = inner
    return Reply(ask(server.http_address, "POST", PATHS[route], body))


def verdict(server, route, name, case):
    """What the server does with the member, and its message if it rejects it."""
    member = re.split(r"[.:] ?| \(", name)[0]
    base = ask_with(server, route, case.also)
    assert base.answer.status == 200, f"{name}: the request without it fails: {base.answer.body}"
    value = case.value(base) if callable(case.value) else case.value
    reply = ask_with(server, route, {**case.also, member: value})
    if reply.answer.status != 200:
        error = reply.answer.body["error"]
        assert 400 <= reply.answer.status < 500 or reply.answer.status == 501, f"{name}: {error}"
        return REJECTED, shown(error["message"], member)
    ignored = reply.answer.headers.get("x-ignored-members", "").replace("sampling_params.", "").split(", ")
    if member in ignored or name in ignored:
        return IGNORED, None
    if case.effect is None:
        assert reply.text == base.text and reply.tokens == base.tokens, f"{name} on {PATHS[route]} has an effect"
        return NO_EFFECT, None
    assert case.effect(reply, base), f"{name} on {PATHS[route]} is dropped in silence: {reply.answer.body}"
    return WORKS, None


def shown(message, member):
    """The message as it is in the table: without the place in this request's JSON."""
    message = re.sub(r" at line \d+ column \d+", "", message)
    message = re.sub(rf"^(body|sampling_params(\.\w+)*|{member}[\w.\[\]]*): ", "", message)
    return code(message.replace("|", "\\|"))


def code(text):
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def member_rows(servers):
    rows, problems = {}, []
    for name, case in CASES.items():
        member, value = re.fullmatch(r"([\w.]+)(?:: (.*)| \(.*\))?", name).groups()
        verdicts = rows.setdefault(f"`{member}`" + (f": {value}" if value else ""), {})
        for route in case.routes:
            try:
                verdicts[route] = verdict(servers[case.model], route, name, case)
            except AssertionError as problem:
                problems.append(str(problem).partition("\n")[0])
    assert not problems, "\n".join(problems)
    for label, verdicts in rows.items():
        messages = {message for _, message in verdicts.values() if message}
        yield [label, *(verdicts.get(route, ("",))[0] for route in PATHS), "; ".join(sorted(messages))]


def route_rows(servers):
    server = servers["probe"]
    described = ask(server.http_address, "GET", "/openapi.json").body["paths"]
    rows = []
    for route, request in ROUTES.items():
        method, path = route.split()
        answer = send(server, route)
        missing = path != "/openapi.json" and method.lower() not in described.get(path, ())
        assert not missing or answer.status in (404, 405), f"{route}: {answer}"
        if missing or answer.status == 501:
            message = answer.body["error"]["message"].removeprefix(f"{path}: ")
            verdict = [f"{REJECTED} with {answer.status}", code(message)]
        else:
            assert answer.status in request.statuses, f"{route}: {answer.status} {answer.body}"
            verdict = [WORKS, ""]
        if rows and verdict == rows[-1][1:] != [WORKS, ""]:
            rows[-1][0] += f", `{route}`"
        else:
            rows.append([f"`{route}`", *verdict])
    return rows


def table(heading, rows):
    def line(cells):
        return "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|"

    return "\n".join([line(heading), "|" + "---|" * len(heading), *map(line, rows)])


TABLES = {
    "members": (["member", "completions", "chats", "token ids", "message"], member_rows),
    "routes": (["route", "here", "message"], route_rows),
}


@pytest.mark.parametrize("kind", TABLES)
def test_the_table_says_what_the_server_does(servers, request, kind):
    heading, rows = TABLES[kind]
    expected = table(heading, rows(servers))
    page = PAGE.read_text()
    head = re.escape(table(heading, []).partition("\n")[0])
    (written,) = re.findall(rf"^{head}\n(?:\|.*\n)*", page, re.MULTILINE)
    if request.config.getoption("--record"):
        PAGE.write_text(page.replace(written, expected + "\n"))
    else:
        assert written.splitlines() == expected.splitlines()
