"""Images as TRL's own client sends them to vLLM, unmodified: rendered first, then beside the trainer's token ids."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import requests
from PIL import Image
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration

from rollout_client import RolloutClient, SamplingParams, ServerProcess
from serving import FIXTURES, SMALL_CACHE
from test_images import PAD

SAMPLING = {"n": 2, "temperature": 1.0, "max_tokens": 5, "logprobs": 0, "generation_kwargs": {"seed": 3}}


@pytest.fixture
def served(pytestconfig):
    flags = [*SMALL_CACHE, "--limit-mm-per-prompt", "image=2"]
    with ServerProcess(pytestconfig.getoption("--server"), FIXTURES / "qwen2_5_vl", flags) as server:
        yield server


def test_rendered_images_have_the_samples_of_exact_pixels(served, rng):
    # Its constructor needs the package vllm.
    client = VLLMClient.__new__(VLLMClient)
    client.session, client.base_url = requests.Session(), f"http://{served.http_address}"
    client.model = str(FIXTURES / "qwen2_5_vl")
    arrays = [[picture(rng, 2, 3), picture(rng, 4, 1)], [picture(rng, 2, 2)]]
    features = client.image_features([[Image.fromarray(array) for array in of_prompt] for of_prompt in arrays])
    trainer = SimpleNamespace(processing_class=SimpleNamespace(image_token_id=PAD))
    prompts = [[5, *[PAD] * 6, 7, *[PAD] * 4, 8], [*[PAD] * 4, 9]]
    placed = [VLLMGeneration._place_features(trainer, *given) for given in zip(features, prompts, strict=True)]
    output = client.generate(prompts, placed, **SAMPLING)
    assert output["prompt_ids"] == prompts
    with RolloutClient(served.address) as ours:
        sampling = SamplingParams(max_tokens=5, seed=3)
        alone = [
            ours.generate([prompt], n=2, sampling=sampling, images=[images], return_text=False)[0]
            for prompt, images in zip(prompts, arrays, strict=True)
        ]
    samples = [sample for of_prompt in alone for sample in of_prompt.samples]
    assert output["completion_ids"] == [sample.token_ids for sample in samples]
    for given, sample in zip(output["logprobs"], samples, strict=True):
        assert np.concatenate(given) == pytest.approx(np.array(sample.logprobs), abs=1e-6)


def picture(rng, rows, columns):
    return rng.integers(0, 256, (28 * rows, 28 * columns, 3), dtype=np.uint8)
