"""Which hosts and origins the HTTP port serves, with and without tokens: no page of another site reads or changes."""

from __future__ import annotations

import json

import pytest

from raw_http import Wire
from rollout_client import ServerProcess
from serving import FIXTURES, SMALL_CACHE

MODEL = FIXTURES / "llama-tied"
TOKEN = "control-token-0123456789"
SMALL = {"prompt": [1, 2, 3], "max_tokens": 2}
LOCAL = ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000", "192.0.2.7"]
FOREIGN_HOSTS = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "2130706433"]
FOREIGN_PAGES = {
    "another origin": ["Host: localhost", "Origin: http://evil.example"],
    "no origin": ["Host: localhost", "Origin: null"],
    "another port": ["Host: localhost", "Origin: http://localhost:3000"],
    "another site": ["Host: localhost", "Sec-Fetch-Site: cross-site"],
    "a name of the same site": ["Host: localhost", "Origin: http://localhost", "Sec-Fetch-Site: same-site"],
    "a name that leads here": ["Host: evil.example", "Origin: http://evil.example"],
}


def send(wire, method, path, *headers, body=b""):
    lines = [f"{method} {path} HTTP/1.1", *headers, f"Content-Length: {len(body)}"]
    lines += ["Content-Type: application/json"] if body else []
    wire.send("\r\n".join([*lines, "", ""]).encode() + body)
    return wire.answer()


def routes(address, *headers):
    """Method and path of each route, with those that the description leaves out and one that does not exist."""
    with Wire(address) as wire:
        described = json.loads(send(wire, "GET", "/openapi.json", "Host: localhost", *headers).body)
    methods = {(method.upper(), path) for path, item in described["paths"].items() for method in item}
    found = sorted((method, path) for method, path in methods if method in ("GET", "POST", "DELETE"))
    assert len(found) > 40
    return [*found, ("GET", "/openapi.json"), ("GET", "/events"), ("GET", "/no/such/route"), ("POST", "/no/such/route")]


@pytest.fixture(scope="module")
def guarded(binary, tmp_path_factory):
    """A server with tokens."""
    tokens = tmp_path_factory.mktemp("secrets") / "tokens"
    tokens.write_text(f"control {TOKEN}\n")
    tokens.chmod(0o600)
    with ServerProcess(binary, MODEL, [*SMALL_CACHE, "--auth-token-file", str(tokens)], token=TOKEN) as process:
        yield process


@pytest.fixture(params=["open", "with tokens"])
def served(request, running, guarded):
    """A server on 127.0.0.1, and the header with which everything is allowed."""
    if request.param == "open":
        return running, []
    return guarded, [f"Authorization: Bearer {TOKEN}"]


def test_another_host_is_refused_on_every_route(served):
    server, token = served
    with Wire(server.http_address) as wire:
        for method, path in routes(server.http_address, *token):
            for host in FOREIGN_HOSTS:
                answer = send(wire, method, path, f"Host: {host}", *token)
                assert answer.status == 403 and "--allow-host" in answer.error()["message"], (method, path, host)
                assert host in answer.error()["message"]
        for host in LOCAL:
            for path in ("/health", "/metrics", "/v1/models", "/timeline.json", "/openapi.json", "/"):
                assert send(wire, "GET", path, f"Host: {host}", *token).status == 200, (path, host)
        assert send(wire, "GET", "http://evil.example/metrics", "Host: localhost", *token).status == 403


def test_foreign_pages_change_nothing_on_any_route(served):
    server, token = served
    with Wire(server.http_address) as wire:
        for method, path in routes(server.http_address, *token):
            for what, headers in FOREIGN_PAGES.items():
                if method != "GET":
                    assert send(wire, method, path, *headers, *token).status == 403, (method, path, what)
        assert server.client.status().lifecycle == "running"
        own = "Host: localhost:8000", "Origin: http://localhost:8000", "Sec-Fetch-Site: same-origin"
        assert send(wire, "POST", "/pause?mode=keep", *own, *token).status == 200
        assert send(wire, "POST", "/resume", "Host: localhost", *token).status == 200
        # Another site's link to the page.
        assert send(wire, "GET", "/", "Host: localhost", "Sec-Fetch-Site: cross-site").status == 200


def test_a_page_without_a_token_is_still_asked_for_one(guarded):
    own = "Host: localhost:8000", "Origin: http://localhost:8000", "Sec-Fetch-Site: same-origin"
    with Wire(guarded.http_address) as wire:
        assert send(wire, "POST", "/sleep", *own).status == 401


@pytest.mark.parametrize(
    ("host", "flags", "taken", "refused"),
    [
        ("0.0.0.0", ["--insecure"], ["rollout:8000", "evil.example"], []),
        (
            "0.0.0.0",
            ["--insecure", "--allow-host", "rollout"],
            ["rollout:8000", "ROLLOUT"],
            ["evil.example", "x.rollout"],
        ),
        ("127.0.0.1", ["--allow-host", "a.example,b.example"], ["a.example:8000", "b.example"], ["c.example"]),
        (
            "127.0.0.1",
            ["--allow-host", "a.example", "--allow-host", "b.example"],
            ["a.example", "b.example"],
            ["c.example"],
        ),
    ],
)
def test_names_by_which_programs_come(binary, host, flags, taken, refused):
    with ServerProcess(binary, MODEL, [*SMALL_CACHE, *flags], host=host) as server:
        named = "--allow-host" in flags
        with Wire(server.http_address) as wire:
            body = json.dumps(SMALL).encode()
            for name in [*LOCAL, *taken]:
                assert send(wire, "GET", "/metrics", f"Host: {name}").status == 200, name
                assert send(wire, "POST", "/v1/completions", f"Host: {name}", body=body).status == 200, name
                page = send(wire, "POST", "/resume", f"Host: {name}", f"Origin: https://{name}")
                assert page.status == (200 if name in LOCAL or named else 403), name
            for name in refused:
                assert send(wire, "GET", "/metrics", f"Host: {name}").status == 403, name
                assert send(wire, "POST", "/v1/completions", f"Host: {name}", body=body).status == 403, name
