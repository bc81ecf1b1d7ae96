#!/usr/bin/env python3
"""Our server and its peers on four workloads beside this machine's limits; prints a Markdown section for RESULTS.md.

    make bench                       # builds, gets the model, runs this
    .venv/bin/python benches/end_to_end.py --model .models/….gguf --workloads W1,W2 --peers '' -- --threads 4

Lengths are fixed (`ignore_eos`), log-probabilities of the sampled tokens are returned, prompts are seeded random token
ids with no common prefix, and prefix caches are emptied before every run. Times are whole-workload walls, prefill and
decode together. A workload's runs go round: one of ours, one of each peer, and again. Peers are those that
`make bench-peers` has installed; the others are named with what is missing.
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
from engines import OURS, Ours, Peer, started
from workloads import (
    SHAPES,
    TITLES,
    WORKLOADS,
    Limits,
    Workload,
    commit,
    floor_seconds,
    machine,
    measure_limits,
)

PEERS = "vllm,llama.cpp,transformers"


def measure(engines: list[Ours | Peer], absent: dict[str, str], name: str, *, vocab_size: int, runs: int) -> list[dict]:
    """One workload: a warm-up of each engine with a small part of it, then `runs` timed rounds.

    A peer that fails leaves `engines` for `absent`.
    """
    workload = WORKLOADS[name]
    prompts = workload.make_prompts(vocab_size)
    walls: dict[str, list[float]] = {engine.name: [] for engine in engines}
    noise = dict.fromkeys(walls, 0.0)
    part = replace(workload, prompts=-(-workload.prompts // 4), new_tokens=-(-workload.new_tokens // 8))
    for engine in list(engines):
        run(engine, part, prompts[: part.prompts], engines, absent)
    for i in range(runs):
        for engine in list(engines):
            before, start = other_cpu_seconds(engine.group), time.monotonic()
            if (wall := run(engine, workload, prompts, engines, absent)) is None:
                continue
            walls[engine.name].append(wall)
            others = (other_cpu_seconds(engine.group) - before) / (time.monotonic() - start)
            noise[engine.name] = max(noise[engine.name], others)
            rate = workload.counted_tokens / wall
            print(f"  {name} {engine.name} run {i + 1}/{runs}: {rate:.0f} tokens/s", file=sys.stderr)
    return [result(name, engine, walls[engine.name], noise[engine.name]) for engine in engines]


def run(
    engine: Ours | Peer, workload: Workload, prompts: list, engines: list[Ours | Peer], absent: dict[str, str]
) -> float | None:
    """Seconds of a workload; None of a peer that fails at it."""
    try:
        return engine.run(workload, prompts)
    except RuntimeError as error:
        print(f"  {error}", file=sys.stderr)
        engines.remove(engine)
        absent[engine.name] = str(error)
        return None


def result(name: str, engine: Ours | Peer, walls: list[float], noise: float) -> dict:
    workload, wall = WORKLOADS[name], statistics.median(walls)
    return {
        "workload": name,
        **asdict(workload),
        "engine": engine.name,
        "tokens_per_second": workload.counted_tokens / wall,
        "tokens_per_second_min": workload.counted_tokens / max(walls),
        "tokens_per_second_max": workload.counted_tokens / min(walls),
        "wall_seconds": wall,
        "floor_seconds": None,
        "floor_fraction": None,
        "others_cores": noise,
    }


def measure_model(args: argparse.Namespace, name: str, path: Path) -> dict:
    """All workloads of one model, on our server and on the peers that are there."""
    print(f"measuring {name} …", file=sys.stderr)
    flags = ["--dtype", args.dtype, "--mem-util", str(args.mem_util), *args.flags]
    with started(args.server, path, flags, Path(args.peers_dir), args.peers) as (ours, peers, absent):
        engines = [ours, *peers]
        results = [
            entry
            for workload in args.workloads
            for entry in measure(engines, absent, workload, vocab_size=ours.info.vocab_size, runs=args.runs)
        ]
        return {
            "model": name,
            "parameters": ours.info.parameters,
            "dtype": ours.info.dtype,
            "kernel": ours.info.kernel,
            "versions": {engine.name: engine.version for engine in [ours, *peers]},
            "start_seconds": {engine.name: engine.start_seconds for engine in [ours, *peers]},
            "absent": absent,
            "memory": {
                **asdict(ours.server.client.status().memory),
                "peak_resident_bytes": peak_resident_bytes(ours.group),
            },
            "results": results,
        }


def add_floors(model: dict, limits: Limits) -> None:
    """What none beats, for a model that the floor knows."""
    if shape := SHAPES.get(model["parameters"]):
        for r in model["results"]:
            r["floor_seconds"] = floor_seconds(WORKLOADS[r["workload"]], shape, model["dtype"], limits)
            r["floor_fraction"] = r["floor_seconds"] / r["wall_seconds"]


def best_of(a: Limits, b: Limits) -> Limits:
    """The larger of each: a neighbour of this machine can make it slow for minutes."""
    bf16 = [dot for dot in (a.bf16_dot_gflops, b.bf16_dot_gflops) if dot is not None]
    return replace(
        a,
        f32_fma_gflops=max(a.f32_fma_gflops, b.f32_fma_gflops),
        bf16_dot_gflops=max(bf16, default=None),
        read_gb_per_s=max(a.read_gb_per_s, b.read_gb_per_s),
    )


def other_cpu_seconds(group: int) -> float:
    """CPU seconds that processes outside a process group and this one's own have used, where the system tells."""
    try:
        ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    except OSError:
        return 0.0
    own = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        # Our server is a process of this one's group; a peer leads one.
        if int(fields[2]) == group or int(stat.parent.name) == group:
            own += int(fields[11]) + int(fields[12])
    busy = sum(ticks[:8]) - ticks[3] - ticks[4]  # all but idle and iowait; guest time is in user time
    return (busy - own) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


def peak_resident_bytes(pid: int) -> int | None:
    """Most resident memory the process has had, where the system tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def markdown(report: dict) -> str:
    """Sections for RESULTS.md."""
    return "\n\n".join(section(report, model) for model in report["models"])


def section(report: dict, model: dict) -> str:
    limits, memory = report["limits"], model["memory"]
    bf16, peak = limits["bf16_dot_gflops"], memory["peak_resident_bytes"]
    peak_mib = "?" if peak is None else f"{peak / 2**20:,.0f}"
    peers = [name for name in model["versions"] if name != OURS]
    found = ", ".join(
        f"{name} {model['versions'][name]} (start {model['start_seconds'][name]:.1f} s)" for name in peers
    )
    absent = "; ".join(f"{name} is absent: {reason}" for name, reason in model["absent"].items())
    lines = [
        f"## {report['date']}: {model['model']}, {model['dtype']}",
        "",
        f"- machine: {report['machine']}",
        f"- commit: {report['commit']}",
        f"- command: `{report['command']}`",
        f"- limits, the better of before and after: f32 FMA {limits['f32_fma_gflops']:.0f} GFLOP/s "
        f"({limits['instructions']}), bf16 dot {'none' if bf16 is None else f'{bf16:.0f} GFLOP/s'}, memory read "
        f"{limits['read_gb_per_s']:.1f} GB/s, {limits['threads']} threads; the server's kernel is {model['kernel']}",
        f"- start: {model['start_seconds'][OURS]:.2f} s from process start to first token, model in the page cache",
        f"- memory: peak resident {peak_mib} MiB, ceiling {memory['ceiling_bytes'] / 2**20:,.0f} MiB",
        f"- peers, in turn with our server in the same session: {'; '.join(filter(None, [found, absent])) or 'none'}",
        "",
        "| workload | engine | tokens/s median (min–max) | wall s | of floor | ours is ahead by | others' cores |",
        "|---|---|---|---|---|---|---|",
    ]
    ours = {r["workload"]: r["tokens_per_second"] for r in model["results"] if r["engine"] == OURS}
    return "\n".join([*lines, *(row(r, ours[r["workload"]]) for r in model["results"])])


def row(r: dict, ours: float) -> str:
    rate, is_ours = r["tokens_per_second"], r["engine"] == OURS
    title = f"{r['workload']} {TITLES[r['workload']]}" if is_ours else ""
    rates = f"{number(rate)} ({number(r['tokens_per_second_min'])}–{number(r['tokens_per_second_max'])})"
    of_floor = "" if r["floor_fraction"] is None else f"{100 * r['floor_fraction']:.0f} %"
    ahead = "" if is_ours else f"{ours / rate:.1f} ×"
    cells = [title, r["engine"], rates, f"{r['wall_seconds']:.2f}", of_floor, ahead, f"{r['others_cores']:.2f}"]
    return f"| {' | '.join(cells)} |"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--limits", default="target/release/examples/limits", help="the probe's binary")
    add_model_arguments(parser)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument("--peers", default=PEERS, help="comma-separated; those that are installed are measured")
    parser.add_argument("--peers-dir", default=".peers", help="where `make bench-peers` has put them")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write everything there, for chart.py")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args()
    args.workloads = args.workloads.split(",")
    args.peers = list(filter(None, args.peers.split(",")))
    for option, known in (("workloads", list(WORKLOADS)), ("peers", PEERS.split(","))):
        if unknown := set(getattr(args, option)) - set(known):
            parser.error(f"--{option}: {sorted(unknown)} are not among {known}")
    return args


def main() -> int:
    args = parse_args()
    # Ends as an exception does, so that no peer is left standing still.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print("measuring this machine's limits …", file=sys.stderr)
    before = measure_limits(args.limits)
    with named_models(args) as models:
        measured = [measure_model(args, name, path) for name, path in models]
    limits = best_of(before, measure_limits(args.limits))
    for model in measured:
        add_floors(model, limits)
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "command": f"benches/end_to_end.py {' '.join(sys.argv[1:])}",
        "runs": args.runs,
        "limits": asdict(limits),
        "models": measured,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
