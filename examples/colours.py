"""A task with images: name the colour of the square in a picture. The reward is 1 for that word alone, else 0."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
from PIL import Image

from questions import Question

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (230, 210, 50),
    "black": (20, 20, 20),
    "white": (240, 240, 240),
}
QUESTION = "What colour is the square?"
TRAINED, HELD_OUT = 480, 240  # questions
SIDE = 56  # pixels of a picture: two tokens of Qwen2.5-VL each way
BACKGROUND = 128.0
NOISE = 12  # standard deviation of each pixel


def dataset(seed: int) -> tuple[list[Question], list[Question]]:
    """Questions to train on, and those held out; each colour is as frequent as the others."""
    rng = np.random.default_rng(seed)
    colours = list(COLOURS) * ((TRAINED + HELD_OUT) // len(COLOURS))
    random.Random(seed).shuffle(colours)
    questions = [question(draw(colour, rng), colour) for colour in colours]
    return questions[:TRAINED], questions[TRAINED:]


def draw(colour: str, rng: np.random.Generator) -> Image.Image:
    """A square of this colour, of any size and place, before grey, all with some noise."""
    picture = np.full((SIDE, SIDE, 3), BACKGROUND)
    side = rng.integers(SIDE // 3, 2 * SIDE // 3)
    top, left = rng.integers(0, SIDE - side, 2)
    picture[top : top + side, left : left + side] = COLOURS[colour]
    picture += NOISE * rng.standard_normal(picture.shape)
    return Image.fromarray(picture.clip(0, 255).astype(np.uint8))


def question(picture: Image.Image, colour: str) -> Question:
    """Asks for the colour of the square in a picture."""
    content = [{"type": "image"}, {"type": "text", "text": QUESTION}]
    return Question([{"role": "user", "content": content}], partial(reward, colour=colour), (picture,))


def reward(answer: str, colour: str) -> float:
    """Whether the answer is the colour's name alone."""
    return float(answer.strip() == colour)
