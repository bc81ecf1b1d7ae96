"""Samples of a real run, made again from the adapters that the trainer saved."""

from __future__ import annotations

import pytest
from runs import STEPS, config
from tiny import length_reward, lora, prompts
from transformers import TrainerCallback

from rollout_client.cli import main
from rollout_client.replay import RecordingClient, read_receipts
from rollout_client.trl import GRPOTrainer


class Saving(TrainerCallback):
    """Saves the adapter after each step."""

    def __init__(self, directory):
        self._directory = directory

    def on_step_end(self, args, state, control, model=None, **_):
        model.save_pretrained(self._directory / f"step-{state.global_step}")


@pytest.fixture
def recorded(server, model, tmp_path):
    """The receipts of a run, and the directories of its adapters after each step."""
    path = tmp_path / "samples.jsonl"
    with RecordingClient(server.address, record=path) as client:
        trainer = GRPOTrainer(
            model,
            length_reward,
            config(server=server, output_dir=tmp_path / "out"),
            prompts(),
            peft_config=lora(),
            client=client,
            callbacks=[Saving(tmp_path)],
        )
        trainer.train()
    return path, [tmp_path / f"step-{step}" for step in range(1, STEPS + 1)]


def test_each_step_comes_again_from_the_adapter_that_made_it(server, recorded, capsys):
    path, adapters = recorded
    versions = list(dict.fromkeys(receipt.spans[0].weight_version for receipt in read_receipts(path)))
    assert len(versions) == STEPS
    at = ("--address", server.address)
    # The first step sampled from an adapter that had not been trained.
    for version, adapter in zip(versions[1:], adapters, strict=False):
        assert main(["push-lora", str(adapter), *at]) == 0
        assert main(["replay", str(path), "--weight-version", str(version), *at]) == 0
        capsys.readouterr()
        assert main(["replay", str(path), *at]) == 1
        assert f"made by the weights of version {versions[0]} " in capsys.readouterr().out
