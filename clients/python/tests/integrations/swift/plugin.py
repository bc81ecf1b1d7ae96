"""What the tests add to a training of ms-swift (`--external_plugins`): a reward, turns, and a record of what happened.

Each line of the file `RECORD` is one step: what the rollouts said, what the trainer computes of the same tokens, and
both sides' weights.
"""

from __future__ import annotations

import hashlib
import json
import os

import torch
from swift.rewards import ORM, orms
from swift.rlhf_trainers import GRPOTrainer
from swift.rollout import MultiTurnScheduler, multi_turns
from swift.template.templates.qwen import Qwen2VLTemplate

from rollout_client import RolloutClient, checksum_of


class Codes(ORM):
    """Other texts have other rewards: the mean of the characters' codes."""

    def __call__(self, completions, **columns):
        Codes.infos = columns["rollout_infos"]
        return [sum(map(ord, completion)) / 1000 / (1 + len(completion)) for completion in completions]


class Again(MultiTurnScheduler):
    """Asks for more, as long as the model ends its turns by itself."""

    def step(self, infer_request, response_choice, current_turn):
        infer_request.messages.append({"role": "user", "content": f"again {current_turn}"})
        return {"infer_request": infer_request}


def lifecycles():
    """What the servers do while the trainer trains."""
    found = []
    for address in os.environ["ADDRESSES"].split(","):
        with RolloutClient(address, timeout=60) as client:
            found.append(str(client.status().lifecycle))
    return found


def trainer_side(model):
    """Parameters that serve, by the checkpoint's names, and the bits of those that are not trained."""
    weights, frozen = {}, hashlib.sha256()
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        weights[name] = checksum_of(value, "float32")
        if not parameter.requires_grad:
            frozen.update(value.contiguous().view(torch.uint8).numpy())
    return weights, frozen.hexdigest()


def recorded(original):
    """Of what ms-swift compares before each step."""

    def compute(self, trained, rolled_out, mask):
        weights, frozen = trainer_side(self.accelerator.unwrap_model(self.model))
        entry = {
            "difference": ((trained - rolled_out) * mask).abs().max().item(),
            "tokens": int(mask.sum()),
            "lifecycles": lifecycles(),
            "weights": weights,
            "frozen": frozen,
            "infos": Codes.infos,
        }
        with open(f"{os.environ['RECORD']}.{self.accelerator.process_index}", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        return original(self, trained, rolled_out, mask)

    return compute


# The template knows this token by its number in the vocabulary of Qwen2.5-VL, which is larger than the tiny model's.
Qwen2VLTemplate.image_token_id = 514
orms["codes"] = Codes
multi_turns["again"] = Again
GRPOTrainer._compute_rollout_offpolicy_metrics = recorded(GRPOTrainer._compute_rollout_offpolicy_metrics)
