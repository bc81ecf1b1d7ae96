#!/usr/bin/env python3
"""Full pushes and a stream of tokens through TLS beside the same without it; prints a Markdown section for RESULTS.md.

    make server && .venv/bin/python benches/tls.py --model .models/….gguf --runs 5

Two servers of the same model on this machine, asked in turn, one with a certificate that `openssl` makes on the spot.
What is pushed are random weights in bfloat16 through the connection. The first push of each server is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from checkpoints import random_bfloat16
from workloads import commit, machine

from rollout_client import RolloutClient, SamplingParams, ServerProcess


def make_certificate(directory: Path) -> tuple[Path, Path]:
    cert, key = directory / "cert.pem", directory / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-nodes",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, *names, "-out", str(cert), "-keyout", str(key)], check=True, capture_output=True)
    return cert, key


def push_rate(client: RolloutClient, state: dict) -> float:
    """GB/s of a full push through the connection."""
    size = sum(len(data) for data, _, _ in state.values())
    start = time.perf_counter()
    client.push_full(state, transport="inline", progress=False)
    return size / 1e9 / (time.perf_counter() - start)


def token_rate(client: RolloutClient) -> float:
    """Tokens per second of 16 samples whose tokens are sent one by one."""
    sampling = SamplingParams(max_tokens=64, ignore_eos=True, seed=1)
    start = time.perf_counter()
    for _ in client.generate_stream([[1, 2, 3]], n=16, sampling=sampling, stream_tokens=True, return_text=False):
        pass
    return 16 * 64 / (time.perf_counter() - start)


def connect_ms(server: ServerProcess, tls: dict | None) -> float:
    """Time until a new client has its first answer."""
    start = time.perf_counter()
    with RolloutClient(server.address, tls=tls) as client:
        client.info()
    return 1e3 * (time.perf_counter() - start)


def shown(values: list[float]) -> str:
    digits = 0 if statistics.median(values) >= 100 else 2
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})"


def measure(args: argparse.Namespace, directory: Path) -> dict[str, list[list[float]]]:
    """Rates by what was measured: those without TLS, and those with."""
    cert, key = make_certificate(directory)
    flags = ["--dtype", "bfloat16", "--mem-util", "0.2", "--kv-cache-bytes", "256MiB"]
    tls = {"ca": str(cert)}
    with (
        ServerProcess(args.server, args.model, flags) as plain,
        ServerProcess(
            args.server, args.model, [*flags, "--tls-cert", str(cert), "--tls-key", str(key)], tls=tls
        ) as encrypted,
    ):
        rng = np.random.default_rng(2)
        parameters = plain.client.parameters()
        state = {p.name: random_bfloat16(rng, p.shape, 1.0 if "norm" in p.name else 0.0) for p in parameters}
        found: dict[str, list[list[float]]] = {name: [[], []] for name in ("push", "tokens", "connect")}
        for run in range(args.runs + 1):
            for way, (server, files) in enumerate(((plain, None), (encrypted, tls))):
                values = {
                    "push": push_rate(server.client, state),
                    "tokens": token_rate(server.client),
                    "connect": connect_ms(server, files),
                }
                for name, value in values.items():
                    if run:
                        found[name][way].append(value)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--model", required=True, help="a local model, as the server's --model takes it")
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollout-bench-") as directory:
        found = measure(args, Path(directory))
    titles = {
        "push": "FULL inline, GB/s",
        "tokens": "16 samples, each token sent alone, tokens/s",
        "connect": "connect and first answer, ms",
    }
    print(f"## {datetime.date.today().isoformat()}: TLS beside none\n")
    print(f"- machine: {machine()}\n- commit: {commit()}\n- command: `benches/tls.py {' '.join(sys.argv[1:])}`")
    print(f"- median (least–most) of {args.runs} runs, in turn\n\n| | plain | TLS |\n|---|---|---|")
    for name, title in titles.items():
        print(f"| {title} | {shown(found[name][0])} | {shown(found[name][1])} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
