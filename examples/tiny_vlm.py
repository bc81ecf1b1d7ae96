#!/usr/bin/env python3
"""Makes a tiny Qwen2.5-VL that answers "What colour is the square?" with any of the colours, whatever the picture.

    python examples/tiny_vlm.py .models/tiny-vlm

It is what `make train MODEL=tiny-vlm` starts from: random weights, trained for some seconds on every picture with
every colour as its answer, so that it has the format right and the colour by chance. The directory is an ordinary
Hugging Face checkpoint in float32, with a processor.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import torch
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)

from colours import COLOURS, QUESTION, SIDE, dataset
from questions import encode
from tiny_model import SPECIALS, make_tokenizer, pretrain, run

VISION_START, VISION_END, IMAGE, VIDEO = VISION_SPECIALS = [
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' }}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{{ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
)
BATCH = 32
EXAMPLES = 256


def make_processor() -> Qwen2_5_VLProcessor:
    """A processor that leaves the size of the task's pictures as it is."""
    tokenizer = make_tokenizer([QUESTION, *COLOURS], [*SPECIALS, *VISION_SPECIALS], CHAT_TEMPLATE)
    pictures = Qwen2VLImageProcessor(min_pixels=SIDE**2, max_pixels=SIDE**2)
    return Qwen2_5_VLProcessor(pictures, tokenizer, Qwen2VLVideoProcessor(), chat_template=CHAT_TEMPLATE)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Random weights, spread more widely than usual, as those of the tiny model of text."""
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    tower = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.1,
    }
    image, video, start, end = tokenizer.convert_tokens_to_ids([IMAGE, VIDEO, VISION_START, VISION_END])
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def make(directory: Path, steps: int = 60, seed: int = 0) -> None:
    """Writes the checkpoint, the same one for the same seed on the same machine."""
    torch.manual_seed(seed)
    processor = make_processor()
    tokenizer = processor.tokenizer
    model = make_model(tokenizer)
    prompts = [encode(processor, question) for question in dataset(seed)[0][:EXAMPLES]]
    answers = [[*tokenizer(colour)["input_ids"], tokenizer.eos_token_id] for colour in COLOURS]
    # Each picture with each colour: nothing about the right one can be learnt, and no loss is below ln(6) / 2 = 0.896.
    examples = list(itertools.product(prompts, answers))
    pretrain(model, examples, steps=steps, batch=BATCH, rng=random.Random(seed))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    processor.save_pretrained(directory)


if __name__ == "__main__":
    run(make, __doc__, steps=60)
