"""verl's own trainer, `python -m verl.trainer.main_ppo`, with one setting changed, on the CPU (cpu_platform.py)."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest
from PIL import Image
from replicas import MODEL

from models import write_vision_model
from rollout_client.verl import NAME
from rollout_client.verl._settings import BINARY_VARIABLE

STEPS = 3
SETTINGS = {
    "actor_rollout_ref.rollout.name": NAME,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.calculate_log_probs": True,
    "actor_rollout_ref.rollout.load_format": "auto",
    "actor_rollout_ref.rollout.dtype": "float32",
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.2,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.rollout.agent.num_workers": 1,
    "actor_rollout_ref.model.path": MODEL,
    "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
    "actor_rollout_ref.model.use_remove_padding": False,
    "actor_rollout_ref.model.enable_gradient_checkpointing": False,
    "actor_rollout_ref.actor.strategy": "fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
    # Else the trainer computes in bfloat16, and differs by its own rounding.
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype": "fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.reduce_dtype": "fp32",
    "+actor_rollout_ref.actor.fsdp_config.mixed_precision.buffer_dtype": "fp32",
    "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
    "actor_rollout_ref.actor.use_torch_compile": False,
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 4,
    "data.max_prompt_length": 64,
    "data.max_response_length": 16,
    "data.dataloader_num_workers": 0,
    "reward.num_workers": 1,
    "reward.custom_reward_function.name": "count_of_e",
    "trainer.logger": "[console]",
    "trainer.device": "cpu",
    "trainer.n_gpus_per_node": 1,
    "trainer.total_training_steps": STEPS,
    "trainer.val_before_train": False,
    "trainer.resume_mode": "disable",
    # What Ray is told of, not what there is.
    "ray_kwargs.ray_init.num_cpus": 16,
    "+ray_kwargs.ray_init.num_gpus": 1,
    "+ray_kwargs.ray_init.include_dashboard": False,
    "+ray_kwargs.ray_init.object_store_memory": 200 << 20,
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "transfer_queue.backend.SimpleStorage.total_storage_size": 1000,
}
REWARD = """
def count_of_e(data_source, solution_str, ground_truth, extra_info=None, **others):
    return solution_str.count("e") / max(len(solution_str), 1)
"""


# Two ranks that gather each tensor together, of which one pushes it; and adapters of one rank.
TWO_RANKS = {
    "trainer.n_gpus_per_node": 2,
    "+ray_kwargs.ray_init.num_gpus": 2,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
}


@pytest.mark.parametrize("model", [TWO_RANKS, {"actor_rollout_ref.model.lora_rank": 4}], ids=["full", "lora"])
def test_verls_trainer_runs_and_agrees_with_what_the_server_says(binary, tmp_path, model):
    assert_on_policy(binary, tmp_path, [{"prompt": ask(f"count {i}")} for i in range(4 * STEPS)], model)


def test_verls_trainer_and_the_server_see_the_same_images(binary, tmp_path, rng):
    """Prompts of one and of two images, which differ by them alone."""
    counts = [1 + i % 2 for i in range(4 * STEPS)]
    prompts = [{"prompt": ask("<image>" * n + "what is it"), "images": [png(rng) for _ in range(n)]} for n in counts]
    path = write_vision_model(tmp_path / "vision")
    model = {"actor_rollout_ref.model.path": path, "+actor_rollout_ref.rollout.limit_images": 2}
    assert_on_policy(binary, tmp_path, prompts, model)


def ask(question):
    return [{"role": "user", "content": question}]


def png(rng):
    """A file of random size, as verl's data sets have it."""
    height, width = rng.integers(30, 90, 2)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return {"bytes": file.getvalue()}


def assert_on_policy(binary, tmp_path, prompts, model):
    """Trains, and finds the server's probabilities to be the trainer's at every step."""
    rows = [
        {
            **prompt,
            "data_source": "tiny",
            "reward_model": {"style": "rule", "ground_truth": "e"},
            "extra_info": {"index": i},
        }
        for i, prompt in enumerate(prompts)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "prompts.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    files = {
        "data.train_files": tmp_path / "prompts.parquet",
        "data.val_files": tmp_path / "prompts.parquet",
        "reward.custom_reward_function.path": tmp_path / "reward.py",
    }
    environment = {
        "PYTHONPATH": str(Path(__file__).parent),
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "VERL_PLATFORM": "cpu",
        BINARY_VARIABLE: str(binary),
    }
    arguments = [f"{name}={value}" for name, value in {**SETTINGS, **files, **model}.items()]
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
        cwd=tmp_path,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    differences = [float(value) for value in re.findall(r"training/rollout_probs_diff_max:([\d.e-]+)", done.stdout)]
    assert len(differences) == STEPS, done.stdout[-8000:]
    assert max(differences) < 1e-4, differences
