"""Servers of their own: parity with transformers, killed clients, the end by SIGTERM, starts that must fail."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from models import read_safetensors
from rollout_client import RolloutClient, RolloutError, SamplingParams, ServerProcess, Unavailable
from rollout_client.process import free_port
from serving import FIXTURES, REPOSITORY, SMALL_CACHE, assert_idle, wait_for

MODELS = [
    "glm4_moe",
    "llama",
    "llama-tied",
    "mistral",
    "mixtral",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen_v1",
    "smollm3",
]
TOLERANCE = 1e-4
LONG_CLIENT = """
import sys
from rollout_client import RolloutClient, SamplingParams
client = RolloutClient(sys.argv[1])
client.generate([[i + 3] for i in range(16)], n=64, sampling=SamplingParams(max_tokens=900, ignore_eos=True))
"""


@pytest.mark.parametrize("model", [*MODELS, "llama-tied.gguf"])
def test_float32_on_two_ranks_has_transformers_logprobs(binary, model):
    """The command line of the contract: `--model <dir> --tp 2 --mem-util 0.5 --dtype float32`."""
    path = FIXTURES / model
    reference = read_safetensors(
        path / "reference.safetensors" if path.is_dir() else path.with_name(f"{model}.reference.safetensors")
    )
    flags = ["--tp", "2", "--mem-util", "0.5", "--dtype", "float32"]
    with ServerProcess(binary, path, flags) as server:
        assert server.client.info().tensor_parallel_size == 2
        scores = server.client.score(list(reference["tokens"]))
        logprobs = np.array([score.raw_logprobs[1:] for score in scores])
        np.testing.assert_allclose(logprobs, reference["logprobs_f32"], rtol=0, atol=TOLERANCE)
        greedy = SamplingParams(temperature=0, max_tokens=len(reference["greedy_tokens"]), ignore_eos=True)
        (sample,) = server.client.generate([reference["greedy_prompt"]], sampling=greedy)[0].samples
        assert sample.token_ids == reference["greedy_tokens"].tolist()
        np.testing.assert_allclose(sample.raw_logprobs, reference["greedy_logprobs"], rtol=0, atol=TOLERANCE)
        assert_idle(server.client)


def test_a_killed_client_leaves_every_block_free(running):
    """SIGKILL in the middle of a stream: nothing says goodbye but the connection."""
    with RolloutClient(running.address) as client:
        doomed = subprocess.Popen([sys.executable, "-c", LONG_CLIENT, running.address])
        try:
            busy = wait_for(
                client, lambda s: s.running_samples > 0 and s.free_blocks < s.total_blocks, "running", seconds=30
            )
        finally:
            doomed.kill()
            doomed.wait()
        assert busy.running_requests == 1
        assert_idle(client)
        assert client.generate([[1]])[0].samples


def test_resident_memory_stays_below_the_ceiling_while_the_whole_cache_is_used(binary):
    """The system's own high-water mark, of a server whose every block has been written."""
    total = ServerProcess(binary, FIXTURES / "llama-tied", SMALL_CACHE)
    with total:
        machine = total.client.status().memory.total_bytes
    ceiling = 256 << 20
    with ServerProcess(binary, FIXTURES / "llama-tied", ["--mem-util", f"{ceiling / machine:.6f}"]) as server:
        before = server.client.status()
        tokens = before.total_blocks * server.client.info().block_size
        prompts = [[(i * 7 + j) % 500 for j in range(960)] for i in range(tokens // 960)]
        sampling = SamplingParams(max_tokens=48, ignore_eos=True)
        server.client.generate(prompts, n=8, sampling=sampling)
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        peak = int(re.search(r"VmHWM:\s+(\d+) kB", status).group(1)) << 10
        after = server.client.status()
        assert sum(after.memory.entries.values()) <= after.memory.ceiling_bytes
        # Prompts and samples need more than the cache has: all of it was used.
        assert after.cached_blocks > 0.9 * after.total_blocks
        used = sum(after.memory.entries.values()) - after.memory.entries["process"]
        assert 0.5 * used < peak <= after.memory.ceiling_bytes, (peak, after.memory)


@pytest.mark.parametrize("option", ["d", "v"])
def test_the_resource_limits_of_the_process_count(binary, option):
    """`ulimit -d` is the memory that `--mem-util` is a share of; of `ulimit -v` the mapped checkpoint comes off."""
    limit, model = 2 << 30, FIXTURES / "llama-tied"
    prefix = ("sh", "-c", f'ulimit -{option} {limit >> 10}; exec "$@"', "sh")
    with ServerProcess(binary, model, [*SMALL_CACHE, "--mem-util", "0.5"], prefix=prefix) as server:
        ledger = server.client.status().memory
        if option == "d":
            assert ledger.total_bytes == limit
        else:
            checkpoint = (model / "model.safetensors").stat().st_size
            assert limit // 2 < ledger.total_bytes < limit - checkpoint
        assert ledger.ceiling_bytes == ledger.total_bytes // 2
        server.client.generate([[1, 2, 3]], n=4, sampling=SamplingParams(max_tokens=8))


def test_sigterm_lets_running_requests_finish_and_refuses_new_ones(binary):
    with ServerProcess(binary, FIXTURES / "llama-tied", SMALL_CACHE) as server:
        sampling = SamplingParams(max_tokens=600, ignore_eos=True)
        outputs = []
        asking = threading.Thread(
            target=lambda: outputs.extend(server.client.generate([[1], [2]], n=8, sampling=sampling))
        )
        asking.start()
        wait_for(server.client, lambda status: status.running_samples > 0, "running")
        server.process.send_signal(signal.SIGTERM)
        with RolloutClient(server.address, timeout=10) as late, pytest.raises(Unavailable):
            while True:  # the signal may need a moment
                late.generate([[1]], sampling=SamplingParams(max_tokens=1))
        asking.join()
        assert [[len(sample.token_ids) for sample in output.samples] for output in outputs] == [[600] * 8] * 2
        assert server.process.wait(30) == 0


def test_an_idle_server_ends_at_once(binary):
    with ServerProcess(binary, FIXTURES / "llama-tied", SMALL_CACHE) as server:
        server.client.status()
        start = time.monotonic()
        assert server.stop() == 0
        # The grace period is 30 s; nothing is there to wait for, the idle connection of a client least of all.
        assert time.monotonic() - start < 15


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "does/not/exist"], ["does/not/exist"]),
        (["--model", "does-not-exist.gguf"], ["does-not-exist.gguf"]),
        (["--tp", "3"], ["3", "1, 2, 4"]),
        (["--tp", "0"], ["tp"]),
        (["--mem-util", "0.000001"], ["mem-util"]),
        (["--mem-util", "1.5"], ["mem-util"]),
        (["--mem-util", "nan"], ["mem-util"]),
        (["--dtype", "float8"], ["dtype"]),
        (["--kv-cache-bytes", "1000000GiB"], ["kv-cache-bytes"]),
        (["--kv-cache-bytes", "3parsecs"], ["kv-cache-bytes"]),
        (["--max-model-len", "999999"], ["max-model-len"]),
        (["--block-size", "0"], ["block-size"]),
        (["--port", "70000"], ["port"]),
        (["--weights-dir", "does/not/exist"], ["weights-dir", "does/not/exist"]),
        (["--weights-dir", __file__], ["weights-dir", __file__]),
        (["--staging-bytes", "1000000GiB"], ["--staging-bytes 1073741824000000"]),
        (["--kv-cache-bytes", "99999999999999999999"], ["kv-cache-bytes", "more memory than any machine"]),
        (["--shutdown-grace-seconds", str(2**64 - 1)], ["--shutdown-grace-seconds", str(2**64 - 1), "86400"]),
    ],
)
def test_a_bad_start_ends_with_one_message_that_names_the_flag(binary, flags, says):
    default = [] if flags[0] == "--model" else ["--model", str(FIXTURES / "llama-tied")]
    port = [] if flags[0] == "--port" else ["--port", str(free_port())]
    ended = subprocess.run([binary, *default, *port, *flags], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode not in (0, None) and ended.returncode > 0, f"status {ended.returncode}"
    for word in says:
        assert word in ended.stderr
    assert "panicked" not in ended.stderr and "backtrace" not in ended.stderr.lower()


def test_a_port_in_use_is_said(binary):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [binary, "--model", FIXTURES / "llama-tied", "--port", port, *SMALL_CACHE]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode > 0 and port in ended.stderr and "panicked" not in ended.stderr


def test_flags_are_environment_variables_too(binary):
    port = free_port()
    environment = {
        **os.environ,
        "ROLLOUT_MODEL": str(FIXTURES / "qwen3"),
        "ROLLOUT_PORT": str(port),
        "ROLLOUT_BLOCK_SIZE": "8",
        "ROLLOUT_KV_CACHE_BYTES": "16MiB",
    }
    process = subprocess.Popen([binary], env=environment)
    try:
        with RolloutClient(f"127.0.0.1:{port}") as client:
            client.wait_until_ready(30)
            info = client.info()
        assert (info.architecture, info.block_size) == ("Qwen3ForCausalLM", 8)
    finally:
        process.terminate()
        assert process.wait(30) == 0


def test_each_kernel_is_shown_by_info_or_refused_with_those_that_are_there(binary, tmp_path):
    served, refused = [], {}
    for kernel in ("amx", "avx512_bf16", "avx512f", "avx2", "neon", "scalar", "avx512_bf16_emulated", "amx_emulated"):
        log = tmp_path / kernel
        flags = [*SMALL_CACHE, "--kernel", kernel]
        try:
            with log.open("w") as output, ServerProcess(binary, FIXTURES / "llama", flags, output=output) as server:
                assert server.client.info().kernel == kernel
                served.append(kernel)
        except RolloutError:
            refused[kernel] = log.read_text()
    assert {"scalar", "avx512_bf16_emulated", "amx_emulated"} <= set(served)
    there = ", ".join(kernel for kernel in served if not kernel.endswith("emulated"))
    for kernel, said in refused.items():
        assert f"--kernel {kernel}: this processor lacks it; it has {there}" in said
    # Without a ROLLOUT_KERNEL that the tests themselves may run under: the text shows it.
    plain = {name: value for name, value in os.environ.items() if name != "ROLLOUT_KERNEL"}
    ask = [binary, "--help"]
    described = subprocess.run(ask, capture_output=True, text=True, timeout=60, check=True, env=plain).stdout
    assert "[possible values: auto, amx, avx512_bf16, avx512f, avx2, neon, scalar]" in described
    assert "emulated" not in described


def test_the_page_of_flags_lists_every_flag(binary):
    described = subprocess.run([binary, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    flags = set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", described, re.MULTILINE)) - {"--help", "--version"}
    rows = [line for line in (REPOSITORY / "docs/flags.md").read_text().splitlines() if line.startswith("| `--")]
    assert {flag for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row.split("|")[1])} == flags


def test_the_profile_is_printed_when_asked_for_and_at_the_end(binary, tmp_path):
    """Every part of a step is there, on both ranks, and nothing of what was printed before is printed again."""
    path = tmp_path / "log"
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    with (
        path.open("w") as log,
        ServerProcess(binary, FIXTURES / "qwen3", [*SMALL_CACHE, "--tp", "2", "--profile"], output=log) as server,
    ):
        server.client.generate([[1, 2, 3], [4, 5]], n=2, sampling=sampling, return_text=False)
        server.process.send_signal(signal.SIGUSR1)
        wait_for(server.client, lambda _: "profile: " in path.read_text(), "printed")
        server.client.generate([[1, 2, 3]], sampling=sampling, return_text=False)
    _, first, last = path.read_text().split("profile: ")
    parts = "step|schedule|launch|wait for the ranks|update|emit|decode on rank 0|decode on rank 1|sampling|exchange"
    operators = "embed|linear \\d+ x \\d+|rms_norm_heads|add_rms_norm|rope|write_kv|paged_attention"
    for part in [*parts.split("|"), *operators.split("|")]:
        for table in (first, last):
            assert re.search(rf"^ *{part} +[1-9]", table, re.MULTILINE), f"no {part} in:\n{table}"
    assert int(first.split()[0]) == int(last.split()[0]) == 5, "prefill and the first token, four more"


def test_without_the_profile_nothing_of_it_is_printed(binary, tmp_path):
    path = tmp_path / "log"
    with path.open("w") as log, ServerProcess(binary, FIXTURES / "llama", SMALL_CACHE, output=log) as server:
        server.client.generate([[1, 2, 3]], sampling=SamplingParams(max_tokens=3), return_text=False)
    assert "profile: " not in path.read_text()
