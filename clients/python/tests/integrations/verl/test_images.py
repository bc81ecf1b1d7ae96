"""Prompts with images, as verl's agent loops send them, against transformers' results with the trainer's processor."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from replicas import SAMPLING, in_time, rollout_config, server_alone
from verl.utils import hf_processor

import rollout_client.verl.server
from models import write_vision_model
from rollout_client import InvalidArgument

SIDE = 28


class Family(NamedTuple):
    """A kind of models with images."""

    name: str
    """Of the fixture."""
    model: str
    """Its class in transformers."""
    image: str
    """An image in the text of a prompt."""
    smaller: dict
    """Options of the image processor that make images smaller."""
    processor: Callable
    """Makes the processor: verl's function, or transformers' where that has none for the model."""


QWEN2_5_VL = Family(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    "<|vision_start|><|image_pad|><|vision_end|>",
    {"size": {"shortest_edge": 4 * SIDE**2, "longest_edge": 6 * SIDE**2}},
    hf_processor,
)
INTERNVL3 = Family(
    "internvl3",
    "InternVLForConditionalGeneration",
    "<IMG_CONTEXT>",
    {"max_patches": 3},
    transformers.AutoProcessor.from_pretrained,
)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes a model: `write(name)`."""
    return lambda name: write_vision_model(tmp_path_factory.mktemp("vision") / "model", name)


def picture(rng, width, height):
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@torch.no_grad()
def difference(model, inputs, output):
    """The largest difference of an output's log-probabilities from those that transformers gives its tokens."""
    answer = torch.tensor([output.token_ids])
    ids = torch.cat([inputs["input_ids"], answer], 1)
    further = {name: inputs[name] for name in ("pixel_values", "image_grid_thw") if name in inputs}
    if "mm_token_type_ids" in inputs:
        further["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], 1)
    logits = model(input_ids=ids, **further).logits[0, -answer.shape[1] - 1 : -1]
    expected = (logits / SAMPLING["temperature"]).log_softmax(-1).gather(-1, answer[0, :, None])[:, 0]
    return (torch.tensor(output.log_probs) - expected).abs().max().item()


@pytest.mark.parametrize("family", [QWEN2_5_VL, INTERNVL3], ids=lambda family: family.name)
def test_log_probabilities_are_those_of_the_processors_pixels(binary, write, rng, monkeypatch, family):
    model = write(family.name)
    monkeypatch.setattr(rollout_client.verl.server, "hf_processor", family.processor)
    processor = family.processor(model)
    images = [picture(rng, 100, 75), picture(rng, 150, 90)]
    cases = []
    for options in ({}, {"images_kwargs": family.smaller, "fps": 2}):
        text = f"{family.image}what{family.image}is it"
        inputs = processor(text=[text], images=images, return_tensors="pt", **options)
        cases.append((options, inputs))
    assert cases[0][1]["input_ids"].shape > cases[1][1]["input_ids"].shape, "the options make images smaller"
    server = server_alone(rollout_config(binary, limit_images=2, tensor_model_parallel_size=2), path=model)

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
    trained = getattr(transformers, family.model).from_pretrained(model, dtype=torch.float32)
    for case, (_, inputs) in enumerate(cases):
        group = outputs[3 * case : 3 * case + 3]
        assert max(difference(trained, inputs, output) for output in group) < 1e-4
        assert len({tuple(output.token_ids) for output in group}) == 3
        others = {**inputs, "pixel_values": inputs["pixel_values"].flip(0)}
        assert difference(trained, others, group[0]) > 0.01, "pixels change them"


def test_images_of_a_model_that_verl_has_no_processor_for_are_rejected(binary, write, rng):
    model = write(INTERNVL3.name)
    assert hf_processor(model) is None
    server = server_alone(rollout_config(binary), path=model)

    async def sampled():
        await server.launch_server()
        try:
            with pytest.raises(InvalidArgument, match="takes no images, or verl has no processor for it"):
                await server.generate([5], {}, "image", image_data=[picture(rng, 100, 75)])
            return await server.generate([5], dict(SAMPLING), "text")
        finally:
            server._process.stop()

    output = in_time(sampled())
    trained = transformers.InternVLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    assert difference(trained, {"input_ids": torch.tensor([[5]])}, output) < 1e-4
