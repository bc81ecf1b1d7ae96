"""TRL's trainers with images in every prompt: the server computes on the pixels that the trainer scores with."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import trl
from runs import EXACT, IMAGE_RATE, assert_on_policy, config, logged
from tiny import length_reward, lora, picture, questions
from transformers import AutoProcessor
from trl import GRPOConfig, RLOOConfig

from models import write_vision_model
from rollout_client import InvalidArgument, RolloutClient, ServerProcess
from rollout_client.trl import GRPOTrainer, RLOOTrainer, rollout_func
from rollout_client.trl._sampler import Sampler
from rollout_client.trl.async_grpo import AsyncGRPOTrainer
from serving import SMALL_CACHE, assert_idle

IMAGE_TOKEN = 514
OUTSIDE_THE_DECODER = {
    "qwen2_5_vl": ["visual.blocks.", "visual.merger."],
    "internvl": ["vision_tower.", "multi_modal_projector."],
}
"""Parts of the names of each model's tower and projector."""
# This template supports tools, unlike that of Qwen2.5-VL. Both write images in the same way.
TOOL_TEMPLATE = Path(trl.__file__).with_name("chat_templates").joinpath("qwen3_vl.jinja").read_text()
ONE_MODEL = pytest.mark.parametrize("vision_model", ["qwen2_5_vl"], indirect=True)
SIZES = [[(100, 75), (60, 90)], [(40, 40)], [(150, 70), (40, 40)], [(30, 200)]]
"""Widths and heights of the pictures of some prompts. For InternVL3 a picture has from 1 to 13 tiles."""
CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"number": [1-9]\}\}\n</tool_call>'


@pytest.fixture(scope="module", params=["qwen2_5_vl", "internvl3"])
def vision_model(request, tmp_path_factory):
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model", request.param)


@pytest.fixture(scope="module")
def vision_server(binary, vision_model):
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--dtype", "float32", "--limit-mm-per-prompt", "image=3"]
    with ServerProcess(binary, vision_model, flags) as server:
        yield server


@pytest.fixture(scope="module")
def model(vision_model):
    """The path as trainers take it."""
    return str(vision_model)


@pytest.fixture
def server(vision_server):
    """The server that the trainers share, at its checkpoint; each leaves it idle."""
    client = vision_server.client
    client.sleep(2)
    client.wake(reload=True)
    yield vision_server
    assert_idle(client)


@pytest.fixture(scope="module")
def processor(model):
    return AutoProcessor.from_pretrained(model)


def test_grpo(server, model, tmp_path):
    settings = config(GRPOConfig, server, tmp_path, learning_rate=IMAGE_RATE)
    trainer = GRPOTrainer(model, length_reward, settings, questions(*SIZES))
    trainer.train()
    assert_on_policy(trainer)


def test_grpo_of_an_adapter_on_the_tower_too(server, model, tmp_path):
    settings = config(GRPOConfig, server, tmp_path, learning_rate=IMAGE_RATE)
    trainer = GRPOTrainer(model, length_reward, settings, questions(*SIZES), peft_config=lora())
    trainer.train()
    assert_on_policy(trainer)
    trained = [name for name, part in trainer.model.named_parameters() if "lora_B" in name and part.any()]
    for part in OUTSIDE_THE_DECODER[trainer.model.config.model_type]:
        assert any(part in name for name in trained), part


def test_rloo(server, model, tmp_path, monkeypatch):
    """The trainer reports no difference, so that each sample is scored under the policy that drew it."""
    gaps, sample = [], Sampler.sample

    def scored(sampler, prompts, n, sampling, images):
        outputs = sample(sampler, prompts, n, sampling, images)
        assert len({tuple(prompt) for prompt in prompts}) == 1 and len({pixels[0].rgb for pixels in images}) == 2
        for prompt, pixels, output in zip(prompts, images, outputs, strict=True):
            for one in output.samples:
                score = sampler.client.score([prompt + one.token_ids], images=[pixels])[0]
                gaps.append(np.abs(np.float32(score.raw_logprobs[len(prompt) :]) - one.raw_logprobs).max())
        return outputs

    monkeypatch.setattr(Sampler, "sample", scored)
    settings = config(RLOOConfig, server, tmp_path, learning_rate=IMAGE_RATE, max_steps=1)
    RLOOTrainer(model, length_reward, settings, questions([(100, 75)])).train()
    assert len(gaps) == 8 and max(gaps) == 0


def test_pictures_of_another_prompt_show(server, model, tmp_path, monkeypatch):
    features = Sampler.image_features
    monkeypatch.setattr(Sampler, "image_features", lambda sampler, images: features(sampler, images)[::-1])
    settings = config(GRPOConfig, server, tmp_path, learning_rate=IMAGE_RATE, max_steps=1)
    trainer = GRPOTrainer(model, length_reward, settings, questions([(100, 75)]))
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) > 100 * EXACT


def test_a_rollout_func_tells_prompts_apart_by_their_pictures(server, model, tmp_path):
    settings = config(GRPOConfig, server, tmp_path, learning_rate=IMAGE_RATE, max_steps=2)
    roll_out = rollout_func(server.address)
    trainer = GRPOTrainer(model, length_reward, settings, questions([(100, 75)]), rollout_func=roll_out)
    trainer.train()
    assert_on_policy(trainer, 2)


@ONE_MODEL  # TRL 1.16 fails to score images of tools with InternVL3: docs/trl.md
def test_images_of_tools(server, vision_model, tmp_path, monkeypatch):
    model = tmp_path / "model"
    shutil.copytree(vision_model, model)
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    turns, generate = [], RolloutClient.generate

    def spy(client, prompts, n, sampling, **options):
        turns.append((prompts, options["images"]))
        outputs = generate(client, prompts, n, sampling, **options)
        # The trainer computes no log-probabilities of what the regular expression allows.
        return [
            dataclasses.replace(o, samples=[dataclasses.replace(s, logprobs=s.raw_logprobs) for s in o.samples])
            for o in outputs
        ]

    def look(number: int) -> list:
        """Shows a picture.

        Args:
            number: which one.

        Returns:
            The picture.
        """
        return [{"type": "image", "image": picture(number, 60, 90)}, {"type": "text", "text": "look"}]

    monkeypatch.setattr(RolloutClient, "generate", spy)
    settings = config(
        GRPOConfig,
        server,
        tmp_path,
        max_steps=1,
        max_completion_length=300,
        max_tool_calling_iterations=1,
        vllm_structured_outputs_regex=CALL,
    )

    def reward(completions, **columns):
        return [float(sum(map(ord, str(completion)))) for completion in completions]

    trainer = GRPOTrainer(str(model), reward, settings, questions([(100, 75)]), tools=[look])
    trainer.train()
    assert_on_policy(trainer, 1)
    assert logged(trainer, "tools/failure_frequency") == [0]
    (_, first), (prompts, second) = turns
    assert [len(images) for images in first] == [1, 1]
    assert [len(images) for images in second] == [2] * 8
    for prompt, images in zip(prompts, second, strict=True):
        assert prompt.count(IMAGE_TOKEN) == sum(image.width * image.height for image in images) // 28**2


@ONE_MODEL
def test_asynchronous_training_has_no_images(model):
    with pytest.raises(
        InvalidArgument, match=r"train_dataset: column 'images': AsyncGRPOTrainer of TRL trains on text"
    ):
        AsyncGRPOTrainer(model, length_reward, train_dataset=questions([(100, 75)]), client="127.0.0.1:1")
