"""The loop of examples/grpo.py on a model with experts: what its experts learn, and that a wrong replay is noticed."""

from __future__ import annotations

import sys
from dataclasses import replace

import peft
import pytest
import torch
from runs import EXACT

from rollout_client import RolloutClient, Routing
from serving import REPOSITORY, server

sys.path.append(str(REPOSITORY / "examples"))

import grpo
import sorting
import tiny_moe
from questions import encode

SETTINGS = grpo.Settings(steps=20)
EXPERTS = 8
QUESTIONS, HELD_OUT = sorting.dataset(SETTINGS.seed)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint that sorts by chance."""
    directory = tmp_path_factory.mktemp("models") / "tiny-moe"
    tiny_moe.make(directory, steps=100)
    return directory


@pytest.fixture(scope="module")
def client(binary, tiny):
    """Of a server that sleeps."""
    with server(binary, tiny, "--dtype", "float32", "--return-routing") as client:
        client.sleep()
        yield client
        client.wake()


def greedy_reward(directory, adapter=None):
    """The mean reward of the answers to held-out questions that transformers finds the most likely."""
    tokenizer, model = grpo.load_base(directory)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    prompts = torch.tensor([encode(tokenizer, question).token_ids for question in HELD_OUT])
    found = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=SETTINGS.max_tokens
    )
    answers = tokenizer.batch_decode(found[:, prompts.shape[1] :], skip_special_tokens=True)
    return sum(question.reward(answer) for question, answer in zip(HELD_OUT, answers, strict=True)) / len(HELD_OUT)


def test_what_experts_learn_with_the_server_they_know_without_it(client, tiny, tmp_path):
    tokenizer, model = grpo.load(tiny, SETTINGS)
    steps = grpo.train(client, tokenizer, model, QUESTIONS, SETTINGS)
    assert max(step.max_difference for step in steps) < EXACT
    learnt = {name: p.abs().max().item() for name, p in model.named_parameters() if "mlp" in name and "lora_B" in name}
    assert len(learnt) == 6 and min(learnt.values()) > 0, learnt  # of two layers: two tensors of experts, a router
    model.save_pretrained(tmp_path)
    before, after = greedy_reward(tiny), greedy_reward(tiny, tmp_path)
    assert after > before + 0.2, (before, after, [step.reward for step in steps])


class OthersExperts(RolloutClient):
    """A client with a fault: it returns other experts than the tokens took."""

    def generate(self, prompts, **options):
        groups = super().generate(prompts, **options)
        return [replace(group, routing=Routing(0, (group.routing.experts + 1) % EXPERTS)) for group in groups]


def test_a_replay_of_other_experts_is_noticed(client, tiny):
    settings = grpo.Settings(steps=2, questions=4)
    with OthersExperts(client.address) as faulty:
        steps = grpo.train(faulty, *grpo.load(tiny, settings), QUESTIONS, settings)
    assert min(step.max_difference for step in steps) > EXACT
