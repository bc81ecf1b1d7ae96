"""Prompts with images of random sizes against transformers: pixels of files, and log-probabilities."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from rollout_client import SamplingParams, processed_pixels
from serving import FIXTURES, server
from test_images import PAD

PROMPTS = 10
IMAGES = 20
"""Random images of each model, in its prompts."""
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_5_vl-tied"])
def test_random_images(pytestconfig, rng, name):
    processor = transformers.AutoImageProcessor.from_pretrained(FIXTURES / name)
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(
        FIXTURES / name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    pictures = [[picture(rng) for _ in range(IMAGES // PROMPTS)] for _ in range(PROMPTS)]
    pixels = [processed_pixels(of_prompt, processor) for of_prompt in pictures]
    prompts = [prompt(rng, of_prompt) for of_prompt in pixels]
    flags = ["--dtype", "float32", "--limit-mm-per-prompt", "image=2"]
    with server(pytestconfig.getoption("--server"), FIXTURES / name, *flags) as client:
        scores = client.score(prompts, images=pixels)
        files = [[png(image) for image in of_prompt] for of_prompt in pictures]
        outputs = client.generate(prompts, sampling=SamplingParams(max_tokens=1), images=files, return_text=False)
    for output, of_prompt in zip(outputs, pixels, strict=True):
        assert [image.hash for image in output.images] == [image.hash for image in of_prompt]
    for tokens, of_prompt, score in zip(prompts, pictures, scores, strict=True):
        expected = logprobs(model, tokens, processor(images=of_prompt, return_tensors="pt"))
        apart = np.abs(np.array(score.raw_logprobs[1:]) - expected).max()
        assert apart < TOLERANCE, (apart, [image.size for image in of_prompt])


def picture(rng):
    """A picture of random size, with large areas and noise."""
    width, height = rng.integers(20, 230, 2)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((int(width), int(height)), Image.Resampling.BILINEAR), np.int16)
    return Image.fromarray(np.clip(smooth + rng.integers(-20, 20, smooth.shape), 0, 255).astype(np.uint8))


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def prompt(rng, images):
    """Text before, between and after the images, whose placeholders are expanded."""
    parts = [rng.integers(3, 500, rng.integers(1, 8)) for _ in range(len(images) + 1)]
    tokens = [image.width * image.height // 28**2 for image in images]
    runs = [[PAD] * count for count in tokens]
    return [int(token) for pair in zip(parts, [*runs, []], strict=True) for part in pair for token in part]


@torch.no_grad()
def logprobs(model, tokens, processed):
    ids = torch.tensor([tokens])
    kinds = (ids == PAD).int()
    logits = model(input_ids=ids, mm_token_type_ids=kinds, use_cache=False, **processed).logits[0]
    return torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
