#!/usr/bin/env python3
"""Pushes, sleep and wake beside a plain copy of the same bytes; prints a Markdown section for RESULTS.md.

    make bench-weight-sync           # builds, gets the model, runs this
    .venv/bin/python benches/weight_sync.py --model .models/….gguf --runs 5 --json results.json -- --threads 4

Two models: the given one, and a random one in the shape of Qwen2.5-0.5B, written to a temporary directory first. Each
gets LoRA adapters of rank 16 on all linear layers, sleeps with such a policy, and is pushed whole in bfloat16 through
the connection and through shared memory, all while nothing runs. The first push of each kind is not counted. The KV
cache is 1 GiB, of which next to nothing is touched, so that there is room for everything else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from checkpoints import RANDOM, random_bfloat16, write_qwen
from workloads import Limits, commit, machine, measure_limits

from rollout_client import (
    ParameterInfo,
    RolloutClient,
    SamplingParams,
    ServerProcess,
    SharedBuffer,
    UpdateResult,
    clean_stale_segments,
)

RANK = 16
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Timing:
    """Median, least and most of several runs."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Timing:
        """The statistics of these runs."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        """`value` rounded to the digits that can be trusted."""
        digits = 0 if self.median >= 100 else 1 if self.median >= 10 else 2
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}–{self.high:.{digits}f})"


def random_adapter(parameters: list[ParameterInfo], modules: list[str] = LINEAR) -> tuple[dict[str, np.ndarray], dict]:
    rng = np.random.default_rng(1)
    tensors = {}
    for parameter in parameters:
        module = parameter.name.removesuffix(".weight")
        if module.rpartition(".")[2] in modules:
            rows, columns = parameter.shape
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = 0.01 * rng.standard_normal((RANK, columns), dtype=np.float32)
            tensors[f"{prefix}.lora_B.weight"] = 0.01 * rng.standard_normal((rows, RANK), dtype=np.float32)
    return tensors, {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules}


def copy_rate(size: int, runs: int) -> Timing:
    """GB/s at which one thread copies `size` bytes to memory that has been used before."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    return Timing.of([size / 1e9 / timed(lambda: np.copyto(target, source))[0] for _ in range(runs)])


def timed(use: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = use()
    return time.perf_counter() - start, result


def pushes(push: Callable[[], UpdateResult], runs: int) -> tuple[list[float], list[UpdateResult]]:
    """Seconds and results of the runs, without the first, which takes fresh pages."""
    push()
    found = [timed(push) for _ in range(runs)]
    return [seconds for seconds, _ in found], [result for _, result in found]  # type: ignore[misc]


def measure_adapters(client: RolloutClient, runs: int) -> dict:
    """Measures pushes of adapters, which are merged into the checkpoint."""
    adapter, config = random_adapter(client.parameters())
    seconds, results = pushes(lambda: client.push_lora(adapter, config, progress=False), runs)
    return {
        "bytes": sum(tensor.nbytes for tensor in adapter.values()),
        "seconds": Timing.of(seconds),
        "pause_ms": Timing.of([result.pause_ms for result in results]),
    }


def measure_full(client: RolloutClient, runs: int) -> dict:
    """Measures full pushes with each transport."""
    rng = np.random.default_rng(2)
    state = {p.name: random_bfloat16(rng, p.shape, 1.0 if "norm" in p.name else 0.0) for p in client.parameters()}
    size = sum(len(data) for data, _, _ in state.values())
    report: dict = {"bytes": size, "copy": copy_rate(size, runs)}
    with SharedBuffer(size) as buffer:
        ways = {
            "inline": lambda: client.push_full(state, transport="inline", progress=False),
            "shared_memory": lambda: client.push_full(state, transport="shared_memory", progress=False),
            "shared_buffer": lambda: client.push_full(gathered, buffer=buffer, progress=False),
        }
        gathered = {name: (gather(buffer, data), dtype, shape) for name, (data, dtype, shape) in state.items()}
        for name, push in ways.items():
            seconds, results = pushes(push, runs)
            report[name] = {
                "rate": Timing.of([size / 1e9 / s for s in seconds]),
                "seconds": Timing.of(seconds),
                "staging_ms": Timing.of([result.staging_ms for result in results]),
                "pause_ms": Timing.of([result.pause_ms for result in results]),
            }
    report["shared_memory"]["client_rate"] = Timing.of(staging_rates(state, size, runs))
    return report


def gather(buffer: SharedBuffer, data: bytes) -> memoryview:
    """Copies the bytes into the buffer, as a trainer that gathers a tensor does."""
    part = buffer.take(len(data))
    part[:] = data
    return part


def staging_rates(state: dict, size: int, runs: int) -> list[float]:
    """GB/s at which the client fills a segment that it has used before, digests included."""
    from rollout_client._segment import Segment  # noqa: PLC0415 no part of the client's interface

    segment, rates = Segment(size), []
    for _ in range(runs + 1):
        start, offset = time.perf_counter(), 0
        for data, _, _ in state.values():
            segment.write(offset, memoryview(data))
            offset += len(data)
        rates.append(size / 1e9 / (time.perf_counter() - start))
    segment.close()
    return rates[1:]


def measure_sleep(server: ServerProcess, runs: int) -> dict:
    """Measures both levels of sleep on a server that has just generated."""
    client, sampling = server.client, SamplingParams(max_tokens=8, ignore_eos=True)
    awake, sleeps, wakes, asleep = [], [], [], []
    for _ in range(runs):
        client.generate([[1, 2, 3]], n=8, sampling=sampling, return_text=False)
        awake.append(resident_mib(server))
        sleeps.append(1e3 * timed(client.sleep)[0])
        asleep.append(resident_mib(server))
        wakes.append(1e3 * timed(client.wake)[0])
    client.sleep(2)
    report = {
        "awake_mib": Timing.of(awake),
        "level_1_mib": Timing.of(asleep),
        "level_2_mib": resident_mib(server),
        "sleep_ms": Timing.of(sleeps),
        "wake_ms": Timing.of(wakes),
        "reload_ms": 1e3 * timed(lambda: client.wake(reload=True))[0],
    }
    return report


def resident_mib(server: ServerProcess) -> float:
    return server.client.status().memory.resident_bytes / 2**20


def measure(args: argparse.Namespace, name: str, model: str | Path) -> dict:
    print(f"measuring {name} …", file=sys.stderr)
    flags = ["--dtype", "bfloat16", "--mem-util", str(args.mem_util), "--kv-cache-bytes", "1GiB", *args.flags]
    with ServerProcess(args.server, model, flags) as server:
        # The full push comes last: its weights cannot be read from the checkpoint again, so a sleep of level 1 would
        # keep them.
        lora, sleep = measure_adapters(server.client, args.runs), measure_sleep(server, args.runs)
        return {"model": name, "lora": lora, "sleep": sleep, **measure_full(server.client, args.runs)}


def markdown(report: dict) -> str:
    """The section for RESULTS.md."""
    limits, results = Limits(**report["limits"]), report["results"]
    names = " | ".join(result["model"] for result in results)

    def row(title: str, value: Callable[[dict], object]) -> str:
        return f"| {title} | {' | '.join(str(value(result)) for result in results)} |"

    return "\n".join(
        [
            f"## {report['date']}: weight sync",
            "",
            f"- machine: {report['machine']}; memory read {limits.read_gb_per_s:.1f} GB/s, {limits.threads} threads",
            f"- commit: {report['commit']}",
            f"- command: `{report['command']}`",
            f"- median (least–most) of {report['runs']} runs after one that is not counted; nothing else runs",
            "",
            f"| | {names} |",
            f"|---|{'---|' * len(results)}",
            row("all weights, bfloat16, MB", lambda r: f"{r['bytes'] / 1e6:,.0f}"),
            row("copy of the same bytes, one thread, GB/s", lambda r: r["copy"]),
            row("FULL inline, GB/s", lambda r: r["inline"]["rate"]),
            row("FULL inline, pause ms", lambda r: r["inline"]["pause_ms"]),
            row("FULL shared memory, end to end, GB/s", lambda r: r["shared_memory"]["rate"]),
            row("… client's part (copy and digests), GB/s", lambda r: r["shared_memory"]["client_rate"]),
            row("… server's check, ms", lambda r: r["shared_memory"]["staging_ms"]),
            row("… pause, ms", lambda r: r["shared_memory"]["pause_ms"]),
            row("FULL gathered into shared memory, end to end, GB/s", lambda r: r["shared_buffer"]["rate"]),
            row("LoRA r=16, all linear layers, MB", lambda r: f"{r['lora']['bytes'] / 1e6:,.1f}"),
            row("… end to end, s", lambda r: r["lora"]["seconds"]),
            row("… pause, ms", lambda r: r["lora"]["pause_ms"]),
            row("sleep level 1 (checkpoint and adapter), ms", lambda r: r["sleep"]["sleep_ms"]),
            row("wake, ms", lambda r: r["sleep"]["wake_ms"]),
            row("wake with reload after level 2, ms", lambda r: f"{r['sleep']['reload_ms']:,.0f}"),
            row("resident awake, MiB", lambda r: r["sleep"]["awake_mib"]),
            row("resident asleep, level 1, MiB", lambda r: r["sleep"]["level_1_mib"]),
            row("resident asleep, level 2, MiB", lambda r: f"{r['sleep']['level_2_mib']:.0f}"),
        ]
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--limits", default="target/release/examples/limits", help="the probe's binary")
    parser.add_argument("--model", required=True, help="a local model, as the server's --model takes it")
    parser.add_argument("--mem-util", type=float, default=0.4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only-given", action="store_true", help="without the random model (1 GB on disk)")
    parser.add_argument("--json", metavar="FILE", help="also write everything there")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    clean_stale_segments()
    print("measuring this machine's limits …", file=sys.stderr)
    limits = measure_limits(args.limits)
    results = [measure(args, Path(args.model).stem, args.model)]
    if not args.only_given:
        with tempfile.TemporaryDirectory(prefix="rollout-bench-") as directory:
            results.append(measure(args, RANDOM, write_qwen(Path(directory))))
    report = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "commit": commit(),
        "command": f"benches/weight_sync.py {' '.join(sys.argv[1:])}",
        "runs": args.runs,
        "limits": asdict(limits),
        "results": results,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1, default=asdict) + "\n")
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
