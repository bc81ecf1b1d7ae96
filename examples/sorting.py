"""The task of the examples: put three digits in ascending order. An answer's reward is the share of right places."""

from __future__ import annotations

import itertools
import random
import re

HELD_OUT = 120  # questions that are never trained on


def dataset(seed: int) -> tuple[list[list[int]], list[list[int]]]:
    """All 720 ways to write three different digits, shuffled: those to train on, and those held out."""
    digits = [list(three) for three in itertools.permutations(range(10), 3)]
    random.Random(seed).shuffle(digits)
    return digits[HELD_OUT:], digits[:HELD_OUT]


def question(digits: list[int]) -> list[dict[str, str]]:
    """The chat that asks for these digits in ascending order."""
    return [{"role": "user", "content": f"Sort these numbers in ascending order: {' '.join(map(str, digits))}"}]


def reward(answer: str, digits: list[int]) -> float:
    """The share of places that have the right number; more numbers than asked for count as wrong ones."""
    numbers = [int(number) for number in re.findall(r"\d+", answer)]
    right = sum(a == b for a, b in zip(numbers, sorted(digits), strict=False))
    return right / max(len(digits), len(numbers))
