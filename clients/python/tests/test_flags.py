"""Command lines as people who know vLLM type them, and the help that they see."""

from __future__ import annotations

import subprocess

import pytest

from rollout_client import RolloutClient, ServerProcess, Unauthenticated
from serving import FIXTURES, SMALL_CACHE
from vllm_answers import ask

MODEL = FIXTURES / "llama"
KEY = "a-key-of-many-characters"


def run(binary, *arguments):
    return subprocess.run([binary, *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False)


def test_flags_of_vllm_start_a_server(binary, tmp_path):
    log = tmp_path / "log"
    flags = [
        "--served-model-name", "policy", "alias", "--gpu-memory-utilization", "0.2", "--kv_cache_memory_bytes=16777216",
        "--enable-sleep-mode", "--trust-remote-code", "--tensor-parallel-size", "1", "--seed", "7",
        "--enable-lora", "--max-loras", "2", "--uvicorn-log-level", "info", "--return-tokens-as-token-ids",
        "--structured-outputs-config.backend", "xgrammar",
    ]  # fmt: skip
    with log.open("w") as output, ServerProcess(binary, MODEL, flags, output=output) as server:
        listed = ask(server.http_address, "GET", "/v1/models").body["data"]
        assert [(model["id"], model["root"]) for model in listed] == [("policy", str(MODEL)), ("alias", str(MODEL))]
        for name in ("policy", "alias", "", None):
            body = {"model": name, "prompt": [1, 2], "max_tokens": 2}
            answer = ask(server.http_address, "POST", "/v1/completions", body)
            assert answer.status == 200 and answer.body["model"] == (name or "policy")
        tokens = ask(server.http_address, "POST", "/v1/completions", {"prompt": [1], "max_tokens": 1, "logprobs": 1})
        assert tokens.body["choices"][0]["logprobs"]["tokens"][0].startswith("token_id:")
        unknown = ask(server.http_address, "POST", "/v1/completions", {"model": "gpt-4", "prompt": [1]})
        message = unknown.body["error"]["message"]
        assert unknown.status == 404 and unknown.body["error"]["param"] == "model"
        assert (
            message == "The model `gpt-4` does not exist. This server serves `policy`, `alias`; no adapter is resident"
        )
        info = server.client.info()
        assert (info.model, info.max_adapters) == ("policy", 2)
    said = log.read_text()
    for note in (
        "--gpu-memory-utilization is --mem-util here", "--kv_cache_memory_bytes is --kv-cache-bytes here",
        "--enable-sleep-mode has no effect here: sleep and wake are always available", "--max-loras is --max-adapters",
        "--structured-outputs-config.backend xgrammar has no effect here: llguidance is the only backend",
    ):  # fmt: skip
        assert note in said, said


def test_the_model_may_be_the_first_argument(binary):
    for line in (["/nothing/here"], ["serve", "/nothing/here"], ["--model", "/nothing/here"]):
        ended = run(binary, *line)
        assert ended.returncode == 1 and "--model /nothing/here: no such file or directory" in ended.stderr, ended
    ended = run(binary)
    assert ended.returncode == 2 and "--model" in ended.stderr


@pytest.mark.parametrize("flags, said", [
    (["--pipeline-parallel-size", "2"], "--pipeline-parallel-size 2: ranks share each layer: use --tp"),
    (["--quantization", "awq"], "--quantization awq: weights are served as bfloat16 or float32"),
    (["--no-enable-prefix-caching"], "the prefix cache is always on"),
    (["--tool-call-parser", "pythonic"], "--tool-call-parser pythonic: the chat template says which of the formats"),
    (["--device", "cuda"], "this build is for the CPU; `make cuda` builds the server for NVIDIA GPUs"),
    (["--api-key", "short"], "the token has 5 characters; give 16"),
    (["--port", "8000", "--http-port", "8000"], "--port 8000: must be different from --http-port"),
    (["--kv-transfer-config.kv_role", "kv_both"], "keys and values stay in the server that computed them"),
    (["--no-such-flag"], "unexpected argument '--no-such-flag'"),
    (["--chat-template", "/nothing.jinja"], "/nothing.jinja"),
])  # fmt: skip
def test_a_flag_for_what_is_missing_says_so(binary, flags, said):
    ended = run(binary, MODEL, *flags)
    assert ended.returncode != 0 and said in ended.stderr, ended.stderr


def test_an_api_key_is_required_and_may_do_everything(binary):
    with ServerProcess(binary, MODEL, [*SMALL_CACHE, "--mem-util", "0.2", "--api-key", KEY], token=KEY) as server:
        server.client.pause()
        server.client.resume()
        assert ask(server.http_address, "GET", "/v1/models").status == 401
        with RolloutClient(server.address) as stranger, pytest.raises(Unauthenticated):
            stranger.generate([[1, 2]], return_text=False)


def test_a_chat_template_of_ones_own(binary, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--chat-template", str(template)]
    with ServerProcess(binary, MODEL, flags) as server:
        tokens = [
            ask(server.http_address, "POST", "/tokenize", body | {"add_special_tokens": False}).body["tokens"]
            for body in ({"messages": [{"role": "user", "content": "Hello"}]}, {"prompt": "Hello"})
        ]
        assert tokens[0] == tokens[1] != []


def test_help_begins_with_a_first_run_and_has_sections(binary):
    shown = run(binary, "--help").stdout
    first = "\n".join(shown.splitlines()[:24])
    assert "First run:" in first and "rollout-server MODEL" in first and "curl" in first
    sections = ["Model:", "Serving:", "Memory:", "Parallelism:", "Device:", "Weights and adapters:", "Security:"]
    places = [shown.index(f"\n{section}\n") for section in [*sections, "Speculation:", "Observability:"]]
    assert places == sorted(places)
    assert "\nOptions:" not in shown.replace("\nOptions:\n  -h, --help", "")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_can_complete_the_flags(binary, shell):
    script = run(binary, "completion", shell)
    assert script.returncode == 0 and "mem-util" in script.stdout and "max-lora-rank" in script.stdout
    unknown = run(binary, "completion", "tcsh")
    assert unknown.returncode == 1 and "must be bash, zsh, fish" in unknown.stderr
