#!/usr/bin/env python3
"""GRPO with LoRA in plain torch and PEFT: the whole loop, written out. It teaches a model to sort three digits, or to
name the colour of a square in a picture.

    make train                  # a tiny model, made on the spot: under a minute
    make train MODEL=smollm2    # SmolLM2-135M-Instruct, five minutes
    make train KL=0.05          # with a divergence from the base model in the loss, which the server scores
    make train MODEL=tiny-vlm   # a tiny Qwen2.5-VL, made on the spot: its prompts have images
    make train MODEL=tiny-moe   # a tiny Qwen3-MoE, made on the spot: the trainer replays the experts of the samples
    python examples/grpo.py --server target/release/rollout-server --model .models/tiny --out runs/tiny

Each step wakes the server, pushes the newest adapter into it, lets it sample a group of answers to each question, and
puts it to sleep again; then the trainer makes one step of its optimizer from what came back. So the two never hold
their memory at the same time. At the end `--out` has the adapter, a line for each step, and a picture.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from tqdm import tqdm

import colours
import sorting
from questions import Prompt, Question, encode, model_inputs, shuffle_images
from rollout_client import GenerateOptions, PromptOutput, Returns, RolloutClient, SamplingParams, ServerProcess
from routing_replay import replay, routers, sampled_experts
from training_report import Exam, Step, draw, summary

TASKS = {"sorting": sorting, "colours": colours}
POLICY = "policy"
"""Name of the resident adapter, if the base below it serves as the reference."""


@dataclass(frozen=True)
class Settings:
    """What a run can be told."""

    steps: int = 60
    questions: int = 16  # of a step
    samples: int = 8  # of a question: its group
    max_tokens: int = 16  # of an answer
    temperature: float = 1.0
    rank: int = 8
    learning_rate: float = 2e-3
    clip: float = 0.2  # how far a ratio of importance may be from 1 and still count
    kl: float = 0.0  # weight of the divergence from the base model, under which the server scores the samples
    seed: int = 0


# --- The policy: a model with a LoRA adapter ---


def load_base(directory: str | Path) -> tuple[Any, transformers.PreTrainedModel]:
    """The tokenizer, or the processor of a model of text and images, and the model in float32."""
    if hasattr(transformers.AutoConfig.from_pretrained(directory), "vision_config"):
        processors, models = transformers.AutoProcessor, transformers.AutoModelForImageTextToText
    else:
        processors, models = transformers.AutoTokenizer, transformers.AutoModelForCausalLM
    return processors.from_pretrained(directory), models.from_pretrained(directory, dtype=torch.float32)


def load(directory: str | Path, settings: Settings) -> tuple[Any, peft.PeftModel]:
    """The same with a fresh adapter on all linear layers, those of the vision tower and of experts too."""
    torch.manual_seed(settings.seed)
    processor, base = load_base(directory)
    config = peft.LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear")
    with warnings.catch_warnings():
        # PEFT looks for the patterns that it has itself set for experts among modules, and not among parameters.
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match", RuntimeWarning)
        return processor, peft.get_peft_model(base, config)


@dataclass
class Batch:
    """Samples as tensors. `S` samples, each of a prompt and an answer, padded on the right to `T` tokens."""

    tokens: torch.Tensor
    """`[S, T]`."""
    inputs: dict[str, torch.Tensor]
    """What the model needs beside the tokens, if the prompts have images."""
    experts: torch.Tensor | None
    """`[S, T, layers, k]`: those that each token took in the server, if the model has experts."""
    answer: torch.Tensor
    """`[S, T - 1]`: whether the token after this place was sampled."""
    old_logprobs: torch.Tensor
    """`[S, T - 1]`: the log-probability with which it was sampled, by the server."""
    reference_logprobs: torch.Tensor | None
    """`[S, T - 1]`: the same under the base model, by the server; None without a divergence in the loss."""
    advantages: torch.Tensor
    """`[S, 1]`."""


def placeholders(config: transformers.PretrainedConfig) -> torch.Tensor:
    """The tokens that stand for images and videos, which the server leaves out of the draw; none in a model of text."""
    names = ("image_token_id", "video_token_id")
    return torch.tensor([getattr(config, name) for name in names if hasattr(config, name)], dtype=torch.long)


def logprobs(model: torch.nn.Module, batch: Batch, temperature: float) -> torch.Tensor:
    """`[S, T - 1]`: the log-probability of each token after the first, by the trainer's own forward pass.

    The distribution is the one that the server sampled from: divided by the temperature, and without placeholders.
    """
    first = int(batch.answer.any(0).nonzero()[0])  # the logits of the prompts are not needed
    width = batch.tokens.shape[1]
    with replay(model, batch.experts):
        logits = model(batch.tokens, **batch.inputs, logits_to_keep=width - first).logits[:, :-1].float() / temperature
    logits.index_fill_(-1, placeholders(model.config), -torch.inf)
    chosen = torch.log_softmax(logits, -1).gather(-1, batch.tokens[:, first + 1 :, None])[..., 0]
    return torch.nn.functional.pad(chosen, (first, 0))


# --- One step: sample with the newest policy, then learn from it ---


class Stopwatch:
    """The seconds between one call and the next, added up by name."""

    def __init__(self) -> None:
        """Starts now."""
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def __call__(self, part: str) -> None:
        """What was done since the last call was `part`."""
        now = time.perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now - self._last
        self._last = now


def sample(
    client: RolloutClient,
    model: peft.PeftModel,
    prompts: Sequence[Prompt],
    *,
    n: int,
    sampling: SamplingParams,
    watch: Stopwatch,
    with_reference: bool = False,
) -> list[PromptOutput]:
    """Pushes the policy and samples n answers to each prompt; before and after the server sleeps.

    With a reference the adapter is not merged but becomes resident beside the base, for which the server must be awake,
    and the server scores each answer under the base alone as well, in the batches in which it samples.
    """
    with client.awake(None if with_reference else ["weights"]):
        watch("wake")
        if with_reference:
            client.push_lora(model, name=POLICY)
            options = GenerateOptions(adapter=POLICY, returns=Returns(references=[None], divergences=True))
            watch("push")
        else:
            options = GenerateOptions(if_weight_version=client.push_lora(model).weight_version)  # one more than before
            watch("push")
            client.wake(["kv_cache"])  # after the push, which can use its memory
            watch("wake")
        tokens, images = [prompt.token_ids for prompt in prompts], [prompt.images for prompt in prompts]
        groups = client.generate(
            tokens,
            images=images,
            n=n,
            sampling=sampling,
            return_routing=bool(routers(model)),
            **options,
        )
        watch("generate")
    watch("sleep")
    return groups


def make_batch(prompts: Sequence[Prompt], groups: list[PromptOutput], rewards: torch.Tensor) -> Batch:
    """Tensors of the samples; an advantage is how much better a sample is than its group, in standard deviations."""
    samples = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group.samples]
    shape = len(samples), max(len(prompt.token_ids) + len(one.token_ids) for prompt, one in samples)
    tokens = torch.zeros(shape, dtype=torch.long)
    answer = torch.zeros(shape, dtype=torch.bool)
    old_logprobs, reference_logprobs = torch.zeros(shape), torch.zeros(shape)
    has_reference = bool(samples[0][1].references)
    for row, (prompt, one) in enumerate(samples):
        start, end = len(prompt.token_ids), len(prompt.token_ids) + len(one.token_ids)
        tokens[row, :end] = torch.tensor(prompt.token_ids + one.token_ids)
        answer[row, start:end] = True
        old_logprobs[row, start:end] = torch.from_numpy(one.logprobs)
        if has_reference:
            reference_logprobs[row, start:end] = torch.from_numpy(one.references[0].logprobs)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    inputs = model_inputs([prompt for prompt, _ in samples], shape[1])
    experts = sampled_experts(groups, shape[1])
    return Batch(
        tokens=tokens,
        inputs=inputs,
        experts=experts,
        answer=answer[:, 1:],
        old_logprobs=old_logprobs[:, 1:],
        reference_logprobs=reference_logprobs[:, 1:] if has_reference else None,
        advantages=advantages.reshape(-1, 1),
    )


def mean_divergence(groups: list[PromptOutput]) -> float | None:
    """KL(policy || base model) of a token, by the server; None if the samples have no reference."""
    scores = [one.references[0].kl for group in groups for one in group.samples if one.references]
    return float(np.concatenate(scores).mean()) if scores else None


def learn(model: peft.PeftModel, optimizer: torch.optim.Optimizer, batch: Batch, settings: Settings) -> float:
    """One step of the optimizer.

    Returns the largest difference of log-probabilities between trainer and server.
    """
    new_logprobs = logprobs(model, batch, settings.temperature)
    # How much more likely the trainer's policy makes each token than the one that sampled it. After a push it is 1, and
    # its gradient that of the log-probability; had the policy moved on since, it would weigh the samples by that.
    ratio = torch.exp(new_logprobs - batch.old_logprobs)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    loss = -gain[batch.answer].mean()
    if batch.reference_logprobs is not None:
        # An estimate of KL(policy || base) that is never negative, as TRL has it. It has a gradient, which the exact
        # divergence of the server has not.
        away = batch.reference_logprobs - new_logprobs
        loss = loss + settings.kl * (torch.exp(away) - away - 1)[batch.answer].mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (new_logprobs - batch.old_logprobs)[batch.answer].abs().max().item()


def train(
    client: RolloutClient, processor: Any, model: peft.PeftModel, questions: Sequence[Question], settings: Settings
) -> list[Step]:
    """The loop; the server is asleep before and after."""
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.learning_rate)
    steps = []
    bar = tqdm(range(1, settings.steps + 1), desc="GRPO", unit="step")
    for number in bar:
        asked = rng.sample(questions, settings.questions)
        prompts = [encode(processor, question) for question in asked]
        sampling = SamplingParams(settings.temperature, max_tokens=settings.max_tokens, seed=settings.seed + number)
        watch = Stopwatch()
        groups = sample(
            client,
            model,
            prompts,
            n=settings.samples,
            sampling=sampling,
            watch=watch,
            with_reference=settings.kl > 0,
        )
        rewards = [[question.reward(one.text) for one in g.samples] for question, g in zip(asked, groups, strict=True)]
        batch = make_batch(prompts, groups, torch.tensor(rewards))
        difference, kl = learn(model, optimizer, batch, settings), mean_divergence(groups)
        watch("train")
        reward = torch.tensor(rewards).mean().item()
        steps.append(Step(reward, difference, int(batch.answer.sum()), watch.seconds, kl))
        shown = {} if kl is None else {"kl": f"{kl:.3f}"}
        bar.set_postfix(reward=f"{reward:.2f}", difference=f"{difference:.0e}", **shown)
    return steps


def examine(
    client: RolloutClient, processor: Any, model: peft.PeftModel, questions: Sequence[Question], settings: Settings
) -> float:
    """The mean reward of the most likely answers."""
    prompts = [encode(processor, question) for question in questions]
    greedy = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
    groups = sample(client, model, prompts, n=1, sampling=greedy, watch=Stopwatch())
    return sum(q.reward(g.samples[0].text) for q, g in zip(questions, groups, strict=True)) / len(questions)


# --- The run: a server of its own, and what is left at the end ---


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint with a chat template")
    parser.add_argument("--task", choices=TASKS, default="sorting", help="what it learns (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"), help="where adapter, steps and picture go")
    for setting in fields(Settings):
        flag = "--" + setting.name.replace("_", "-")
        parser.add_argument(flag, type=type(setting.default), default=setting.default, help="default %(default)s")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    settings = Settings(**{setting.name: getattr(args, setting.name) for setting in fields(Settings)})
    args.out.mkdir(parents=True, exist_ok=True)
    questions, held_out = TASKS[args.task].dataset(settings.seed)
    exams = {"held-out questions": held_out}
    if held_out[0].images:
        exams["held-out questions, images shuffled among them"] = shuffle_images(held_out, settings.seed)
    processor, model = load(args.model, settings)
    flags = ["--dtype", "float32", "--mem-util", "0.3"]  # float32 as the trainer, so that both agree to 1e-4
    if routers(model):
        flags.append("--return-routing")
    if settings.kl > 0:
        flags += ["--max-adapters", "1"]
    with (
        (args.out / "server.log").open("w") as log,
        ServerProcess(args.server, args.model, flags, output=log) as server,
    ):
        server.client.sleep()
        before = [examine(server.client, processor, model, exam, settings) for exam in exams.values()]
        steps = train(server.client, processor, model, questions, settings)
        after = [examine(server.client, processor, model, exam, settings) for exam in exams.values()]
    results = [Exam(*exam) for exam in zip(exams, before, after, strict=True)]
    model.save_pretrained(args.out / "adapter")
    (args.out / "steps.json").write_text(json.dumps([asdict(step) for step in steps], indent=1))
    draw(steps, results, args.out / "training.png", f"GRPO with LoRA on {Path(args.model).name}")
    print(summary(steps, results))
    print(f"adapter, steps.json and training.png are in {args.out}")


if __name__ == "__main__":
    main()
