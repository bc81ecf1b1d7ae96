#!/usr/bin/env python3
"""Four workloads through gRPC beside this machine's measured limits; prints a Markdown section for RESULTS.md.

    make bench                       # builds, gets the model, runs this
    .venv/bin/python benches/end_to_end.py --model .models/….gguf --workloads W1,W2 --json results.json -- --threads 4

Lengths are fixed (`ignore_eos`), log-probabilities are returned, prompts are seeded random token ids with no common
prefix, and the prefix cache is emptied before every run. Times are whole-workload walls, prefill and decode together.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from rollout_client import RolloutClient, SamplingParams, ServerInfo, ServerProcess

PROMPT_SEED = 20260101


@dataclass(frozen=True)
class Workload:
    """`prompts` x `n` samples, `prompt_len` + `new_tokens` tokens each."""

    prompts: int
    n: int
    prompt_len: int
    new_tokens: int
    temperature: float

    @property
    def counted_tokens(self) -> int:
        """What tokens/s counts: generated tokens, or prompt tokens where next to nothing is generated."""
        return self.prompts * (self.prompt_len if self.new_tokens == 1 else self.n * self.new_tokens)


WORKLOADS = {
    "W1": Workload(prompts=8, n=8, prompt_len=128, new_tokens=128, temperature=1.0),
    "W2": Workload(prompts=1, n=1, prompt_len=128, new_tokens=128, temperature=0.0),
    "W3": Workload(prompts=16, n=1, prompt_len=1024, new_tokens=1, temperature=0.0),
    "W4": Workload(prompts=1, n=16, prompt_len=1024, new_tokens=128, temperature=1.0),
}
TITLES = {"W1": "groups", "W2": "single stream, greedy", "W3": "prefill, prompt tokens", "W4": "long shared prompt"}


@dataclass(frozen=True)
class Shape:
    """What the floor needs to know of a model."""

    parameters: float
    embedding_parameters: float
    kv_elements_per_token: float


# By parameter count, which the server reports; for another model the floor is left out.
SHAPES = {
    134_515_008: Shape(134_515_008, 49_152 * 576, 30 * 2 * 3 * 64),  # SmolLM2-135M, tied
}


@dataclass(frozen=True)
class Limits:
    """What the machine can do, by `kernels/examples/limits.rs`."""

    threads: int
    instructions: str
    f32_fma_gflops: float
    bf16_dot_gflops: float | None
    read_gb_per_s: float

    def peak_gflops(self, dtype: str) -> float:
        """The fastest way to multiply weights of this type."""
        bf16 = self.bf16_dot_gflops if dtype == "bfloat16" else None
        return max(self.f32_fma_gflops, bf16 or 0.0)


def floor_seconds(workload: Workload, shape: Shape, dtype: str, limits: Limits) -> float:
    """No implementation is faster: every unique prompt token's FLOPs at the peak, then for each decode step the larger
    of reading all weights and computing all samples, plus reading each KV entry once."""
    bytes_per_element = 4 if dtype == "float32" else 2
    peak, bandwidth = limits.peak_gflops(dtype) * 1e9, limits.read_gb_per_s * 1e9
    w, sequences = workload, workload.prompts * workload.n
    seconds = 2 * (shape.parameters - shape.embedding_parameters) * w.prompts * w.prompt_len / peak
    seconds += 2 * shape.embedding_parameters * w.prompts / peak
    step = max(shape.parameters * bytes_per_element / bandwidth, 2 * shape.parameters * sequences / peak)
    for made in range(1, w.new_tokens):
        kv_tokens = w.prompts * w.prompt_len + sequences * made
        seconds += step + kv_tokens * shape.kv_elements_per_token * bytes_per_element / bandwidth
    return seconds


def run_once(client: RolloutClient, workload: Workload, prompts: list[list[int]]) -> float:
    """Seconds of one run, from a cold prefix cache."""
    client.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=workload.new_tokens, temperature=workload.temperature, ignore_eos=True, seed=1)
    start = time.perf_counter()
    outputs = client.generate(prompts, n=workload.n, sampling=sampling, return_text=False)
    seconds = time.perf_counter() - start
    for sample in (sample for output in outputs for sample in output.samples):
        lengths = {len(sample.token_ids), len(sample.logprobs), len(sample.raw_logprobs)}
        if lengths != {workload.new_tokens}:
            raise RuntimeError(f"a sample has {lengths} tokens and log-probabilities, not {workload.new_tokens}")
    return seconds


def measure(server: ServerProcess, name: str, info: ServerInfo, limits: Limits, runs: int) -> dict:
    """One workload: a warm-up, then `runs` timed runs."""
    workload = WORKLOADS[name]
    rng = random.Random(PROMPT_SEED)
    prompts = [[rng.randrange(info.vocab_size) for _ in range(workload.prompt_len)] for _ in range(workload.prompts)]
    run_once(server.client, workload, prompts)
    noise, walls = [], []
    for i in range(runs):
        before, start = other_cpu_seconds(server.process.pid), time.monotonic()
        walls.append(run_once(server.client, workload, prompts))
        noise.append((other_cpu_seconds(server.process.pid) - before) / (time.monotonic() - start))
        print(f"  {name} run {i + 1}/{runs}: {workload.counted_tokens / walls[-1]:.0f} tokens/s", file=sys.stderr)
    wall = statistics.median(walls)
    shape = SHAPES.get(info.parameters)
    floor = floor_seconds(workload, shape, info.dtype, limits) if shape else None
    return {
        "workload": name,
        **asdict(workload),
        "tokens_per_second": workload.counted_tokens / wall,
        "tokens_per_second_min": workload.counted_tokens / max(walls),
        "tokens_per_second_max": workload.counted_tokens / min(walls),
        "wall_seconds": wall,
        "floor_seconds": floor,
        "floor_fraction": floor / wall if floor else None,
        "others_cores": max(0.0, *noise),
    }


def measure_start(args: argparse.Namespace) -> tuple[ServerProcess, float]:
    """The server, and the seconds from its start to its first token with the model's files in the page cache."""
    model = Path(args.model)
    for path in [model] if model.is_file() else sorted(model.glob("*")):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass
    flags = ["--dtype", args.dtype, "--mem-util", str(args.mem_util), *args.flags]
    start = time.perf_counter()
    server = ServerProcess(args.server, args.model, flags)
    try:
        server.wait_until_ready()
        server.client.generate([[1, 2, 3]], sampling=SamplingParams(max_tokens=1, ignore_eos=True), return_text=False)
    except BaseException:
        server.stop()
        raise
    return server, time.perf_counter() - start


def measure_limits(binary: str) -> Limits:
    return Limits(**json.loads(subprocess.run([binary], check=True, capture_output=True, text=True).stdout))


def other_cpu_seconds(pid: int) -> float:
    """CPU seconds that other processes than the server and this one have used, where the system tells."""
    try:
        ticks = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        own = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    busy = sum(ticks[:8]) - ticks[3] - ticks[4]  # all but idle and iowait; guest time is in user time
    return (busy - int(own[11]) - int(own[12])) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:2])


def peak_resident_bytes(pid: int) -> int | None:
    """Most resident memory the process has had, where the system tells."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores {name}, {platform.system()}"


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    return (git("rev-parse", "--short", "HEAD") or "unknown") + (
        " with changes" if git("status", "--porcelain") else ""
    )


def markdown(report: dict) -> str:
    """A section for RESULTS.md."""
    limits, memory = report["limits"], report["memory"]
    bf16 = limits["bf16_dot_gflops"]
    peak_mib = "?" if memory["peak_resident_bytes"] is None else f"{memory['peak_resident_bytes'] / 2**20:,.0f}"
    lines = [
        f"## {report['date']}: {report['model']}, {report['dtype']}",
        "",
        f"- machine: {report['machine']}",
        f"- commit: {report['commit']}",
        f"- command: `{report['command']}`",
        f"- limits: f32 FMA {limits['f32_fma_gflops']:.0f} GFLOP/s ({limits['instructions']}), bf16 dot "
        f"{'none' if bf16 is None else f'{bf16:.0f} GFLOP/s'}, memory read {limits['read_gb_per_s']:.1f} GB/s, "
        f"{limits['threads']} threads; the server's kernel is {report['kernel']}",
        f"- start: {report['start_seconds']:.2f} s from process start to first token, model in the page cache",
        f"- memory: peak resident {peak_mib} MiB, ceiling {memory['ceiling_bytes'] / 2**20:,.0f} MiB",
        "",
        "| workload | prompts × samples, tokens | tokens/s median (min–max) | wall s | of floor | others' cores |",
        "|---|---|---|---|---|---|",
    ]
    for r in report["results"]:
        of_floor = "" if r["floor_fraction"] is None else f"{100 * r['floor_fraction']:.0f} %"
        lines.append(
            f"| {r['workload']} {TITLES[r['workload']]} | {r['prompts']} × {r['n']}, "
            f"{r['prompt_len']} + {r['new_tokens']} | {r['tokens_per_second']:.0f} "
            f"({r['tokens_per_second_min']:.0f}–{r['tokens_per_second_max']:.0f}) | "
            f"{r['wall_seconds']:.2f} | {of_floor} | {r['others_cores']:.2f} |"
        )
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--limits", default="target/release/examples/limits", help="the probe's binary")
    parser.add_argument("--model", required=True, help="a local model, as the server's --model takes it")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--mem-util", type=float, default=0.4)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write everything there")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args()
    args.workloads = args.workloads.split(",")
    if unknown := set(args.workloads) - WORKLOADS.keys():
        parser.error(f"--workloads: {sorted(unknown)} are not among {sorted(WORKLOADS)}")
    return args


def main() -> int:
    args = parse_args()
    print("measuring this machine's limits …", file=sys.stderr)
    limits = measure_limits(args.limits)
    server, start_seconds = measure_start(args)
    try:
        info = server.client.info()
        results = [measure(server, name, info, limits, args.runs) for name in args.workloads]
        report = {
            "date": datetime.date.today().isoformat(),
            "machine": machine(),
            "commit": commit(),
            "command": f"benches/end_to_end.py {' '.join(sys.argv[1:])}",
            "model": Path(args.model).name,
            "dtype": info.dtype,
            "kernel": info.kernel,
            "limits": asdict(limits),
            "start_seconds": start_seconds,
            "memory": {
                **asdict(server.client.status().memory),
                "peak_resident_bytes": peak_resident_bytes(server.process.pid),
            },
            "results": results,
        }
    finally:
        server.stop()
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    print(markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
