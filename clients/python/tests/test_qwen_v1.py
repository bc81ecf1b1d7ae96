"""Qwen v1: chats without a template, where answers end, how long contexts are, and pushes under its own names."""

from __future__ import annotations

import json
import shutil
import subprocess

import numpy as np
import pytest

from models import checksums, perturbed, read_model
from rollout_client import SamplingParams, ServerProcess
from rollout_client._served_names import served_parameters
from serving import FIXTURES, SMALL_CACHE, bits, server
from vllm_answers import ask

MODEL = FIXTURES / "qwen_v1"
TEXT = json.loads((MODEL / "text.json").read_text())
END_OF_TURN = 514
QUICK = [*SMALL_CACHE, "--mem-util", "0.2"]


@pytest.fixture(scope="module")
def qwen(binary):
    with ServerProcess(binary, MODEL, [*QUICK, "--dtype", "float32"]) as process:
        yield process


@pytest.mark.parametrize("chat", TEXT["chats"], ids=["default system message", "its own"])
def test_a_chat_is_chatml_without_a_template_file(qwen, chat):
    rendered = ask(qwen.http_address, "POST", "/tokenize", {"messages": chat["messages"]}).body["tokens"]
    assert rendered == chat["ids"]
    assert ask(qwen.http_address, "POST", "/detokenize", {"tokens": rendered}).body["prompt"] == chat["prompt"]
    answer = ask(qwen.http_address, "POST", "/v1/chat/completions", {"messages": chat["messages"], "max_tokens": 3})
    assert answer.status == 200 and answer.body["usage"]["prompt_tokens"] == len(chat["ids"])


def test_an_answer_ends_with_the_end_of_a_turn(qwen):
    sampling = SamplingParams(logit_bias={END_OF_TURN: 100.0}, max_tokens=5)
    (sample,) = qwen.client.generate([[1, 2]], sampling=sampling)[0].samples
    assert sample.token_ids == [END_OF_TURN] and not sample.text


def refused(*command):
    """What a server says that does not start."""
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    return ended.stderr


def test_a_context_beyond_seq_length_is_refused_with_the_reason(binary):
    said = refused(binary, "--model", MODEL, "--max-model-len", "1025")
    assert "--max-model-len 1025: must be at most 1024, seq_length of config.json" in said
    assert "dynamic NTK and log-n attention" in said


def test_a_checkpoint_of_pickles_is_refused_with_what_to_do(binary, tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    said = refused(binary, "--model", tmp_path / "model")
    assert "convert them to safetensors: python3 -c" in said


def served(state):
    """Checksums of the server's parameters, given tensors under the model's own names."""
    return checksums(dict(part for name, array in state.items() for part in served_parameters(name, array)), "float32")


def test_pushes_under_its_own_names_are_served_through_sleep(binary, rng):
    base = read_model(MODEL, np.float32)
    with server(binary, MODEL, "--dtype", "float32") as client:
        assert client.checksum() == served(base)
        full = perturbed(rng, base)
        version = client.push_full(full).weight_version
        assert client.checksum() == served(full)
        other = perturbed(rng, full)
        some = {name: np.where(rng.random(array.shape) < 0.1, other[name], array) for name, array in full.items()}
        client.push_delta(full, some, base_version=version)
        assert client.checksum() == served(some)
        sampling = SamplingParams(max_tokens=8, seed=3, ignore_eos=True)
        before = [bits(sample) for sample in client.generate([[1, 2, 3]], sampling=sampling)[0].samples]
        client.sleep()
        client.wake()
        assert client.checksum() == served(some)
        assert [bits(sample) for sample in client.generate([[1, 2, 3]], sampling=sampling)[0].samples] == before
        client.sleep(2)
        client.wake(reload=True)
        assert client.checksum() == served(base)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_the_server_has_every_parameter_under_its_own_name(qwen, as_bytes):
    base = read_model(MODEL, np.float32)
    tensors = {name: (array.tobytes(), "float32", array.shape) for name, array in base.items()} if as_bytes else base
    names = [served_name for name, tensor in tensors.items() for served_name, _ in served_parameters(name, tensor)]
    assert sorted(names) == sorted(qwen.client.checksum())
