"""TRL's synchronous trainers on a rollout-server, without the vllm package."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import trl
from runs import EXACT, STEPS, assert_on_policy, config, logged, serving_checksums
from tiny import length_reward, lora, prompts
from trl import GRPOConfig, RLOOConfig
from trl.generation import vllm_generation
from trl.trainer import grpo_trainer

from rollout_client import InvalidArgument, Lifecycle, RolloutClient
from rollout_client.process import free_port
from rollout_client.trl import GRPOTrainer, RLOOTrainer, RolloutGeneration, use_rollout_server
from rollout_client.trl._sampler import Sampler, sampling_params

LINEAR_LAYERS = 14
"""Of the tiny model: what an adapter for "all-linear" changes."""
ADAPTERS = pytest.mark.parametrize("peft_config", [lora(), None], ids=["LoRA", "full"])


@ADAPTERS
def test_grpo(server, model, tmp_path, peft_config):
    trainer = GRPOTrainer(
        model, length_reward, config(GRPOConfig, server, tmp_path), prompts(), peft_config=peft_config
    )
    trainer.train()
    assert_on_policy(trainer)
    pushed = trainer.vllm_generation.last_push
    # Of an adapter the base comes first, to be compared.
    assert server.client.status().weight_version == pushed.weight_version == STEPS + (peft_config is not None)
    assert pushed.parameters == (len(server.client.parameters()) if peft_config is None else LINEAR_LAYERS)
    assert importlib.util.find_spec("vllm") is None


@ADAPTERS
def test_rloo(server, model, tmp_path, peft_config):
    trainer = RLOOTrainer(
        model, length_reward, config(RLOOConfig, server, tmp_path), prompts(), peft_config=peft_config
    )
    base = server.client.checksum()
    trainer.train()
    trainer.vllm_generation.sync_weights()
    assert len(logged(trainer, "reward")) == STEPS
    served = server.client.checksum()
    assert served == serving_checksums(trainer.model) != base


def test_a_push_that_is_missed_shows(server, model, tmp_path):
    class Forgetful(RolloutGeneration):
        def sync_weights(self):
            if self.last_push is None:
                super().sync_weights()

    trainer = GRPOTrainer(model, length_reward, config(GRPOConfig, server, tmp_path), prompts(), peft_config=lora())
    trainer.vllm_generation.__class__ = Forgetful
    trainer.train()
    assert max(logged(trainer, "sampling/sampling_logp_difference/max")) > 100 * EXACT


@ADAPTERS
def test_the_server_sleeps_but_for_the_rollouts(server, model, tmp_path, peft_config):
    seen = []

    def reward(completions, **columns):
        seen.append(server.client.status())
        return length_reward(completions)

    settings = config(GRPOConfig, server, tmp_path, vllm_enable_sleep_mode=True)
    trainer = GRPOTrainer(model, reward, settings, prompts(), peft_config=peft_config)
    seen.append(server.client.status())
    trainer.train()
    assert_on_policy(trainer)
    assert [status.lifecycle for status in seen] == [Lifecycle.ASLEEP] * (1 + STEPS)
    base = peft_config is not None  # comes first, to be compared
    assert [status.weight_version for status in seen] == [0, 1 + base, 2 + base, 3 + base], "each rollout had its push"


def test_the_server_sleeps_after_a_rollout_that_failed(server, model, tmp_path):
    settings = config(
        GRPOConfig, server, tmp_path, vllm_enable_sleep_mode=True, generation_kwargs={"stop_token_ids": [10**6]}
    )
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora())
    with pytest.raises(InvalidArgument, match="stop_token_ids"):
        trainer.train()
    assert server.client.status().lifecycle is Lifecycle.ASLEEP


def test_settings_reach_the_server(server, model, tmp_path, monkeypatch):
    asked = []
    generate = RolloutClient.generate

    def spy(client, prompts, n, sampling, **options):
        asked.append((len(prompts), n, sampling))
        return generate(client, prompts, n, sampling, **options)

    monkeypatch.setattr(RolloutClient, "generate", spy)
    completions = []

    def reward(completions_of_batch, **columns):
        completions.extend(completion[0]["content"] for completion in completions_of_batch)
        return length_reward(completions_of_batch)

    def reward_func(completions, **columns):
        return reward(completions)

    settings = config(
        GRPOConfig,
        server,
        tmp_path,
        max_steps=1,
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        min_p=0.05,
        repetition_penalty=1.2,
        vllm_structured_outputs_regex="[0-9]{1,12}",
        generation_kwargs={"seed": 5, "presence_penalty": 0.5},
    )
    GRPOTrainer(model, reward_func, settings, prompts(), peft_config=lora()).train()
    [(groups, n, sampling)] = asked
    assert (groups, n) == (2, 4)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.7, 0.9, 0, 0.05)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.seed) == (1.2, 0.5, 5)
    assert sampling.max_tokens == 12
    assert len(completions) == 8 and all(re.fullmatch("[0-9]{1,12}", text) for text in completions), completions


def test_arguments_of_trl_become_sampling_params(caplog):
    given = sampling_params(
        {"top_k": 0, "min_p": None}, None, {"temperature": 0.5, "structured_outputs": {"regex": "a"}}
    )
    assert (given.top_k, given.min_p, given.temperature, given.structured_outputs) == (0, 0.0, 0.5, {"regex": "a"})
    assert sampling_params({"top_k": 7}).top_k == 7
    assert sampling_params({}, "b", {"structured_outputs": {"regex": "a"}}).structured_outputs == {"regex": "b"}
    assert "takes precedence" in caplog.text
    with pytest.raises(ValueError, match="unknown sampling parameter 'best_of'; the server has temperature"):
        sampling_params({}, None, {"best_of": 2})


def test_other_log_probabilities_are_refused(server):
    with pytest.raises(ValueError, match="logprobs=5: only the sampled token's"):
        Sampler(server.client, None).generate([[1]], logprobs=5)


def test_a_configuration_that_means_another_backend_is_refused(server, model, tmp_path):
    with pytest.raises(ValueError, match="set use_vllm=True, vllm_mode='server'"):
        GRPOTrainer(model, length_reward, config(GRPOConfig, output_dir=tmp_path), prompts())
    with pytest.raises(ValueError, match="vllm_mode='colocate': rollout-server runs as a separate process"):
        settings = config(GRPOConfig, server, tmp_path, vllm_mode="colocate")
        GRPOTrainer(model, length_reward, settings, prompts())


def test_an_address_that_is_not_grpcs_is_explained(server, model, tmp_path):
    def trainer(address):
        settings = config(GRPOConfig, server, tmp_path, vllm_server_base_url=address, vllm_server_timeout=0.5)
        return GRPOTrainer(model, length_reward, settings, prompts())

    with pytest.raises(ConnectionError, match=f"{server.http_address} is an HTTP port: vllm_server_base_url"):
        trainer(f"http://{server.http_address}")
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConnectionError, match=f"no rollout-server at {nobody}"):
        trainer(nobody)


def test_another_dtype_is_warned_of(binary, server, model, tmp_path, caplog):
    settings = config(GRPOConfig, server, tmp_path, bf16=True)
    GRPOTrainer(model, length_reward, settings, prompts())
    assert "computes in float32 and the trainer in bfloat16" in caplog.text
    assert "--dtype bfloat16" in caplog.text


def test_a_trainer_of_ones_own(server, model, tmp_path):
    rewarded = []

    class Watching(trl.GRPOTrainer):
        """Watches."""

        def _calculate_rewards(self, *args, **kwargs):
            rewards = super()._calculate_rewards(*args, **kwargs)
            rewarded.append(rewards.mean().item())
            return rewards

    made = use_rollout_server(Watching)
    assert (made.__name__, made.__doc__, made.__mro__[1]) == ("Watching", "Watches.", Watching)
    client = RolloutClient(server.address)
    settings = config(GRPOConfig, server, tmp_path, vllm_server_base_url=None, max_steps=1)
    trainer = made(model, length_reward, settings, prompts(), client=client)
    trainer.train()
    assert_on_policy(trainer, 1)
    assert trainer.vllm_generation.vllm_client.client is client
    assert logged(trainer, "reward") == rewarded
    assert grpo_trainer.VLLMGeneration is vllm_generation.VLLMGeneration is not RolloutGeneration


def test_an_adapter_for_another_base_is_refused(server, model, tmp_path):
    """As after a run that has pushed every parameter."""
    settings = config(GRPOConfig, server, tmp_path, max_steps=2)
    GRPOTrainer(model, length_reward, settings, prompts()).train()
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora())
    with pytest.raises(ValueError, match=r"differs between the server and the model that is trained"):
        trainer.train()
    server.client.sleep(2)
    server.client.wake(reload=True)
    trainer.train()
    assert_on_policy(trainer, 2)


def test_two_ranks(server, model, tmp_path):
    """Each has half of every batch and rank 0 pushes; then models that FSDP 2 has sharded over both are pushed."""
    script = Path(__file__).with_name("ranks_run.py")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = subprocess.run(
        [*launch, model, str(tmp_path), server.address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranks"] == 2
    differences = result["log"]["sampling/sampling_logp_difference/max"]
    assert len(differences) == STEPS and max(differences) < EXACT
    assert result["requests"] == [[4, 4]] * STEPS, "one for all ranks: 4 groups of 4"
    assert len(result["references"]) == 2 and max(result["references"]) < EXACT, result["references"]
    assert result["sharded"]["adapter"] == result["expected"]["adapter"]
    assert result["sharded"]["full"] == result["expected"]["full"] != result["expected"]["adapter"]
