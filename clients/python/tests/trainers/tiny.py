"""A tiny random Qwen2 with a tokenizer and a chat template, which trains in milliseconds, and prompts to train on."""

from __future__ import annotations

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXTS = ["hello world what is two plus two", "the answer is four"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(chat_template=CHAT_TEMPLATE):
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 10, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = chat_template
    return fast


def make_model(path, chat_template=CHAT_TEMPLATE):
    """Saves the model and its tokenizer in a directory; the same each time."""
    tokenizer = make_tokenizer(chat_template)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def lora():
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")


def prompts(count=16):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"hello world {i}"}]} for i in range(count)])


def picture(number, width=100, height=75):
    """One that the processor resizes; other numbers have other colours."""
    y, x = np.mgrid[:height, :width]
    waves = [127 + 120 * np.sin((x + number * y) / (3 + channel + number % 5)) for channel in range(3)]
    return Image.fromarray(np.stack(waves, -1).astype(np.uint8))


def questions(*sizes):
    """Prompts of the same text, each with pictures of one of the lists of sizes; all pictures differ."""
    prompt = [{"role": "user", "content": "what is it"}]
    rows = [sizes[row % len(sizes)] for row in range(16)]
    pictures = [[picture(2 * row + i, *size) for i, size in enumerate(of_row)] for row, of_row in enumerate(rows)]
    return Dataset.from_list([{"prompt": prompt, "images": of_row} for of_row in pictures])


def length_reward(completions, **columns):
    """Varies within any group of a random model."""
    return [float(len(completion[0]["content"])) for completion in completions]
