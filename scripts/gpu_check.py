#!/usr/bin/env python3
"""The tests of the kernels and of whole engines on a card, in the order in which they should first be tried.

    make gpu-check                                  builds and runs
    scripts/gpu_check.py card                       status 0 if there is a card, 77 if there is none
    scripts/gpu_check.py collect DIR <MESSAGES      copies the binaries that cargo's JSON messages name to DIR
    scripts/gpu_check.py run DIR --libraries LIBS   runs them; --emulator FOLDER puts the emulator in the card's place

A step that fails does not end the check: the steps after it say how far the fault reaches. docs/cuda.md says what a
failure means. DIR/logs has the whole output of each step. Status 77: there is no card, and nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
BENCHES = REPOSITORY / "benches"
FIXTURES = REPOSITORY / "tests" / "fixtures"
sys.path.insert(0, str(BENCHES))

from card import Card, CardError, NoCardError  # noqa: E402 of benches/, which is no package

CHECK_SECONDS = 480.0
"""For all steps on a card."""
MOST_OF_SPEEDS = 300.0
"""Seconds of the last step."""
SPEEDS = "free memory and speed of random 1.5B and 7B shapes"
"""Title of the last step."""
NO_CARD = 77
"""Exit status, by which automake and meson know a test that was skipped. That of a card that is broken is 1."""
LIMITS = "the card and its limits"
"""Title of the first step."""
NO_BINARY = "there is no such binary"
NO_TEST = "no test has such a name"
NO_FLASH = "built without it: FEATURES=cuda,flash-attn"
PASSED, FAILED, ABSENT, LATE = "passed", "FAILED", "left out", "NOT RUN"
RESULT = re.compile(r"^test result: \w+\. (\d+) passed; (\d+) failed", re.MULTILINE)
SECTION = re.compile(r"^---- (\S+) stdout ----$", re.MULTILINE)
"""Of a test's output. libtest repeats it for each test at its end (`--show-output`)."""
LEFT_OUT = re.compile(r"^left out: (.+)$", re.MULTILINE)
"""What a test prints that cannot run here: see kernels/src/cpu/testing/require.rs."""
BINARIES = {
    ("rollout_kernels", "lib"): "kernels",
    ("devices", "test"): "devices",
    ("rollout-kernels", "cuda", "test"): "equalities",
    ("rollout-server", "cuda", "test"): "engines",
}
"""Names here of what cargo builds, by target and kind, and by package where two share a name."""


@dataclass(frozen=True)
class Step:
    """Some tests of a binary."""

    title: str
    binary: str
    filters: tuple[str, ...] = ()
    """Parts of the tests' names; all of the binary's tests if empty."""
    tool: str | None = None
    """Of compute-sanitizer, which then runs the tests."""
    devices: int = 1
    """Without so many the step is left out."""
    is_optional: bool = False
    """Left out where the build has not the tests."""


OTHER_KERNELS = ("cuda::arena", "cuda::digest", "cuda::footprint", "cuda::attention::cache")
STEPS = [
    Step("products: every tile has the same bits", "kernels", ("cuda::linear",)),
    Step("products: any batch has the same bits", "equalities", ("linear::",)),
    Step("operators beside the reference", "devices"),
    Step("attention: every way has the same bits", "kernels", ("cuda::attention::tests",)),
    Step("attention: any batch has the same bits", "equalities", ("attention::",)),
    Step("attention beside FlashAttention", "kernels", ("attention::flash::",), is_optional=True),
    Step("sampler: the processor's tokens", "equalities", ("sampling::",)),
    Step("merge: the processor's bits", "equalities", ("merge::",)),
    Step("arenas, digests and copies of blocks", "kernels", OTHER_KERNELS),
    Step("memory: pages mapped, unmapped and mapped again", "engines", ("engines::sleep",)),
    Step("graphs", "equalities", ("graphs::",)),
    Step("device memory of another process", "engines", ("transport::",)),
    Step("sums of ranks by NCCL", "equalities", ("group::",), devices=4),
    Step("ranks on several cards", "engines", ("ranks::",), devices=4),
    Step("whole engines", "engines", ("engines::",)),
    Step("whole engines with images", "engines", ("images::",)),
    Step("experts of tokens, returned and given", "engines", ("routing::",), devices=4),
    Step("the base below a merged adapter", "engines", ("kept_base::",), devices=4),
    Step("whole engines by FlashAttention", "engines", ("flash::",), is_optional=True),
    Step("whole engines by graphs", "engines", ("graphs::",)),
    Step("memory of whole engines", "engines", ("memory::",)),
    Step("broadcasts of a trainer by NCCL", "engines", ("broadcast::",)),
    Step("ceilings of device and host", "engines", ("ceiling::",)),
    Step("calls that fail", "engines", ("failures::",)),
    Step("other orders of threads", "engines", ("settings::",)),
    Step("memcheck", "equalities", ("linear::the_same", "sampling::answers_are_read"), "memcheck"),
    Step("racecheck", "equalities", ("linear::the_same",), "racecheck"),
]


@dataclass(frozen=True)
class Outcome:
    """What a step has come to."""

    outcome: str
    detail: str
    seconds: float = 0.0


def judge(status: int, output: str) -> Outcome:
    """The outcome of a binary of tests by its exit status and what it has printed. Tests that say that they were left
    out are named, and do not count as passed."""
    found = RESULT.findall(output)
    passed, failed = (sum(int(result[i]) for result in found) for i in (0, 1))
    if status or not found:
        return Outcome(FAILED, f"status {status}, {failed} failed, {passed} passed")
    if passed == 0:
        return Outcome(FAILED, NO_TEST)
    _, *sections = SECTION.split(output)
    said = {name: LEFT_OUT.search(text) for name, text in zip(sections[::2], sections[1::2], strict=True)}
    left_out = [f"{name} ({why[1]})" for name, why in said.items() if why]
    tests = f"{passed - len(left_out)} tests"
    if not left_out:
        return Outcome(PASSED, tests)
    return Outcome(PASSED if passed > len(left_out) else ABSENT, f"{tests}; left out: {', '.join(left_out)}")


def log_of(args: argparse.Namespace, title: str) -> Path:
    """File for the whole output of a step."""
    titles = [LIMITS, *(step.title for step in STEPS), SPEEDS]
    return args.logs / f"{titles.index(title) + 1:02}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}.log"


def logged(command: list[str], log: Path, environment: dict[str, str], seconds: float) -> int | None:
    """Exit status of a command whose output goes to `log`; None if it did not end in time."""
    with log.open("wb") as output:
        try:
            return subprocess.run(
                command, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return None


def sanitizer(directory: Path) -> str | None:
    """Path of compute-sanitizer: beside the binaries, or in PATH."""
    beside = directory / "sanitizer/nvidia/cu13/bin/compute-sanitizer"
    return str(beside.resolve()) if beside.exists() else shutil.which("compute-sanitizer")


def run_step(step: Step, args: argparse.Namespace, environment: dict[str, str], seconds: float) -> Outcome:
    """Runs a step within this time."""
    if args.devices < step.devices:
        return Outcome(ABSENT, f"wants {step.devices} cards, here are {args.devices}")
    binary = args.directory / step.binary
    if not binary.exists():
        return Outcome(FAILED, NO_BINARY)
    command = [str(binary.resolve()), *step.filters, "--show-output"]
    if step.tool:
        tool = None if args.emulator else sanitizer(args.directory)
        if tool is None:
            return Outcome(ABSENT, "the emulator checks this itself" if args.emulator else "no compute-sanitizer")
        # Libraries ask the driver for functions that it may lack: no fault of the kernels.
        options = ["--error-exitcode", "9", "--report-api-errors", "no"]
        command = [tool, "--tool", step.tool, *options, *command, "--test-threads", "1"]
    if seconds <= 0:
        return Outcome(LATE, f"{CHECK_SECONDS:.0f} s are over")
    start = time.monotonic()
    log = log_of(args, step.title)
    status = logged(command, log, environment, seconds)
    output = log.read_text(errors="replace")
    outcome = Outcome(FAILED, "did not end in time") if status is None else judge(status, output)
    if outcome.outcome == FAILED:
        print(f"{output[-6000:]}\n    all of it: {log}", flush=True)
    return Outcome(outcome.outcome, outcome.detail, time.monotonic() - start)


def table(outcomes: list[tuple[str, Outcome]]) -> str:
    """The outcomes as Markdown."""
    rows = [f"| {title} | {o.outcome} | {o.seconds:.0f} | {o.detail} |" for title, o in outcomes]
    return "\n".join(["| step | outcome | s | |", "|---|---|---|---|", *rows])


def limits(args: argparse.Namespace, environment: dict[str, str]) -> Outcome:
    """The card and what it reaches at best, by a process of its own that leaves nothing on it."""
    command = [sys.executable, str(BENCHES / "card.py"), *["--emulated"] * bool(args.emulator)]
    log = log_of(args, LIMITS)
    status = logged(command, log, environment, args.step_seconds)
    output = log.read_text(errors="replace")
    print(output, end="", flush=True)
    if status is None:
        return Outcome(FAILED, "did not end in time", args.step_seconds)
    lines = output.strip().splitlines()
    if status:
        return Outcome(FAILED, lines[-1] if lines else f"status {status}")
    said = json.loads(next(line for line in reversed(lines) if line.startswith("{")))
    args.devices = said["devices"]
    copies, products = said["copy_gb_per_s"], said["bf16_tflops"]
    return Outcome(PASSED, f"{said['name']}: copies {copies:.0f} GB/s, bfloat16 {products:.3g} TFLOP/s")


def run(args: argparse.Namespace) -> int:
    libraries = args.emulator or args.libraries
    found = [str(libraries.resolve())] if libraries else []
    # The emulator in the caller's path would stand in for the card unasked.
    kept = [] if args.emulator else [p for p in [os.environ.get("LD_LIBRARY_PATH")] if p]
    environment = os.environ | {"LD_LIBRARY_PATH": ":".join([*found, *kept])}
    if args.emulator:
        environment["CUEMU_DEVICES"] = "4"
    # Servers and benches: processes that name the same file share the emulated device. Tests name their own.
    sharing = environment | ({"CUEMU_LEDGER": str(Path(tempfile.mkdtemp()) / "ledger")} if args.emulator else {})
    # Where the tests were built there may be no checkout.
    environment["ROLLOUT_FIXTURES"] = str(FIXTURES)
    environment["ROLLOUT_SERVER_BINARY"] = str(server(args).resolve())
    args.logs = args.logs or args.directory / "logs"
    args.logs.mkdir(parents=True, exist_ok=True)
    if args.must_measure and (why := cannot_measure()):
        print(f"gpu-check: --must-measure, and there would be no figures: {why}")
        return 1
    args.devices = 1
    outcomes = [(LIMITS, limits(args, sharing))]
    end = time.monotonic() + (float("inf") if args.emulator else CHECK_SECONDS)
    for step in (step for step in STEPS if re.search(args.only, step.title)):
        print(f"==> {step.title}", flush=True)
        left = end - time.monotonic()
        outcome = run_step(step, args, environment, min(left, args.step_seconds))
        if step.is_optional and outcome.detail in (NO_BINARY, NO_TEST):
            outcome = Outcome(ABSENT, NO_FLASH)
        print(f"    {outcome.outcome}, {outcome.seconds:.1f} s: {outcome.detail}", flush=True)
        outcomes.append((step.title, outcome))
    if re.search(args.only, SPEEDS):
        print(f"==> {SPEEDS}", flush=True)
        outcomes.append((SPEEDS, speeds(args, sharing, min(end - time.monotonic(), MOST_OF_SPEEDS))))
    where = "an emulated card" if args.emulator else "this card"
    print(f"\nOn {where}, with the whole output of each step in {args.logs}:\n\n{table(outcomes)}")
    return int(any(outcome.outcome in (FAILED, LATE) for _, outcome in outcomes))


def server(args: argparse.Namespace) -> Path:
    return args.directory / "rollout-server"


def cannot_measure() -> str | None:
    """Why benches/gpu.py does not start here: a package that it imports is missing. None if it does."""
    command = [sys.executable, str(BENCHES / "gpu.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    return f"{sys.executable}: {(done.stderr.strip() or f'status {done.returncode}').splitlines()[-1]}"


def speeds(args: argparse.Namespace, environment: dict[str, str], seconds: float) -> Outcome:
    """Free memory and throughput, by benches/gpu.py, whose table goes to standard output."""
    if why := cannot_measure():
        return Outcome(ABSENT, why)
    if seconds <= 0:
        return Outcome(LATE, f"{CHECK_SECONDS:.0f} s are over")
    peer = ["--peer-python", args.peer_python] if args.peer_python else []
    emulated = ["--emulated", "--mem-util", "0.5", "--model", str(FIXTURES / "qwen2")]
    command = [sys.executable, str(BENCHES / "gpu.py"), "--server", str(server(args))]
    start = time.monotonic()
    log = log_of(args, SPEEDS)
    status = logged([*command, *peer, *emulated * bool(args.emulator)], log, environment, seconds)
    print(log.read_text(errors="replace"), flush=True)
    taken = time.monotonic() - start
    if status is None:
        return Outcome(FAILED, "did not end in time", taken)
    return Outcome(FAILED, f"status {status}", taken) if status else Outcome(PASSED, "", taken)


def collect(directory: Path) -> int:
    """Copies what cargo has built, by its messages on standard input."""
    directory.mkdir(parents=True, exist_ok=True)
    for message in map(json.loads, filter(lambda line: line.startswith("{"), sys.stdin)):
        if name := name_of(message):
            shutil.copy2(message["executable"], directory / name)
    return 0


def name_of(message: dict) -> str | None:
    """Name here of the binary that a message of cargo is about; None if it is not needed."""
    if not message.get("executable"):
        return None
    target, kind = message["target"]["name"], message["target"]["kind"][0]
    if not message["profile"]["test"]:
        return target if (target, kind) == ("rollout-server", "bin") else None
    package = "rollout-kernels" if "/kernels#" in message["package_id"] else "rollout-server"
    return BINARIES.get((package, target, kind)) or BINARIES.get((target, kind))


def has_card() -> int:
    try:
        Card().close()
    except NoCardError as error:
        print(f"gpu-check: skipped, as there is no card here: {error}")
        return NO_CARD
    except CardError as error:
        print(f"gpu-check: the card cannot be used: {error}")
        return 1
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("card")
    commands.add_parser("collect").add_argument("directory", type=Path)
    runs = commands.add_parser("run")
    runs.add_argument("directory", type=Path, help="of the binaries")
    runs.add_argument("--libraries", type=Path, help="directory of NVIDIA's libraries")
    runs.add_argument("--emulator", type=Path, help="folder of emulator/build.sh, in the card's place")
    runs.add_argument("--only", default="", help="steps whose title has this expression")
    runs.add_argument(
        "--logs", type=Path, help="directory for the whole output of each step; DIRECTORY/logs if not given"
    )
    runs.add_argument(
        "--must-measure",
        action="store_true",
        help="fail at once where the last step would be left out, without figures",
    )
    runs.add_argument(
        "--peer-python", help="a Python with transformers and torch, whose speed the last step measures too"
    )
    runs.add_argument("--step-seconds", type=float, default=180.0, help="most that a step may take")
    args = parser.parse_args()
    if args.command == "card":
        return has_card()
    if args.command == "collect":
        return collect(args.directory)
    return (0 if args.emulator else has_card()) or run(args)


if __name__ == "__main__":
    sys.exit(main())
