#!/usr/bin/env python3
"""Makes a table of what `cargo bench -p rollout-kernels --bench operators` has measured, beside the process's own
peaks.

    make bench-operators             # runs the benches, then this
    .venv/bin/python benches/operators.py target/criterion

Results in FLOPs are compared with the peak of their instructions: dot products of bfloat16 where the processor has
them and the weights or the keys and values are bfloat16, else float32 multiply-adds. Results in bytes are compared
with a plain read of as many bytes. "Layers in turn" are all layers of the model one after the other, as in a step,
with the time of all together.
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from section import number
from workloads import commit, machine

MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Measured:
    """The median of one benchmark's times, and the amount of work."""

    group: str
    function: str
    amount: int
    """Amount of work in FLOPs or bytes."""
    is_flop: bool
    seconds: float

    @property
    def rate(self) -> float:
        """Rate in GFLOP/s or GB/s."""
        return self.amount / self.seconds / 1e9

    @classmethod
    def read(cls, directory: Path) -> Measured | None:
        """Reads a benchmark from the directory of its last run; None if it has no amount of work."""
        benchmark = json.loads((directory / "benchmark.json").read_text())
        if benchmark["throughput"] is None:
            return None
        median = json.loads((directory / "estimates.json").read_text())["median"]["point_estimate"]
        [(unit, amount)] = benchmark["throughput"].items()
        parts = [benchmark["function_id"], benchmark["value_str"]]
        return cls(benchmark["group_id"], " ".join(filter(None, parts)), amount, unit == "Elements", median / 1e9)


class Peaks:
    """The peaks of the process that measured the operators."""

    def __init__(self, measured: list[Measured]) -> None:
        """From its "peak" groups, which ran before and after the operators; the better of each pair counts."""
        self.flops: dict[str, float] = {}
        self.reads: dict[int, float] = {}
        for m in sorted(measured, key=lambda m: m.rate):
            if m.is_flop:
                self.flops[m.function] = m.rate
            else:
                self.reads[m.amount] = m.rate

    def of(self, m: Measured) -> float:
        """The peak that limits the benchmark `m`."""
        if m.is_flop:
            dot = self.flops.get("bf16 dot") if "Bf16" in f"{m.group} {m.function}" else None
            return dot or self.flops["f32 multiply-add"]
        # Compared with a read of no more bytes than the operator's, as fewer may lie in a faster cache.
        return self.reads[max((size for size in self.reads if size <= m.amount), default=min(self.reads))]


def table(measured: list[Measured]) -> str:
    peaks = Peaks([m for m in measured if m.group.startswith("peaks")])
    # Group names look like "peaks before/avx512f/2 threads".
    level, threads = next(m.group for m in measured if m.group.startswith("peaks")).split("/")[1:]
    compute = ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in sorted(peaks.flops.items()))
    reads = ", ".join(f"{size // MEBIBYTE} MiB {rate:.1f}" for size, rate in sorted(peaks.reads.items()))
    lines = [
        f"## {datetime.date.today().isoformat()}: operators, {level}, {threads}",
        "",
        f"- machine: {machine()}; commit: {commit()}; command: `make bench-operators`, criterion's medians",
        f"- peaks of the same process, the better of before and after: {compute}; reads of {reads} GB/s",
        "",
        "| operator | rows or shape | µs | GFLOP/s | GB/s | of the peak |",
        "|---|---|---|---|---|---|",
    ]
    for m in measured:
        if m.group.startswith("peaks"):
            continue
        flop, read = (number(m.rate), "") if m.is_flop else ("", number(m.rate))
        share = 100 * m.rate / peaks.of(m)
        lines.append(f"| {m.group} | {m.function} | {1e6 * m.seconds:,.1f} | {flop} | {read} | {share:.0f} % |")
    return "\n".join(lines)


def main() -> int:
    directories = [path.parent for path in Path(sys.argv[1]).glob("**/new/benchmark.json")]
    if not directories:
        print(f"{sys.argv[1]}: no results; run make bench-operators", file=sys.stderr)
        return 1
    # Sorted in the order in which they ran.
    directories.sort(key=lambda directory: (directory / "estimates.json").stat().st_mtime)
    print(table(list(filter(None, map(Measured.read, directories)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
