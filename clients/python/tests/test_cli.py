"""The command `rollout` against a real server: what each subcommand does, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from fake_server import completion, summary
from models import checksums, random_adapter, read_model, write_safetensors
from rollout_client import InvalidArgument, RolloutClient, SamplingParams, ServerProcess, _proto
from rollout_client._adapter_directory import read_adapter
from rollout_client.cli import build_parser, main
from rollout_client.process import free_port
from serving import FIXTURES, LONG, PUSH_MODEL, SMALL_CACHE, wait_for

GENERATE_TOKEN, CONTROL_TOKEN = "generate-token-0123456789", "control-token-0123456789"


@pytest.fixture
def rollout(running, capsys, monkeypatch):
    """Runs the command on the shared server: gives its status, standard output and standard error."""
    monkeypatch.setenv("ROLLOUT_ADDRESS", running.address)

    def run(*arguments):
        capsys.readouterr()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code
        return status, *capsys.readouterr()

    return run


def saved(directory, tensors, config):
    """The directory that PEFT would have written."""
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps(config))
    write_safetensors(directory / "adapter_model.safetensors", tensors)
    return directory


def test_generate_gives_the_samples_of_the_client(rollout, client):
    sampling = ["--max-tokens", 5, "--temperature", 0.5, "--top-k", 9, "--top-p", 0.9, "--seed", 3, "--ignore-eos"]
    status, out, _ = rollout("generate", "--tokens", "5, 6,7", "8", "-n", 2, "--json", *sampling)
    expected = client.generate(
        [[5, 6, 7], [8]],
        2,
        SamplingParams(max_tokens=5, temperature=0.5, top_k=9, top_p=0.9, seed=3, ignore_eos=True),
    )
    assert status == 0
    samples = [json.loads(line) for line in out.splitlines()]
    assert [sample["token_ids"] for sample in samples] == [s.token_ids for group in expected for s in group.samples]
    assert [np.float32(sample["logprobs"]).tobytes() for sample in samples] == [
        s.logprobs.tobytes() for group in expected for s in group.samples
    ]


def test_generate_writes_one_text_alone_and_several_under_headings(rollout, client):
    text = client.generate(["one two"], sampling=SamplingParams(seed=1))[0].samples[0].text
    assert rollout("generate", "one two", "--seed", 1)[:2] == (0, f"{text}\n")
    status, out, _ = rollout("generate", "one two", "three", "--seed", 1)
    assert status == 0 and text in out
    assert len(re.findall("^── prompt [01], sample 0: [0-9]+ tokens, ", out, re.MULTILINE)) == 2


def test_a_text_that_the_terminal_cannot_show_is_written_escaped(running):
    command = [sys.executable, "-m", "rollout_client.cli", "generate", "ü" * 20, "--address", running.address]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    # Long enough that some token is not ASCII.
    command += ["--max-tokens", "200", "--ignore-eos", "--seed", "1"]
    result = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert result.returncode == 0 and result.stdout.isascii() and b"\\" in result.stdout, result


def test_lifecycle(rollout, client):
    assert rollout("sleep", "--level", 1)[1].startswith("asleep after ")
    status, out, error = rollout("generate", "--tokens", 1)
    assert (status, out) == (1, "") and "asleep" in error and len(error.splitlines()) == 1
    assert rollout("wake", "weights")[1].startswith("asleep after ")
    assert rollout("wake")[1].startswith("running after ")
    assert rollout("pause", "--mode", "keep")[:2] == (0, "paused\n")
    assert rollout("resume")[:2] == (0, "running\n")
    assert client.status().lifecycle == "running"


def test_checksum(rollout, client):
    expected = client.checksum()
    assert rollout("checksum")[1] == "".join(f"{digest}  {name}\n" for name, digest in expected.items())
    name = next(iter(expected))
    assert json.loads(rollout("checksum", name, "--json")[1]) == {name: expected[name]}
    status, out, error = rollout("checksum", "nobody")
    assert (status, out) == (1, "") and "nobody" in error


def test_timeline_as_table_json_and_trace(rollout, client, tmp_path):
    client.generate([[1, 2]], sampling=SamplingParams(max_tokens=2), return_text=False)
    assert re.search(r"^idle +[0-9.]+ .+ +[0-9.]+%$", rollout("timeline")[1], re.MULTILINE)
    spans = json.loads(rollout("timeline", "--json")[1])["spans"]
    assert rollout("timeline", "--trace", tmp_path / "trace.json")[0] == 0
    events = [e for e in json.loads((tmp_path / "trace.json").read_text()) if e["ph"] == "X" and e["tid"] == 1]
    closed = [span for span in spans if span["track"] == "engine" and span["end"] is not None]
    assert [event["name"] for event in events[: len(closed)]] == [span["phase"] for span in closed]
    assert all(event["dur"] >= 0 for event in events)
    status, _, error = rollout("timeline", "--trace", tmp_path / "nowhere" / "trace.json")
    assert status == 1 and "No such file" in error


def test_push_lora_gives_what_the_client_gives(binary, rollout, rng, tmp_path):
    base = read_model(PUSH_MODEL)
    tensors, config = random_adapter(rng, base)
    directory = saved(tmp_path / "adapter", tensors, config)
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2", "--max-adapters", "1"]) as server:
        at = ("--address", server.address)
        status, out, _ = rollout("push-lora", directory, "--version", 7, "--json", *at)
        pushed = server.client.checksum()
        assert (status, json.loads(out)["weight_version"]) == (0, 7)
        assert pushed != checksums(base, "bfloat16")
        assert "force_version" in rollout("push-lora", directory, "--version", 6, *at)[2]
        assert rollout("push-lora", directory, "--version", 6, "--force-version", *at)[0] == 0
        assert server.client.status().weight_version == 6
        server.client.push_lora(tensors, config)
        assert server.client.checksum() == pushed
        assert "adapter math, generation 1" in rollout("push-lora", directory, "--name", "math", *at)[1]
        assert rollout("generate", "--tokens", 1, "--adapter", "math", *at)[0] == 0
        shutil.rmtree(directory)
        status, out, error = rollout("push-lora", directory, *at)
        assert (status, out) == (1, "") and str(directory) in error


@pytest.mark.parametrize("name", ["plain", "bfloat16", "float16"])
def test_adapters_that_peft_saved_are_read_as_the_server_reads_them(at_base, name):
    client, _ = at_base
    directory = FIXTURES / "peft" / name
    client.push_directory(directory)
    expected = client.checksum()
    client.push_lora(None)
    assert client.checksum() != expected
    client.push_lora(*read_adapter(directory))
    assert client.checksum() == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "adapter_config.json").unlink(), "adapter_config.json: No such file"),
        (lambda d: (d / "adapter_config.json").write_text("{"), "adapter_config.json: invalid JSON"),
        (
            lambda d: (d / "adapter_config.json").write_text("[" * 100_000),
            "adapter_config.json: invalid JSON: it is nested too deeply",
        ),
        (lambda d: (d / "adapter_config.json").write_text("[]"), "expected an object, got list"),
        (lambda d: (d / "adapter_model.safetensors").unlink(), "adapter_model.safetensors: No such file"),
        (lambda d: (d / "adapter_model.safetensors").rename(d / "adapter_model.bin"), "a pickle; save the adapter"),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b""), "adapter_model.safetensors: "),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b"12345"), "not a safetensors file"),
        (
            lambda d: (d / "adapter_model.safetensors").write_bytes((100_000).to_bytes(8, "little") + b"[" * 100_000),
            "its header is nested too deeply",
        ),
        (lambda d: (d / "adapter_model.safetensors").write_bytes(b"\xff" * 64), "not a safetensors file"),
        (lambda d: os.truncate(d / "adapter_model.safetensors", 300), "not a safetensors file"),
        (
            lambda d: write_safetensors(d / "adapter_model.safetensors", {"x": np.zeros(2, np.int32)}),
            "x has dtype I32; F32, BF16, F16 can be pushed",
        ),
    ],
)
def test_what_is_no_adapter_is_refused_by_name(rng, tmp_path, change, message):
    directory = saved(tmp_path / "adapter", *random_adapter(rng, read_model(PUSH_MODEL)))
    change(directory)
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        read_adapter(directory)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nothing"],
        ["sleep", "--level", "3"],
        ["wake", "everything"],
        ["status", "--address", "localhost"],
        ["status", "--address", "localhost:65536"],
        ["status", "--timeout", "0"],
        ["status", "--timeout", "nan"],
        ["status", "--interval", "inf"],
        ["status", "--window", "1e300"],
        ["timeline", "--last", "inf"],
        ["status", "--json", "--svg", "status.svg"],
        ["sidecar", "--listen", "127.0.0.1"],
        ["sidecar", "--listen", "127.0.0.1:65536"],
        ["sidecar", "--http-address", "http://127.0.0.1:8000"],
        ["generate"],
        ["generate", "--chat", "--tokens", "1"],
    ],
)
def test_wrong_usage_is_status_2(rollout, arguments):
    status, out, error = rollout(*arguments)
    assert (status, out) == (2, "") and error.startswith("usage: rollout")


def test_a_shell_can_complete_the_command(rollout):
    for shell in ("bash", "zsh", "fish"):
        status, script, error = rollout("completion", shell)
        assert (status, error) == (0, "") and "push-lora" in script and "token-file" in script
    subprocess.run(["bash", "-n"], input=rollout("completion", "bash")[1], text=True, check=True, timeout=60)


def test_an_address_in_the_environment_that_is_empty_is_none(monkeypatch):
    monkeypatch.setenv("ROLLOUT_ADDRESS", "")
    monkeypatch.setenv("ROLLOUT_HTTP_ADDRESS", "")
    options = build_parser().parse_args(["sidecar"])
    assert (options.address, options.http_address) == ("127.0.0.1:50051", None)


def test_a_port_of_http_is_said_to_be_one(rollout, running):
    status, _, error = rollout("pause", "--address", running.http_address)
    assert status == 1 and f"{running.http_address}: a port of HTTP; name that of gRPC" in error


def test_a_server_that_does_not_answer_in_time_is_named_with_the_time(rollout, fake):
    fake.answers["GetStatus"] = lambda request, context: fake.cancelled.wait(20)
    status, _, error = rollout("status", "--once", "--timeout", "0.2", "--address", fake.address)
    fake.cancelled.set()
    assert (status, error) == (1, f"rollout: {fake.address}: no answer within 0.2 s (--timeout)\n")


def test_samples_that_were_ended_early_are_shown_and_said_to_be_parts(rollout, fake):
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response()
    samples = [completion(sample_index=i, token_ids=[i], finish_reason=reason) for i, reason in enumerate((4, 5))]
    fake.answers["Generate"] = lambda request, context: [*samples, summary()]
    status, out, error = rollout("generate", "--tokens", 1, "-n", 2, "--address", fake.address)
    assert status == 1 and re.findall("^[01]$", out, re.MULTILINE) == ["0", "1"]
    assert error == "rollout: 1 of 2 samples were ended early, by --timeout or by another client\n"


def test_a_server_that_is_not_there_is_one_line(rollout):
    address = f"127.0.0.1:{free_port()}"
    for command in (["sleep"], ["status", "--once"], ["generate", "x"], ["push-lora", FIXTURES / "peft/plain"]):
        status, out, error = rollout(*command, "--address", address)
        assert (status, out) == (1, "")
        assert re.fullmatch(rf"rollout: .*{re.escape(address)}.*\n", error), error


def test_tokens_come_from_a_file_and_their_want_is_explained(binary, rollout, tmp_path, monkeypatch):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# both\ngenerate {GENERATE_TOKEN}\n\ncontrol {CONTROL_TOKEN}\n")
    alone = tmp_path / "token"
    alone.write_text(f"{GENERATE_TOKEN}\n")
    with ServerProcess(
        binary, PUSH_MODEL, [*SMALL_CACHE, "--auth-token-file", str(tokens)], token=CONTROL_TOKEN
    ) as server:
        monkeypatch.setenv("ROLLOUT_ADDRESS", server.address)
        status, _, error = rollout("pause")
        assert status == 1 and "--token-file" in error and len(error.splitlines()) == 1
        status, _, error = rollout("pause", "--token-file", alone)
        assert status == 1 and "role control" in error and GENERATE_TOKEN not in error
        assert rollout("status", "--once", "--token-file", alone)[0] == 0
        monkeypatch.setenv("ROLLOUT_TOKEN_FILE", str(tokens))
        assert rollout("pause")[:2] == (0, "paused\n")
    status, _, error = rollout("pause", "--token-file", tmp_path / "none")
    assert status == 1 and "none: No such file" in error
    alone.write_text("one two three four")
    assert "expected a token" in rollout("pause", "--token-file", alone)[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "\udcff"], "prompts[0]: 'utf-8' codec can't encode"),
        (["generate", "--chat", "\udcff"], "prompts[0][0].content: 'utf-8' codec can't encode"),
        (["generate", "--tokens", "1 x"], "--tokens: 'x' is not a token id; "),
        (["generate", "--tokens", "99999"], "prompts[0].tokens.ids[0]: 99999"),
        (["generate", "x", "--adapter", "\udcff"], "adapter: 'utf-8' codec can't encode"),
        (["generate", "x", "-n", "0"], "n: 0 samples"),
        (["status", "--tls-cert", "a"], "give both --tls-cert and --tls-key"),
        (["status", "--tls-ca", "/dev/null"], "/dev/null has no certificate in PEM"),
        (["status", "--svg", "/nowhere/status.svg"], "--svg /nowhere/status.svg: No such file"),
    ],
)
def test_what_is_refused_is_one_line(rollout, arguments, message):
    status, out, error = rollout(*arguments)
    assert (status, out) == (1, "") and message in error and len(error.splitlines()) == 1


def test_interrupted_it_is_quiet_and_what_it_asked_for_ends(running):
    """SIGINT while a long generation runs: status 130, nothing written, and the server is idle again."""
    words = ["--tokens", "1", "--max-tokens", str(LONG.max_tokens), "-n", "64", "--ignore-eos"]
    command = [sys.executable, "-m", "rollout_client.cli", "generate", *words, "--address", running.address]
    with RolloutClient(running.address) as client:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_for(client, lambda status: status.running_samples > 0, "generating")
        process.send_signal(signal.SIGINT)
        assert process.communicate() == (b"", b"")
        assert process.returncode == 130
        wait_for(client, lambda status: status.running_requests == 0, "idle")


def test_a_reader_that_leaves_is_no_error(running):
    command = [sys.executable, "-m", "rollout_client.cli", "checksum", "--address", running.address]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        result = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (result.returncode, result.stderr) == (141, b"")
