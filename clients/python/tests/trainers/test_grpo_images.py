"""The loop of examples/grpo.py on images: what it learns to see, and that wrong pixels and positions are noticed."""

from __future__ import annotations

import sys

import peft
import pytest
import torch
from runs import EXACT

from rollout_client import RolloutClient
from serving import REPOSITORY, server

sys.path.append(str(REPOSITORY / "examples"))

import colours
import grpo
import tiny_vlm
from questions import encode, model_inputs, shuffle_images

SETTINGS = grpo.Settings(steps=70, rank=16)
QUESTIONS, HELD_OUT = colours.dataset(SETTINGS.seed)
CHANCE = 1 / len(colours.COLOURS)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint that names colours by chance."""
    directory = tmp_path_factory.mktemp("models") / "tiny-vlm"
    tiny_vlm.make(directory)
    return directory


@pytest.fixture(scope="module")
def client(binary, tiny):
    """Of a server that sleeps."""
    with server(binary, tiny, "--dtype", "float32") as client:
        client.sleep()
        yield client
        client.wake()


@pytest.fixture
def differences(client, tiny):
    """Trains some steps with a client; returns the largest difference of log-probabilities of each."""

    def train(client=client, steps=3):
        settings = grpo.Settings(steps=steps, questions=4)
        return [step.max_difference for step in grpo.train(client, *grpo.load(tiny, settings), QUESTIONS, settings)]

    return train


def greedy_reward(directory, questions, adapter=None):
    """The mean reward of the answers that transformers finds the most likely."""
    processor, model = grpo.load_base(directory)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    prompts = [encode(processor, question) for question in questions]
    tokens = torch.tensor([prompt.token_ids for prompt in prompts])
    inputs = model_inputs(prompts, tokens.shape[1])
    found = model.generate(
        input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs, do_sample=False, max_new_tokens=4
    )
    answers = processor.batch_decode(found[:, tokens.shape[1] :], skip_special_tokens=True)
    return sum(question.reward(answer) for question, answer in zip(questions, answers, strict=True)) / len(questions)


def test_what_it_learns_to_see_with_the_server_it_sees_without_it(client, tiny, tmp_path):
    processor, model = grpo.load(tiny, SETTINGS)
    steps = grpo.train(client, processor, model, QUESTIONS, SETTINGS)
    assert max(step.max_difference for step in steps) < EXACT
    model.save_pretrained(tmp_path)
    rewards = [step.reward for step in steps]
    assert greedy_reward(tiny, HELD_OUT) < CHANCE + 0.1
    assert greedy_reward(tiny, HELD_OUT, tmp_path) > 0.6, rewards
    assert greedy_reward(tiny, shuffle_images(HELD_OUT, 0), tmp_path) < CHANCE + 0.1, rewards


class OthersImages(RolloutClient):
    """A client with a fault: it sends each prompt the images of another."""

    def generate(self, prompts, *, images, **options):
        return super().generate(prompts, images=[*images[1:], images[0]], **options)


def test_pixels_of_another_picture_are_noticed(client, differences):
    with OthersImages(client.address) as faulty:
        assert min(differences(faulty)) > EXACT
    assert max(differences()) < EXACT


def test_positions_of_a_text_are_noticed(differences, monkeypatch):
    def without_types(prompts, width):
        return {name: x for name, x in model_inputs(prompts, width).items() if name != "mm_token_type_ids"}

    monkeypatch.setattr(grpo, "model_inputs", without_types)
    assert min(differences()) > EXACT


@pytest.mark.parametrize(("answer", "expected"), [("red", 1.0), (" red ", 1.0), ("blue", 0.0), ("red red", 0.0)])
def test_rewards_of_colours(answer, expected):
    assert colours.reward(answer, "red") == expected
