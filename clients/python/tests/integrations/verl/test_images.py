"""Prompts with images, as verl's agent loops send them, against transformers' results with verl's own processor."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from replicas import SAMPLING, in_time, rollout_config, server_alone
from verl.utils import hf_processor

from models import write_vision_model
from rollout_client import InvalidArgument

SIDE = 28
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


def picture(rng, width, height):
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@torch.no_grad()
def difference(model, inputs, output):
    """The largest difference of an output's log-probabilities from those that transformers gives its tokens."""
    answer = torch.tensor([output.token_ids])
    ids = torch.cat([inputs["input_ids"], answer], 1)
    kinds = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    pixels = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **pixels).logits[0, -answer.shape[1] - 1 : -1]
    expected = (logits / SAMPLING["temperature"]).log_softmax(-1).gather(-1, answer[0, :, None])[:, 0]
    return (torch.tensor(output.log_probs) - expected).abs().max().item()


def test_log_probabilities_are_those_of_the_processors_pixels(binary, model, rng):
    processor = hf_processor(model)
    images = [picture(rng, 100, 75), picture(rng, 150, 90)]
    cases = []
    smaller = {"size": {"shortest_edge": 4 * SIDE**2, "longest_edge": 6 * SIDE**2}}
    for options in ({}, {"images_kwargs": smaller, "fps": 2}):
        inputs = processor(text=[f"{IMAGE}what{IMAGE}is it"], images=images, return_tensors="pt", **options)
        cases.append((options, inputs))
    assert cases[0][1]["input_ids"].shape > cases[1][1]["input_ids"].shape, "the options make images smaller"
    server = server_alone(rollout_config(binary, limit_images=2), path=model)

    async def sampled():
        await server.launch_server()
        try:
            with pytest.raises(InvalidArgument, match=r"images\[2\].pixels: 4 images are more than 2"):
                await server.generate([5], {}, "many", image_data=images * 2)
            with pytest.raises(InvalidArgument, match="video_data: rollout-server takes token ids and images only"):
                await server.generate([5], {}, "video", video_data=images)
            requests = [
                server.generate(
                    inputs["input_ids"][0].tolist(),
                    dict(SAMPLING),
                    f"{case}-{sample}",
                    image_data=images,
                    mm_processor_kwargs=options,
                    video_data=None,
                )
                for case, (options, inputs) in enumerate(cases)
                for sample in range(3)
            ]
            return await asyncio.gather(*requests)
        finally:
            server._process.stop()

    outputs = in_time(sampled())
    trained = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    for case, (_, inputs) in enumerate(cases):
        group = outputs[3 * case : 3 * case + 3]
        assert max(difference(trained, inputs, output) for output in group) < 1e-4
        assert len({tuple(output.token_ids) for output in group}) == 3
        others = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
        assert difference(trained, others, group[0]) > 0.01, "pixels change them"
