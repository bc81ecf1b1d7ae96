"""What verl's configuration becomes: flags of a server, parameters of sampling, and refusals that name the setting."""

from __future__ import annotations

import os

import numpy as np
import pytest
from replicas import MODEL, PROMPT, model_config, rollout_config

from rollout_client import InvalidArgument, SamplingParams
from rollout_client.types import FinishReason, Sample, VersionSpan
from rollout_client.verl import NAME
from rollout_client.verl._sampling import output_fields, request_seed, sampling_params
from rollout_client.verl._settings import BINARY_VARIABLE, OPTIONS, command_line, find_binary, read_settings


def settings(options=None, model=None, replica_rank=0, replicas_per_node=1, **values):
    config = rollout_config(None, {} if options is None else options, **values)
    return read_settings(config, {"path": str(MODEL), **(model or {})}, replica_rank, replicas_per_node)


def test_what_verl_says_becomes_flags_and_options_become_further_ones():
    found = settings({"kv_cache_bytes": "64MiB", "profile": True, "threads": None}, tensor_model_parallel_size=2)
    assert " ".join(command_line(found.flags)) == (
        "--tp 2 --mem-util 0.2 --dtype float32 --log warn --kv-cache-bytes 64MiB --profile"
    )
    assert found.model == str(MODEL) and found.address is None
    assert command_line(settings(max_model_len=99).flags)[-2:] == ["--max-model-len", "99"]
    assert command_line(settings(limit_images=3).flags)[-2:] == ["--limit-mm-per-prompt", "image=3"]
    assert command_line(settings(enable_rollout_routing_replay=True).flags)[-1] == "--return-routing"
    four = {"tensor_model_parallel_size": 4}  # verl wants as many ranks of experts
    assert settings(**four, expert_parallel_size=4).flags == settings(**four).flags, "experts are whole on each rank"
    assert "--mem-util 0.1 " in " ".join(command_line(settings({"mem_util": 0.1}).flags)), "an option wins"


def test_replicas_of_one_machine_share_its_memory_and_its_cores():
    flags = settings(gpu_memory_utilization=0.6, replicas_per_node=4).flags
    assert flags["mem_util"] == pytest.approx(0.15)
    assert flags["threads"] == max(1, os.cpu_count() // 4)
    assert "threads" not in settings().flags


def test_pushes_of_adapters_are_told_from_merged_ones():
    assert not settings().adapter
    assert settings(model={"lora_rank": 8}).adapter
    assert settings(model={"lora": {"rank": 8}}).adapter
    assert not settings(model={"lora_rank": 8, "lora": {"rank": 8, "merge": True}}).adapter
    config = rollout_config(None, {})
    assert read_settings(config, model_config(lora_rank=8), 0, 1).adapter, "of verl's own class"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data_parallel_size": 2}, ["rollout.data_parallel_size=2", "must be 1"]),
        ({"pipeline_model_parallel_size": 2}, ["rollout.pipeline_model_parallel_size=2"]),
        ({"quantization": "fp8"}, ["rollout.quantization='fp8'", "None"]),
        ({"dtype": "float16"}, ["rollout.dtype='float16'", "'bfloat16'"]),
        ({"logprobs_mode": "raw_logits"}, ["rollout.logprobs_mode='raw_logits'", "'processed_logprobs'"]),
        ({"qat": {"enable": True}}, ["rollout.qat.enable"]),
        ({"options": {"http_port": 1}}, [f"{OPTIONS}.http_port", "leave it out"]),
        ({"options": {"addresses": ["a:1"], "tp": 2}}, [f"{OPTIONS}.tp", "addresses"]),
        ({"options": {"addresses": ["a:1"]}, "replica_rank": 1}, [f"{OPTIONS}.addresses: 1 for replicas 0 to 1"]),
        ({"options": "x"}, [f"{OPTIONS}: expected names with values"]),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(values, words):
    with pytest.raises(InvalidArgument) as caught:
        settings(**values)
    assert all(word in str(caught.value) for word in words), caught.value


def test_servers_that_run_are_named_one_for_each_replica():
    assert settings({"addresses": ["a:1", "b:2"]}, replica_rank=1).address == "b:2"
    assert settings({"addresses": "a:1"}).address == "a:1"


def test_the_binary_is_the_one_given_or_that_of_the_environment_or_of_the_path(tmp_path, monkeypatch):
    def executable(name):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
        return path

    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(InvalidArgument, match=rf"no rollout-server in PATH.* \+{OPTIONS}.binary=PATH"):
        find_binary(None)
    in_path = executable("bin/rollout-server")
    assert find_binary(None) == in_path
    monkeypatch.setenv(BINARY_VARIABLE, str(executable("other")))
    assert find_binary(None) == tmp_path / "other"
    assert find_binary(str(in_path)) == in_path
    with pytest.raises(InvalidArgument, match=f"{OPTIONS}.binary: no executable at /nowhere"):
        find_binary("/nowhere")


def test_parameters_of_sampling_are_those_of_vllm():
    found = sampling_params(
        {"temperature": 0.7, "top_k": -1, "top_p": 0.9, "logprobs": True, "max_tokens": 5, "stop": "x", "n": 1},
        len(PROMPT),
        settings(repetition_penalty=1.1, ignore_eos=True),
        100,
    )
    expected = SamplingParams(
        temperature=0.7, top_p=0.9, max_tokens=5, stop=["x"], repetition_penalty=1.1, ignore_eos=True
    )
    assert found == expected


@pytest.mark.parametrize(
    ("given", "prompt_tokens", "expected"),
    [
        ({}, 8, 32),  # response_length
        ({}, 80, 16),  # what prompt_length + response_length leave
        ({}, 97, 1),  # more than they leave
        ({"max_tokens": 50}, 8, 50),
        ({"max_new_tokens": 50}, 8, 50),
        ({"max_tokens": 500}, 60, 40),  # what the context leaves
        ({"max_tokens": 0}, 8, 1),
    ],
)
def test_max_tokens_is_cut_to_what_there_is_room_for(given, prompt_tokens, expected):
    assert sampling_params(given, prompt_tokens, settings(), 100).max_tokens == expected


@pytest.mark.parametrize(
    ("given", "prompt_tokens", "words"),
    [
        ({"n": 2}, 8, "sampling_params['n']: 2"),
        ({"best_of": 2}, 8, "sampling_params['best_of']: rollout-server has no such parameter"),
        ({"prompt_logprobs": 1}, 8, "sampling_params['prompt_logprobs']: 1"),
        ({}, 100, "prompt_ids: 100 tokens leave no room for an answer in a context of 100"),
    ],
)
def test_parameters_without_a_meaning_here_are_refused(given, prompt_tokens, words):
    with pytest.raises(InvalidArgument) as caught:
        sampling_params(given, prompt_tokens, settings(), 100)
    assert words in str(caught.value)


def sample(versions, reason=FinishReason.LENGTH):
    tokens = len(versions)
    spans = [VersionSpan(version, i, i + 1) for i, version in enumerate(versions)]
    logprobs, raw = np.full(tokens, -1, np.float32), np.full(tokens, -2, np.float32)
    return Sample(0, 0, list(range(tokens)), logprobs, raw, None, reason, spans, 1, 3, [], [])


def test_an_output_has_the_oldest_and_the_newest_version_of_its_tokens():
    found = output_fields(sample([4, 4, 6]), settings(), True, 9)
    assert found == {
        "token_ids": [0, 1, 2],
        "log_probs": [-1, -1, -1],
        "routed_experts": None,
        "stop_reason": "completed",
        "extra_fields": {"global_steps": 6, "min_global_steps": 4, "max_global_steps": 6, "num_cached_tokens": 3},
    }
    assert output_fields(sample([4]), settings(logprobs_mode="raw_logprobs"), True, 9)["log_probs"] == [-2]
    assert output_fields(sample([4]), settings(), False, 9)["log_probs"] is None
    nothing = output_fields(sample([], FinishReason.ABORTED), settings(), True, 9)
    assert nothing["stop_reason"] == "aborted" and nothing["extra_fields"]["min_global_steps"] == 9


def test_seeds_of_full_determinism_differ_between_samples_turns_and_steps():
    assert settings().seed is None
    assert settings(full_determinism=True, seed=7).seed == 7
    seeds = [request_seed(7, f"det-{i}", 8, 1) for i in range(100)]
    seeds += [request_seed(7, "det-0", 9, 1), request_seed(7, "det-0", 8, 2), request_seed(8, "det-0", 8, 1)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)
    assert seeds[0] == request_seed(7, "det-0", 8, 1)


def test_the_name_is_that_of_the_entry_point():
    assert NAME == "rollout_server"
