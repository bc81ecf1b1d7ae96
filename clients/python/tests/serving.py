"""Real servers of tiny models, and what can be seen of them."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from pathlib import Path

import numpy as np

from rollout_client import RolloutClient, SamplingParams, ServerProcess, ServerStatus

REPOSITORY = Path(__file__).resolve().parents[3]
FIXTURES = REPOSITORY / "tests" / "fixtures"
PUSH_MODEL = FIXTURES / "qwen2"
# The fixtures need a few hundred bytes of cache per token: this holds some 100,000 tokens.
SMALL_CACHE = ["--kv-cache-bytes", str(64 << 20)]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 5, [2, 7, 1, 8, 2, 8]]
SAMPLING = SamplingParams(max_tokens=12, seed=11, ignore_eos=True)
# Long enough for a push to come in the middle.
LONG = SamplingParams(max_tokens=900, seed=3, ignore_eos=True)


def bits(sample):
    return sample.token_ids, sample.logprobs.tobytes(), sample.raw_logprobs.tobytes(), sample.finish_reason


def outputs(client, **options):
    """Everything about some groups and scores that depends on nothing but the weights."""
    groups = client.generate(PROMPTS, n=2, sampling=SAMPLING, return_text=False, **options)
    scores = client.score(PROMPTS, **options)
    return [bits(s) for g in groups for s in g.samples] + [np.float64(s.raw_logprobs[1:]).tobytes() for s in scores]


@contextlib.contextmanager
def server(binary, model, *flags):
    if "--mem-util" not in flags:
        flags = (*SMALL_CACHE, "--mem-util", "0.2", *flags)
    with ServerProcess(binary, model, [str(flag) for flag in flags]) as process:
        yield process.client
        assert_idle(process.client)


def no_room(binary):
    """Flags of a server whose cache leaves a push hardly any memory."""
    with server(binary, PUSH_MODEL) as client:
        machine = client.status().memory.total_bytes
    return ["--mem-util", f"{(256 << 20) / machine:.6f}", "--staging-bytes", "600KiB"]


def seen(client):
    return client.checksum(), outputs(client)


def held(status):
    """Names of the reservations."""
    return {name for name, size in status.memory.entries.items() if size}


def resident_bytes(pid):
    """As the operating system counts it."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mapped_segments(pid):
    """Segments that a process maps, whether their files are there or not."""
    return set(re.findall(r"/dev/shm/(rollout-\d+-[0-9a-f]+)", Path(f"/proc/{pid}/maps").read_text()))


def fill_cache(client):
    """Touches every page of the KV cache."""
    status, info = client.status(), client.info()
    prompts = [
        [(i * 31 + j) % 500 for j in range(900)] for i in range(status.total_blocks * info.block_size // 900 + 1)
    ]
    client.generate(prompts, sampling=SamplingParams(max_tokens=1), return_text=False)


def start_group(client, prompt=(5, 6, 7), n=8):
    """A group that is generating, in a thread; `join` gives its samples."""
    result = []
    thread = threading.Thread(
        target=lambda: result.extend(client.generate([list(prompt)], n=n, sampling=LONG, return_text=False)[0].samples)
    )
    thread.start()
    start = client.status().generated_tokens
    wait_for(client, lambda status: status.generated_tokens > start + 20 and status.running_samples == n, "generating")

    def join():
        thread.join(120)
        return result

    return join


def wait_for(client: RolloutClient, condition, what: str, seconds: float = 60.0) -> ServerStatus:
    """The first status for which `condition` holds."""
    deadline = time.monotonic() + seconds
    while True:
        status = client.status()
        if condition(status):
            return status
        assert time.monotonic() < deadline, f"not {what} after {seconds:g} s: {status}"
        time.sleep(0.01)


def assert_idle(client: RolloutClient) -> None:
    """Soon nothing runs or waits, and no block is held."""
    wait_for(
        client,
        lambda s: s.running_requests == s.running_samples == s.waiting_samples == 0 and s.free_blocks == s.total_blocks,
        "idle with every block free",
    )
