"""TRL's AsyncGRPOTrainer: unmodified over HTTP, through the sidecar, and with pushes over gRPC."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import peft
import pytest
import tools
import torch
import transformers
from async_run import STEPS, settings
from cpu_attention import train_on_cpu
from runs import EXACT, serving_checksums
from tiny import length_reward, lora, make_model, prompts
from trl.experimental.async_grpo import async_grpo_trainer, packing

from rollout_client import Lifecycle, ServerProcess
from rollout_client.trl.async_grpo import AsyncGRPOTrainer, RolloutWeightTransfer
from serving import SMALL_CACHE
from sidecars import sidecar
from vllm_answers import ask

MAX_STALENESS = 1
# What `train_on_cpu` replaces.
REPLACED = [(packing, "_flash_attn"), (async_grpo_trainer, "get_peak_flops_per_device")]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The tiny model with a chat template that TRL knows."""
    return str(make_model(tmp_path_factory.mktemp("chat"), tools.CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def serve(binary, chat_model):
    """Starts a server of the model that keeps the adapters of a run."""

    def start(*flags):
        adapters = ["--max-adapters", str(MAX_STALENESS + 2)]
        return ServerProcess(
            binary, chat_model, [*SMALL_CACHE, "--mem-util", "0.2", "--dtype", "float32", *adapters, *flags]
        )

    return start


def logprobs(model, sequence):
    with torch.no_grad():
        logits = model(torch.tensor([sequence])).logits[0].log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(sequence[1:])[:, None])[:, 0].numpy()


def assert_on_policy(log):
    """Of the samples of the first step nothing can be stale."""
    steps = [entry for entry in log if "ratio" in entry]
    assert len(steps) == STEPS
    assert steps[0]["sample/staleness_max"] == 0
    assert abs(steps[0]["ratio"] - 1) < EXACT and abs(steps[0]["kl"]) < EXACT, steps[0]
    assert min(entry["grad_norm"] for entry in steps) > 0


def assert_serves(client, model, output_dir):
    """Each adapter that is resident is the one that TRL has saved, which transformers scores alike."""
    sequence = list(range(20, 60))
    resident = [adapter.name for adapter in client.adapters()]
    assert set(resident) == {f"trl-policy-v{STEPS}", f"trl-policy-v{STEPS + 1}"}
    found = []
    for name in resident:
        saved = output_dir / ".vllm_lora" / name
        policy = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(model), saved)
        found.append(np.array(client.score([sequence], adapter=name)[0].raw_logprobs[1:]))
        assert np.abs(found[-1] - logprobs(policy.eval(), sequence)).max() < EXACT
    base = np.array(client.score([sequence])[0].raw_logprobs[1:])
    assert min(np.abs(found[0] - found[1]).max(), np.abs(found[0] - base).max()) > 10 * EXACT


def test_trls_own_trainer_unmodified(serve, chat_model, tmp_path):
    """Straight to the HTTP port, and through the sidecar with a directory that the server may not read."""
    absent, readable, unreadable = (tmp_path / name for name in ("absent", "readable", "unreadable"))
    absent.mkdir()
    (absent / "rollout_client.py").write_text("raise ImportError('this trainer must do without rollout_client')\n")
    readable.mkdir()
    with (
        serve("--weights-dir", str(readable)) as direct,
        serve() as behind,
        sidecar("--address", behind.address, "--http-address", behind.http_address) as (beside, _),
    ):
        runs = [readable / "run", f"http://{direct.http_address}", unreadable, f"http://{beside}"]
        ended = subprocess.run(
            [sys.executable, str(HERE / "async_run.py"), chat_model, *map(str, runs)],
            env={**os.environ, "PYTHONPATH": f"{absent}:{HERE}"},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        lines = [line.removeprefix("RUN ") for line in ended.stdout.splitlines() if line.startswith("RUN ")]
        assert len(lines) == 2, ended.stderr
        for line, server, output_dir in zip(lines, (direct, behind), (runs[0], runs[2]), strict=True):
            run = json.loads(line)
            assert run["imported"] == []
            assert_on_policy(run["log"])
            assert_serves(server.client, chat_model, output_dir)
        order = {"lora_name": "probe", "lora_path": str(unreadable / ".vllm_lora" / f"trl-policy-v{STEPS}")}
        assert ask(behind.http_address, "POST", "/v1/load_lora_adapter", order).status == 400


def test_an_adapter_over_grpc(serve, chat_model, tmp_path, monkeypatch):
    """The merged policy serves, adapters are not resident, and vLLM is not there."""
    for module, name in REPLACED:
        monkeypatch.setattr(module, name, getattr(module, name))
    train_on_cpu()
    with serve() as server:
        args = settings(tmp_path, f"http://{server.http_address}")
        trainer = AsyncGRPOTrainer(
            chat_model, length_reward, args, prompts(), peft_config=lora(), client=server.address
        )
        trainer.train()
        assert_on_policy(trainer.state.log_history)
        transfer, client = trainer.weight_transfer, server.client
        assert client.status().weight_version == transfer.last_push.weight_version == trainer.model_version == STEPS + 1
        assert client.status().lifecycle is Lifecycle.RUNNING and client.adapters() == []
        assert transfer.last_push.bytes < 100_000, "an adapter travels alone"
        # TRL's own merges have left the base of the trainer a little off.
        trainer.model.save_pretrained(tmp_path / "adapter")
        base = transformers.AutoModelForCausalLM.from_pretrained(chat_model)
        assert client.checksum() == serving_checksums(peft.PeftModel.from_pretrained(base, tmp_path / "adapter"))


def test_every_parameter_over_grpc(serve, chat_model):
    """In the order in which TRL calls a `WeightTransferProtocol`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(chat_model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    with serve() as server:
        transfer, client = RolloutWeightTransfer(server.address), server.client
        transfer.init_weight_transfer()
        transfer.pause()
        assert client.status().lifecycle is Lifecycle.PAUSED
        transfer.send_weights(iter(model.named_parameters()))
        transfer.resume()
        transfer.destroy()
        assert client.status().lifecycle is Lifecycle.RUNNING
        assert transfer.last_push.weight_version == client.status().weight_version == 1
        assert client.checksum() == serving_checksums(model)
