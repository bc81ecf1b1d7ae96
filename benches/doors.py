"""The HTTP door beside gRPC on one server: groups, a single stream, and many streams at once.

Prints a section for `benches/RESULTS.md`. Runs of the two doors take turns, and ratios are of medians.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import http.client
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

from step_profile import report, thread_seconds
from workloads import WORKLOADS, Workload, commit, machine, run_once

from rollout_client import ImageInput, RolloutClient, SamplingParams, ServerProcess

HTTP_SHARE = 0.03
"""Most of a group's time that HTTP may cost."""
FIRST_TOKEN_MS = 2.0
"""Most milliseconds that HTTP may cost until the first token of a single stream."""


def body(workload: Workload, prompts: list[list[int]], *, stream: bool = False) -> bytes:
    """What a trainer sends for a workload: token ids in, token ids and log-probabilities out."""
    members = {
        "prompt": prompts,
        "n": workload.n,
        "max_tokens": workload.new_tokens,
        "temperature": workload.temperature,
        "ignore_eos": True,
        "seed": 1,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": stream,
    }
    return json.dumps(members).encode()


class Http:
    """One kept connection to the HTTP door."""

    def __init__(self, address: str) -> None:
        """Connects to `address`."""
        self.connection = http.client.HTTPConnection(address)

    def post(self, path: str, content: bytes) -> http.client.HTTPResponse:
        """Sends a body and returns the answer, whose status must be 200."""
        self.connection.request("POST", path, content, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"{path}: {answer.status} {answer.read()[:500]!r}")
        return answer

    def run(self, workload: Workload, prompts: list[list[int]]) -> float:
        """Seconds of one run of a workload, starting with an empty prefix cache."""
        content = body(workload, prompts)
        start = time.perf_counter()
        answer = json.loads(self.post("/v1/completions", content).read())
        seconds = time.perf_counter() - start
        for choice in answer["choices"]:
            lengths = {len(choice["token_ids"]), len(choice["logprobs"]["token_logprobs"])}
            if lengths != {workload.new_tokens}:
                raise RuntimeError(f"a sample has {lengths} tokens and log-probabilities, not {workload.new_tokens}")
        return seconds

    def first_token(self, workload: Workload, prompts: list[list[int]]) -> float:
        """Seconds until the first token of a stream."""
        content = body(workload, prompts, stream=True)
        start = time.perf_counter()
        answer = self.post("/v1/completions", content)
        line = answer.readline()
        seconds = time.perf_counter() - start
        json.loads(line.removeprefix(b"data: "))
        answer.read()
        return seconds


def first_token(
    client: RolloutClient, workload: Workload, prompts: list[list[int]], images: Sequence[Sequence[ImageInput]] = ()
) -> float:
    """Seconds until the first token of a stream through gRPC, of prompts that may have images."""
    sampling = SamplingParams(max_tokens=workload.new_tokens, temperature=workload.temperature, ignore_eos=True, seed=1)
    start = time.perf_counter()
    events = client.generate_stream(
        prompts, n=workload.n, sampling=sampling, images=images, stream_tokens=True, return_text=True
    )
    next(events)
    seconds = time.perf_counter() - start
    for _ in events:
        pass
    return seconds


async def many_streams(address: str, workload: Workload, prompts: list[list[int]], count: int) -> float:
    """Seconds of `count` streams at once, each with one sample of one prompt on a connection of its own."""
    host, port = address.rsplit(":", 1)

    async def one(number: int) -> int:
        content = body(workload, [prompts[number % len(prompts)]], stream=True)
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + content)
        received = await reader.read()
        writer.close()
        if not received.rstrip().endswith(b"0") or b"data: [DONE]" not in received:
            raise RuntimeError(f"a stream ended with {received[-200:]!r}")
        return received.count(b"data: {")

    start = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(count)))
    return time.perf_counter() - start


def paired(runs: int, *measures: Callable[[], float]) -> list[list[float]]:
    """The figures of each measure, `runs` each, in turn, after one run of each that does not count."""
    for measure in measures:
        measure()
    figures: list[list[float]] = [[] for _ in measures]
    for run in range(runs):
        order = list(zip(figures, measures, strict=True))
        for taken, measure in order if run % 2 == 0 else order[::-1]:
            taken.append(measure())
            print(".", end="", file=sys.stderr, flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="the server's binary")
    parser.add_argument("--model", required=True, type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--streams", type=int, default=256, help="streams at once")
    options = parser.parse_args()
    with ServerProcess(options.server, options.model) as server:
        measure(server, options)
    with (
        tempfile.NamedTemporaryFile("w") as output,
        Path(output.name).open() as log,
        ServerProcess(options.server, options.model, ["--profile"], output=output) as server,
    ):
        profile(server, log, options)
    print(file=sys.stderr)


def profile(server: ServerProcess, log: IO[str], options: argparse.Namespace) -> None:
    """Prints how busy the engine is while it serves as many streams."""
    one, many = streams_of(options, server.client.info().vocab_size)
    asyncio.run(many_streams(server.http_address, one, many, options.streams))
    report(server, log)
    before = thread_seconds(server.process.pid)
    seconds = asyncio.run(many_streams(server.http_address, one, many, options.streams))
    used = thread_seconds(server.process.pid) - before
    threads = ", ".join(f"{name} {spent:.2f}" for name, spent in used.most_common() if spent >= 0.005)
    print(f"\n{options.streams} streams, {seconds:.2f} s at the client; CPU seconds: {threads}\n\n```")
    lines = report(server, log).splitlines()
    wanted = (
        "profile:",
        "span",
        "step",
        "schedule",
        "launch",
        "wait for the ranks",
        "update",
        "emit",
        "in none of these",
    )
    print("\n".join(line for line in lines if line.strip().startswith(wanted)) + "\n```")


def streams_of(options: argparse.Namespace, vocab_size: int) -> tuple[Workload, list[list[int]]]:
    """What each stream asks for, and the prompts of all."""
    one = Workload(prompts=1, n=1, prompt_len=32, new_tokens=64, temperature=1.0)
    return one, replace(one, prompts=options.streams).make_prompts(vocab_size)


def measure(server: ServerProcess, options: argparse.Namespace) -> None:
    """Runs everything and prints the section."""
    client, door, vocab = server.client, Http(server.http_address), server.client.info().vocab_size
    print(f"## {datetime.date.today()}: HTTP beside gRPC\n")
    print(f"{machine()}, commit {commit()}, `{shlex.join(sys.argv)}`. Medians of {options.runs} runs in turn.\n")
    print("| | gRPC | HTTP | HTTP costs |\n|---|---|---|---|")

    groups = WORKLOADS["W1"]
    prompts = groups.make_prompts(vocab)

    def through_http() -> float:
        client.reset_prefix_cache()
        return door.run(groups, prompts)

    grpc, http_ = map(statistics.median, paired(options.runs, lambda: run_once(client, groups, prompts), through_http))
    speeds = [f"{groups.counted_tokens / seconds:,.0f} tokens/s" for seconds in (grpc, http_)]
    print(f"| W1, groups | {speeds[0]} | {speeds[1]} | {http_ / grpc - 1:+.1%} (at most {HTTP_SHARE:.0%}) |")

    single = WORKLOADS["W2"]
    prompt = single.make_prompts(vocab)

    def fresh(measure: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            client.reset_prefix_cache()
            return measure()

        return run

    measures = [fresh(lambda: first_token(client, single, prompt)), fresh(lambda: door.first_token(single, prompt))]
    grpc, http_ = (1000 * statistics.median(figures) for figures in paired(4 * options.runs, *measures))
    costs = f"{http_ - grpc:+.2f} ms (at most {FIRST_TOKEN_MS:g})"
    print(f"| W2, first token | {grpc:.2f} ms | {http_:.2f} ms | {costs} |")

    one, many = streams_of(options, vocab)
    alone = replace(one, prompts=options.streams)

    def streams() -> float:
        client.reset_prefix_cache()
        return asyncio.run(many_streams(server.http_address, one, many, options.streams))

    grpc, http_ = map(statistics.median, paired(options.runs, lambda: run_once(client, alone, many), streams))
    speeds = [f"{alone.counted_tokens / seconds:,.0f} tokens/s" for seconds in (grpc, http_)]
    name = f"{options.streams} prompts: one request through gRPC, as many streams through HTTP"
    print(f"| {name} | {speeds[0]} | {speeds[1]} | {http_ / grpc - 1:+.1%} |")


if __name__ == "__main__":
    main()
