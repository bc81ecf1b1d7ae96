#!/usr/bin/env python3
"""The time of what a loss needs beside samples (`returns`); prints a Markdown section for RESULTS.md.

    make bench-returns
    .venv-trainers/bin/python benches/returns.py --model .models/SmolLM2-135M-Instruct --runs 3

Groups are those of W1 (`workloads.py`). Runs take turns after one of each that is not counted; a ratio is the median of
the runs' ratios, with the smallest and the largest.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import transformers
from doors import paired
from weight_sync import Timing, random_adapter, timed
from workloads import WORKLOADS, commit, machine

from rollout_client import PromptOutput, Returns, RolloutClient, SamplingInput, SamplingParams, ServerProcess

GROUPS = WORKLOADS["W1"]
ADAPTER = "policy"
ALL = Returns(entropy=True, support=True, top=64)
TAIL_MEDIAN, TAIL_SPREAD = 60, 0.8
"""Median and sigma of the lognormal lengths of answers in the tail's workload."""
REFERENCES = Returns(references=[None])
DIVERGENCES = replace(REFERENCES, divergences=True)
Row = tuple[str, list[float], list[float], str]


def generate(
    client: RolloutClient, prompts: list[list[int]], sampling: SamplingInput, **options: Any
) -> list[PromptOutput]:
    """The samples of all groups, starting with an empty prefix cache."""
    client.reset_prefix_cache()
    return client.generate(prompts, n=GROUPS.n, sampling=sampling, return_text=False, **options)


def seconds(call: Callable[[], object]) -> float:
    return timed(call)[0]


def sequences(outputs: list[PromptOutput]) -> list[list[int]]:
    """The token ids of prompts and samples."""
    return [[*output.prompt_token_ids, *sample.token_ids] for output in outputs for sample in output.samples]


def score(client: RolloutClient, samples: list[list[int]]) -> None:
    client.reset_prefix_cache()
    client.score(samples)


def policy_side(client: RolloutClient, prompts: list[list[int]], runs: int) -> list[Row]:
    """Entropies, supports and most likely tokens beside the same groups without them."""
    rows = []
    for title, top_p in [
        ("W1 with entropies, supports and the 64 most likely tokens, s (beside: without)", 1.0),
        ("… with top_p 0.95", 0.95),
    ]:
        sampling = SamplingParams(max_tokens=GROUPS.new_tokens, ignore_eos=True, seed=1, top_p=top_p)
        ours, beside = paired(
            runs,
            lambda sampling=sampling: seconds(lambda: generate(client, prompts, sampling, returns=ALL)),
            lambda sampling=sampling: seconds(lambda: generate(client, prompts, sampling)),
        )
        rows.append((title, ours, beside, "≤ 1.03"))
    return rows


def references(client: RolloutClient, model: Path, prompts: list[list[int]], runs: int) -> list[Row]:
    """References beside a Score of the same samples, and transformers' forward pass over them."""
    sampling = SamplingParams(max_tokens=GROUPS.new_tokens, ignore_eos=True, seed=1)
    samples = sequences(generate(client, prompts, sampling, adapter=ADAPTER))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    batch = torch.tensor(samples)

    @torch.inference_mode()
    def forward() -> None:
        for part in batch.split(GROUPS.n):
            logits = theirs(part, logits_to_keep=GROUPS.new_tokens + 1).logits[:, :-1].float()
            torch.log_softmax(logits, -1).gather(-1, part[:, -GROUPS.new_tokens :, None])

    with_, whole, without, scored, transformed = paired(
        runs,
        lambda: seconds(lambda: generate(client, prompts, sampling, adapter=ADAPTER, returns=REFERENCES)),
        lambda: seconds(lambda: generate(client, prompts, sampling, adapter=ADAPTER, returns=DIVERGENCES)),
        lambda: seconds(lambda: generate(client, prompts, sampling, adapter=ADAPTER)),
        lambda: seconds(lambda: score(client, samples)),
        lambda: seconds(forward),
    )
    added, added_whole = ([a - b for a, b in zip(long, without, strict=True)] for long in (with_, whole))
    return [
        ("W1 with a reference, s (beside: without)", with_, without, ""),
        ("… the difference beside a Score of the same samples, s", added, scored, "≤ 1.1"),
        ("… with both divergences over the whole vocabulary", added_whole, scored, "≤ 1.1"),
        (
            f"transformers {transformers.__version__}, its forward pass over them, s (beside: our divergences)",
            transformed,
            added_whole,
            "≥ 1.8",
        ),
    ]


def kept_base(client: RolloutClient, prompts: list[list[int]], runs: int) -> list[Row]:
    """The base below a merged adapter, for which a step runs the model twice, beside the same samples without it."""
    client.push_lora(*random_adapter(client.parameters()))
    sampling = SamplingParams(max_tokens=GROUPS.new_tokens, ignore_eos=True, seed=3)
    samples = sequences(generate(client, prompts, sampling))
    with_, without, scored = paired(
        runs,
        lambda: seconds(lambda: generate(client, prompts, sampling, returns=Returns(base=True))),
        lambda: seconds(lambda: generate(client, prompts, sampling)),
        lambda: seconds(lambda: score(client, samples)),
    )
    added = [a - b for a, b in zip(with_, without, strict=True)]
    return [
        ("W1 of a merged adapter with the base, s (beside: without)", with_, without, ""),
        ("… the difference beside a Score of the same samples, s", added, scored, "≤ 1.1"),
    ]


def long_tail(client: RolloutClient, prompts: list[list[int]], runs: int) -> list[Row]:
    """The same where answers have lengths of a long tail, so that the last steps have few rows."""
    rng = Random(7)
    lengths = [min(int(rng.lognormvariate(0, TAIL_SPREAD) * TAIL_MEDIAN) + 1, 1000) for _ in prompts]
    sampling = [SamplingParams(max_tokens=length, ignore_eos=True, seed=i) for i, length in enumerate(lengths)]
    samples = sequences(generate(client, prompts, sampling, adapter=ADAPTER))
    with_, without, scored = paired(
        runs,
        lambda: seconds(lambda: generate(client, prompts, sampling, adapter=ADAPTER, returns=REFERENCES)),
        lambda: seconds(lambda: generate(client, prompts, sampling, adapter=ADAPTER)),
        lambda: seconds(lambda: score(client, samples)),
    )
    added = [a - b for a, b in zip(with_, without, strict=True)]
    title = (
        f"answers of {min(lengths)} to {max(lengths)} tokens: the wall time that a reference adds, s (beside: a Score)"
    )
    return [(title, added, scored, "≤ 0.4")]


def adapters(client: RolloutClient, prompts: list[list[int]], runs: int) -> list[Row]:
    """Eight resident adapters in each step, one for each prompt, beside one that is merged."""
    tensors, config = random_adapter(client.parameters())
    names = [f"tenant-{number}" for number in range(len(prompts))]
    for name in names:
        client.push_lora(tensors, config, name=name)
    client.push_lora(tensors, config)
    sampling = SamplingParams(max_tokens=GROUPS.new_tokens, ignore_eos=True, seed=5)

    def each(names: list[str | None]) -> None:
        client.reset_prefix_cache()
        with ThreadPoolExecutor(len(prompts)) as threads:
            calls = [
                threads.submit(client.generate, [prompt], GROUPS.n, sampling, return_text=False, adapter=name)
                for prompt, name in zip(prompts, names, strict=True)
            ]
            for call in calls:
                call.result()

    merged, resident = paired(
        runs,
        lambda: seconds(lambda: each([None] * len(prompts))),
        lambda: seconds(lambda: each(names)),
    )
    for name in names:
        client.remove_adapter(name)
    return [
        (
            f"W1 of a merged adapter, s (beside: {len(names)} resident adapters, one a prompt)",
            merged,
            resident,
            "≥ 0.85",
        )
    ]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    return parser.parse_args()


def main() -> int:
    args, load = parse_args(), os.getloadavg()[0]
    flags = ["--dtype", "bfloat16", "--speculation", "off", "--mem-util", "0.4", "--max-adapters", "9", "--keep-base"]
    flags += args.flags
    print(f"\n### Returns — {datetime.datetime.now(tz=datetime.timezone.utc):%Y-%m-%d}, commit {commit()}\n")
    print(f"{machine()}, load {load:.1f}; {args.model.name} in bfloat16; {args.runs} runs in turn.\n")
    print("| | ours | beside | ratio | aim |\n|---|---|---|---|---|")
    with ServerProcess(args.server, args.model, flags) as server:
        client = server.client
        vocab_size = client.info().vocab_size
        prompts, many = (w.make_prompts(vocab_size) for w in (GROUPS, replace(GROUPS, prompts=32)))
        tensors, config = random_adapter(client.parameters())
        client.push_lora(tensors, config, name=ADAPTER)
        parts = [
            partial(policy_side, client, prompts),
            partial(references, client, args.model, prompts),
            partial(long_tail, client, many),
            partial(kept_base, client, prompts),
            partial(adapters, client, prompts),
        ]
        for part in parts:
            for title, ours, beside, aim in part(args.runs):
                ratio = Timing.of([a / b for a, b in zip(ours, beside, strict=True)])
                print(f"| {title} | {Timing.of(ours)} | {Timing.of(beside)} | {ratio} | {aim} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
