#!/usr/bin/env python3
"""Inline pushes through the client's own HTTP/2 (`_http2.py`) and through grpcio, in turn, on one server.

    .venv/bin/python benches/push_streams.py --server target/release/rollout-server --runs 12

The model is a random one in the shape of Qwen2.5-0.5B, written to a temporary directory (1 GB).
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import grpc
import numpy as np
from checkpoints import random_bfloat16, write_qwen

from rollout_client import ServerProcess, _pusher
from rollout_client._channel import Translated, make_channel
from rollout_client._http2 import ClientStream

QUEUED_MESSAGES = 2


class _GrpcStream:
    """As `ClientStream`, with a channel of grpcio."""

    channels: dict[str, grpc.Channel]

    def __init__(
        self, address: str, path: str, metadata: Iterable[tuple[str, str]], timeout: float | None, tls: object = None
    ) -> None:
        if address not in self.channels:
            self.channels[address] = make_channel(grpc, address, None)
        self._translated = Translated(address, None)
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(QUEUED_MESSAGES):
            self._room.put(None)
        start = self.channels[address].stream_unary(path)
        self._call = start.future(iter(self._next, None), timeout=timeout, metadata=tuple(metadata))

    def _next(self) -> bytes | None:
        message = self._messages.get()
        self._room.put(None)
        return message

    def send(self, *parts: bytes | memoryview) -> None:
        self._room.get()
        self._messages.put(b"".join(parts))

    def check(self) -> None:
        if self._call.done():
            self.finish()

    def finish(self) -> bytes:
        self._messages.put(None)
        with self._translated:
            return self._call.result()

    def cancel(self) -> None:
        self._call.cancel()

    def __enter__(self) -> _GrpcStream:
        return self

    def close(self) -> None:
        self.cancel()
        self._messages.put(None)

    def __exit__(self, *error: object) -> None:
        self.close()


def shown(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def measure(server: ServerProcess, runs: int) -> None:
    rng, client = np.random.default_rng(2), server.client
    state = {p.name: random_bfloat16(rng, p.shape, 1.0 if "norm" in p.name else 0.0) for p in client.parameters()}
    size = sum(len(data) for data, _, _ in state.values())
    rates: dict[type, list[float]] = {ClientStream: [], _GrpcStream: []}
    core_ms: dict[type, list[float]] = {ClientStream: [], _GrpcStream: []}
    for run in range(runs + 1):  # the first takes fresh pages, and is not counted
        for stream in list(rates)[:: 1 if run % 2 else -1]:
            _pusher.ClientStream = stream
            begun, cpu = time.perf_counter(), time.process_time()
            client.push_full(state, transport="inline", progress=False)
            if run:
                rates[stream].append(size / 1e9 / (time.perf_counter() - begun))
                core_ms[stream].append(1e3 * (time.process_time() - cpu))
    print(f"{size / 1e6:.0f} MB in bfloat16 | GB/s | client, core-ms")
    for name, stream in (("own HTTP/2", ClientStream), ("grpcio", _GrpcStream)):
        print(f"{name} | {shown(rates[stream], 2)} | {shown(core_ms[stream], 0)}")
    ratios = [[own / theirs for own, theirs in zip(*values.values(), strict=True)] for values in (rates, core_ms)]
    print(f"own HTTP/2 / grpcio | {shown(ratios[0], 2)} | {shown(ratios[1], 2)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--runs", type=int, default=12)
    options = parser.parse_args()
    _GrpcStream.channels = {}
    flags = ["--dtype", "bfloat16", "--mem-util", "0.6", "--max-model-len", "4096", "--kv-cache-bytes", "64MiB"]
    with (
        tempfile.TemporaryDirectory(prefix="rollout-bench-") as directory,
        ServerProcess(options.server, write_qwen(Path(directory)), flags) as server,
    ):
        measure(server, options.runs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
