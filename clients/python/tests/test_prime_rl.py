"""prime-rl's calls, with the paths and bodies that its client builds (src/prime_rl/utils/client.py, commit 559b4477 of
August 2026, and renderers/client.py): steps with whole checkpoints and with an adapter under one name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from models import random_adapter, read_model, write_safetensors
from rollout_client import SamplingParams, ServerProcess
from serving import PUSH_MODEL, SMALL_CACHE, assert_idle, wait_for
from vllm_answers import ask

PROMPT = [5, 6, 7]
LORA = "r8-a16"


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """The directory that prime-rl's trainer writes to."""
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def server(binary, output):
    flags = [*SMALL_CACHE, "--mem-util", "0.3", "--weights-dir", output, "--max-adapters", "2"]
    flags += ["--served-model-name", "policy", "--liveness-seconds", "1"]
    with ServerProcess(binary, PUSH_MODEL, flags) as process:
        yield process


def post(server, path, body=None):
    answer = ask(server.http_address, "POST", path, body)
    assert answer.status == 200, answer
    return answer


def tokens(server, model):
    """A sample as renderers' client asks for it: its tokens and their log-probabilities."""
    sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    sampling |= {"stop_token_ids": [], "logprobs": 1, "skip_special_tokens": False}
    body = {
        "model": model,
        "token_ids": PROMPT,
        "sampling_params": sampling,
        "cache_salt": "1",
        "priority": 0,
    }
    answer = post(server, "/inference/v1/generate", body)
    choice = answer.body["choices"][0]
    assert answer.body["request_id"] and choice["finish_reason"] == "length"
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


def changed(rng, parameters):
    return {
        name: (array * rng.uniform(0.9, 1.1, array.shape)).astype(array.dtype) for name, array in parameters.items()
    }


def write_checkpoint(output, step, parameters):
    """What the trainer's filesystem broadcast leaves: files of the checkpoint, and a mark that they are complete."""
    path = output / "broadcasts" / f"step_{step}"
    path.mkdir(parents=True)
    names = sorted(parameters)
    for i, part in enumerate((names[::2], names[1::2])):
        write_safetensors(path / f"model-{i:05d}.safetensors", {name: parameters[name] for name in part})
    (path / "STABLE").touch()
    return path


def update_weights(server, path):
    post(server, "/pause?mode=keep&clear_cache=false")
    try:
        (path / "NCCL_READY").touch()
        answer = post(server, "/update_weights", {"weight_dir": path.as_posix()})
        assert answer.body["status"] == "ok"
    finally:
        post(server, "/resume")


def test_it_finds_the_server_ready(server):
    assert ask(server.http_address, "GET", "/health").status == 200
    assert "policy" in [model["id"] for model in ask(server.http_address, "GET", "/v1/models").body["data"]]
    live = ask(server.http_address, "GET", "/liveness")
    assert (live.status, live.body) == (200, {"status": "ok"})


def test_steps_with_checkpoints_in_the_middle_of_a_sample(server, output, rng):
    before = tokens(server, "policy")
    parameters = read_model(PUSH_MODEL)
    bits, version = [before], server.client.status().weight_version
    for step in (1, 2):
        parameters = changed(rng, parameters)
        path = write_checkpoint(output, step, parameters)
        sampling = SamplingParams(max_tokens=600, ignore_eos=True)
        with server.client.generate_stream([PROMPT], sampling=sampling, return_text=False) as running:
            wait_for(server.client, lambda status: status.running_samples == 1, "running")
            update_weights(server, path)
            (sample,) = [event for event in running if hasattr(event, "weight_versions")]
        assert sample.weight_versions[-1].weight_version == version + step, "it goes on under the new policy"
        bits.append(tokens(server, "policy"))
    assert bits[0] != bits[1] != bits[2]
    server.client.push_full(parameters.items())
    assert tokens(server, "policy") == bits[2], "as a push over gRPC"
    assert_idle(server.client)


def test_an_incomplete_checkpoint_changes_nothing(server, output, rng):
    parameters = changed(rng, read_model(PUSH_MODEL))
    before, version = tokens(server, "policy"), server.client.status().weight_version
    parameters.pop(next(name for name in parameters if "down_proj" in name))
    path = write_checkpoint(output, 7, parameters)
    refused = ask(server.http_address, "POST", "/update_weights", {"weight_dir": path.as_posix()})
    assert refused.status == 400 and "down_proj" in refused.body["error"]["message"], refused
    for missing, status in (("broadcasts/step_99", 404), ("/etc", 400)):
        refused = ask(server.http_address, "POST", "/update_weights", {"weight_dir": missing})
        assert refused.status == status, refused
    assert (tokens(server, "policy"), server.client.status().weight_version) == (before, version)


def test_weights_by_nccl_are_refused_with_the_setting_to_change(server):
    body = {"host": "localhost", "port": 29501, "rank_offset": 0, "inference_world_size": 1, "timeout": 1200}
    refused = ask(server.http_address, "POST", "/init_broadcaster", body | {"quantize_in_weight_transfer": False})
    assert refused.status == 501 and "filesystem" in refused.body["error"]["message"]


def test_steps_with_an_adapter_under_one_name(server, output, rng):
    bits = []
    for step in (1, 2, 3):
        tensors, config = random_adapter(rng, read_model(PUSH_MODEL))
        path = output / "lora" / "broadcasts" / f"step_{step}"
        path.mkdir(parents=True)
        write_safetensors(path / "adapter_model.safetensors", tensors)
        (path / "adapter_config.json").write_text(json.dumps(config))
        loaded = post(server, "/load_lora_adapter", {"lora_name": LORA, "lora_path": path.as_posix()})
        assert loaded.body == {"status": "ok"}
        bits.append(tokens(server, LORA))
    assert bits[0] != bits[1] != bits[2]
    server.client.push_lora(tensors, config, name="other")
    assert tokens(server, "other") == bits[2]
    missing = {"lora_name": LORA, "lora_path": (output / "lora" / "step_9").as_posix()}
    assert ask(server.http_address, "POST", "/load_lora_adapter", missing).status == 404, "which prime-rl tries again"
    post(server, "/v1/unload_lora_adapter", {"lora_name": LORA})


def test_prefill_scores_are_those_of_a_score(server):
    """As `prefill_logprobs` flattens them."""
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": "policy", "token_ids": [1, 5, 6, 7, 9], "sampling_params": sampling}
    entries = post(server, "/inference/v1/generate", body).body["prompt_logprobs"]
    flat = [float(next(iter(entry.values()))["logprob"]) if entry else 0.0 for entry in entries]
    score = server.client.score([[1, 5, 6, 7, 9]])[0]
    assert np.float32(flat[1:]).tobytes() == np.float32(score.raw_logprobs[1:]).tobytes() and flat[0] == 0.0
