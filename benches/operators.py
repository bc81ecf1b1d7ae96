#!/usr/bin/env python3
"""A table of what `cargo bench -p rollout-kernels --bench operators` has measured, beside the same process's peaks.

    make bench-operators             # runs the benches, then this
    .venv/bin/python benches/operators.py target/criterion

What is counted in FLOPs is beside the peak of its instructions: dot products of bfloat16 where the processor has them
and the weights or the keys and values are bfloat16, else float32 multiply-adds. What is counted in bytes is beside a
plain read of as many. "Layers in turn" are all layers of the model, as a step has them, and their time that of all.
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
    """The median of one benchmark."""

    group: str
    function: str
    amount: int
    """FLOPs or bytes."""
    is_flop: bool
    seconds: float

    @property
    def rate(self) -> float:
        """GFLOP/s or GB/s."""
        return self.amount / self.seconds / 1e9

    @classmethod
    def read(cls, directory: Path) -> Measured | None:
        """From the directory of its last run; None if it counts nothing."""
        benchmark = json.loads((directory / "benchmark.json").read_text())
        if benchmark["throughput"] is None:
            return None
        median = json.loads((directory / "estimates.json").read_text())["median"]["point_estimate"]
        [(unit, amount)] = benchmark["throughput"].items()
        parts = [benchmark["function_id"], benchmark["value_str"]]
        return cls(benchmark["group_id"], " ".join(filter(None, parts)), amount, unit == "Elements", median / 1e9)


class Peaks:
    """What the process that measured the operators could do at most."""

    def __init__(self, measured: list[Measured]) -> None:
        """From its "peak" groups, the better of each: they ran before the operators and after them."""
        self.flops: dict[str, float] = {}
        self.reads: dict[int, float] = {}
        for m in sorted(measured, key=lambda m: m.rate):
            if m.is_flop:
                self.flops[m.function] = m.rate
            else:
                self.reads[m.amount] = m.rate

    def of(self, m: Measured) -> float:
        """The peak that `m` could reach."""
        if m.is_flop:
            dot = self.flops.get("bf16 dot") if "Bf16" in f"{m.group} {m.function}" else None
            return dot or self.flops["f32 multiply-add"]
        # Of no more than it reads, as less may lie in a faster cache.
        return self.reads[max((size for size in self.reads if size <= m.amount), default=min(self.reads))]


def table(measured: list[Measured]) -> str:
    peaks = Peaks([m for m in measured if m.group.startswith("peaks")])
    # Of "peaks before/avx512f/2 threads".
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
    # In the order in which they ran.
    directories.sort(key=lambda directory: (directory / "estimates.json").stat().st_mtime)
    print(table(list(filter(None, map(Measured.read, directories)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
