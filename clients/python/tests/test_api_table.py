"""docs/api.md lists every method and every route, each once, with the role that the server wants."""

from __future__ import annotations

import re

from serving import REPOSITORY
from vllm_answers import ask

ROW = re.compile(r"^\| (`[^|]+) \| (anyone|generate|control) \| ([^|]+) \|", re.MULTILINE)
METHOD = re.compile(r'\("/([\w.]+/\w+)", Role::(\w+)\)')


def rows():
    """Name and role of each row; a row may have several names."""
    for names, role, what in ROW.findall((REPOSITORY / "docs" / "api.md").read_text()):
        assert what.strip(), f"{names}: no word on what it does"
        for name in re.findall(r"`([^`]+)`", names):
            yield name.removeprefix("rollout.v1."), role


def test_every_method_and_route_is_in_the_table_with_its_role(running):
    middleware = (REPOSITORY / "src/server/grpc/middleware.rs").read_text()
    expected = [(name.removeprefix("rollout.v1."), role.lower()) for name, role in METHOD.findall(middleware)]
    assert len(expected) > 15, "METHODS has another form now"
    paths = ask(running.http_address, "GET", "/openapi.json").body["paths"]
    for path, operations in paths.items():
        expected += [(f"{verb.upper()} {path}", operation["x-role"]) for verb, operation in operations.items()]
    # The description leaves out itself, and a stream without an end, which is the page's own.
    expected += [("GET /openapi.json", "generate"), ("GET /events", "generate")]
    assert sorted(rows()) == sorted(expected)
