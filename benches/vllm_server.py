"""vLLM behind its HTTP routes, as trainers use it in server mode: adapters as directories, prompts as token ids."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from engines import TIDY_SECONDS, PeerFailedError, environment

from rollout_client.process import free_port

PYTHON = "vllm/bin/python"
"""Below the directory of the peers. Their `vllm serve` asks for a package of that name, and is not used."""
MODULE = "vllm.entrypoints.launchers.api_server.entry"
ADAPTER = "policy"
START_SECONDS = 900.0
"""vLLM compiles the model at its start, for two minutes on two cores with nothing else on them."""
ANSWER_SECONDS = 1800.0


@dataclass(frozen=True)
class Sample:
    """One answer; `examples/grpo.py` makes a batch of these as of the client's own."""

    token_ids: list[int]
    logprobs: np.ndarray
    """`[T]`, float32."""


@dataclass(frozen=True)
class Group:
    """The answers to one prompt."""

    samples: list[Sample]


class VllmServer:
    """A vLLM of one's own in float32, with one adapter at a time. It is stopped (SIGSTOP) except in `running`."""

    def __init__(self, peers: Path, model: Path, rank: int) -> None:
        """Starts vLLM and waits until it answers; its log goes to standard error."""
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        where = {"model": model, "host": "127.0.0.1", "port": port}
        flags = where | {"dtype": "float32", "max-lora-rank": rank, "max-loras": 1, "max-model-len": 2048}
        self.process = subprocess.Popen(
            [
                str(peers / PYTHON),
                "-m",
                MODULE,
                "--enable-lora",
                *(f"--{name}={value}" for name, value in flags.items()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            env=os.environ
            | environment("vllm", peers, str(os.cpu_count() or 1))
            | {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
            start_new_session=True,
        )
        try:
            self.version = self._wait_for_version()
        except BaseException:
            self.close()
            raise
        os.killpg(self.process.pid, signal.SIGSTOP)

    def _wait_for_version(self) -> str:
        end = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/version", timeout=10) as answer:
                return json.load(answer)["version"]
            time.sleep(0.5)
        if self.process.poll() is None:
            raise PeerFailedError(f"vLLM did not answer within {START_SECONDS:g} s")
        raise PeerFailedError(f"vLLM ended with status {self.process.returncode}; its message is above")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets vLLM run, so that it takes nothing from the others before and after."""
        os.killpg(self.process.pid, signal.SIGCONT)
        yield
        os.killpg(self.process.pid, signal.SIGSTOP)

    def load_adapter(self, directory: Path) -> None:
        """Replaces the adapter by the one that PEFT saved there. Each needs a directory of its own, because vLLM keeps
        the prefixes of an adapter's former tensors by its path.
        """
        self._post("/v1/load_lora_adapter", lora_name=ADAPTER, lora_path=str(directory), load_inplace=True)

    def generate(self, prompts: list[list[int]], *, n: int, max_tokens: int, seed: int) -> list[Group]:
        """Samples with the adapter at temperature 1, each of `max_tokens` tokens."""
        answer = self._post(
            "/v1/completions",
            model=ADAPTER,
            prompt=prompts,
            n=n,
            max_tokens=max_tokens,
            temperature=1.0,
            seed=seed,
            ignore_eos=True,
            logprobs=0,
            return_token_ids=True,
        )
        samples = [
            Sample(choice["token_ids"], np.array(choice["logprobs"]["token_logprobs"], np.float32))
            for choice in json.loads(answer)["choices"]
        ]
        return [Group(samples[start : start + n]) for start in range(0, len(samples), n)]

    def _post(self, path: str, **body: Any) -> bytes:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise PeerFailedError(f"vLLM answered {path} with {error.code}: {error.read()[:300]!r}") from None

    def close(self) -> None:
        """Ends vLLM and all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGCONT)
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(TIDY_SECONDS)
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
