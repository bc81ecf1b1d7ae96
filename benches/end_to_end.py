#!/usr/bin/env python3
"""Our server and its peers on four workloads beside this machine's limits; prints a Markdown section for RESULTS.md.

    make bench                       # builds, gets the model, runs this on three models, then the operators
    make bench BENCH_FLAGS='--runs 3,1 --peer-minutes 1'     # shorter
    .venv/bin/python benches/end_to_end.py --model .models/….gguf --workloads W1,W2 --peers '' -- --threads 4

Lengths are fixed (`ignore_eos`), log-probabilities of the sampled tokens are returned, prompts are seeded random token
ids with no common prefix, and prefix caches are emptied before every run. Times are whole-workload walls, prefill and
decode together. A workload's runs go round: one of ours, one of each peer, and again. One stream is measured a second
time in the same rounds on a server of ours without speculation. Peers are those that `make bench-peers` has installed;
the others are named with what is missing. A run that is cut short prints what it has.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from checkpoints import add_model_arguments, named_models
from engines import PEERS, PLAIN, Ours, Peer, PeerFailedError, started
from section import markdown, number
from workloads import (
    SHAPES,
    SPECULATIVE,
    WORKLOADS,
    Limits,
    commit,
    floor_seconds,
    machine,
    measure_limits,
)


def measure(
    engines: list[Ours | Peer], absent: dict[str, str], name: str, *, vocab_size: int, runs: int, peer_seconds: float
) -> list[dict]:
    """Measures one workload: a warm-up of each engine with a small part of it, then `runs` timed rounds.

    A peer that fails is moved from `engines` to `absent`. A peer whose next run would take it beyond `peer_seconds` of
    this workload is not run again, and its result says so.
    """
    workload = WORKLOADS[name]
    prompts = workload.make_prompts(vocab_size)
    taking_part = [engine for engine in engines if engine.name != PLAIN or name in SPECULATIVE]
    walls: dict[str, list[float]] = {engine.name: [] for engine in taking_part}
    noise, expected = dict.fromkeys(walls, 0.0), dict.fromkeys(walls, 0.0)
    part = replace(workload, prompts=-(-workload.prompts // 4), new_tokens=-(-workload.new_tokens // 8))
    rounds = [(part, prompts[: part.prompts]), *[(workload, prompts)] * runs]
    for i, (order, order_prompts) in enumerate(rounds):
        for engine in [engine for engine in taking_part if engine in engines]:
            is_free = isinstance(engine, Ours) or not peer_seconds
            if not is_free and sum(walls[engine.name]) + expected[engine.name] > peer_seconds:
                continue
            before, start = other_cpu_seconds(engine.group), time.monotonic()
            try:
                wall = engine.run(order, order_prompts)
            except PeerFailedError as error:
                print(f"  {error}", file=sys.stderr)
                engines.remove(engine)
                absent[engine.name] = str(error)
                continue
            # Scaled from the warm-up by the number of tokens. An estimate, since most engines make more tokens a second
            # with more samples, and fewer than they read.
            expected[engine.name] = wall * workload.all_tokens / order.all_tokens
            if i == 0:
                continue
            walls[engine.name].append(wall)
            others = (other_cpu_seconds(engine.group) - before) / (time.monotonic() - start)
            noise[engine.name] = max(noise[engine.name], others)
            rate = workload.counted_tokens / wall
            print(f"  {name} {engine.name} run {i}/{runs}: {number(rate)} tokens/s", file=sys.stderr)
    return [
        result(name, engine.name, walls[engine.name], noise[engine.name], expected[engine.name])
        for engine in taking_part
        if engine in engines
    ]


def result(name: str, engine: str, walls: list[float], noise: float, expected: float) -> dict:
    """The report's entry for an engine's runs of a workload; without runs, the time that one was expected to take."""
    workload = WORKLOADS[name]
    entry = {"workload": name, **asdict(workload), "engine": engine, "runs": len(walls)}
    if not walls:
        return entry | {"expected_seconds": expected}
    wall = statistics.median(walls)
    return entry | {
        "tokens_per_second": workload.counted_tokens / wall,
        "tokens_per_second_min": workload.counted_tokens / max(walls),
        "tokens_per_second_max": workload.counted_tokens / min(walls),
        "wall_seconds": wall,
        "floor_seconds": None,
        "floor_fraction": None,
        "others_cores": noise,
    }


def measure_model(args: argparse.Namespace, report: dict, name: str, path: Path, runs: int) -> None:
    """Measures all workloads of one model on our server and on the installed peers, and keeps the report up to date."""
    print(f"measuring {name} …", file=sys.stderr)
    flags = ["--dtype", args.dtype, "--mem-util", str(args.mem_util), *args.flags]
    plain = "--speculation" not in args.flags and not set(SPECULATIVE).isdisjoint(args.workloads)
    with started(args.server, path, flags, Path(args.peers_dir), args.peers, plain=plain) as (ours, peers, absent):
        engines, server = [*ours, *peers], ours[0]
        model = {
            "model": name,
            "parameters": server.info.parameters,
            "dtype": server.info.dtype,
            "kernel": server.info.kernel,
            "runs": runs,
            "versions": {engine.name: engine.version for engine in [server, *peers]},
            "start_seconds": {engine.name: engine.start_seconds for engine in [server, *peers]},
            "absent": absent,
            "memory": None,
            "results": [],
        }
        report["models"].append(model)
        for workload in args.workloads:
            vocab_size, peer_seconds = server.info.vocab_size, 60 * args.peer_minutes
            model["results"] += measure(
                engines, absent, workload, vocab_size=vocab_size, runs=runs, peer_seconds=peer_seconds
            )
            peak = {"peak_resident_bytes": peak_resident_bytes(server.group)}
            model["memory"] = asdict(server.server.client.status().memory) | peak
            keep(args, report)


def keep(args: argparse.Namespace, report: dict, limits: Limits | None = None) -> None:
    """Writes the report so far. The limits are measured again, and the better of each pair counts."""
    if limits:
        report["limits"] = asdict(best_of(Limits(**report["limits"]), limits))
    for model in report["models"]:
        add_floors(model, Limits(**report["limits"]))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")


def add_floors(model: dict, limits: Limits) -> None:
    """Adds the least time that each workload can take on this machine, for a model whose shape is known."""
    if shape := SHAPES.get(model["parameters"]):
        for r in (r for r in model["results"] if r["runs"]):
            r["floor_seconds"] = floor_seconds(WORKLOADS[r["workload"]], shape, model["dtype"], limits)
            r["floor_fraction"] = r["floor_seconds"] / r["wall_seconds"]


def best_of(a: Limits, b: Limits) -> Limits:
    """The larger of each limit, because other load on this machine can make it slow for minutes."""

    def largest(*found: float | None) -> float | None:
        return max((gflops for gflops in found if gflops is not None), default=None)

    return replace(
        a,
        f32_fma_gflops=max(a.f32_fma_gflops, b.f32_fma_gflops),
        bf16_dot_gflops=largest(a.bf16_dot_gflops, b.bf16_dot_gflops),
        bf16_tile_gflops=largest(a.bf16_tile_gflops, b.bf16_tile_gflops),
        read_gb_per_s=max(a.read_gb_per_s, b.read_gb_per_s),
    )


def other_cpu_seconds(group: int) -> float:
    """CPU seconds used by processes outside a process group and outside this process's own, where the system tells."""
    try:
        ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0.0
    own = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        # Our server is a process of this process's group; a peer leads a group of its own.
        if int(fields[2]) == group or int(stat.parent.name) == group:
            own += int(fields[11]) + int(fields[12])
    busy = sum(ticks[:8]) - ticks[3] - ticks[4]  # all but idle and iowait; guest time is in user time
    return (busy - own) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


def peak_resident_bytes(pid: int) -> int | None:
    """The most resident memory that the process has had, where the system tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--limits", default="target/release/examples/limits", help="the probe's binary")
    add_model_arguments(parser)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument(
        "--peers", default=",".join(PEERS), help="comma-separated; those that are installed are measured"
    )
    parser.add_argument("--peers-dir", default=".peers", help="where `make bench-peers` has put them")
    parser.add_argument(
        "--runs", default="3", help="timed runs of each engine; 3,1 is three of the first model, one of each other"
    )
    parser.add_argument(
        "--peer-minutes",
        type=float,
        default=0.0,
        metavar="M",
        help="for all runs of a peer at a workload of a model: a peer gets fewer runs if more do not fit, or none, and "
        "the table says so; whether the first fits is estimated from the warm-up (default: no limit)",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="also write everything there after each workload, for chart.py and section.py"
    )
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args()
    args.workloads = args.workloads.split(",")
    args.peers = list(filter(None, args.peers.split(",")))
    for option, known in (("workloads", list(WORKLOADS)), ("peers", list(PEERS))):
        if unknown := set(getattr(args, option)) - set(known):
            parser.error(f"--{option}: {sorted(unknown)} are not among {known}")
    try:
        args.runs = [int(runs) for runs in args.runs.split(",")]
    except ValueError:
        args.runs = []
    if not args.runs or min(args.runs) < 1:
        parser.error("--runs: one number from 1 on, or one for each model")
    return args


def main() -> int:
    args = parse_args()
    # SIGTERM ends the bench as an exception does, so that no peer is left stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("measuring this machine's limits …", file=sys.stderr)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "command": f"benches/end_to_end.py {' '.join(sys.argv[1:])}",
        "peer_minutes": args.peer_minutes,
        "limits": asdict(measure_limits(args.limits)),
        "models": [],
    }
    try:
        with named_models(args) as models:
            for i, (name, path) in enumerate(models):
                measure_model(args, report, name, path, args.runs[min(i, len(args.runs) - 1)])
                keep(args, report, measure_limits(args.limits))
    finally:
        # Also prints the results of a run that was cut short.
        print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
