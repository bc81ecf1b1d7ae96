"""Runs of verl's own trainer, `python -m verl.trainer.main_ppo`, on the CPU (cpu_platform.py)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import torch
import transformers
from replicas import MODEL

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
    # Resources that Ray schedules by; the machine may have fewer.
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

# Two ranks that gather each tensor together, of which one pushes it.
TWO_RANKS = {
    "trainer.n_gpus_per_node": 2,
    "+ray_kwargs.ray_init.num_gpus": 2,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
}

# A teacher, which is the model that the training begins with, on a rank of its own.
TEACHER = {
    "distillation.enabled": True,
    "distillation.n_gpus_per_node": 1,
    "distillation.nnodes": 1,
    "distillation.teacher_models.teacher_model.model_path": MODEL,
    "distillation.teacher_models.teacher_model.inference.tensor_model_parallel_size": 1,
    "distillation.teacher_models.teacher_model.inference.gpu_memory_utilization": 0.2,
    "+ray_kwargs.ray_init.num_gpus": 3,
}


def ask(question):
    return [{"role": "user", "content": question}]


def questions():
    return [{"prompt": ask(f"count {i}")} for i in range(4 * STEPS)]


def write_expert_model(directory, **config):
    """A random Qwen3-MoE in float32, with the tokenizer of `MODEL`; the configuration may have other values."""
    values = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,  # so that tokens take experts of clearly different weights
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    torch.manual_seed(5)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**values | config)).save_pretrained(directory)
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


def assert_on_policy(binary, tmp_path, prompts, model, without=()):
    """Trains, and finds the server's probabilities to be the trainer's at every step.

    `model` has settings besides `SETTINGS`, of which those that begin like one of `without` are left out. Returns the
    metrics that verl logs, by name, for each step.
    """
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
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
        "VERL_PLATFORM": "cpu",
        BINARY_VARIABLE: str(binary),
    }
    settings = {name: value for name, value in SETTINGS.items() if not name.lstrip("+").startswith(tuple(without))}
    arguments = [f"{name}={value}" for name, value in {**settings, **files, **model}.items()]
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
    lines = re.findall(r"\bstep:\d+ - .*", done.stdout)
    steps = [{name: float(value) for name, value in re.findall(r"([\w/]+):([\d.e+-]+) ", line + " ")} for line in lines]
    assert len(steps) == STEPS, done.stdout[-8000:]
    differences = [step["training/rollout_probs_diff_max"] for step in steps]
    assert max(differences) < 1e-4, differences
    return steps
