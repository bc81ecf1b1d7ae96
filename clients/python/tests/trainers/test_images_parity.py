"""Prompts with images of random sizes against transformers: pixels of files, and log-probabilities."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from rollout_client import SamplingParams, processed_pixels
from serving import FIXTURES, server

sys.path.append(str(FIXTURES))

import make_internvl_fixtures as internvl

PROMPTS = 10
IMAGES = 20
"""Random images of each model, in its prompts."""
SIDE = 28
TOLERANCE = 1e-4
FLOAT32 = {"dtype": torch.float32, "attn_implementation": "eager"}


def qwen(directory):
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(directory, **FLOAT32)
    return transformers.AutoImageProcessor.from_pretrained(directory), model


def tiles(directory):
    model = transformers.InternVLForConditionalGeneration.from_pretrained(directory, **FLOAT32)
    return transformers.AutoImageProcessor.from_pretrained(directory, crop_to_patches=True), model


def own_tiles(directory):
    """Of InternVL's own layout, whose classes transformers lacks: its weights in transformers' classes."""
    config = internvl.config_of(directory.name)
    model = transformers.InternVLForConditionalGeneration._from_config(config, **FLOAT32)
    stored = load_file(directory / "model.safetensors")
    model.load_state_dict({name: internvl.stored_tensor(name, stored).float() for name in model.state_dict()})
    return internvl.image_processor(config.vision_config.image_size[0]), model


LOAD = {"qwen2_5_vl": qwen, "qwen2_5_vl-tied": qwen, "internvl3": tiles, "internvl3-chat": own_tiles}


@pytest.mark.parametrize("name", LOAD)
def test_random_images(pytestconfig, rng, name):
    processor, model = LOAD[name](FIXTURES / name)
    pictures = [[picture(rng) for _ in range(IMAGES // PROMPTS)] for _ in range(PROMPTS)]
    pixels = [processed_pixels(of_prompt, processor) for of_prompt in pictures]
    prompts = [prompt(rng, of_prompt, model.config.image_token_id) for of_prompt in pixels]
    flags = ["--dtype", "float32", "--limit-mm-per-prompt", "image=2"]
    with server(pytestconfig.getoption("--server"), FIXTURES / name, *flags) as client:
        scores = client.score(prompts, images=pixels)
        files = [[png(image) for image in of_prompt] for of_prompt in pictures]
        outputs = client.generate(prompts, sampling=SamplingParams(max_tokens=1), images=files, return_text=False)
    for output, of_prompt in zip(outputs, pixels, strict=True):
        assert [image.hash for image in output.images] == [image.hash for image in of_prompt]
    for tokens, of_prompt, score in zip(prompts, pictures, scores, strict=True):
        expected = logprobs(model.eval(), tokens, processor(images=of_prompt, return_tensors="pt"))
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


def prompt(rng, images, placeholder):
    """Text before, between and after the images, whose placeholders are expanded."""
    parts = [rng.integers(3, 500, rng.integers(1, 8)) for _ in range(len(images) + 1)]
    tokens = [image.tiles * image.width * image.height // SIDE**2 for image in images]
    runs = [[placeholder] * count for count in tokens]
    return [int(token) for pair in zip(parts, [*runs, []], strict=True) for part in pair for token in part]


@torch.no_grad()
def logprobs(model, tokens, processed):
    ids = torch.tensor([tokens])
    inputs = {"pixel_values": processed["pixel_values"]}
    if "image_grid_thw" in processed:
        kinds = (ids == model.config.image_token_id).int()
        inputs |= {"image_grid_thw": processed["image_grid_thw"], "mm_token_type_ids": kinds}
    logits = model(input_ids=ids, use_cache=False, **inputs).logits[0]
    return torch.log_softmax(logits[:-1], -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
