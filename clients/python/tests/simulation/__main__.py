"""Runs the simulation for some seconds, from a seed on; the seed of a run that fails repeats it."""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter

from .run import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long new runs begin")
    parser.add_argument("--seed", type=int, help="of the first run; each run after it has the next integer")
    parser.add_argument("--once", action="store_true", help="only the run of this seed, with all that happened in it")
    options = parser.parse_args()
    first = random.randrange(1 << 32) if options.seed is None else options.seed
    print(f"from seed {first}", flush=True)
    outcomes: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    begun, runs, seconds, turns = time.monotonic(), 0, 0.0, 0
    while time.monotonic() - begun < options.seconds:
        try:
            result = run(first + runs)
        except AssertionError as error:
            print(error)
            took = time.monotonic() - begun
            print(f"run {runs + 1} fails after {took:.1f} s; repeat it with --once --seed {first + runs}")
            return 1
        runs, seconds, turns = runs + 1, seconds + result.seconds, turns + result.turns
        outcomes, faults = outcomes + result.outcomes, faults + result.faults
        if options.once:
            print(*result.trace, sep="\n")
            break
    took = time.monotonic() - begun
    print(f"{runs} runs in {took:.1f} s: {seconds / 3600:.1f} virtual hours, {turns / took:,.0f} turns a second")
    print("outcomes:", dict(sorted(outcomes.items())))
    print("faults:", dict(sorted(faults.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
