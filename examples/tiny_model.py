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
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sorting import question

PAD, START, END = SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['content'] + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
BATCH = 128
LEARNING_RATE = 4e-3


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE that knows the words of the questions; each digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([question([0])[0]["content"]] * 2, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
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


def example(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[list[int], int]:
    """Tokens of a question with an answer in random order, and how many of them are the question's."""
    digits = rng.sample(range(10), 3)
    prompt = tokenizer.apply_chat_template(question(digits), add_generation_prompt=True)["input_ids"]
    answer = " ".join(map(str, rng.sample(digits, 3)))
    return prompt + tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id], len(prompt)


def pretrain(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, rng: random.Random) -> float:
    """Trains on answers in random order; returns the last loss per token (none is below ln(6) / 6 = 0.299)."""
    examples = [example(tokenizer, rng) for _ in range(steps * BATCH // 8)]
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=0.1)
    bar = tqdm(range(steps), desc="tiny model", unit="step")
    for _ in bar:
        batch = rng.sample(examples, BATCH)
        tokens, start = torch.tensor([ids for ids, _ in batch]), batch[0][1]
        logits = model(tokens[:, :-1]).logits[:, start - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, start:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()


def make(directory: Path, steps: int = 400, seed: int = 0) -> None:
    """Writes the checkpoint, the same one for the same seed on the same machine."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    pretrain(model, tokenizer, steps, random.Random(seed))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where the checkpoint goes")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.directory, args.steps, args.seed)


if __name__ == "__main__":
    main()
