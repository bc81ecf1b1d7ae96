"""What a task asks: questions with rewards of their answers, and the tokens and images that the model gets of them.

A task is a module with `dataset(seed)`: the questions to train on, and those held out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence

from rollout_client import Pixels, processed_pixels


@dataclass(frozen=True)
class Question:
    """One item of a task."""

    chat: list[dict[str, Any]]
    """Messages; each part of the type `image` takes the next of the images."""
    reward: Callable[[str], float]
    """The reward of an answer's text, from 0 to 1."""
    images: tuple[Image.Image, ...] = ()


def shuffle_images(questions: Sequence[Question], seed: int) -> list[Question]:
    """The same questions with the images of others: an answer can be right only by chance."""
    images = [question.images for question in questions]
    random.Random(seed).shuffle(images)
    return [replace(question, images=others) for question, others in zip(questions, images, strict=True)]


@dataclass(frozen=True)
class Prompt:
    """A question as server and trainer get it."""

    token_ids: list[int]
    """With as many placeholders as the images have tokens."""
    images: list[Pixels] = field(default_factory=list)
    """For the server: the pixels that the trainer's processor made."""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """For the trainer's model, beside the tokens: `pixel_values` and others; empty without images."""


def encode(processor: Any, question: Question) -> Prompt:
    """A question's prompt. The trainer makes the tokens and pixels, so that it learns from those that the server saw.

    Args:
        processor: of a model of text and images, or the tokenizer of a model of text.
        question: the question.
    """
    text = processor.apply_chat_template(question.chat, add_generation_prompt=True, tokenize=False)
    if not question.images:
        return Prompt(processor(text, add_special_tokens=False)["input_ids"])
    encoded = processor(text=[text], images=list(question.images), add_special_tokens=False, return_tensors="pt")
    (token_ids,) = encoded["input_ids"].tolist()
    # Without the types of the tokens transformers computes the positions of a text, and does not say so.
    inputs = {name: encoded[name] for name in ("pixel_values", "image_grid_thw", "mm_token_type_ids")}
    return Prompt(token_ids, processed_pixels(question.images, processor), inputs)


def model_inputs(prompts: Sequence[Prompt], width: int) -> dict[str, torch.Tensor]:
    """What the trainer's model needs for these prompts beside their tokens, which are padded to a width."""
    if not prompts[0].inputs:
        return {}
    inputs = {name: torch.cat([p.inputs[name] for p in prompts]) for name in ("pixel_values", "image_grid_thw")}
    types = pad_sequence([p.inputs["mm_token_type_ids"][0] for p in prompts], batch_first=True)
    return inputs | {"mm_token_type_ids": torch.nn.functional.pad(types, (0, width - types.shape[1]))}
