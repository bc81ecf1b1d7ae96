"""The memory ceiling beside clients of HTTP that send too much, never end what they send, or never read."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raw_http import Wire, ask, post, request
from test_memory_ceiling import PATIENCE, bounded, memory, server

__all__ = ["bounded", "server"]

COMPLETIONS = "/v1/completions"
MIB = 1 << 20


def filled(start, part, end, size):
    return start + part * ((size - len(start)) // len(part)) + end


BOMBS = {
    "texts of one letter": (b'{"prompt": [', b'"a",', b'"a"]}'),
    "empty texts": (b'{"prompt": [', b'"",', b'""]}'),
    "empty lists": (b'{"prompt": [', b"[],", b"[]]}"),
    "lists of one token": (b'{"prompt": [', b"[1],", b"[1]]}"),
    "tokens": (b'{"prompt": [', b"1,", b"1]}"),
    "empty objects": (b'{"prompt": [', b"{},", b"{}]}"),
    "lists in lists": (b'{"prompt": ', b"[", b""),
    "lists in lists that nobody reads": (b'{"x": ', b"[", b""),
    "stop strings": (b'{"prompt": "a", "stop": [', b'"s",', b'"s"]}'),
    "biases": (b'{"prompt": "a", "logit_bias": {', b'"1":1,', b'"1":1}}'),
    "tokens that are allowed": (b'{"prompt": "a", "allowed_token_ids": [', b"1,", b"1]}"),
    "a value for nothing": (b'{"prompt": "a", "best_of": [', b"0,", b"0]}"),
    "a long name": (b'{"', b"n", b'": 1, "prompt": 5}'),
    "many members": (b'{"prompt": "a"', b',"x":0', b"}"),
    "digits": (b'{"prompt": "a", "seed": ', b"9", b"}"),
    "escapes": (b'{"prompt": "', b"\\ud83e\\udd80", b'"}'),
    "halves of characters": (b'{"prompt": "', b"\\ud800", b'"}'),
    "no UTF-8": (b'{"prompt": "', b"\xff", b'"}'),
    "spaces": (b'{"prompt": "a"', b" ", b"}}"),
}


@pytest.mark.parametrize("size", [MIB, 30 * MIB])
def test_bodies_that_grow_when_they_are_parsed(bounded, size):
    """As many at once as it takes to fill the memory for requests, if each took no more than its size."""
    with ThreadPoolExecutor(8) as pool:
        for what, parts in BOMBS.items():
            data = post(COMPLETIONS, filled(*parts, size))
            before = memory(bounded.process.pid, "VmHWM")
            answers = list(pool.map(lambda _, data=data: ask(bounded.http_address, data), range(8)))
            grown = memory(bounded.process.pid, "VmHWM") - before
            print(f"{what}: {[answer.status for answer in answers]}, {grown / MIB:.0f} MiB more")
            assert {answer.status for answer in answers} <= {200, 400, 429}, f"{what}: {answers}"


def test_100_bodies_that_never_end(bounded):
    head = request("POST", COMPLETIONS, "Content-Type: application/json", f"Content-Length: {100 * MIB}")
    piece, sent, refused = b" " * (1 << 16), 0, 0
    with contextlib.ExitStack() as wires:
        opened = [wires.enter_context(Wire(bounded.http_address, head)).socket for _ in range(100)]
        for connection in opened:
            connection.setblocking(False)
        deadline = time.monotonic() + 4
        while opened and time.monotonic() < deadline:
            for connection in list(opened):
                try:
                    sent += connection.send(piece)
                except BlockingIOError:
                    continue
                except OSError:
                    opened.remove(connection)
                    refused += 1
    print(f"{sent >> 20} MiB were taken, {refused} bodies refused")
    assert refused > 0


def test_300_heads_that_never_end(bounded):
    before = memory(bounded.process.pid, "VmHWM")
    with contextlib.ExitStack() as wires:
        for _ in range(300):
            wires.enter_context(Wire(bounded.http_address, b"GET / HTTP/1.1\r\nX-A: " + b"a" * 16_000))
        time.sleep(1)
    grown = memory(bounded.process.pid, "VmHWM") - before
    assert grown < 32 * MIB, f"{grown >> 20} MiB were taken"


def test_streams_that_nobody_reads(bounded):
    body = {
        "prompt": [list(range(400))] * 4, "n": 16, "max_tokens": 600, "ignore_eos": True, "logprobs": 20,
        "echo": True, "return_token_ids": True, "stream": True,
    }  # fmt: skip
    limit = bounded.client.status().memory.entries["requests"]
    with contextlib.ExitStack() as wires:
        for _ in range(24):
            wire = wires.enter_context(Wire(bounded.http_address))
            wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            wire.send(post(COMPLETIONS, body))
        most, held, deadline = 0, 0, time.monotonic() + 2 * PATIENCE
        while time.monotonic() < deadline and held < 10:
            status = bounded.client.status()
            most = max(most, status.memory.traffic_bytes)
            # Held back: no sample runs but everybody else's.
            held = held + 1 if status.running_samples <= 1 and status.memory.traffic_bytes > 1 << 20 else 0
            time.sleep(0.1)
    print(f"{most >> 20} MiB of {limit >> 20} wait")
    assert held == 10, "requests go on though nobody reads"
    assert most < limit


# An answer of 1,000 places with 21 tokens each, for each of 16 samples.
LARGE = {"prompt": [i % 500 for i in range(1000)], "n": 16, "max_tokens": 2, "prompt_logprobs": 20, "seed": 5}


def test_answers_that_nobody_reads_are_counted_until_they_are_sent(bounded):
    length = len(ask(bounded.http_address, post(COMPLETIONS, LARGE)).body)
    assert length > 10 * MIB
    with contextlib.ExitStack() as wires:
        waiting = [wires.enter_context(Wire(bounded.http_address, post(COMPLETIONS, LARGE))) for _ in range(3)]
        lengths = [int(wire.head()[1]["content-length"]) for wire in waiting]
        time.sleep(1)
        counted = bounded.client.status().memory.traffic_bytes
        assert counted > sum(lengths), f"{counted} bytes are counted for answers of {lengths}"
        # Whoever reads gets all of it.
        assert len(json.loads(waiting[0].exactly(lengths[0]))["choices"]) == 16


def test_an_answer_that_does_not_fit_is_refused(bounded):
    """It would have gigabytes; others are answered all the while."""
    answer = ask(bounded.http_address, post(COMPLETIONS, {**LARGE, "n": 512, "prompt_logprobs": 100}))
    assert answer.status == 429 and "--request-bytes" in answer.error()["message"], answer.body[:300]
