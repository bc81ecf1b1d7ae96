"""The four workloads, this machine's limits, and the least time that one token a step can take."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from rollout_client import RolloutClient, SamplingParams

PROMPT_SEED = 20260101


@dataclass(frozen=True)
class Workload:
    """`prompts` prompts with `n` samples each, of `prompt_len` prompt tokens and `new_tokens` generated tokens."""

    prompts: int
    n: int
    prompt_len: int
    new_tokens: int
    temperature: float

    @property
    def counted_tokens(self) -> int:
        """The tokens that tokens/s counts: the generated ones, or the prompts' where next to nothing is generated."""
        return self.prompts * (self.prompt_len if self.new_tokens == 1 else self.n * self.new_tokens)

    @property
    def all_tokens(self) -> int:
        """Number of prompt tokens and generated tokens together."""
        return self.prompts * (self.prompt_len + self.n * self.new_tokens)

    def make_prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids without a common prefix, the same for every engine."""
        rng = random.Random(PROMPT_SEED)
        return [[rng.randrange(vocab_size) for _ in range(self.prompt_len)] for _ in range(self.prompts)]


WORKLOADS = {
    "W1": Workload(prompts=8, n=8, prompt_len=128, new_tokens=128, temperature=1.0),
    "W2": Workload(prompts=1, n=1, prompt_len=128, new_tokens=128, temperature=0.0),
    "W3": Workload(prompts=16, n=1, prompt_len=1024, new_tokens=1, temperature=0.0),
    "W4": Workload(prompts=1, n=16, prompt_len=1024, new_tokens=128, temperature=1.0),
}
SPECULATIVE = ("W2",)
"""Workloads in which speculation makes more than one token of a sample in a step. They are also measured without it."""
TITLES = {"W1": "groups", "W2": "single stream, greedy", "W3": "prefill, prompt tokens", "W4": "long shared prompt"}


@dataclass(frozen=True)
class Shape:
    """The sizes of a model from which the floor is computed."""

    parameters: float
    """Without an embedding whose rows are only looked up."""
    embedding_parameters: float
    kv_elements_per_token: float
    expert_parameters: float = 0.0
    """Of all experts of all layers."""
    taken_share: float = 1.0
    """The share of a layer's experts that a token takes."""

    @property
    def used_parameters(self) -> float:
        """Parameters with which one token is multiplied."""
        return self.parameters - self.expert_parameters * (1 - self.taken_share)

    def read_parameters(self, tokens: int) -> float:
        """Parameters that a step of so many tokens reads, where each takes experts at random: on average, an expert is
        taken by none of them with the probability (1 - taken_share) ** tokens.
        """
        return self.parameters - self.expert_parameters * (1 - self.taken_share) ** tokens


# Shapes by parameter count, which the server reports. A model that is not listed gets no floor.
SHAPES = {
    134_515_008: Shape(134_515_008, 49_152 * 576, 30 * 2 * 3 * 64),  # SmolLM2-135M, tied
    494_032_768: Shape(494_032_768, 151_936 * 896, 24 * 2 * 2 * 64),  # Qwen2.5-0.5B, tied
    # QWEN3_MOE of checkpoints.py, whose embedding is only looked up: each of 10 layers has 64 experts of
    # 3 x 1,024 x 512 parameters, and a token takes 8 of them.
    1_121_607_168: Shape(1_088_052_736, 32_768 * 1024, 10 * 2 * 2 * 128, 10 * 64 * 3 * 1024 * 512, 8 / 64),
}


@dataclass(frozen=True)
class Limits:
    """This machine's limits, measured by `kernels/examples/limits.rs`."""

    threads: int
    instructions: str
    f32_fma_gflops: float
    bf16_dot_gflops: float | None
    bf16_tile_gflops: float | None
    read_gb_per_s: float

    def peak_gflops(self, dtype: str) -> float:
        """GFLOP/s of the fastest way to multiply weights of this type."""
        bf16 = [self.bf16_dot_gflops, self.bf16_tile_gflops] if dtype == "bfloat16" else []
        return max([self.f32_fma_gflops, *(gflops or 0.0 for gflops in bf16)])


def measure_limits(binary: str) -> Limits:
    return Limits(**json.loads(subprocess.run([binary], check=True, capture_output=True, text=True).stdout))


def floor_seconds(workload: Workload, shape: Shape, dtype: str, limits: Limits) -> float:
    """Least time of a workload on this machine: the FLOPs of every unique prompt token at the peak, then for each
    decode step the larger of reading the weights that it uses and computing all samples, plus reading each KV entry
    once.
    """
    bytes_per_element = 4 if dtype == "float32" else 2
    peak, bandwidth = limits.peak_gflops(dtype) * 1e9, limits.read_gb_per_s * 1e9
    w, sequences = workload, workload.prompts * workload.n
    seconds = 2 * (shape.used_parameters - shape.embedding_parameters) * w.prompts * w.prompt_len / peak
    seconds += 2 * shape.embedding_parameters * w.prompts / peak
    read = shape.read_parameters(sequences) * bytes_per_element / bandwidth
    step = max(read, 2 * shape.used_parameters * sequences / peak)
    for made in range(1, w.new_tokens):
        kv_tokens = w.prompts * w.prompt_len + sequences * made
        seconds += step + kv_tokens * shape.kv_elements_per_token * bytes_per_element / bandwidth
    return seconds


def run_once(client: RolloutClient, workload: Workload, prompts: list[list[int]]) -> float:
    """Seconds of one run on our server, starting with an empty prefix cache."""
    client.reset_prefix_cache()
    sampling = SamplingParams(max_tokens=workload.new_tokens, temperature=workload.temperature, ignore_eos=True, seed=1)
    start = time.perf_counter()
    outputs = client.generate(prompts, n=workload.n, sampling=sampling, return_text=False)
    seconds = time.perf_counter() - start
    for sample in (sample for output in outputs for sample in output.samples):
        lengths = {len(sample.token_ids), len(sample.logprobs), len(sample.raw_logprobs)}
        if lengths != {workload.new_tokens}:
            raise RuntimeError(f"a sample has {lengths} tokens and log-probabilities, not {workload.new_tokens}")
    return seconds


def machine() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores {name}, {platform.system()}"


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False).stdout.strip()

    # The results of the last run do not count as a change.
    is_changed = git("status", "--porcelain", "--", ":/", ":(exclude,top)benches/results.*")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + (" with changes" if is_changed else "")
