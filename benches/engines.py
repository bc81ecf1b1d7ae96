"""The engines that are measured: our server and the installed peers, each a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from checkpoints import stem_of
from workloads import Workload, run_once

from rollout_client import SamplingParams, ServerInfo, ServerProcess

OURS = "rollout-server"
PLAIN = "without speculation"
"""Name of our server's second entry, without speculation: one token of a sample in a step, as the peers do it."""
PEERS = ("vllm", "llama.cpp", "transformers", "mistral.rs")
NOTES = {"mistral.rs": "in float32, as its bfloat16 is slower"}
"""For each peer, what a reader of its figures must know."""
PEER = Path(__file__).with_name("peer.py")
TIDY_SECONDS = 20.0
"""Seconds that a peer may take to end by itself."""


class PeerFailedError(Exception):
    """A peer has ended or cannot be started. The others go on without it."""


class Ours:
    """Our server, measured through its own client."""

    def __init__(self, name: str, binary: str, model: Path, flags: list[str]) -> None:
        """Starts the server, with the model's files in the page cache, and generates a first token."""
        self.name = name
        for path in [model] if model.is_file() else sorted(model.glob("*")):
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
        start = time.perf_counter()
        self.server = ServerProcess(binary, model, flags)
        try:
            self.server.wait_until_ready()
            sampling = SamplingParams(max_tokens=1, ignore_eos=True)
            self.server.client.generate([[1, 2, 3]], sampling=sampling, return_text=False)
            self.start_seconds = time.perf_counter() - start
            self.info: ServerInfo = self.server.client.info()
        except BaseException:
            self.close()
            raise
        self.version = self.info.server_version
        self.group = self.server.process.pid

    def run(self, workload: Workload, prompts: list[list[int]]) -> float:
        """Seconds of one run of a workload."""
        return run_once(self.server.client, workload, prompts)

    def close(self) -> None:
        """Ends the server."""
        self.server.stop()


class Peer:
    """A peer behind `peer.py`. It is stopped (SIGSTOP) except during its own runs, so that it takes nothing from the
    others.
    """

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        """Starts the peer and waits until it is ready."""
        self.name = name
        start = time.perf_counter()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            start_new_session=True,
        )
        self.group = self.process.pid
        try:
            self.version = self.answer()["version"]
        except BaseException:
            self.close()
            raise
        self.start_seconds = time.perf_counter() - start
        os.killpg(self.group, signal.SIGSTOP)

    def run(self, workload: Workload, prompts: list[list[int]]) -> float:
        """Seconds of one run of a workload, as the peer's own process measures them."""
        os.killpg(self.group, signal.SIGCONT)
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the peer has ended, as the missing answer says
            self.process.stdin.write(json.dumps(asdict(workload) | {"prompts": prompts}) + "\n")
            self.process.stdin.flush()
        seconds = self.answer()["seconds"]
        os.killpg(self.group, signal.SIGSTOP)
        return seconds

    def answer(self) -> dict:
        """The next line that the peer prints."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerFailedError(f"{self.name} has ended with status {self.process.wait()}; its message is above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the peer and all its processes. It may tidy up first, as vLLM does with its shared memory."""
        try:
            os.killpg(self.group, signal.SIGCONT)
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(timeout=TIDY_SECONDS)
        except (ProcessLookupError, BrokenPipeError, subprocess.TimeoutExpired):
            pass
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        self.process.wait()


def commands(peers: Path, model: Path) -> dict[str, tuple[list[str], dict[str, str]] | str]:
    """For each peer the command that starts it, or why it cannot be started. `make bench-peers` installs the peers and
    their forms of the model.
    """
    threads = str(os.cpu_count() or 1)
    python = peers / "vllm/bin/python"
    mistral_rs = peers / "mistralrs/bin/python"
    llama_server = peers / "llama.cpp/bin/llama-server"
    name = stem_of(model)
    checkpoint = model if model.is_dir() else peers / "models" / name
    gguf = peers / "models" / f"{name}.bf16.gguf"

    def command(name: str, binary: Path, file: Path, *start: object) -> tuple[list[str], dict[str, str]] | str:
        missing = [str(path) for path in (binary, file) if not path.exists()]
        if missing:
            return f"no {' and no '.join(missing)}"
        return [str(part) for part in (start[0], PEER, name, *start[1:])], environment(name, peers, threads)

    return {
        "vllm": command("vllm", python, checkpoint, python, checkpoint),
        "llama.cpp": command("llama.cpp", llama_server, gguf, sys.executable, llama_server, gguf),
        "transformers": command("transformers", python, checkpoint, python, checkpoint),
        "mistral.rs": command("mistral.rs", mistral_rs, checkpoint, mistral_rs, checkpoint),
    }


def environment(name: str, peers: Path, threads: str) -> dict[str, str]:
    """Environment variables that a peer's own guide advises on the CPU."""
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads}
    if name == "mistral.rs":
        return offline | {"RAYON_NUM_THREADS": threads, "RUST_LOG": "warn"}
    if name != "vllm":
        return offline
    # Intel's OpenMP comes with vLLM; tcmalloc is used if the system has it.
    libraries = [peers / "vllm/lib/libiomp5.so", *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")]
    return offline | {
        "LD_PRELOAD": ":".join(str(library.resolve()) for library in libraries if library.exists()),
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{int(threads) - 1}",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextmanager
def started(
    binary: str, model: Path, flags: list[str], peers: Path, wanted: list[str], *, plain: bool
) -> Iterator[tuple[list[Ours], list[Peer], dict[str, str]]]:
    """Our server (twice, also without speculation, if `plain`) and the wanted peers that are installed; and why others
    are not.
    """
    with ExitStack() as stack:
        found, absent = [], {}
        for name, command in commands(peers, model).items():
            if name not in wanted:
                continue
            if isinstance(command, str):
                absent[name] = command
                continue
            print(f"starting {name} …", file=sys.stderr)
            try:
                found.append(Peer(name, *command))
            except PeerFailedError as error:
                absent[name] = str(error)
            else:
                stack.callback(found[-1].close)
        ours = []
        for name, more in [(OURS, []), (PLAIN, ["--speculation", "off"])][: 1 + plain]:
            ours.append(Ours(name, binary, model, [*flags, *more]))
            stack.callback(ours[-1].close)
        yield ours, found, absent
