#!/usr/bin/env python3
"""GRPO with LoRA in plain torch and PEFT: the whole loop, written out. It teaches a model to sort three digits.

    make train                  # a tiny model, made on the spot: under a minute
    make train MODEL=smollm2    # SmolLM2-135M-Instruct, five minutes
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
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import peft
import torch
import transformers
from tqdm import tqdm

from rollout_client import PromptOutput, RolloutClient, SamplingParams, ServerProcess
from sorting import dataset, question, reward
from training_report import Step, draw, summary


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
    seed: int = 0


def prompt_ids(tokenizer: transformers.PreTrainedTokenizerBase, digits: list[int]) -> list[int]:
    """The same as tokens. The trainer makes them, so that it learns from the very tokens that the server saw."""
    return tokenizer.apply_chat_template(question(digits), add_generation_prompt=True)["input_ids"]


# --- The policy: a model with a LoRA adapter ---


def load(directory: str | Path, settings: Settings) -> tuple[transformers.PreTrainedTokenizerBase, peft.PeftModel]:
    """The tokenizer, and the model in float32 with a fresh adapter on all linear layers."""
    torch.manual_seed(settings.seed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    base = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    config = peft.LoraConfig(r=settings.rank, lora_alpha=2 * settings.rank, target_modules="all-linear")
    return tokenizer, peft.get_peft_model(base, config)


@dataclass
class Batch:
    """Samples as tensors. `S` samples, each of a prompt and an answer, padded on the right to `T` tokens."""

    tokens: torch.Tensor
    """`[S, T]`."""
    answer: torch.Tensor
    """`[S, T - 1]`: whether the token after this place was sampled."""
    old_logprobs: torch.Tensor
    """`[S, T - 1]`: the log-probability with which it was sampled, by the server."""
    advantages: torch.Tensor
    """`[S, 1]`."""


def logprobs(model: torch.nn.Module, batch: Batch, temperature: float) -> torch.Tensor:
    """`[S, T - 1]`: the log-probability of each token after the first, by the trainer's own forward pass.

    Divided by the temperature, as the distribution was that the server sampled from.
    """
    first = int(batch.answer.any(0).nonzero()[0])  # the logits of the prompts are not needed
    width = batch.tokens.shape[1]
    logits = model(batch.tokens, logits_to_keep=width - first).logits[:, :-1].float() / temperature
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
    prompts: list[list[int]],
    *,
    n: int,
    sampling: SamplingParams,
    watch: Stopwatch,
) -> list[PromptOutput]:
    """Pushes the policy and samples n answers to each prompt; before and after the server sleeps."""
    with client.awake(["weights"]):
        watch("wake")
        version = client.push_lora(model).weight_version  # one more than before
        watch("push")
        client.wake(["kv_cache"])  # after the push, which can use its memory
        watch("wake")
        groups = client.generate(prompts, n=n, sampling=sampling, if_weight_version=version)
        watch("generate")
    watch("sleep")
    return groups


def make_batch(prompts: list[list[int]], groups: list[PromptOutput], rewards: torch.Tensor) -> Batch:
    """Tensors of the samples; an advantage is how much better a sample is than its group, in standard deviations."""
    samples = [(prompt, one) for prompt, group in zip(prompts, groups, strict=True) for one in group.samples]
    shape = len(samples), max(len(prompt) + len(one.token_ids) for prompt, one in samples)
    tokens = torch.zeros(shape, dtype=torch.long)
    answer = torch.zeros(shape, dtype=torch.bool)
    old_logprobs = torch.zeros(shape)
    for row, (prompt, one) in enumerate(samples):
        start, end = len(prompt), len(prompt) + len(one.token_ids)
        tokens[row, :end] = torch.tensor(prompt + one.token_ids)
        answer[row, start:end] = True
        old_logprobs[row, start:end] = torch.from_numpy(one.logprobs)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    return Batch(tokens, answer[:, 1:], old_logprobs[:, 1:], advantages.reshape(-1, 1))


def learn(model: peft.PeftModel, optimizer: torch.optim.Optimizer, batch: Batch, settings: Settings) -> float:
    """One step of the optimizer; returns the largest difference of log-probabilities between trainer and server."""
    new_logprobs = logprobs(model, batch, settings.temperature)
    # How much more likely the trainer's policy makes each token than the one that sampled it. After a push it is 1, and
    # its gradient that of the log-probability; had the policy moved on since, it would weigh the samples by that.
    ratio = torch.exp(new_logprobs - batch.old_logprobs)
    clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
    gain = torch.minimum(ratio * batch.advantages, clipped * batch.advantages)
    loss = -gain[batch.answer].mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return (new_logprobs - batch.old_logprobs)[batch.answer].abs().max().item()


def train(
    client: RolloutClient, tokenizer: transformers.PreTrainedTokenizerBase, model: peft.PeftModel, settings: Settings
) -> list[Step]:
    """The loop; the server is asleep before and after."""
    questions, _ = dataset(settings.seed)
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=settings.learning_rate)
    steps = []
    bar = tqdm(range(1, settings.steps + 1), desc="GRPO", unit="step")
    for number in bar:
        asked = rng.sample(questions, settings.questions)
        prompts = [prompt_ids(tokenizer, digits) for digits in asked]
        sampling = SamplingParams(settings.temperature, max_tokens=settings.max_tokens, seed=settings.seed + number)
        watch = Stopwatch()
        groups = sample(client, model, prompts, n=settings.samples, sampling=sampling, watch=watch)
        rewards = [[reward(one.text, d) for one in group.samples] for d, group in zip(asked, groups, strict=True)]
        batch = make_batch(prompts, groups, torch.tensor(rewards))
        difference = learn(model, optimizer, batch, settings)
        watch("train")
        steps.append(Step(torch.tensor(rewards).mean().item(), difference, int(batch.answer.sum()), watch.seconds))
        bar.set_postfix(reward=f"{steps[-1].reward:.2f}", difference=f"{difference:.0e}")
    return steps


def exam(
    client: RolloutClient, tokenizer: transformers.PreTrainedTokenizerBase, model: peft.PeftModel, settings: Settings
) -> float:
    """The mean reward of the most likely answers to the questions that are held out."""
    _, asked = dataset(settings.seed)
    prompts = [prompt_ids(tokenizer, digits) for digits in asked]
    greedy = SamplingParams(temperature=0.0, max_tokens=settings.max_tokens)
    groups = sample(client, model, prompts, n=1, sampling=greedy, watch=Stopwatch())
    return sum(reward(g.samples[0].text, d) for d, g in zip(asked, groups, strict=True)) / len(asked)


# --- The run: a server of its own, and what is left at the end ---


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint with a chat template")
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"), help="where adapter, steps and picture go")
    for setting in fields(Settings):
        flag = "--" + setting.name.replace("_", "-")
        parser.add_argument(flag, type=type(setting.default), default=setting.default, help="default %(default)s")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    settings = Settings(**{setting.name: getattr(args, setting.name) for setting in fields(Settings)})
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer, model = load(args.model, settings)
    flags = ["--dtype", "float32", "--mem-util", "0.3"]  # float32 as the trainer, so that both agree to 1e-4
    with (
        (args.out / "server.log").open("w") as log,
        ServerProcess(args.server, args.model, flags, output=log) as server,
    ):
        server.client.sleep()
        before = exam(server.client, tokenizer, model, settings)
        steps = train(server.client, tokenizer, model, settings)
        after = exam(server.client, tokenizer, model, settings)
    model.save_pretrained(args.out / "adapter")
    (args.out / "steps.json").write_text(json.dumps([asdict(step) for step in steps], indent=1))
    draw(steps, args.out / "training.png", f"GRPO with LoRA on {Path(args.model).name}")
    print(summary(steps, before, after))
    print(f"adapter, steps.json and training.png are in {args.out}")


if __name__ == "__main__":
    main()
