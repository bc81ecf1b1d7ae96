"""Replicas of a tiny model as verl makes them, and what its trainer does with them."""

from __future__ import annotations

import asyncio
import os
import subprocess

import peft
import ray
import torch
import transformers
from omegaconf import OmegaConf
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import RolloutMode, get_rollout_replica_class
from verl.workers.rollout.router import get_router_handle

from rollout_client import RolloutClient
from rollout_client.verl import NAME
from rollout_client.verl._settings import read_settings
from rollout_client.verl.server import RolloutServer
from serving import PUSH_MODEL as MODEL

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
# As verl's agent loops ask for it; of the tiny model every sample has its full length.
SAMPLING = {"temperature": 0.8, "top_k": -1, "top_p": 1.0, "logprobs": True, "max_tokens": 24, "ignore_eos": True}
GREEDY = {**SAMPLING, "temperature": 0.0}


def rollout_config(binary, options=None, **settings):
    """verl's configuration of a rollout in float32, for a server of this binary."""
    options = {"binary": str(binary), "kv_cache_bytes": "64MiB"} if options is None else options
    values = {
        "name": NAME,
        "tensor_model_parallel_size": 1,
        "dtype": "float32",
        "gpu_memory_utilization": 0.2,
        "prompt_length": 64,
        "response_length": 32,
        "n_gpus_per_node": 1,
        "engine_kwargs": {NAME: options},
    }
    return RolloutConfig(**values | settings)


def model_config(path=MODEL, **settings):
    return HFModelConfig(path=str(path), **settings)


def server_alone(config, mode=RolloutMode.HYBRID, path=MODEL):
    """What runs in a replica's actor, in this process."""
    return RolloutServer(read_settings(config, model_config(path), 0, 1), mode)


class Rollouts:
    """One replica, verl's router before it, and the adapter of the trainer's only rank."""

    def __init__(self, config, model, mode=RolloutMode.HYBRID, rank=0):
        self.config = config
        self.replica = get_rollout_replica_class(NAME)(rank, config, model, gpus_per_node=1)
        self.replica.rollout_mode = mode
        os.environ["RANK"] = str(rank)
        self.adapter = get_rollout_class(NAME, "async")(config, model, None)

    async def start(self):
        await self.replica.launch_servers()
        target = await self.replica.server_handle.get_push_target.remote()
        self.direct = RolloutClient(target["address"], timeout=120)
        self.pid = await self.replica.server_handle.__ray_call__.remote(lambda server: server._process.process.pid)
        self.router = get_router_handle({self.replica.server_address: self.replica.server_handle})

    async def generate(self, prompt=PROMPT, sampling=None, cls=LLMServerClient, request_id="request", **media):
        """As verl's agent loops do."""
        rollout = {"name": NAME, "response_length": self.config.response_length}
        rollout["full_determinism"] = self.config.full_determinism
        client = cls(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), self.router)
        return await client.generate(request_id, prompt_ids=prompt, sampling_params=dict(sampling or SAMPLING), **media)

    async def generate_on(self, prompt=PROMPT, sampling=None):
        """As those do whose samples go on after an abort."""
        return await self.generate(prompt, sampling, FullyAsyncLLMServerClient)

    async def push(self, model, step):
        """As the trainer's worker pushes an adapter to rollouts that have the base."""
        tensors = peft.get_peft_model_state_dict(model)
        config = model.peft_config["default"].to_dict()
        await self.adapter.update_weights(
            iter(tensors.items()), peft_config=config, base_sync_done=True, global_steps=step
        )

    def close(self):
        """Kills the actor, with which the server ends."""
        self.direct.close()
        ray.kill(self.replica.server_handle)
        subprocess.run(["tail", f"--pid={self.pid}", "-f", "/dev/null"], check=True, timeout=120)


def base_model():
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def adapted_model(seed):
    """A model with an adapter that changes what it says."""
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base_model(), config)
    return changed(model, seed)


def changed(model, seed):
    """The same model with noise on whatever is trained."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logprob_difference(model, output, temperature, prompt=PROMPT):
    """The largest difference of an output's log-probabilities from those that transformers gives its tokens."""
    ids = torch.tensor([prompt + output.token_ids])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return (torch.tensor(output.log_probs) - expected).abs().max().item()


def versions(output):
    return output.extra_fields["min_global_steps"], output.extra_fields["max_global_steps"]


def in_time(coroutine):
    async def main():
        return await asyncio.wait_for(coroutine, 240)

    return asyncio.run(main())
