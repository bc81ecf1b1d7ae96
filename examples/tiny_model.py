#!/usr/bin/env python3
"""Makes a tiny model that answers "Sort these numbers in ascending order: 7 3 9" with the three numbers in any order.

    python examples/tiny_model.py .models/tiny

It is what examples/grpo.py starts from where no real model is given: a Llama of two layers, trained for some ten
seconds on random permutations, so that it has the format right and the order by chance. The directory is an ordinary
Hugging Face checkpoint in float32: configuration, weights, tokenizer and chat template.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from questions import Prompt, encode, model_inputs
from sorting import question

PAD, START, END = SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
BATCH = 128
LEARNING_RATE = 4e-3


def make_tokenizer(texts: Sequence[str], specials: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows the words of these texts; each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(specials), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*texts] * 2, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = chat_template
    return fast


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Random weights, spread more widely than usual: so small a model finds out sooner how to copy."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


Example = tuple[Prompt, list[int]]
"""A prompt, and the tokens of an answer to it; all examples of a model have the same lengths."""


def example(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> Example:
    """A question with an answer in random order."""
    digits = rng.sample(range(10), 3)
    answer = " ".join(map(str, rng.sample(digits, 3)))
    return encode(tokenizer, question(digits)), [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]


def pretrain(
    model: torch.nn.Module, examples: Sequence[Example], *, steps: int, batch: int, rng: random.Random
) -> float:
    """Trains on the answers; returns the last loss per token."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    bar = tqdm(range(steps), desc="tiny model", unit="step")
    for _ in bar:
        prompts, answers = zip(*rng.sample(examples, batch), strict=True)
        tokens = torch.tensor([p.token_ids + answer[:-1] for p, answer in zip(prompts, answers, strict=True)])
        targets = torch.tensor(answers)
        inputs = model_inputs(prompts, tokens.shape[1])
        logits = model(tokens, **inputs, logits_to_keep=targets.shape[1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()


def make(
    directory: Path,
    steps: int = 400,
    seed: int = 0,
    make_model: Callable[[PreTrainedTokenizerFast], PreTrainedModel] = make_model,
) -> None:
    """Writes the checkpoint, the same one for the same seed on the same machine."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer([question([0]).chat[0]["content"]], SPECIALS, CHAT_TEMPLATE)
    model = make_model(tokenizer)
    rng = random.Random(seed)
    examples = [example(tokenizer, rng) for _ in range(steps * BATCH // 8)]
    pretrain(model, examples, steps=steps, batch=BATCH, rng=rng)  # no loss is below ln(6) / 6 = 0.299
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def run(make: Callable[[Path, int, int], None], description: str, steps: int) -> None:
    """The command line of a program that makes a model."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.directory, args.steps, args.seed)


if __name__ == "__main__":
    run(make, __doc__, steps=400)
