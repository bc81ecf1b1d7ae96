"""The loop of examples/grpo.py: what it learns, as transformers alone sees it, and that a wrong push is noticed."""

from __future__ import annotations

import sys

import peft
import pytest
import torch

from rollout_client import RolloutClient, SamplingParams
from serving import REPOSITORY, server

sys.path.append(str(REPOSITORY / "examples"))

import grpo
import sorting
import tiny_model
from questions import encode

SETTINGS = grpo.Settings(steps=25)
QUESTIONS, _ = sorting.dataset(SETTINGS.seed)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A checkpoint that sorts by chance."""
    directory = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(directory, steps=250)
    return directory


def assert_same_policy(steps):
    """Server and trainer give every sampled token the same log-probability, after every push."""
    assert max(step.max_difference for step in steps) < 1e-4


def sampled_reward(directory, adapter=None):
    """The mean reward of held-out questions, sampled by transformers."""
    tokenizer, model = grpo.load_base(directory)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    _, questions = sorting.dataset(SETTINGS.seed)
    prompts = torch.tensor([encode(tokenizer, question).token_ids for question in questions])
    torch.manual_seed(1)
    tokens = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, max_new_tokens=SETTINGS.max_tokens
    )
    answers = tokenizer.batch_decode(tokens[:, prompts.shape[1] :], skip_special_tokens=True)
    return sum(question.reward(answer) for question, answer in zip(questions, answers, strict=True)) / len(questions)


def test_what_is_learnt_with_the_server_is_there_without_it(binary, tiny, tmp_path):
    tokenizer, model = grpo.load(tiny, SETTINGS)
    with server(binary, tiny, "--dtype", "float32") as client:
        client.sleep()
        steps = grpo.train(client, tokenizer, model, QUESTIONS, SETTINGS)
        client.wake()
    assert_same_policy(steps)
    model.save_pretrained(tmp_path)
    before, after = sampled_reward(tiny), sampled_reward(tiny, tmp_path)
    assert after > before + 0.2, (before, after, [step.reward for step in steps])


def test_the_divergence_from_the_base_is_the_servers_and_holds_the_policy_back(binary, tiny):
    """The server's reference log-probabilities match transformers' base model; a large weight limits the divergence."""
    moved = {}
    for kl in (0.01, 5.0):
        settings = grpo.Settings(steps=12, kl=kl)
        tokenizer, model = grpo.load(tiny, settings)
        with server(binary, tiny, "--dtype", "float32", "--max-adapters", "1") as client:
            client.sleep()
            steps = grpo.train(client, tokenizer, model, QUESTIONS, settings)
            prompts = [encode(tokenizer, question) for question in QUESTIONS[:4]]
            sampling = SamplingParams(max_tokens=6, seed=1)
            groups = grpo.sample(
                client, model, prompts, n=2, sampling=sampling, watch=grpo.Stopwatch(), with_reference=True
            )
            client.wake()
        assert_same_policy(steps)
        batch = grpo.make_batch(prompts, groups, torch.zeros(4, 2))
        with torch.no_grad(), model.disable_adapter():
            base = grpo.logprobs(model, batch, 1.0)
        assert (base - batch.reference_logprobs)[batch.answer].abs().max() < 1e-4
        assert steps[0].kl < 1e-6 < steps[-1].kl, "the policy begins as the base"
        moved[kl] = steps[-1].kl
    assert moved[5.0] < moved[0.01] / 2, moved


class HalvedPushes(RolloutClient):
    """A client with a fault: it pushes half of the adapter."""

    def push_lora(self, adapter, config=None, **options):
        tensors = peft.get_peft_model_state_dict(adapter)
        halved = {name: tensor / 2 if "lora_B" in name else tensor for name, tensor in tensors.items()}
        return super().push_lora(halved, adapter.peft_config["default"], **options)


def test_a_push_of_half_the_adapter_is_noticed(binary, tiny):
    settings = grpo.Settings(steps=3)
    tokenizer, model = grpo.load(tiny, settings)
    with server(binary, tiny, "--dtype", "float32") as client, HalvedPushes(client.address) as faulty:
        client.sleep()
        steps = grpo.train(faulty, tokenizer, model, QUESTIONS, settings)
        client.wake()
    assert_same_policy(steps[:1])  # an adapter that has learnt nothing is zero
    with pytest.raises(AssertionError):
        assert_same_policy(steps)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("1 2 3", 1.0), ("1, 2, 3.", 1.0), ("3 2 1", 1 / 3), ("1 2", 2 / 3), ("1 2 3 4", 3 / 4), ("none", 0.0)],
)
def test_rewards_of_answers(answer, expected):
    assert sorting.reward(answer, [3, 1, 2]) == expected
