#!/usr/bin/env python3
"""Where the time of the four workloads goes: the server's own profile, and each thread's share of the processors.

    make bench-profile               # builds, gets the model, runs this
    .venv/bin/python benches/step_profile.py --model .models/….gguf --workloads W1 -- --tp 2

Each workload runs once to warm up and once more between two reports of a server with `--profile`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import IO

from checkpoints import add_model_arguments, named_models
from workloads import TITLES, WORKLOADS, Workload, run_once

from rollout_client import ServerProcess

REPORT_SECONDS = 10.0
"""Seconds that a server may take to print its profile."""


def report(server: ServerProcess, log: IO[str]) -> str:
    """The profile since the last one, which the server prints at SIGUSR1."""
    log.read()
    server.process.send_signal(signal.SIGUSR1)
    end, text = time.monotonic() + REPORT_SECONDS, ""
    while time.monotonic() < end:
        time.sleep(0.1)
        more = log.read()
        if text and not more:
            return text
        text += more
    raise RuntimeError(f"the server has not printed its profile within {REPORT_SECONDS:g} s; it printed: {text!r}")


def thread_seconds(pid: int) -> Counter[str]:
    """CPU seconds of each thread of a process by its name, and of this process as "client"."""
    seconds: Counter[str] = Counter({"client (this process)": sum(os.times()[:2])})
    for task in Path(f"/proc/{pid}/task").glob("*"):
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        name = (task / "comm").read_text().strip()
        seconds[name] += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def measure(server: ServerProcess, log: IO[str], workload: Workload) -> str:
    prompts = workload.make_prompts(server.client.info().vocab_size)
    run_once(server.client, workload, prompts)
    report(server, log)
    before = thread_seconds(server.process.pid)
    wall = run_once(server.client, workload, prompts)
    used = thread_seconds(server.process.pid) - before
    threads = ", ".join(f"{name} {seconds:.2f}" for name, seconds in used.most_common() if seconds >= 0.005)
    rate = workload.counted_tokens / wall
    return f"{wall:.2f} s at the client, {rate:.0f} tokens/s; CPU seconds: {threads}\n\n{report(server, log)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    add_model_arguments(parser)
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="comma-separated")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args()
    with named_models(args) as models, tempfile.NamedTemporaryFile("w") as output:
        for name, path in models:
            flags = ["--dtype", args.dtype, "--mem-util", str(args.mem_util), "--profile", *args.flags]
            with ServerProcess(args.server, path, flags, output=output) as server, Path(output.name).open() as log:
                for workload in args.workloads.split(","):
                    print(f"## {name}, {workload} {TITLES[workload]}: ", end="", flush=True)
                    print(measure(server, log, WORKLOADS[workload]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
