"""Bugs that the simulation must find, each as a change of one place of the fleet.

    PYTHONPATH=clients/python/tests python -m simulation.planted

applies each to a copy of the package and runs the simulation on it until it fails, ten minutes at most.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PACKAGE = "rollout_client/fleet"


@dataclass(frozen=True)
class Planted:
    """One bug."""

    file: str
    """In the package of the fleet."""
    before: str
    after: str
    breaks: str
    """What the fleet no longer keeps."""


PLANTED = [
    Planted(
        "_pushes.py",
        "            push.gate_closed = True\n            self._replica_set.router.close_gate()\n",
        "            push.gate_closed = False\n",
        "barrier: groups begin between the first commit and the last",
    ),
    Planted(
        "_router.py",
        "        if state is not ReplicaState.CURRENT:\n            for assignment",
        "        if state is ReplicaState.LOST:\n            for assignment",
        "router: groups stay on a replica that missed a push, and return the older policy",
    ),
    Planted(
        "_pushes.py",
        "            replica.known = replace("
        "replica.known, unconfirmed=UnconfirmedCommit(push.updates[number], after))\n",
        "",
        "replacement: a replica whose answer to the commit was lost counts as one that has not applied the push",
    ),
    Planted(
        "_pushes.py",
        "        if push.has_turn:\n            replica_set.updating.release()",
        "        if push.gate_closed:\n            replica_set.updating.release()",
        "push turn: a push that fails before the barrier holds the turn",
    ),
    Planted(
        "_pushes.py",
        "        if push.gate_closed:\n            replica_set.router.open_gate()",
        "        if push.gate_closed and not push.cancelled:\n            replica_set.router.open_gate()",
        "resume after failure: a push that is cancelled in the commit leaves the gate closed",
    ),
    Planted(
        "_requests.py",
        "        return [replace(given, seed=prompt_seed(seed, index)) for index in range(count)]",
        "        return [replace(given, seed=seed + index) for index in range(count)]",
        "seeds: samples are not those of one server",
    ),
    Planted(
        "_requests.py",
        'return options | {"min_weight_version": max(options.get("min_weight_version") or 0, version)}',
        "return options",
        "restarts: a server that has restarted unseen serves its checkpoint",
    ),
    Planted(
        "_router.py",
        "                self.release(future.result())\n            elif",
        "                pass\n            elif",
        "assignments: a group that is cancelled as it gets its place keeps it",
    ),
    Planted(
        "_lifecycle.py",
        "                    if level > 1:\n                        replica_set.mark_uncertain()\n",
        "",
        "sleep: after one that has failed, replicas take requests before they say whether they have dropped the policy",
    ),
    Planted(
        "_lifecycle.py",
        "            known = replica.number in asleep and replica.held is not None",
        "            known = replica.held is not None",
        "sleep: a replica that missed a sleep of level 2 counts as one that has dropped its policy",
    ),
    Planted(
        "_requests.py",
        "                if replica.state is ReplicaState.LOST:\n                    lost.append",
        "                if False:\n                    lost.append",
        "the cap of lost replicas: a prompt that ends its server ends all of them, again and again",
    ),
    Planted(
        "_push.py",
        "            self._transaction.drop(self._sender.close)",
        "            pass",
        "push turn: a push that was dropped holds it",
    ),
]


def simulate(source: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the simulation on a copy of the package."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(Path(__file__).parents[1])])}
    command = [sys.executable, "-m", "simulation", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def found(bug: Planted, seconds: float, seed: int) -> bool:
    """Whether the simulation finds a bug in time, with a seed that passes without the bug; prints how."""
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "src"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        path = copy / PACKAGE / bug.file
        path.write_text(path.read_text().replace(bug.before, bug.after))
        done = simulate(copy, "--seconds", str(seconds), "--seed", str(seed))
    failed = re.search(r"^run \d+ fails after .* --seed (\d+)$", done.stdout, re.MULTILINE)
    if failed is None:
        print(f"{bug.breaks}\n    NOT FOUND\n{done.stdout}{done.stderr}", flush=True)
        return False
    how = failed[0].partition(";")[0]
    why = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("seed ")), "")
    print(f"{bug.breaks}\n    {how}, seed {failed[1]}\n    {why}", flush=True)
    if simulate(SOURCE, "--once", "--seed", failed[1]).returncode != 0:
        print("    NOT FOUND: this seed fails without the bug too", flush=True)
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="simulation.planted", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="for each bug")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="a part of what the bugs break")
    options = parser.parse_args()
    bugs = [bug for bug in PLANTED if options.only in bug.breaks]
    missed = [bug for bug in bugs if not found(bug, options.seconds, options.seed)]
    print(f"{len(bugs) - len(missed)} of {len(bugs)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
