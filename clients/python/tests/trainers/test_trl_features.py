"""Images as TRL's own client sends them to vLLM, unmodified: rendered first, then beside the trainer's token ids."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import requests
from PIL import Image
from transformers import AutoImageProcessor
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from rollout_client import RolloutClient, SamplingParams, ServerProcess, processed_pixels
from serving import FIXTURES, SMALL_CACHE
from test_images import PAD, SIDE

SAMPLING = {"n": 2, "temperature": 1.0, "max_tokens": 5, "logprobs": 0, "generation_kwargs": {"seed": 3}}


@pytest.fixture(params=["qwen2_5_vl", "internvl3"])
def model(request):
    return FIXTURES / request.param


@pytest.fixture
def served(pytestconfig, model):
    flags = [*SMALL_CACHE, "--limit-mm-per-prompt", "image=2"]
    with ServerProcess(pytestconfig.getoption("--server"), model, flags) as server:
        yield server


def test_rendered_images_have_the_samples_of_exact_pixels(served, model, rng):
    # Its constructor needs the package vllm.
    client = VLLMClient.__new__(VLLMClient)
    client.session, client.base_url = requests.Session(), f"http://{served.http_address}"
    client.model = str(model)
    pictures = [[picture(rng, 60, 90), picture(rng, 110, 30)], [picture(rng, 50, 50)]]
    features = client.image_features(pictures)
    processor = AutoImageProcessor.from_pretrained(model)
    pixels = [processed_pixels(of_prompt, processor) for of_prompt in pictures]
    (first, second), (third,) = [[[PAD] * tokens(image) for image in of_prompt] for of_prompt in pixels]
    prompts = [[5, *first, 7, *second, 8], [*third, 9]]
    trainer = SimpleNamespace(processing_class=SimpleNamespace(image_token_id=PAD))
    placed = [VLLMGeneration._place_features(trainer, *given) for given in zip(features, prompts, strict=True)]
    output = client.generate(prompts, placed, **SAMPLING)
    assert output["prompt_ids"] == prompts
    with RolloutClient(served.address) as ours:
        sampling = SamplingParams(max_tokens=5, seed=3)
        alone = [
            ours.generate([prompt], n=2, sampling=sampling, images=[images], return_text=False)[0]
            for prompt, images in zip(prompts, pixels, strict=True)
        ]
    samples = [sample for of_prompt in alone for sample in of_prompt.samples]
    assert output["completion_ids"] == [sample.token_ids for sample in samples]
    for given, sample in zip(output["logprobs"], samples, strict=True):
        assert np.concatenate(given) == pytest.approx(np.array(sample.logprobs), abs=1e-6)


def picture(rng, width, height):
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def tokens(pixels):
    return pixels.tiles * pixels.width * pixels.height // SIDE**2
