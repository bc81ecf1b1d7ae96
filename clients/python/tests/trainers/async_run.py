"""TRL's AsyncGRPOTrainer, unmodified, as a script of its own: MODEL, and OUTPUT_DIR SERVER_URL of one run or several.

`rollout_client` must not be there. Prints a line of JSON for each run.
"""

from __future__ import annotations

import json
import sys

import torch
from cpu_attention import train_on_cpu
from tiny import length_reward, lora, prompts
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer, async_rollout_worker

STEPS = 3


def settings(output_dir, url):
    return AsyncGRPOConfig(
        output_dir=str(output_dir),
        vllm_server_base_url=url,
        max_steps=STEPS,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=12,
        learning_rate=5e-2,
        token_budget=-1,
        max_staleness=1,
        max_inflight_tasks=4,
        queue_maxsize=8,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def main():
    torch.set_num_threads(1)
    train_on_cpu()
    # TRL asks whether vLLM is installed, though nothing of it is used for adapters.
    async_rollout_worker.is_vllm_available = lambda: True
    model, *runs = sys.argv[1:]
    for output_dir, url in zip(runs[::2], runs[1::2], strict=True):
        trainer = AsyncGRPOTrainer(model, length_reward, settings(output_dir, url), prompts(), peft_config=lora())
        trainer.train()
        imported = [name for name in ("vllm", "rollout_client") if name in sys.modules]
        print("RUN", json.dumps({"log": trainer.state.log_history, "imported": imported}))


if __name__ == "__main__":
    main()
