#!/usr/bin/env python3
"""A push into 1, 2 and 4 replicas of a fleet; prints a Markdown section for RESULTS.md.

    make bench-fleet                 # builds, gets the model, runs this
    .venv/bin/python benches/fleet.py --model .models/….gguf --rounds 3 --runs 5

Each round starts as many servers as the fleet has replicas, all on this machine, and pushes LoRA adapters of rank 16 on
all linear layers, then all weights in bfloat16 through shared memory and through the connections, while nothing runs.
The first push of each kind is not counted. Sizes take turns in each round. Ray starts servers and has no part in
pushes, so that it is not needed here.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from checkpoints import random_bfloat16
from weight_sync import Timing, pushes, random_adapter
from workloads import commit, machine

from rollout_client import ServerProcess, clean_stale_segments
from rollout_client.fleet import Fleet, FleetReceipt

SIZES = (1, 2, 4)
KINDS = {
    "lora": "LoRA r=16, all linear layers",
    "shared_memory": "all weights, shared memory",
    "inline": "all weights, connections",
}


def ways(fleet: Fleet) -> dict[str, tuple[int, Callable[[], FleetReceipt]]]:
    """Bytes and pushes of each kind. Full ones come last: adapters are merged into the checkpoint."""
    parameters, rng = fleet.parameters(), np.random.default_rng(2)
    adapter, config = random_adapter(parameters)
    state = {p.name: random_bfloat16(rng, p.shape, 1.0 if "norm" in p.name else 0.0) for p in parameters}
    size = sum(len(data) for data, _, _ in state.values())
    return {
        "lora": (
            sum(tensor.nbytes for tensor in adapter.values()),
            lambda: fleet.push_lora(adapter, config, progress=False),
        ),
        "shared_memory": (size, lambda: fleet.push_full(state, transport="shared_memory", progress=False)),
        "inline": (size, lambda: fleet.push_full(state, transport="inline", progress=False)),
    }


def measure(args: argparse.Namespace, replicas: int) -> dict[str, tuple[int, list[float]]]:
    """Bytes and seconds of each kind of push into so many replicas."""
    print(f"measuring {replicas} …", file=sys.stderr)
    flags = [
        "--dtype",
        "bfloat16",
        "--mem-util",
        "0.2",
        "--max-model-len",
        "2048",
        "--kv-cache-bytes",
        "64MiB",
        *args.flags,
    ]
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(ServerProcess(args.server, args.model, flags, output=subprocess.DEVNULL))
            for _ in range(replicas)
        ]
        fleet = stack.enter_context(Fleet([server.address for server in servers], quorum=replicas))
        found = {}
        for kind, (size, push) in ways(fleet).items():
            seconds, receipts = pushes(push, args.runs)
            assert all(receipt.missed == [] for receipt in receipts)
            found[kind] = size, seconds
        return found


def markdown(args: argparse.Namespace, results: dict[int, dict[str, tuple[int, list[float]]]], loads: str) -> str:
    """The section for RESULTS.md."""
    command = f"benches/fleet.py {' '.join(sys.argv[1:])}"
    counted = f"median (least–most) of {args.rounds} rounds of {args.runs} pushes, milliseconds"
    lines = [
        f"## {datetime.date.today().isoformat()}: a push into a fleet",
        "",
        f"- machine: {machine()}; trainer and all replicas share it; load average {loads}",
        f"- commit: {commit()}",
        f"- command: `{command}`",
        f"- {Path(args.model).stem}; {counted}",
        "",
        f"| | MB | 1 replica | {' | '.join(f'{size} replicas' for size in SIZES[1:])} | "
        f"{' | '.join(f'{size} against 1' for size in SIZES[1:])} |",
        f"|---|---|{'---|' * (2 * len(SIZES) - 1)}",
    ]
    for kind, title in KINDS.items():
        times = {size: Timing.of([1e3 * second for second in results[size][kind][1]]) for size in SIZES}
        ratios = [f"{times[size].median / times[1].median:.2f}" for size in SIZES[1:]]
        cells = [f"{results[1][kind][0] / 1e6:,.1f}", *(str(times[size]) for size in SIZES), *ratios]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--model", required=True, help="a local model, as the server's --model takes it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=5, help="pushes of each kind in a round")
    parser.add_argument("flags", nargs="*", help="further flags of the servers, after --")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    clean_stale_segments()
    before = os.getloadavg()[0]
    results: dict[int, dict[str, tuple[int, list[float]]]] = {size: {} for size in SIZES}
    for _ in range(args.rounds):
        for size in SIZES:
            for kind, (count, seconds) in measure(args, size).items():
                results[size][kind] = count, results[size].get(kind, (0, []))[1] + seconds
    print(markdown(args, results, f"{before:.1f} before, {os.getloadavg()[0]:.1f} after"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
