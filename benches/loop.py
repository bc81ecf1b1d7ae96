#!/usr/bin/env python3
"""A trainer's loop by its parts, beside the same loop with transformers' generate; prints a Markdown section.

    make bench-loop
    .venv-trainers/bin/python benches/loop.py --model .models/SmolLM2-135M-Instruct --runs 5

Steps of examples/grpo.py in float32: the server wakes, gets the adapter, samples and sleeps, and the trainer makes one
step of its optimizer. In turn with them, steps in which transformers samples as many tokens from the trainer's own
model, adapter and all, and the trainer makes the same step. The first step of each is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import peft
import torch
from workloads import commit, machine

from rollout_client import RolloutClient, SamplingParams, ServerProcess

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import grpo

PARTS = ["wake", "push", "generate", "sleep", "train"]


def server_step(
    client: RolloutClient, model: peft.PeftModel, prompts: list[list[int]], number: int, args: argparse.Namespace
) -> tuple[dict[str, float], grpo.Batch]:
    """Seconds by part, and the batch to learn from; the rewards are random."""
    watch = grpo.Stopwatch()
    sampling = SamplingParams(max_tokens=args.tokens, ignore_eos=True, seed=number)
    groups = grpo.sample(client, model, prompts, n=args.samples, sampling=sampling, watch=watch)
    return watch.seconds, grpo.make_batch(prompts, groups, torch.rand(args.prompts, args.samples))


@torch.no_grad()
def transformers_sample(model: peft.PeftModel, prompts: list[list[int]], args: argparse.Namespace) -> None:
    """Samples as many tokens; the prompts have one length, so there is no padding."""
    tokens = torch.tensor(prompts).repeat_interleave(args.samples, 0)
    length = {"min_new_tokens": args.tokens, "max_new_tokens": args.tokens}
    found = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, pad_token_id=0, **length
    )
    assert found.shape == (tokens.shape[0], tokens.shape[1] + args.tokens)


def timed_learning(
    model: peft.PeftModel, optimizer: torch.optim.Optimizer, batch: grpo.Batch, settings: grpo.Settings
) -> tuple[float, float]:
    """Seconds, and the largest difference of log-probabilities."""
    start = time.perf_counter()
    difference = grpo.learn(model, optimizer, batch, settings)
    return time.perf_counter() - start, difference


def measure(args: argparse.Namespace) -> tuple[list[dict[str, float]], list[dict[str, float]], float]:
    """Seconds by part of each step with the server and with transformers, and the largest difference."""
    settings = grpo.Settings(rank=16, learning_rate=1e-4)
    tokenizer, model = grpo.load(args.model, settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.learning_rate)
    questions, _ = grpo.dataset(settings.seed)
    prompts = [grpo.prompt_ids(tokenizer, digits) for digits in questions[: args.prompts]]
    ours, theirs, differences = [], [], []
    flags = ["--dtype", "float32", "--mem-util", str(args.mem_util)]
    with ServerProcess(args.server, args.model, flags, output=subprocess.DEVNULL) as server:
        server.client.sleep()
        for number in range(args.runs + 1):
            seconds, batch = server_step(server.client, model, prompts, number, args)
            train, difference = timed_learning(model, optimizer, batch, settings)
            ours.append(seconds | {"train": train})
            differences.append(difference)
            start = time.perf_counter()
            transformers_sample(model, prompts, args)
            generate = time.perf_counter() - start
            theirs.append({"generate": generate, "train": timed_learning(model, optimizer, batch, settings)[0]})
            print(f"step {number}: {ours[-1]} {theirs[-1]}", file=sys.stderr, flush=True)
    return ours[1:], theirs[1:], max(differences)


def cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def markdown(
    args: argparse.Namespace, ours: list[dict[str, float]], theirs: list[dict[str, float]], difference: float
) -> str:
    """The section for RESULTS.md."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    rows = []
    for part in PARTS:
        peer = cell([step[part] for step in theirs]) if part in theirs[0] else ""
        rows.append(f"| {part} | {cell([step[part] for step in ours])} | {peer} |")
    whole = [[sum(step.values()) for step in steps] for steps in (ours, theirs)]
    rollout = [[sum(step.values()) - step["train"] for step in steps] for steps in (ours, theirs)]
    ratio = statistics.median(b / a for a, b in zip(*rollout, strict=True))
    return "\n".join(
        [
            f"## {datetime.date.today().isoformat()}: the loop of a trainer",
            "",
            f"- machine: {machine()}; load {load}",
            f"- commit: {commit()}",
            f"- command: `benches/loop.py {' '.join(sys.argv[1:])}`",
            f"- {Path(args.model).name} in float32, LoRA of rank 16 on all linear layers, {args.prompts} prompts × "
            f"{args.samples} samples × {args.tokens} tokens; seconds, median (least–most) of {args.runs} steps",
            "",
            "| | rollout-server | transformers' generate |",
            "|---|---|---|",
            *rows,
            f"| all but train | {cell(rollout[0])} | {cell(rollout[1])} |",
            f"| the whole step | {cell(whole[0])} | {cell(whole[1])} |",
            "",
            f"All but the training takes {ratio:.1f} times as long with transformers, step by step. The largest "
            f"difference of log-probabilities between server and trainer was {difference:.0e}.",
        ]
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint with a chat template")
    parser.add_argument("--mem-util", type=float, default=0.3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    print(markdown(args, *measure(args)))


if __name__ == "__main__":
    main()
