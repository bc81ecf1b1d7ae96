"""A task of text: put three digits in ascending order. An answer's reward is the share of right places."""

from __future__ import annotations

import itertools
import random
import re
from functools import partial

from questions import Question

HELD_OUT = 120  # questions that are never trained on


def dataset(seed: int) -> tuple[list[Question], list[Question]]:
    """All 720 ways to write three different digits, shuffled: those to train on, and those held out."""
    questions = [question(list(three)) for three in itertools.permutations(range(10), 3)]
    random.Random(seed).shuffle(questions)
    return questions[HELD_OUT:], questions[:HELD_OUT]


def question(digits: list[int]) -> Question:
    """Asks for these digits in ascending order."""
    content = f"Sort these numbers in ascending order: {' '.join(map(str, digits))}"
    return Question([{"role": "user", "content": content}], partial(reward, digits=digits))


def reward(answer: str, digits: list[int]) -> float:
    """The share of places that have the right number; more numbers than asked for count as wrong ones."""
    numbers = [int(number) for number in re.findall(r"\d+", answer)]
    right = sum(a == b for a, b in zip(numbers, sorted(digits), strict=False))
    return right / max(len(digits), len(numbers))
