"""`rollout_func` of TRL: ours, and a naive one; samples of groups and of repeated prompts differ as they should."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from runs import STEPS, assert_on_policy, config, logged
from tiny import length_reward, lora, prompts
from trl import GRPOConfig
from trl import GRPOTrainer as TrlsGRPOTrainer

from rollout_client import Aborted, Lifecycle, RolloutClient, SamplingParams
from rollout_client.trl import GRPOTrainer, rollout_func
from rollout_client.trl._rollout_func import _seeded
from rollout_client.trl._sampler import Sampler


class Watched:
    """A rollout function with what it was asked and answered, and how the server's policy scored the answers then."""

    def __init__(self, client, func):
        self.client, self.func, self.answers, self.gaps, self.prompts = client, func, [], [], []

    def __call__(self, prompts, trainer):
        answer = self.func(prompts, trainer)
        self.prompts.append(prompts)
        self.answers.append(answer)
        sequences = [p + c for p, c in zip(answer["prompt_ids"], answer["completion_ids"], strict=True)]
        for score, logprobs in zip(self.client.score(sequences), answer["logprobs"], strict=True):
            self.gaps.append(np.abs(score.logprobs[-len(logprobs) :] - np.float32(logprobs)).max())
        return answer


def test_aborted_samples_are_an_error(server):
    with RolloutClient(server.address, timeout=0.05) as impatient:
        sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
        with pytest.raises(Aborted, match=r"of 2 samples were aborted.*or the client's timeout"):
            Sampler(impatient, None).sample([[1, 2, 3]], 2, sampling)


def test_a_seed_differs_by_rank_and_step():
    def seed(given, step, rank):
        place = {"state": SimpleNamespace(global_step=step), "accelerator": SimpleNamespace(process_index=rank)}
        return _seeded(SamplingParams(seed=given), SimpleNamespace(**place)).seed

    assert seed(7, 0, 0) == seed(7, 0, 0)
    assert len({seed(*place) for place in [(7, 0, 0), (7, 0, 1), (7, 1, 0), (8, 0, 0)]}) == 4
    assert seed(None, 0, 0) is None


@pytest.mark.parametrize("peft_config", [lora(), None], ids=["LoRA", "full"])
def test_without_use_vllm_it_pushes_itself(server, model, tmp_path, peft_config):
    columns = []

    def reward(completions, weight_version, finish_reason, cached_tokens, **others):
        columns.append((weight_version, finish_reason, cached_tokens))
        return length_reward(completions)

    watched = Watched(server.client, rollout_func(server.address))
    settings = config(GRPOConfig, output_dir=tmp_path, max_steps=2)
    trainer = TrlsGRPOTrainer(model, reward, settings, prompts(), peft_config=peft_config, rollout_func=watched)
    trainer.train()
    assert min(logged(trainer, "grad_norm")) > 0
    assert logged(trainer, "frac_reward_zero_std") == [0, 0]
    assert max(watched.gaps) == 0, "the policy that scores is the one that sampled, to the bit"
    first = 1 if peft_config is None else 2  # of an adapter the base comes first, to be compared
    assert [versions for versions, _, _ in columns] == [[first] * 8, [first + 1] * 8]
    assert {reason for _, reasons, _ in columns for reason in reasons} <= {"length", "eos"}
    assert all(len(cached) == 8 for _, _, cached in columns)
    for given, answer in zip(watched.prompts, watched.answers, strict=True):
        expected = trainer.processing_class.apply_chat_template(given, add_generation_prompt=True)["input_ids"]
        assert answer["prompt_ids"] == expected


def test_with_use_vllm_the_trainer_pushes_and_corrects(server, model, tmp_path):
    watched = Watched(server.client, rollout_func(RolloutClient(server.address)))
    settings = config(GRPOConfig, server, tmp_path)
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora(), rollout_func=watched)
    trainer.train()
    assert_on_policy(trainer)
    assert server.client.status().weight_version == 1 + STEPS, "one push for each step"


def test_the_server_sleeps_between_its_rollouts(server, model, tmp_path):
    seen = []

    def reward(completions, **columns):
        seen.append(server.client.status().lifecycle)
        return length_reward(completions)

    settings = config(GRPOConfig, output_dir=tmp_path, max_steps=2, vllm_enable_sleep_mode=True)
    func = rollout_func(server.address, SamplingParams(max_tokens=5, ignore_eos=True))
    trainer = TrlsGRPOTrainer(model, reward, settings, prompts(), rollout_func=func)
    trainer.train()
    assert seen == [Lifecycle.ASLEEP] * 2
    assert logged(trainer, "completions/mean_length") == [5, 5], "as the sampling says that was given"


def test_a_naive_one_has_groups_that_differ(server, model, tmp_path):
    """It sends the prompts as they come, repeated, and asks for one sample of each."""

    def naive(given, trainer):
        ids = trainer.processing_class.apply_chat_template(given, add_generation_prompt=True)["input_ids"]
        outputs = server.client.generate(ids, sampling=SamplingParams(max_tokens=12, seed=trainer.state.global_step))
        samples = [output.samples[0] for output in outputs]
        return {
            "prompt_ids": ids,
            "completion_ids": [sample.token_ids for sample in samples],
            "logprobs": [sample.logprobs.tolist() for sample in samples],
        }

    settings = config(GRPOConfig, output_dir=tmp_path)
    trainer = TrlsGRPOTrainer(model, length_reward, settings, prompts(), rollout_func=naive)
    trainer.train()
    assert max(logged(trainer, "frac_reward_zero_std")) < 1
    assert min(logged(trainer, "grad_norm")) > 0


def test_equal_sample_indices_of_different_prompts_agree_by_chance_only(server):
    """The model is nearly uniform over its 291 tokens: of 64 x 12 pairs some three are equal by chance."""
    sampling = SamplingParams(max_tokens=12, seed=17, ignore_eos=True)
    outputs = server.client.generate([[5, 6, 7], [50, 60, 70], [5, 6, 7]], n=64, sampling=sampling)
    tokens = np.array([[sample.token_ids for sample in output.samples] for output in outputs])
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert (tokens[one] == tokens[other]).mean() < 0.05, (one, other)
