"""A run of TRL's own GRPOTrainer in server mode, which broadcasts its weights to the server. A process of its own,
because it imports the package `vllm` of `emulated`. Arguments: the server's HTTP port, the group's port, model, folder
of outputs, "text" or "images", and "lora" or "full". Prints a line of JSON."""

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
