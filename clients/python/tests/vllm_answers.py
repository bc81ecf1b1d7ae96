"""Answers of a real vLLM 0.32 over HTTP, recorded, and ours to the same requests beside them.

`tests/fixtures/vllm_http/FAMILY.jsonl` has one exchange a line: `{name, title, request: {method, path, headers?, body},
response: {status, content_type, body}}`, members in vLLM's order, streams as text. The model's name is written MODEL.
What is compared is all that a client can rely on: status, content type, names and order of members, which of them are
null, the types of their values, the values of `object`, `role` and `finish_reason`, of an error all but its text, and
of a stream its framing and the kinds of events in order. Texts, numbers and token ids depend on the model.
"""

from __future__ import annotations

import fnmatch
import http.client
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).resolve().parents[3] / "tests" / "fixtures" / "vllm_http"
# Members whose values do not depend on the model.
FIXED = {"object", "role", "finish_reason", "param", "code", "type"}
# Paths of objects whose members are named by data: token ids or texts.
MAPS = re.compile(r"prompt_logprobs\.\d+$|\.logprobs\.top_logprobs\.\d+$|^\.checksums$")
EVENT = re.compile(r"data: (.*)\n\n")
# A space that is in no text.
SPACE = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^"\s])*?\s')


@dataclass
class Answer:
    """What a server has answered."""

    status: int
    content_type: str
    body: Any
    """Parsed if it is JSON, else text."""
    headers: dict[str, str] = field(default_factory=dict)
    """By lower-case name."""
    chunks: list[str] = field(default_factory=list)
    """The body as it came, one for each chunk of HTTP."""


@dataclass
class Exchange:
    """A request to vLLM and its answer."""

    name: str
    title: str
    request: dict[str, Any]
    answer: Answer


def recorded(name: str) -> Exchange:
    """The exchange of this name, `FAMILY/NAME`."""
    family = RECORDED / f"{name.partition('/')[0]}.jsonl"
    for line in family.read_text().splitlines():
        entry = json.loads(line)
        if entry["name"] == name:
            response = entry["response"]
            answer = Answer(response["status"], response["content_type"], response["body"])
            return Exchange(name, entry["title"], entry["request"], answer)
    raise KeyError(f"{family} has no {name}")


def ask(address: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
    """Sends one request to `host:port`; a body that is no text is sent as JSON."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    try:
        text = body if isinstance(body, (str, bytes)) or body is None else json.dumps(body)
        content = {} if body is None else {"content-type": "application/json"}
        content |= {name.lower(): value for name, value in (headers or {}).items()}
        connection.request(method, path, text, content)
        response = connection.getresponse()
        chunks = _chunks(response)
        kind = response.headers.get("content-type", "")
        raw = "".join(chunks)
        parsed = json.loads(raw) if kind.startswith("application/json") else raw
        fields = {name.lower(): value for name, value in response.headers.items()}
        return Answer(response.status, kind, parsed, fields, chunks)
    finally:
        connection.close()


def _chunks(response: http.client.HTTPResponse) -> list[str]:
    """The body, split as the server has split it."""
    if not response.chunked:
        return [response.read().decode()]
    chunks = []
    while True:
        # http.client joins chunks, so they are read from its file.
        size = int(response.fp.readline().split(b";")[0], 16)
        chunk = response.fp.read(size)
        response.fp.readline()
        if size == 0:
            return chunks
        chunks.append(chunk.decode())


def same_request(address: str, exchange: Exchange, model: str, changes: dict[str, Any] | None = None) -> Answer:
    """Sends the recorded request to this model. `changes` are members of its body to set; None takes one away."""
    request = exchange.request
    body = request.get("body")
    if isinstance(body, dict):
        body = {name: model if value == "MODEL" else value for name, value in body.items()} | (changes or {})
        body = {name: value for name, value in body.items() if value is not None or name not in (changes or {})}
    if "raw_body" in request:
        body = request["raw_body"].replace("MODEL", model)
    return ask(address, request["method"], request["path"], body, request.get("headers"))


def assert_like_vllm(ours: Answer, exchange: Exchange, differences: dict[str, str] | None = None) -> None:
    """Fails where our answer differs from vLLM's in anything that a client can rely on.

    `differences` are those that are meant: a pattern of paths (`usage.prompt_tokens_details`; `*` for anything) with
    the reason. One that does not occur fails too. Under `content_type` is ours, where it is meant to differ.
    """
    theirs, expected = exchange.answer, dict(differences or {})
    assert ours.status == theirs.status, f"{exchange.name}: {ours.body}"
    if "content_type" in expected:
        assert ours.content_type == expected.pop("content_type") != theirs.content_type, exchange.name
    else:
        assert ours.content_type == theirs.content_type, f"{exchange.name}: {ours.body}"
    if ours.content_type.startswith("text/event-stream"):
        found = _streams(ours, theirs)
    else:
        found = dict(_different(theirs.body, ours.body, ""))
    used = {pattern for path in found for pattern in expected if fnmatch.fnmatchcase(path, pattern)}
    left = {path: what for path, what in found.items() if not any(fnmatch.fnmatchcase(path, p) for p in expected)}
    assert not left, f"{exchange.name} ({exchange.title}): {json.dumps(left, indent=1)}"
    assert used == expected.keys(), f"{exchange.name}: these do not differ any more: {expected.keys() - used}"


def events(text: str) -> list[Any]:
    """The events of a stream, parsed, without the `[DONE]` at its end; its framing must be vLLM's."""
    matches = list(EVENT.finditer(text))
    assert "".join(match.group(0) for match in matches) == text, f"not framed as events: {text!r}"
    assert matches and matches[-1].group(1) == "[DONE]", f"no [DONE] at the end: {text!r}"
    texts = [match.group(1) for match in matches[:-1]]
    for event in texts:
        assert not SPACE.match(event), f"JSON with spaces: {event!r}"
    return [json.loads(event) for event in texts]


def _streams(ours: Answer, theirs: Answer) -> dict[str, str]:
    """For each choice the kinds of its events in order, equal ones in a row counted once; one event a chunk."""
    assert all(EVENT.fullmatch(chunk) for chunk in ours.chunks), ours.chunks
    mine, other, found = _kinds(events(ours.body)), _kinds(events(theirs.body)), {}
    for choice in sorted(mine.keys() | other.keys()):
        left, right = mine.get(choice, []), other.get(choice, [])
        at = f"events[{choice}]"
        if len(left) != len(right):
            found[at] = f"{len(left)} kinds of events instead of {len(right)}: {[event for _, event in left]}"
        for i, ((_, our_event), (_, their_event)) in enumerate(zip(left, right, strict=False)):
            found.update({f"{at}.{i}.{path}": what for path, what in _different(their_event, our_event, "")})
    return found


def _kinds(stream: list[Any]) -> dict[str, list[tuple[str, Any]]]:
    """By the index of the choice, which is empty for an event without choices: each kind with its first event."""
    kinds: dict[str, list[tuple[str, Any]]] = {}
    for event in stream:
        choices, kind = event.get("choices") or [], _kind(event, "")
        row = kinds.setdefault(str(choices[0]["index"]) if choices else "", [])
        if not row or row[-1][0] != kind:
            row.append((kind, event))
    return kinds


def _kind(value: Any, path: str) -> str:
    """The shape of a value: equal for values that no comparison here would tell apart."""
    if isinstance(value, dict) and not _is_map(path):
        return "{" + ",".join(f"{name}:{_member(name, item, path)}" for name, item in value.items()) + "}"
    if isinstance(value, dict):
        return "map of " + "|".join(sorted({_kind(item, f"{path}.*") for item in value.values()}))
    if isinstance(value, list):
        return "list of " + "|".join(sorted({_kind(item, f"{path}.{i}") for i, item in enumerate(value)}))
    return _type(value)


def _member(name: str, value: Any, path: str) -> str:
    return json.dumps(value) if name in FIXED else _kind(value, f"{path}.{name}")


def _is_map(path: str) -> bool:
    return MAPS.search(path) is not None


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value)
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def _different(theirs: Any, ours: Any, path: str):
    """Paths where the values differ in shape, each with a word on how."""
    name = path.rpartition(".")[2]
    at = path.removeprefix(".")
    if name in FIXED and not isinstance(theirs, (dict, list)):
        if theirs != ours:
            yield at, f"{ours!r} instead of {theirs!r}"
    elif isinstance(theirs, dict) and isinstance(ours, dict) and not _is_map(path):
        yield from _different_members(theirs, ours, path)
    elif isinstance(theirs, list) and isinstance(ours, list):
        yield from _different_entries(theirs, ours, path)
    elif _kind(theirs, path) != _kind(ours, path):
        yield at, f"{_kind(ours, path)} instead of {_kind(theirs, path)}"


def _different_members(theirs: dict[str, Any], ours: dict[str, Any], path: str):
    def at(member: str) -> str:
        return f"{path}.{member}".removeprefix(".")

    for member in ours.keys() - theirs.keys():
        yield at(member), "vLLM has no such member"
    for member in theirs.keys() - ours.keys():
        yield at(member), "missing"
    both = [member for member in theirs if member in ours]
    if both != [member for member in ours if member in theirs]:
        yield at("order"), f"{list(ours)} instead of {list(theirs)}"
    for member in both:
        yield from _different(theirs[member], ours[member], f"{path}.{member}")


def _different_entries(theirs: list[Any], ours: list[Any], path: str):
    kinds = {_kind(entry, f"{path}.0") for entry in theirs}
    if bool(theirs) != bool(ours):
        yield path.removeprefix("."), f"{len(ours)} entries instead of {len(theirs)}"
    elif len(kinds) == 1:
        for i, entry in enumerate(ours):
            yield from _different(theirs[0], entry, f"{path}.{i}")
    elif not {_kind(entry, f"{path}.0") for entry in ours} <= kinds:
        yield path.removeprefix("."), f"entries like {ours[0]!r} instead of {theirs[0]!r}"
