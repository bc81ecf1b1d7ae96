"""ms-swift itself, started by our launcher, against real servers; needs `make test-integrations`' environment.

Most of a run's time are the imports of its processes, so that each run tries several things at once.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from models import perturbed, read_model, write_model, write_vision_model
from rollout_client import Lifecycle, ServerProcess
from rollout_client.process import free_port
from serving import PUSH_MODEL, SMALL_CACHE

STEPS = 3
TOKENS = 16
IM_END = 2
OWN_LAYOUT = "internvl3-chat"
WITH_IMAGES = {
    "qwen2_5_vl": ("qwen2_5_vl", "qwen2_5_vl"),
    "internvl3": ("internvl", "internvl_hf"),
    OWN_LAYOUT: ("internvl_chat", "internvl3_5"),
}
"""ms-swift's type of model and its template for the fixtures that take images."""
OUTSIDE = ["visual.blocks", "visual.merger", "vision_tower", "multi_modal_projector", "vision_model", "mlp1"]
"""Parts of the names of towers and projectors."""
PLUGIN = Path(__file__).with_name("plugin.py")
LORA = [
    "--tuner_type",
    "lora",
    "--lora_rank",
    "4",
    "--lora_alpha",
    "8",
    "--lora_dropout",
    "0",
    "--learning_rate",
    "5e-3",
]
FULL = ["--tuner_type", "full", "--learning_rate", "1e-3"]
# Of the trainer: small, on the CPU, in float32 as the server, and quiet.
SMALL = {
    "rlhf_type": "grpo",
    "model_type": "qwen2",
    "template": "chatml",
    "check_model": "false",
    "reward_funcs": "codes",
    "external_plugins": str(PLUGIN),
    "max_steps": str(STEPS),
    "num_generations": "4",
    "per_device_train_batch_size": "8",
    "max_completion_length": str(TOKENS),
    "max_length": "512",
    "torch_dtype": "float32",
    "bf16": "false",
    "fp16": "false",
    "gradient_checkpointing": "false",
    "split_dataset_ratio": "0",
    "beta": "0",
    "save_strategy": "no",
    "eval_strategy": "no",
    "report_to": "none",
    "logging_steps": "1",
    "use_vllm": "true",
    "vllm_mode": "server",
    "log_rollout_offpolicy_metrics": "true",
    "rollout_importance_sampling_mode": "token_truncate",
}


@dataclass(frozen=True)
class Training:
    """A run that has ended well."""

    steps: list[list[dict]]
    """What the plug-in has recorded, by process."""
    log: list[dict]
    """ms-swift's own metrics, a dict for each step."""
    clients: list
    """Of the servers."""

    def assert_on_policy(self):
        """At every step the trainer's log-probabilities are those of the rollouts, and its policy a newer one."""
        for process in self.steps:
            assert [entry["difference"] < 1e-4 for entry in process] == [True] * STEPS, process
            assert all(entry["tokens"] for entry in process)
        policies = [json.dumps(entry["weights"]) for entry in self.steps[0]]
        assert len(set(policies)) == STEPS
        assert len(self.log) == STEPS
        # Later a policy may well have learned to say one thing.
        assert self.log[0]["frac_reward_zero_std"] < 1, "equal prompts are no clones"
        for metrics in self.log:
            assert abs(metrics["rollout_correction/is_weight_mean"] - 1) < 1e-4, "importance sampling is on"

    def assert_base_untouched(self):
        """What is not trained has the bits it had: the trainer's base is not merged with the adapter and unmerged."""
        assert len({entry["frozen"] for entry in self.steps[0]}) == 1

    def assert_asleep(self, level):
        """The servers slept while the trainer trained, and sleep now."""
        assert [entry["lifecycles"] for entry in self.steps[0]] == [["asleep"] * len(self.clients)] * STEPS
        for client in self.clients:
            status = client.status()
            assert status.lifecycle is Lifecycle.ASLEEP and status.asleep.level == level
            assert not status.memory.entries.get("kv_cache")


@pytest.fixture
def train(binary, tmp_path):
    """Runs a training to its end: `train(*arguments, servers=1, model=…, served=…)`."""
    with ExitStack() as running:

        def run(*arguments, servers=1, model=PUSH_MODEL, served=None, images=(), flags=(), **environment):
            flags = [*SMALL_CACHE, "--mem-util", "0.2", "--dtype", "float32", *flags]
            processes = [running.enter_context(ServerProcess(binary, served or model, flags)) for _ in range(servers)]
            record, output = tmp_path / "record", tmp_path / "output"
            result = subprocess.run(
                command(output, write_dataset(tmp_path, images), model, processes, arguments),
                env={
                    **{name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")},
                    **{"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                    "MASTER_PORT": str(free_port()),
                    **{"RECORD": str(record), "ADDRESSES": ",".join(process.address for process in processes)},
                    **environment,
                },
                capture_output=True,
                text=True,
                check=False,
                cwd=tmp_path,
            )
            print(result.stdout, result.stderr)
            assert result.returncode == 0
            (logged,) = output.glob("**/logging.jsonl")
            steps = [lines(path) for path in sorted(tmp_path.glob("record.*"))]
            log = [entry for entry in lines(logged) if "reward" in entry]
            return Training(steps, log, [process.client for process in processes])

        yield run


def lines(path):
    """The entries of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_dataset(directory, images):
    """Prompts; with lists of images, ones that differ by them alone."""
    message = {"role": "user", "content": "what is it"}
    rows = [{"messages": [message], "images": [str(path) for path in of_prompt]} for of_prompt in images]
    rows = rows or [{"messages": [{"role": "user", "content": f"how many are {i} and {i + 1}"}]} for i in range(16)]
    path = directory / "dataset.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def command(output, dataset, model, servers, arguments):
    """The command line that a user would type."""
    hosts, ports = zip(*(server.address.split(":") for server in servers), strict=True)
    return [
        *(sys.executable, "-m", "rollout_client.swift", "rlhf", "--model", str(model), "--dataset", str(dataset)),
        *("--output_dir", str(output), "--vllm_server_host", *hosts, "--vllm_server_port", *ports),
        *(part for name, value in SMALL.items() for part in (f"--{name}", value)),
        *arguments,
    ]


def test_an_adapter_with_forked_workers_and_sleep(train):
    training = train(*LORA, "--sleep_level", "1", "--dataset_num_proc", "2", "--dataloader_num_workers", "2")
    training.assert_on_policy()
    training.assert_base_untouched()
    training.assert_asleep(1)
    (client,) = training.clients
    assert client.status().updates == STEPS + 1, "one push a step, and at the start what was merged before is taken out"


def test_full_fine_tuning_by_two_processes_on_two_servers_with_sleep(train):
    arguments = [*FULL, "--sleep_level", "2", "--ddp_backend", "gloo", "--use_cpu", "true"]
    training = train(*arguments, servers=2, NPROC_PER_NODE="2")
    assert len(training.steps) == 2
    training.assert_on_policy()
    training.assert_asleep(2)
    first, second = (client.status() for client in training.clients)
    assert first.updates == second.updates == STEPS
    assert first.finished_requests and second.finished_requests


def test_turns_are_the_trainers_and_their_prefix_is_cached(train, tmp_path):
    # Ends its turns often: the token that does so is more likely than others.
    state = read_model(PUSH_MODEL)
    embedding = state["model.embed_tokens.weight"].copy()
    embedding[IM_END] *= 3
    model = write_model(tmp_path / "talker", PUSH_MODEL, state | {"model.embed_tokens.weight": embedding})
    # No other token ends a turn: ms-swift would add the template's end and train on it, without log-probabilities.
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": IM_END}))
    training = train(*LORA, "--multi_turn_scheduler", "again", "--max_turns", "3", model=model)
    training.assert_on_policy()
    training.assert_base_untouched()
    turns = [info["num_turns"] for entry in training.steps[0] for info in entry["infos"]]
    assert max(turns) == 3, turns
    (client,) = training.clients
    assert client.status().cached_tokens > 0


def test_a_base_that_is_not_the_servers_is_pushed_parameter_by_parameter(train, tmp_path, rng):
    other = write_model(tmp_path / "other", PUSH_MODEL, perturbed(rng, read_model(PUSH_MODEL)))
    arguments = [*LORA, "--sleep_level", "2", "--enable_flattened_weight_sync", "false"]
    training = train(*arguments, served=other, ROLLOUT_PUSH_BASE="1")
    training.assert_on_policy()
    training.assert_base_untouched()
    training.assert_asleep(2)


def test_an_adapter_that_changes_the_base_is_merged_by_the_trainer(train):
    training = train(*LORA, "--init_weights", "pissa", "--top_p", "0.9")
    training.assert_on_policy()
    (client,) = training.clients
    assert client.status().updates == STEPS


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_images(train, tmp_path, rng, name):
    """Of sizes that the template changes, so that the pixels differ from the files'."""
    paths = [[tmp_path / f"{row}-{i}.png" for i in range(1 + row % 2)] for row in range(16)]
    for path in itertools.chain(*paths):
        height, width = rng.integers(30, 120, 2)
        Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    model = write_vision_model(tmp_path / "vision", name)
    if name == OWN_LAYOUT:
        add_own_code(model)
    model_type, template = WITH_IMAGES[name]
    kind = ["--model_type", model_type, "--template", template, "--freeze_vit", "false", "--freeze_aligner", "false"]
    # ms-swift's flag for vLLM has no effect here.
    kind += ["--vllm_limit_mm_per_prompt", '{"image": 2}', "--sleep_level", "1"]
    flags = ["--limit-mm-per-prompt", "image=2"]
    flags += ["--tp", "2"] if name != OWN_LAYOUT else []  # whose tower has three heads
    training = train(*LORA, *kind, model=model, images=paths, flags=flags, INPUT_SIZE="84")
    adapted = {part for name in training.steps[0][0]["weights"] if "lora_B" in name for part in OUTSIDE if part in name}
    assert len(adapted) == 2, adapted  # the tower and the projector
    training.assert_on_policy()
    training.assert_base_untouched()
    training.assert_asleep(1)


def add_own_code(model):
    """The classes of a checkpoint in InternVL's own layout, which transformers lacks."""
    shutil.copy(Path(__file__).with_name("internvl_chat.py"), model)
    classes = {"AutoConfig": "InternVLChatConfig", "AutoModel": "InternVLChatModel"}
    classes["AutoModelForCausalLM"] = classes["AutoModel"]
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {kind: f"internvl_chat.{name}" for kind, name in classes.items()}
    (model / "config.json").write_text(json.dumps(config))
