"""What web pages can do through `rollout sidecar`, which adds its token to requests: nothing, unless it is its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from multidict import CIMultiDict

from browsers import Watched, chromium
from models import random_adapter, read_model, write_safetensors
from raw_http import Wire
from rollout_client import ServerProcess
from rollout_client.cli._origins import AllowedHosts
from serving import PUSH_MODEL, SMALL_CACHE
from sidecars import sidecar, start
from vllm_answers import ask

TOKEN = "control-token-0123456789"
LOAD = "/v1/load_lora_adapter"
NAME = "trainer.example"
EVIL = "evil.example"
ORIGINS = ["none", "own", "foreign", "null"]
SITES = [None, "none", "same-origin", "same-site", "cross-site"]
BODIES = ["none", "application/json", "text/plain", "application/x-www-form-urlencoded", "without a type"]


class Upstream(ThreadingHTTPServer):
    """Stands in for the server, and keeps what has reached it as (method, path, host, origin, token)."""

    daemon_threads = True

    def __init__(self):
        self.seen = []
        super().__init__(("127.0.0.1", 0), Answers)
        self.address = f"127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = (self.headers.get(name) for name in ("Host", "Origin", "Authorization"))
        self.server.seen.append((self.command, self.path, *headers))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST = do_DELETE = do_OPTIONS = answer

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def in_background(server):
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def server(binary, tmp_path_factory):
    """A server with tokens; `server.token_file` has the one of the sidecar."""
    tokens = tmp_path_factory.mktemp("secrets") / "tokens"
    tokens.write_text(f"control {TOKEN}\n")
    tokens.chmod(0o600)
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--max-adapters", "2", "--auth-token-file", str(tokens)]
    with ServerProcess(binary, PUSH_MODEL, flags, token=TOKEN) as process:
        process.token_file = tokens
        yield process


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """A directory that a page tries to make an adapter of."""
    root = tmp_path_factory.mktemp("adapter")
    tensors, config = random_adapter(np.random.default_rng(7), read_model(PUSH_MODEL))
    write_safetensors(root / "adapter_model.safetensors", tensors)
    (root / "adapter_config.json").write_text(json.dumps(config))
    return root


def before(server, *options, http_address=None):
    address = http_address or server.http_address
    return sidecar("--address", server.address, "--http-address", address, "--token-file", server.token_file, *options)


def routes(server):
    """Method and path of each route, with those that the description leaves out and one that does not exist."""
    described = ask(server.http_address, "GET", "/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}).body
    found = [
        (method.upper(), path.replace("{file}", "main.js").replace("{id}", "policy"))
        for path, item in described["paths"].items()
        for method in item
        if method in ("get", "post", "delete")
    ]
    assert len(found) > 40 and ("POST", LOAD) in found
    return [*found, ("GET", "/openapi.json"), ("GET", "/events"), ("POST", "/no/such/route"), ("OPTIONS", "/sleep")]


def request(method, path, sent):
    """A request as bytes; `sent` is its host, and one of each list above."""
    host, origin, site, kind = sent
    origins = {"own": f"http://{host}", "foreign": f"http://{EVIL}", "null": "null"}
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
    lines += [f"Origin: {origins[origin]}"] if origin != "none" else []
    lines += [f"Sec-Fetch-Site: {site}"] if site else []
    lines += [f"Content-Type: {kind}"] if "/" in kind else []
    body = b"" if kind == "none" else b'{"lora_name": "policy", "lora_path": "/no/such/directory"}'
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def test_every_route_refuses_what_a_foreign_page_may_send(server):
    with (
        in_background(Upstream()) as upstream,
        before(server, "--allow-host", NAME, http_address=upstream.address) as (address, _),
    ):
        port = address.rpartition(":")[2]
        hosts = [address, f"localhost:{port}", f"{NAME.upper()}:{port}", f"{EVIL}:{port}", f"localhost.{EVIL}"]
        expected = []
        with Wire(address) as wire:
            for method, path in routes(server):
                for sent in itertools.product(hosts, ORIGINS, SITES, BODIES):
                    wire.send(request(method, path, sent))
                    answer = wire.answer()
                    (host, origin, site, kind), what = sent, (method, path, *sent, answer)
                    foreign_page = origin in ("foreign", "null") or site in ("same-site", "cross-site")
                    if EVIL in host or foreign_page:
                        assert answer.status == 403 and answer.error()["type"] == "PermissionDeniedError", what
                    elif kind not in ("none", "application/json"):
                        assert answer.status == 400 and "is not application/json" in answer.error()["message"], what
                    elif (method, path) == ("POST", LOAD):
                        is_json = kind == "application/json"
                        why = "No adapter found for /no/such/directory" if is_json else "'lora_name' and 'lora_path'"
                        assert answer.status == (404 if is_json else 400), what
                        assert why in answer.error()["message"], what
                    else:
                        assert answer.status == 200, what
                        is_page = origin == "own"
                        own = (host, f"http://{host}") if is_page else (upstream.address, None)
                        expected.append((method, path, *own, f"Bearer {TOKEN}"))
        assert upstream.seen == expected
    assert server.client.adapters() == []


LOCAL = "localhost:8001"
HOSTS = ["127.0.0.1", "127.0.0.1:8001", "[::1]:8001", "10.1.2.3:80", LOCAL, "LocalHost", NAME, f"{NAME.upper()}:8001"]
WRONG_HOSTS = ["", EVIL, f"{EVIL}:8001", f"127.0.0.1.{EVIL}", f"localhost.{EVIL}", f"localhost:8001@{EVIL}", "127.1"]
WRONG_HOSTS += ["user@localhost", "[localhost]", "2130706433", "::1", "localhost:8001:1", f"{LOCAL} {EVIL}"]
WRONG_ORIGINS = [
    "",
    "null",
    "file://",
    f"http://{EVIL}",
    "http://localhost:1",
    f"ftp://{LOCAL}",
    f"http://{LOCAL}@{EVIL}",
]


def refusal(*headers):
    return AllowedHosts([NAME]).refusal(CIMultiDict(headers))


@pytest.mark.parametrize("host", HOSTS)
def test_hosts_of_programs_and_own_pages(host):
    assert refusal(("Host", host)) is None
    for scheme in ("http", "https"):
        assert refusal(("host", host), ("origin", f"{scheme}://{host}"), ("sec-fetch-site", "same-origin")) is None


@pytest.mark.parametrize("host", WRONG_HOSTS)
def test_hosts_that_may_be_anybodys(host):
    for headers in [("Host", host)], [("Host", LOCAL), ("Host", host)], [("Host", host), ("Origin", f"http://{host}")]:
        assert "--allow-host" in refusal(*headers), headers


@pytest.mark.parametrize("origin", WRONG_ORIGINS)
def test_origins_of_foreign_pages(origin):
    own = "Origin", f"http://{LOCAL}"
    for headers in [("Origin", origin)], [own, ("Origin", origin)], [("Origin", origin), own]:
        assert "not allowed" in refusal(("Host", LOCAL), *headers), headers
    assert refusal() is None and refusal(own) is not None, "HTTP/1.0 has no host"
    assert refusal(("Host", LOCAL), ("Sec-Fetch-Site", "none"), ("Sec-Fetch-Site", "cross-site")) is not None


def test_a_target_is_a_path(server):
    """Another host in a target would be sent the token, or take the place of the header's."""
    with in_background(Upstream()) as upstream, before(server, http_address=upstream.address) as (address, _):
        for target in ["http://localhost/sleep", f"http://{EVIL}/sleep", f"http://{address}@{EVIL}/"]:
            with Wire(
                address, f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
            ) as wire:
                assert wire.answer().status == 400, target
        assert upstream.seen == []


@pytest.mark.parametrize("name", ["http://trainer", "trainer:8001", "", "*"])
def test_a_name_with_more_than_a_name_is_refused(name):
    process = start("--allow-host", name)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2 and "is not a host name" in said


class Pages(BaseHTTPRequestHandler):
    """An empty page at every path, at any host."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>a page</title>")

    def log_message(self, *_):
        pass


# Sends all that a browser sends without asking first, and what it asks for; returns what could be read.
ATTACK = """async ([target, load]) => {
    const read = [];
    const send = async (path, options) => {
        try {
            const answer = await fetch(target + path, options);
            if (answer.type !== "opaque") read.push(path + ": " + answer.status);
        } catch { /* the browser keeps the answer to itself */ }
    };
    const text = { "content-type": "text/plain" }, json = { "content-type": "application/json" };
    await send("/sleep?level=2", { method: "POST", mode: "no-cors" });
    await send("/pause?mode=keep", { method: "POST" });
    await send("/v1/load_lora_adapter", { method: "POST", mode: "no-cors", headers: text, body: load });
    await send("/v1/load_lora_adapter", { method: "POST", headers: json, body: load });
    for (const path of ["/metrics", "/v1/models", "/timeline.json"]) {
        await send(path, { mode: "no-cors" });
        await send(path, {});
    }
    navigator.sendBeacon(target + "/v1/load_lora_adapter", load);
    return read;
}"""
FORM = """target => {
    const form = document.createElement("form");
    form.method = "POST";
    form.action = target + "/sleep?level=2";
    document.body.append(form);
    form.submit();
}"""


def test_a_page_in_a_browser_cannot_act_through_it(server, adapter):
    """Pages of another port, of another name, and of a name that comes to lead to the sidecar itself."""
    load = json.dumps({"lora_name": "stolen", "lora_path": str(adapter)})
    resolver = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"
    with (
        in_background(ThreadingHTTPServer(("127.0.0.1", 0), Pages)) as pages,
        before(server) as (address, _),
        chromium(resolver) as browser,
    ):
        port, target = pages.server_address[1], f"http://{address}"
        for page in (f"http://{EVIL}:{port}/", f"http://127.0.0.1:{port}/", f"http://localhost:{port}/"):
            watched = Watched(browser)
            answers = []
            watched.page.on("response", lambda r, answers=answers: answers.append((r.request.method, r.url, r.status)))
            watched.page.goto(page)
            assert watched.page.evaluate(ATTACK, [target, load]) == []
            with watched.page.expect_navigation(url=f"{target}/sleep?level=2"):
                watched.page.evaluate(FORM, target)
            came = [answer for answer in answers if answer[1].startswith(target)]
            assert len(came) > 4 and {status for *_, status in came} == {403}, came
            watched.context.close()
        rebound = Watched(browser)
        for path in ("/", "/metrics", "/v1/models", "/events"):
            answer = rebound.page.goto(f"http://{EVIL}:{address.rpartition(':')[2]}{path}")
            assert answer.status == 403 and "is not allowed" in answer.text(), path
        rebound.context.close()
        assert server.client.status().lifecycle == "running"
        assert server.client.adapters() == []
        own = Watched(browser)
        own.page.goto(f"{target}/")
        own.wait_for_text("#lifecycle", "Running")
        answer = own.page.evaluate("async () => (await fetch('/pause?mode=keep', {method: 'POST'})).status")
        assert answer == 200 and server.client.status().lifecycle == "paused"
        server.client.resume()
        own.context.close()
