"""Importance ratios of TRL's trainer where filters leave tokens out: 1 for equal weights, as without filters."""

from __future__ import annotations

import pytest
from runs import EXACT, STEPS, config, logged
from tiny import length_reward, lora, prompts
from trl import GRPOConfig

from rollout_client import RolloutClient
from rollout_client.trl import GRPOTrainer, rollout_func

REGEX = "[a-z ]{8,40}"


@pytest.fixture
def samples(monkeypatch):
    """Of all requests."""
    seen = []
    generate = RolloutClient.generate

    def spy(client, *args, **options):
        outputs = generate(client, *args, **options)
        seen.extend(sample for output in outputs for sample in output.samples)
        return outputs

    monkeypatch.setattr(RolloutClient, "generate", spy)
    return seen


def assert_ratios(trainer, samples, steps=STEPS):
    """Of sequences, as TRL has them by default; with the distribution that was sampled from they would be below."""
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    assert len(differences) == steps and max(differences) < EXACT, differences
    for end in ("min", "max"):
        ratios = logged(trainer, f"sampling/importance_sampling_ratio/{end}")
        assert len(ratios) == steps and ratios == pytest.approx([1] * steps, abs=12 * EXACT)
    assert len(samples) == 8 * steps
    temperature = trainer.args.temperature
    if temperature == 1:
        assert max((sample.logprobs - sample.raw_logprobs).max() for sample in samples) > 0.05, "nothing was filtered"
        assert all(sample.returned is None for sample in samples), "raw log-probabilities are enough"
    else:
        masses = [sample.returned.support_log_masses for sample in samples]
        assert min(mass.min() for mass in masses) < -0.05, "nothing was filtered"
        assert not any(len(ids) for sample in samples for ids in sample.returned.support_ids), "the mass is enough"


@pytest.mark.parametrize(
    "sampling",
    [{"top_p": 0.9}, {"top_p": 0.9, "temperature": 0.7}, {"vllm_structured_outputs_regex": REGEX, "temperature": 0.7}],
    ids=["top_p", "top_p at 0.7", "regex at 0.7"],
)
def test_ratios_are_1(server, model, tmp_path, samples, sampling):
    settings = config(GRPOConfig, server, tmp_path, learning_rate=1e-2, **sampling)
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora())
    trainer.train()
    assert_ratios(trainer, samples)


def test_ratios_are_1_in_rollout_func_with_references(server, model, tmp_path, samples):
    settings = config(
        GRPOConfig, server, tmp_path, max_steps=2, learning_rate=1e-2, temperature=0.7, top_p=0.9, beta=0.05
    )
    trainer = GRPOTrainer(
        model,
        length_reward,
        settings,
        prompts(),
        peft_config=lora(),
        rollout_func=rollout_func(server.address),
        server_reference=True,
    )
    trainer.train()
    assert_ratios(trainer, samples, 2)
    assert all(sample.references for sample in samples)
