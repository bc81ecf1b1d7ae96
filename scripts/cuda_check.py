#!/usr/bin/env python3
"""Compiles every kernel for every card and compares what it takes with the committed table; fails where it got worse.

    make cuda-check                            compares
    scripts/cuda_check.py kernels/cu --write   writes kernels/cu/resources.tsv anew, after a change that is meant

A row is a kernel on a card: registers of a thread, bytes of spills, bytes of static shared memory, the blocks of its
largest size that fit a multiprocessor by registers, and which of the instructions that matter it has: HMMA (tensor
cores), LDGSTS (copies that do not pass registers), LDSM (matrix loads). More registers or spills, fewer blocks and a
lost instruction are worse.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

CARDS = ["80", "90", "100", "120"]
"""Compute capabilities: A100, H100 and H200, B200, workstation Blackwell."""
INSTRUCTIONS = ["HMMA", "LDGSTS", "LDSM"]
REGISTERS = 65536
"""Of a multiprocessor, on all of these cards."""
COMPILE = ["-O3", "-std=c++17", "--fmad=false", "-cubin", "-Xptxas", "-v"]
"""As kernels/build.rs compiles, and with a report."""
ENTRY = re.compile(r"Compiling entry function '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")
THREADS = re.compile(r"\.maxntid\s+(\d+)")


@dataclass(frozen=True)
class Row:
    """What one kernel takes on one card."""

    kernel: str
    card: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks: int
    instructions: str

    def worse_than(self, before: Row) -> list[str]:
        """Why this is worse; empty if it is not."""
        lost = set(before.instructions.split("+")) - set(self.instructions.split("+")) - {"-"}
        return [
            *[f"{self.registers} registers, not {before.registers}"] * (self.registers > before.registers),
            *[f"{self.spill_bytes} bytes of spills, not {before.spill_bytes}"]
            * (self.spill_bytes > before.spill_bytes),
            *[f"{self.shared_bytes} bytes of shared memory, not {before.shared_bytes}"]
            * (self.shared_bytes > before.shared_bytes),
            *[f"{self.blocks} blocks, not {before.blocks}"] * (self.blocks < before.blocks),
            *[f"no {name}" for name in sorted(lost)],
        ]


def run(command: list[str]) -> str:
    """The output of a command and its messages."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}")
    return done.stdout


def threads(source: Path) -> dict[str, int]:
    """The largest block of each kernel of a file, as its PTX states it; 128 for those that state none."""
    with tempfile.TemporaryDirectory() as directory:
        ptx = Path(directory) / "kernels.ptx"
        run(
            [
                os.environ["NVCC"],
                "-O3",
                "-std=c++17",
                "-ptx",
                f"-I{source.parent}",
                "-arch=compute_80",
                "-o",
                str(ptx),
                str(source),
            ]
        )
        entries = re.split(r"\.entry\s+", ptx.read_text())[1:]
    found = {}
    for entry in entries:
        header = entry.split("{")[0]
        limit = THREADS.search(header)
        found[re.match(r"\w+", entry)[0]] = int(limit[1]) if limit else 128
    return found


def rows(source: Path, card: str, sizes: dict[str, int]) -> list[Row]:
    """The rows of a file's kernels on one card."""
    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernels.cubin"
        log = run(
            [os.environ["NVCC"], *COMPILE, f"-I{source.parent}", f"-arch=sm_{card}", "-o", str(cubin), str(source)]
        )
        assembly = run([os.environ["NVDISASM"], "-c", str(cubin)])
    found = []
    sections = dict(re.findall(r"\.section\s+\.text\.(\w+),(.*?)(?=\n\s*\.section\s|\Z)", assembly, re.DOTALL))
    for part in re.split(r"(?=Compiling entry function)", log)[1:]:
        name = ENTRY.search(part)[1]
        spills, used = SPILLS.search(part), USED.search(part)
        registers = int(used[1])
        # Registers are handed out in eights to each warp.
        blocks = REGISTERS // (-(-registers // 8) * 8 * sizes[name])
        has = [instruction for instruction in INSTRUCTIONS if re.search(rf"\b{instruction}\b", sections.get(name, ""))]
        shared = int(used[2] or 0)
        spilled = int(spills[1]) + int(spills[2])
        found.append(Row(name, card, registers, spilled, shared, blocks, "+".join(has) or "-"))
    return found


def measure(directory: Path) -> list[Row]:
    """The rows of all kernels, by name and card."""
    sources = sorted(directory.glob("*.cu"))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        sizes = list(pool.map(threads, sources))
        tasks = [(source, card, size) for source, size in zip(sources, sizes, strict=True) for card in CARDS]
        found = [row for part in pool.map(lambda task: rows(*task), tasks) for row in part]
    return sorted(found, key=lambda row: (row.kernel, int(row.card)))


def read(table: Path) -> dict[tuple[str, str], Row]:
    """The committed table, by kernel and card."""
    lines = table.read_text().splitlines()[1:]
    cells = [line.split("\t") for line in lines]
    found = [Row(kernel, card, *map(int, numbers), instructions) for kernel, card, *numbers, instructions in cells]
    return {(row.kernel, row.card): row for row in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the kernels' sources")
    parser.add_argument("--write", action="store_true", help="write the table instead of comparing with it")
    args = parser.parse_args()
    table = args.directory / "resources.tsv"
    found = measure(args.directory)
    names = [field.name for field in fields(Row)]
    text = (
        "\n".join(["\t".join(names), *("\t".join(str(getattr(row, name)) for name in names) for row in found)]) + "\n"
    )
    if args.write:
        table.write_text(text)
        print(f"{len(found)} rows are in {table}")
        return
    before = read(table)
    faults = []
    for row in found:
        old = before.pop((row.kernel, row.card), None)
        why = row.worse_than(old) if old else ["it is not in the table"]
        faults += [f"{row.kernel} on sm_{row.card}: {', '.join(why)}"] * bool(why)
    faults += [f"{kernel} on sm_{card}: it is in the table and no longer there" for kernel, card in before]
    print(text)
    if faults:
        sys.exit("\n".join([*faults, "If this is meant: scripts/cuda_check.py kernels/cu --write"]))
    print(f"{len(found)} kernels are no worse than the table")


if __name__ == "__main__":
    main()
