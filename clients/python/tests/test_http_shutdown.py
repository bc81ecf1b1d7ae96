"""The end of a server with open HTTP connections."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import time

from raw_http import Wire, ask, post, request
from rollout_client import ServerProcess
from serving import FIXTURES, SMALL_CACHE, wait_for

COMPLETIONS = "/v1/completions"
LONG = {"prompt": [1, 2, 3], "max_tokens": 1000, "ignore_eos": True}


def test_sigterm_lets_answers_end_and_closes_what_is_idle(binary):
    with ServerProcess(binary, FIXTURES / "llama-tied", SMALL_CACHE) as server:
        address, client = server.http_address, server.client
        with (
            Wire(address, request("GET", "/health")) as idle,
            Wire(address, b"POST /v1/comp") as begun,
            Wire(address, post(COMPLETIONS, LONG)) as whole,
            Wire(address, post(COMPLETIONS, {**LONG, "stream": True})) as stream,
        ):
            assert idle.answer().status == 200 and stream.head()[0] == 200
            wait_for(client, lambda status: status.running_requests == 2, "running")
            server.process.send_signal(signal.SIGTERM)
            answer = whole.answer()
            assert answer.status == 200
            assert json.loads(answer.body)["choices"][0]["finish_reason"] == "length"
            events = b"".join(stream.chunks())
            assert events.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in events
            assert idle.is_closed() and whole.is_closed() and stream.is_closed() and begun.is_closed()
            assert server.process.wait(60) == 0


def test_a_reader_that_has_stopped_does_not_keep_the_server(binary):
    flags = [*SMALL_CACHE, "--shutdown-grace-seconds", "2"]
    with (
        ServerProcess(binary, FIXTURES / "llama-tied", flags) as server,
        Wire(server.http_address) as stopped,
        Wire(server.http_address) as unread,
    ):
        for wire in (stopped, unread):
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stopped.send(post(COMPLETIONS, {**LONG, "n": 256, "logprobs": 20, "stream": True}))
        unread.send(post(COMPLETIONS, {"prompt": list(range(500)), "max_tokens": 1, "prompt_logprobs": 100}))
        assert stopped.head()[0] == 200 and unread.head()[0] == 200
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        server.process.wait(60)
        # The grace, the time in which answers may be fetched, and some for a machine that is busy.
        assert time.monotonic() - began < 30


def test_a_server_that_ends_says_so(binary):
    with (
        ServerProcess(binary, FIXTURES / "llama-tied", SMALL_CACHE) as server,
        Wire(server.http_address, post(COMPLETIONS, {**LONG, "n": 64, "stream": True})) as stream,
    ):
        assert stream.head()[0] == 200
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while ask(server.http_address, request("GET", "/health")).status == 200:
            assert time.monotonic() < deadline, "it does not end"
        assert ask(server.http_address, post(COMPLETIONS, LONG)).status == 503
        server.process.send_signal(signal.SIGTERM)
        events = b"".join(stream.chunks())
        assert b'"error"' in events or b'"finish_reason":"abort"' in events


def test_a_chat_that_is_still_rendered_does_not_keep_the_server(binary, tmp_path):
    model = shutil.copytree(FIXTURES / "llama-tied", tmp_path / "model")
    # Each search reads 5 MB, and the render's own limit of time is half a minute.
    slow = (
        "{% set n = 5000000 %}{% set t = 'a' * n %}{% for i in range(100000) %}{% if 'b' in t %}{% endif %}{% endfor %}"
    )
    (model / "chat_template.jinja").write_text(slow)
    chat = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    with ServerProcess(binary, model, SMALL_CACHE) as server, Wire(server.http_address, chat) as wire:
        wait_for(server.client, lambda status: status.memory.traffic_bytes > 5_000_000, "rendering")
        # Other calls are answered meanwhile.
        assert ask(server.http_address, request("GET", "/health")).status == 200
        server.process.send_signal(signal.SIGTERM)
        answer = wire.answer()
        assert answer.status == 503 and b"shutting down" in answer.body
        assert server.process.wait(60) == 0
