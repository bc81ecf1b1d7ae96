"""What each of several ranks does (`torchrun`): MODEL OUTPUT_DIR SERVER_ADDRESS. Rank 0 leaves what it saw in
`OUTPUT_DIR/result.json`; lines of both on one output would mix.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import trl
from peft import get_peft_model
from runs import config, logged, serving_checksums
from tiny import length_reward, lora, prompts
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from rollout_client import RolloutClient
from rollout_client.trl import GRPOTrainer, RolloutGeneration
from rollout_client.trl._references import computes_reference


def policy(model, adapted):
    """Another one than the checkpoint; with an adapter, over the same base."""
    torch.manual_seed(3)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    loaded = get_peft_model(loaded, lora()) if adapted else loaded
    with torch.no_grad():
        for parameter in loaded.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape), alpha=0.01)
    return loaded


def pushed_from_shards(model, accelerator, address):
    """What the server serves after a push of the model, each rank having a part of every parameter."""
    sharded = fully_shard(model)
    generation = RolloutGeneration(sharded, accelerator, None, mode="server", server_base_url=address)
    generation._dist.fsdp_version = 2  # what accelerate would say of its own FSDP, which it has on GPUs only
    generation.sync_weights()
    return RolloutClient(address).checksum()


def reference_difference(model, address, output_dir):
    """How far references that the server computes are from TRL's own, on any rank."""
    settings = config(server=SimpleNamespace(address=address), output_dir=output_dir, beta=0.05, max_steps=1)
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora(), server_reference=True)
    served, differences = trainer._get_per_token_logps_and_entropies, []

    def compare(given, *args, **options):
        result = served(given, *args, **options)
        if computes_reference(trainer.accelerator.unwrap_model(trainer.model)):
            own = trl.GRPOTrainer._get_per_token_logps_and_entropies(trainer, given, *args, **options)
            differences.append((result[0] - own[0])[own[0] != 0].abs().max())
        return result

    trainer._get_per_token_logps_and_entropies = compare
    trainer.train()
    return trainer.accelerator.gather(torch.stack(differences)).tolist()


def main():
    torch.set_num_threads(1)
    model, output_dir, address = sys.argv[1:]
    requests = []
    generate = RolloutClient.generate

    def spy(client, given, n, *args, **options):
        requests.append((len(given), n))
        return generate(client, given, n, *args, **options)

    RolloutClient.generate = spy
    settings = config(server=SimpleNamespace(address=address), output_dir=output_dir)
    trainer = GRPOTrainer(model, length_reward, settings, prompts(), peft_config=lora())
    trainer.train()
    accelerator = trainer.accelerator
    result = {"ranks": accelerator.num_processes, "requests": list(requests), "expected": {}, "sharded": {}}
    result["log"] = {key: logged(trainer, key) for key in ("sampling/sampling_logp_difference/max", "reward")}
    result["references"] = reference_difference(model, address, output_dir)
    for kind in ("adapter", "full"):
        made = policy(model, adapted=kind == "adapter")
        result["expected"][kind] = serving_checksums(copy.deepcopy(made))
        result["sharded"][kind] = pushed_from_shards(made, accelerator, address)
    if accelerator.is_main_process:
        (Path(output_dir) / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
