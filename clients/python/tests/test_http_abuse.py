"""The HTTP door under attack: broken requests, clients that vanish, pages of other sites, limits of connections."""

from __future__ import annotations

import contextlib
import ctypes
import json
import socket
import struct
import time

import pytest

from raw_http import PATIENCE, Wire, ask, post, request
from rollout_client import ServerProcess
from serving import FIXTURES, SMALL_CACHE, assert_idle, wait_for
from test_connections import cpu_seconds

MODEL = FIXTURES / "llama-tied"
COMPLETIONS = "/v1/completions"
SMALL = {"prompt": [1, 2, 3], "max_tokens": 2}
LONG = {"prompt": [1, 2, 3], "max_tokens": 900, "ignore_eos": True}


@pytest.fixture
def http(running, client):
    """The HTTP port of the shared server, which is idle afterwards and serves."""
    yield running.http_address
    assert ask(running.http_address, post(COMPLETIONS, SMALL)).status == 200


def test_requests_on_one_connection_are_answered_in_their_order(http):
    with Wire(http, request("GET", "/health") * 20 + post(COMPLETIONS, SMALL) * 3 + request("GET", "/nothing")) as wire:
        assert [wire.answer().status for _ in range(24)] == [200] * 23 + [404]


def test_connections_end_when_their_clients_want_it(http):
    for head in (b"GET /health HTTP/1.0\r\n\r\n", request("GET", "/health", "Connection: close")):
        with Wire(http, head) as wire:
            assert wire.answer().status == 200 and wire.is_closed()
    with Wire(http, b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n") as wire:
        assert wire.answer().status == 200
        wire.send(request("GET", "/health"))
        assert wire.answer().status == 200


def test_a_client_that_asks_before_it_sends_its_body_is_told_to(http):
    body = json.dumps(SMALL).encode()
    head = f"Content-Length: {len(body)}", "Content-Type: application/json", "Expect: 100-continue"
    with Wire(http, request("POST", COMPLETIONS, *head)) as wire:
        assert wire.answer().status == 100
        wire.send(body)
        assert wire.answer().status == 200
    # What is refused by its headers need not be sent.
    head = "Content-Length: 999999999", "Content-Type: application/json", "Expect: 100-continue"
    with Wire(http, request("POST", COMPLETIONS, *head)) as wire:
        assert wire.answer().status == 413


def chunked(body, size=7, end=b"0\r\n\r\n"):
    parts = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x;a=b\r\n%s\r\n" % (len(part), part) for part in parts) + end


def test_bodies_in_chunks(http):
    head = "Content-Type: application/json", "Transfer-Encoding: chunked"
    body = json.dumps(SMALL).encode()
    for end in (b"0\r\n\r\n", b"0\r\nX-Trailer: 1\r\n\r\n"):
        with Wire(http, request("POST", COMPLETIONS, *head, body=chunked(body, end=end)) * 2) as wire:
            assert [wire.answer().status for _ in range(2)] == [200, 200]
    for broken in (b"x\r\n", b"FFFFFFFFFFFFFFFFF\r\n", b"-1\r\n", b"5\r\nabcdefgh\r\n", b"5;" + b"e" * (1 << 20)):
        with Wire(http, request("POST", COMPLETIONS, *head, body=broken)) as wire:
            answer = wire.answer()
            assert (answer is None or 400 <= answer.status < 500) and wire.is_closed(), broken[:20]


# A request inside of another's body, which only a server that reads the lengths in another way than a proxy would see.
INNER = request("GET", "/nothing")
AMBIGUOUS = {
    "both lengths": ["Content-Length: 4", "Transfer-Encoding: chunked"],
    "two lengths": ["Content-Length: 4", "Content-Length: 5"],
    "a list of lengths": ["Content-Length: 4, 5"],
    "a sign": ["Content-Length: +4"],
    "a negative length": ["Content-Length: -4"],
    "a hexadecimal length": ["Content-Length: 0x4"],
    "too long a length": ["Content-Length: 18446744073709551617"],
    "no encoding that is known": ["Transfer-Encoding: xchunked"],
    "chunks that are not last": ["Transfer-Encoding: chunked, identity"],
    "a length in two words": ["Content-Length: 4 4"],
    "a space before the colon": ["Content-Length : 4"],
    "a folded line": ["X-A: b", " Content-Length: 4"],
    "a zero byte": ["X-A: b\0c"],
    "a bare carriage return": ["X-A: b\rTransfer-Encoding: chunked"],
}


@pytest.mark.parametrize("what", AMBIGUOUS)
def test_no_request_is_smuggled(http, what):
    data = request("POST", COMPLETIONS, "Content-Type: application/json", *AMBIGUOUS[what], body=b"0\r\n\r\n" + INNER)
    with Wire(http, data) as wire:
        answers = []
        while (answer := wire.answer()) is not None:
            answers.append(answer.status)
    assert 404 not in answers, f"the inner request was answered: {answers}"
    assert len(answers) < 2 and all(400 <= status < 500 for status in answers), answers


REFUSED = {
    "an unknown method": (request("BREW", "/health"), {405}),
    "CONNECT": (request("CONNECT", "localhost:22"), {400, 404, 405}),
    "a long URL": (request("GET", "/" + "a" * 15_000), {404}),
    "a longer URL": (request("GET", "/" + "a" * 100_000), {414, 431}),
    "a long header": (request("GET", "/health", "X-A: " + "b" * 100_000), {431}),
    "many headers": (request("GET", "/health", *["X-A: b"] * 200), {431}),
    "a path that is not UTF-8": (b"GET /%ff%fe HTTP/1.1\r\nHost: localhost\r\n\r\n", {404}),
    "bytes that are not ASCII": (b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n", {400, 404}),
    "HTTP/3": (b"GET / HTTP/3.0\r\n\r\n", {400, 505}),
    "no HTTP": (b"hello\r\n\r\n", {400}),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500), {400}),
    "another kind of body": (
        request("POST", COMPLETIONS, "Content-Type: text/plain", "Content-Length: 2", body=b"{}"),
        {400},
    ),
    "no kind of body": (request("POST", COMPLETIONS, "Content-Length: 2", body=b"{}"), {400}),
    "a body that is too long": (request("POST", COMPLETIONS, "Content-Length: 9999999999"), {400, 413}),
    "another method": (request("GET", COMPLETIONS), {405}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_served_is_refused_with_its_status(http, what):
    data, expected = REFUSED[what]
    assert ask(http, data).status in expected


BODIES = {
    "nothing": b"",
    "no JSON": b"prompt",
    "two values": b"{} {}",
    "a list": b"[]",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud800"}',
    "halves in the wrong order": b'{"prompt": "\\udc00\\ud800"}',
    "no end": b'{"prompt": "a',
    "a deep list": b'{"prompt": ' + b"[" * 100_000,
    "a deep list that nobody reads": b'{"x": ' + b"[" * 100_000,
    "a deep value for nothing": b'{"best_of": ' + b'{"a":' * 100_000,
    "a number of a million digits": b'{"prompt": "a", "max_tokens": ' + b"9" * 1_000_000 + b"}",
    "a fraction of a million digits": b'{"prompt": "a", "temperature": 1e' + b"9" * 1_000_000 + b"}",
    "a seed beyond 64 bits": b'{"prompt": "a", "seed": 99999999999999999999}',
    "a million empty objects": b'{"prompt": [' + b"{}," * 1_000_000 + b"{}]}",
    "a million empty texts": b'{"prompt": [' + b'"",' * 1_000_000 + b'""]}',
    "a million empty prompts": b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}",
    "a member with a long name": b'{"' + b"n" * 1_000_000 + b'": 1, "prompt": 5}',
}


@pytest.mark.parametrize("what", BODIES)
def test_bodies_that_are_wrong_are_refused_in_few_words(http, what):
    answer = ask(http, post(COMPLETIONS, BODIES[what]))
    assert answer.status in (400, 429), answer.body[:200]
    assert len(answer.body) < 4096 and answer.error()["message"]


def test_an_absolute_target_is_the_route_that_it_names(http):
    assert ask(http, b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 200
    assert ask(http, b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n").status in (404, 405)


def test_head_and_options(http):
    for path in ("/health", "/v1/models", "/openapi.json"):
        whole = ask(http, request("GET", path))
        with Wire(http, request("HEAD", path) + request("GET", "/version")) as wire:
            head = wire.answer(to_head=True)
            assert head.status == 200 and head.headers.get("content-length") == whole.headers.get("content-length")
            # No body stands between the two.
            assert "version" in json.loads(wire.answer().body)
        assert ask(http, request("OPTIONS", path)).headers["allow"] == "GET,HEAD"
    answer = ask(http, request("OPTIONS", COMPLETIONS))
    assert answer.status == 405 and answer.headers["allow"] == "POST"
    # Nothing allows another origin to read answers, or to send JSON.
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_the_ports_tell_the_protocols_apart(http, running):
    with Wire(http, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9)) as wire:
        answer = wire.answer()
        assert (answer is None or answer.status == 400) and wire.is_closed()
    with Wire(running.address, request("GET", "/health")) as wire:
        while wire.more():
            pass
        assert not wire.unread.startswith(b"HTTP/1.1 200")


def routes(http, method):
    return [path for path, operations in json.loads(ask(http, request("GET", "/openapi.json")).body)["paths"].items()
            if method in operations]  # fmt: skip


FOREIGN = {
    "another origin": ["Origin: http://evil.example"],
    "no origin": ["Origin: null"],
    "another port": ["Origin: http://localhost:3000"],
    "another site": ["Sec-Fetch-Site: cross-site"],
    "a name that leads here": ["Host: evil.example", "Origin: http://evil.example"],
}


@pytest.mark.parametrize("what", FOREIGN)
def test_pages_of_other_sites_change_nothing(http, client, what):
    """Browsers send a POST without a body, or with a body of text, without asking the server first."""
    headers = [*FOREIGN[what], "Content-Length: 0"]
    for path in routes(http, "post"):
        lines = [f"POST {path} HTTP/1.1", *([] if "Host" in headers[0] else ["Host: localhost"]), *headers]
        answer = ask(http, "\r\n".join(lines).encode() + b"\r\n\r\n")
        assert answer.status == 403, f"{path}: {answer}"
    status = client.status()
    assert status.lifecycle.name == "RUNNING"


def test_pages_of_the_server_itself_may_use_it(http):
    head = "Host: localhost:8000", "Origin: http://localhost:8000", "Sec-Fetch-Site: same-origin"
    body = json.dumps(SMALL)
    lines = [f"POST {COMPLETIONS} HTTP/1.1", *head, "Content-Type: application/json", f"Content-Length: {len(body)}"]
    assert ask(http, ("\r\n".join(lines) + "\r\n\r\n" + body).encode()).status == 200
    # A link on another site's page may lead here.
    assert ask(http, request("GET", "/version", "Sec-Fetch-Site: cross-site")).status == 200


def deafen(connection):
    """Lets the system drop whatever comes for a socket, so that it acknowledges nothing: as if its machine was gone."""

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_void_p)]

    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))
    program = Filter(1, ctypes.cast(nothing, ctypes.c_void_p))
    so_attach_filter = 26
    connection.setsockopt(socket.SOL_SOCKET, so_attach_filter, bytes(program))


def test_clients_that_vanish_or_dawdle_are_given_up(http, client):
    """Of those that vanish one waits for its answer, one reads a stream, one has stopped reading before. One sends the
    head of its request a byte at a time, which may take 30 s.
    """
    endless = {**LONG, "n": 64}
    stopped = {**endless, "stream": True, "return_token_ids": True, "logprobs": 20}
    with (
        Wire(http, post(COMPLETIONS, endless)) as waits,
        Wire(http, post(COMPLETIONS, {**endless, "stream": True})) as reads,
        Wire(http) as stops,
        Wire(http, b"GET /") as dawdles,
    ):
        began = time.monotonic()
        stops.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stops.send(post(COMPLETIONS, stopped))
        assert reads.head()[0] == 200 and stops.head()[0] == 200
        wait_for(client, lambda status: status.running_requests >= 3, "running")
        for wire in (waits, reads, stops):
            deafen(wire.socket)
        assert_idle(client)
        dawdles.socket.settimeout(0.2)
        while time.monotonic() - began < PATIENCE:
            dawdles.send(b"a")
            with contextlib.suppress(TimeoutError):
                answer = dawdles.answer()
                assert answer is None or answer.status == 408
                return
        pytest.fail("it may go on for ever")


def test_a_client_that_leaves_behind_another_request_leaves_nothing(http, client):
    """The transport has not read the second request, and so does not see that nobody is there any more."""
    waits = post(COMPLETIONS, {**SMALL, "min_weight_version": 1 << 60})
    for more in (waits, b"G", b""):
        with Wire(http, waits + more):
            wait_for(client, lambda status: status.held_requests == 1, "held")
        wait_for(client, lambda status: status.held_requests == 0, "given up")


def test_a_wait_for_a_version_ends_at_the_time_limit(http):
    limited = {**SMALL, "min_weight_version": 1 << 60, "time_limit_seconds": 0.1}
    answer = ask(http, post(COMPLETIONS, limited))
    (choice,) = json.loads(answer.body)["choices"]
    assert (answer.status, choice["finish_reason"], choice["text"]) == (200, "abort", "")
    assert (
        "time_limit_seconds"
        in json.loads(ask(http, post(COMPLETIONS, {**SMALL, "time_limit_seconds": -1})).body)["error"]["message"]
    )


def test_connections_beyond_the_limit_are_closed_and_the_others_served(binary, tmp_path):
    path = tmp_path / "log"
    flags = [*SMALL_CACHE, "--max-connections", "4"]
    with path.open("w") as log, ServerProcess(binary, MODEL, flags, output=log) as server:
        kept = [Wire(server.http_address, request("GET", "/health")) for _ in range(4)]
        assert [wire.answer().status for wire in kept] == [200] * 4
        computed, start = cpu_seconds(server.process.pid), time.monotonic()
        for _ in range(20):
            with Wire(server.http_address, request("GET", "/health")) as wire:
                assert wire.answer() is None
        assert cpu_seconds(server.process.pid) - computed < 1 + time.monotonic() - start
        # The limit is of each port.
        assert server.client.status()
        kept.pop().close()
        deadline = time.monotonic() + PATIENCE
        while ask(server.http_address, request("GET", "/health")) is None:
            assert time.monotonic() < deadline, "nobody new is served"
        for wire in kept:
            wire.send(request("GET", "/health"))
            assert wire.answer().status == 200
            wire.close()
    assert 1 <= path.read_text().count("--max-connections are open") < 4
