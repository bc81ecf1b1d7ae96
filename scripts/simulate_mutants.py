#!/usr/bin/env python3
"""Plants the bugs of tests/simulation/mutants.json in a copy of the tree, and runs the simulation until it finds each.

    make simulate-mutants                              all of them, at most ten minutes each
    scripts/simulate_mutants.py --only 3,7 --seconds 60

All bugs are built at once: each text becomes a branch on a number that the copy reads from the environment. So there is
one build, and a run for each bug.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ["Cargo.toml", "Cargo.lock", "build.rs", "src", "proto", "kernels", "emulator", "tests", "docker", "benches"]
"""What cargo needs of the tree."""
VARIABLE = "SIMULATE_MUTANT"
SWITCH = f'''
#[doc(hidden)]
#[allow(clippy::disallowed_methods)]
pub fn is_mutant(number: u32) -> bool {{
    static NUMBER: std::sync::OnceLock<u32> = std::sync::OnceLock::new();
    let read = || std::env::var("{VARIABLE}").ok().and_then(|text| text.parse().ok()).unwrap_or(u32::MAX);
    *NUMBER.get_or_init(read) == number
}}
'''
TEST = "the_engine_keeps_its_invariants"
FOUND = re.compile(r"seed (\d+) fails, after (\d+) steps")


def planted(number: int, before: str, after: str) -> str:
    """The code that is `before`, or `after` where this bug is switched on."""
    choice = f"if crate::is_mutant({number}) {{ {after} }} else {{ {before} }}"
    is_statement = before.rstrip().endswith((";", "}"))
    return choice if is_statement else f"({choice})"


def plant(tree: Path, mutants: list[dict[str, str]]) -> None:
    """Plants all bugs. Those with the same text are branches of branches."""
    for number, mutant in enumerate(mutants):
        path = tree / mutant["file"]
        text = path.read_text()
        if text.count(mutant["before"]) < 1:
            sys.exit(f"{mutant['file']} has no {mutant['before']!r}")
        path.write_text(text.replace(mutant["before"], planted(number, mutant["before"], mutant["after"]), 1))
    root = tree / "src" / "lib.rs"
    root.write_text(root.read_text() + SWITCH)


def copy(tree: Path) -> None:
    for name in COPIED:
        source, target = ROOT / name, tree / name
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, symlinks=True)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)


def build(cargo: str, tree: Path) -> Path:
    """Builds the simulation, and returns its program."""
    command = [cargo, "test", "--test", "simulation", "--no-run", "--message-format=json"]
    done = subprocess.run(command, cwd=tree, stdout=subprocess.PIPE, text=True, check=True)
    messages = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    programs = [message["executable"] for message in messages if message.get("executable")]
    return Path(next(program for program in programs if "simulation" in Path(program).name))


def find(program: Path, number: int, first: int, seconds: int) -> tuple[str, float]:
    """The seed and the steps after which a bug is found, and how long it took; an empty text if it is not found."""
    settings = {
        VARIABLE: str(number),
        "SIMULATE_SEED": str(first),
        "SIMULATE_SECONDS": str(seconds),
        "RUST_BACKTRACE": "0",
    }
    started = time.monotonic()
    command = [str(program), "--nocapture", TEST]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | settings,
            capture_output=True,
            text=True,
            timeout=seconds + 60,
            check=False,
        )
        output, failed = done.stdout + done.stderr, done.returncode != 0
    except subprocess.TimeoutExpired:
        return "a run that does not end", time.monotonic() - started
    took = time.monotonic() - started
    if not failed:
        return "", took
    found = FOUND.search(output)
    if found and not passes_unmutated(program, found[1]):
        sys.exit(f"seed {found[1]} fails in the engine without planted bugs too: mend that first")
    return (f"seed {found[1]}, {found[2]} steps before it" if found else "the process dies"), took


def passes_unmutated(program: Path, seed: str) -> bool:
    """Whether a run passes in which no bug is switched on."""
    command = [str(program), "--nocapture", TEST]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"SIMULATE_SEED": seed}, capture_output=True, timeout=60, check=False
    )
    return done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT / "target" / "mutants", help="where the copy is made")
    parser.add_argument("--seconds", type=int, default=600, help="longest search for one bug")
    parser.add_argument("--seed", type=int, default=1, help="the first seed of each search")
    parser.add_argument("--only", help="numbers of the bugs, as 3,7")
    parser.add_argument("--cargo", default="cargo")
    arguments = parser.parse_args()
    mutants = json.loads((ROOT / "tests" / "simulation" / "mutants.json").read_text())
    arguments.tree.mkdir(parents=True, exist_ok=True)
    copy(arguments.tree)
    plant(arguments.tree, mutants)
    program = build(arguments.cargo, arguments.tree)
    numbers = [int(n) for n in arguments.only.split(",")] if arguments.only else range(len(mutants))
    missed = 0
    for number in numbers:
        where, took = find(program, number, arguments.seed, arguments.seconds)
        missed += not where
        print(f"{number:3}  {took:6.1f} s  {where or 'NOT FOUND':36}  {mutants[number]['breaks']}", flush=True)
    if missed:
        sys.exit(f"{missed} of {len(numbers)} planted bugs were not found")


if __name__ == "__main__":
    main()
