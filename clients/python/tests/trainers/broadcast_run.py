"""Runs TRL's own GRPOTrainer in server mode, which broadcasts its weights to the server. The script runs as a separate
process because it imports the package `vllm` of `emulated`.

It takes six arguments: the server's HTTP port, the port of the NCCL group, the model, the output directory, the dataset
("text" or "images") and the kind of push ("lora" or "full"). It prints the results as one line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "emulated"))

from runs import IMAGE_RATE, config, logged, serving_checksums
from tiny import length_reward, lora, prompts, questions
from trl import GRPOTrainer
from trl.generation.vllm_client import VLLMClient


def main():
    port, group_port, model, output_dir, data, kind = sys.argv[1:]
    # The one thing that TRL would do otherwise on a GPU: torch knows of no device here, and TRL passes the model's.
    init = VLLMClient.init_communicator
    VLLMClient.init_communicator = lambda self, device: init(self, device="cuda")
    dataset, settings = prompts(), {}
    if data == "images":
        # Prompts of one picture and of two, which differ in size.
        dataset = questions([(100, 75)], [(60, 90), (75, 100)])
        settings = {"learning_rate": IMAGE_RATE}
    args = config(
        output_dir=output_dir,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=f"http://127.0.0.1:{port}",
        vllm_group_port=int(group_port),
        **settings,
    )
    peft_config = lora() if kind == "lora" else None
    trainer = GRPOTrainer(model, length_reward, args, dataset, peft_config=peft_config)
    trainer.train()
    trainer.vllm_generation.sync_weights()
    differences = logged(trainer, "sampling/sampling_logp_difference/max")
    sums = serving_checksums(trainer.model)
    print(json.dumps({"differences": differences, "grad_norm": logged(trainer, "grad_norm"), "checksums": sums}))


if __name__ == "__main__":
    main()
