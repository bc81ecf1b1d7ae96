"""verl's own trainer with one setting changed, on the CPU (training.py)."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image
from training import STEPS, TEACHER, TWO_RANKS, ask, assert_on_policy, questions

from models import write_vision_model


def test_verls_trainer_runs_and_agrees_with_what_the_server_says(binary, tmp_path):
    """Its loss has a divergence from a teacher that a server of its own holds."""
    steps = assert_on_policy(binary, tmp_path, questions(), TWO_RANKS | TEACHER)
    differences = [step["actor/distillation/abs_loss"] for step in steps]
    assert differences[0] < 1e-4 and differences[-1] > 1e-3, differences


def test_verls_trainer_and_the_server_see_the_same_images(binary, tmp_path, rng):
    """Prompts of one and of two images, which differ by them alone."""
    counts = [1 + i % 2 for i in range(4 * STEPS)]
    prompts = [{"prompt": ask("<image>" * n + "what is it"), "images": [png(rng) for _ in range(n)]} for n in counts]
    path = write_vision_model(tmp_path / "vision")
    model = {"actor_rollout_ref.model.path": path, "+actor_rollout_ref.rollout.limit_images": 2}
    assert_on_policy(binary, tmp_path, prompts, model)


def png(rng):
    """A file of random size, as verl's data sets have it."""
    height, width = rng.integers(30, 90, 2)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue()}
