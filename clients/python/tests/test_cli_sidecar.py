"""`rollout sidecar`: the server's HTTP routes on another machine, whose directories the server cannot read."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

import numpy as np
import pytest

from certificates import Authority
from models import random_adapter, read_model, write_safetensors
from rollout_client import RolloutClient, ServerProcess, Tls
from rollout_client.process import free_port
from serving import PUSH_MODEL, SMALL_CACHE, wait_for
from sidecars import sidecar, start
from vllm_answers import ask

TOKEN = "control-token-0123456789"
SERVED = [*SMALL_CACHE, "--mem-util", "0.2", "--max-adapters", "2"]
COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 12, "seed": 3, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Directories of adapters below none that the server may read."""
    root, base, rng = tmp_path_factory.mktemp("trainer"), read_model(PUSH_MODEL), np.random.default_rng(7)
    for name, rank in (("one", 4), ("two", 8), ("three", 4), ("big", 64)):
        tensors, config = random_adapter(rng, base, rank=rank)
        (root / name).mkdir()
        write_safetensors(root / name / "adapter_model.safetensors", tensors)
        (root / name / "adapter_config.json").write_text(json.dumps(config))
    return root


@pytest.fixture(scope="module")
def both(binary):
    """A server without `--weights-dir`, and the address of its sidecar."""
    with (
        ServerProcess(binary, PUSH_MODEL, SERVED) as server,
        sidecar("--address", server.address, "--http-address", server.http_address) as (address, _),
    ):
        yield server, address


@pytest.fixture
def served(both):
    """The same without adapters, before and after."""
    server, address = both
    yield server, address
    for adapter in server.client.adapters():
        server.client.remove_adapter(adapter.name)


def load(address, name, path, **members):
    return ask(address, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)} | members)


def test_an_adapters_directory_travels(served, adapters):
    server, address = served
    base = ask(address, "POST", "/v1/completions", COMPLETION)
    assert base.status == 200 and base.body["choices"] == direct(server, COMPLETION)
    loaded = load(address, "policy-v1", adapters / "one")
    assert (loaded.status, loaded.body) == (200, "Success: LoRA adapter 'policy-v1' added successfully.")
    question = COMPLETION | {"model": "policy-v1", "logprobs": 0}
    answer = ask(address, "POST", "/v1/completions", question)
    assert answer.body["choices"] == direct(server, question)
    assert answer.body["choices"][0]["token_ids"] != base.body["choices"][0]["token_ids"]
    models = ask(address, "GET", "/v1/models").body["data"]
    assert [model["id"] for model in models] == [str(PUSH_MODEL), "policy-v1"]
    assert ask(address, "POST", "/v1/unload_lora_adapter", {"lora_name": "policy-v1"}).status == 200
    assert ask(address, "POST", "/v1/completions", question).status == 404


def direct(server, body):
    return ask(server.http_address, "POST", "/v1/completions", body).body["choices"]


def test_a_name_that_is_taken(served, adapters):
    server, address = served
    assert load(address, "policy", adapters / "one").status == 200
    again = load(address, "policy", adapters / "two")
    assert again.status == 400
    assert again.body["error"]["message"].startswith("The lora adapter 'policy' has already been loaded.")
    assert load(address, "policy", adapters / "two", load_inplace=True).status == 200
    assert [adapter.rank for adapter in server.client.adapters() if not adapter.retired] == [8]


def test_a_load_beyond_the_slots_replaces_the_least_recently_used_adapter(served, adapters):
    server, address = served
    assert [load(address, name, adapters / name).status for name in ("one", "two")] == [200, 200]
    assert ask(address, "POST", "/v1/completions", COMPLETION | {"model": "one"}).status == 200
    assert load(address, "big", adapters / "big").status == 400
    assert load(address, "three", adapters / "three").status == 200
    assert [adapter.name for adapter in server.client.adapters()] == ["one", "three"]


def test_what_the_server_refuses_is_passed_on(served, adapters):
    _, address = served
    big = load(address, "big", adapters / "big")
    assert big.status == 400 and "--max-lora-rank" in big.body["error"]["message"], big
    assert big.body["error"]["type"] == "BadRequestError"
    missing = load(address, "new", adapters / "none")
    assert missing.status == 404 and f"No adapter found for {adapters / 'none'}" in missing.body["error"]["message"]


@pytest.mark.parametrize(
    "body", [{}, [], {"lora_name": "a"}, {"lora_name": "", "lora_path": "b"}, {"lora_name": "a", "lora_path": 3}]
)
def test_an_order_without_name_or_path_is_refused(served, body):
    answer = ask(served[1], "POST", "/v1/load_lora_adapter", body)
    assert (answer.status, answer.body["error"]["code"]) == (400, 400)
    assert "'lora_name' and 'lora_path'" in answer.body["error"]["message"]


def test_an_order_that_is_nested_too_deeply_is_refused(served):
    request = urllib.request.Request(
        f"http://{served[1]}/v1/load_lora_adapter", b"[" * 100_000, {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=30)
    with refused.value as answer:
        assert answer.code == 400


def test_orders_queries_and_errors_pass_through(served):
    server, address = served
    assert ask(address, "POST", "/pause?mode=keep").status == 200
    assert server.client.status().lifecycle == "paused"
    assert ask(address, "POST", "/resume").status == 200
    assert ask(address, "GET", "/health").status == 200
    info = ask(address, "GET", "/server_info?config_format=json")
    assert info.body == ask(server.http_address, "GET", "/server_info?config_format=json").body
    impossible = {"prompt": [1], "max_tokens": -1}
    wrong = ask(address, "POST", "/v1/completions", impossible)
    expected = ask(server.http_address, "POST", "/v1/completions", impossible)
    assert wrong.status == expected.status == 400 and wrong.body == expected.body
    assert ask(address, "GET", "/no/such/route").status == 404


def stream(address):
    """A connection and the answer of a long stream, of which the first event has been read."""
    connection = http.client.HTTPConnection(address, timeout=60)
    body = json.dumps(COMPLETION | {"max_tokens": 900, "stream": True})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: {")
    return connection, answer


def test_a_stream_comes_as_it_is_made_and_ends_with_its_client(served):
    server, address = served
    connection, answer = stream(address)
    running = server.client.status()
    assert running.running_samples == 1, "the first event has come, and the sample still runs"
    answer.close()
    connection.close()
    wait_for(server.client, lambda status: status.running_samples == 0, "without the request")
    assert server.client.status().generated_tokens < running.generated_tokens + 900


def test_a_stream_that_breaks_is_seen_to_break(binary):
    server = ServerProcess(binary, PUSH_MODEL, SERVED)
    try:
        server.wait_until_ready()
        with sidecar("--address", server.address, "--http-address", server.http_address) as (address, _):
            connection, answer = stream(address)
            server.process.kill()
            with pytest.raises((http.client.IncompleteRead, ConnectionError)):
                answer.read()
            connection.close()
    finally:
        server.stop()


def test_a_server_that_is_gone_is_said_to_be(binary):
    with ServerProcess(binary, PUSH_MODEL, SERVED) as server:
        gone = f"127.0.0.1:{free_port()}"
        with sidecar("--address", server.address, "--http-address", gone) as (address, _):
            answer = ask(address, "GET", "/health")
    assert answer.status == 502
    assert f"the server at http://{gone} does not answer" in answer.body["error"]["message"]


def test_a_server_that_keeps_no_adapters_is_named_with_its_flag(running):
    process = start("--address", running.address, "--http-address", running.http_address)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "--max-adapters of at least max_staleness + 2" in said


def test_an_address_that_is_taken_or_none(both):
    server, address = both
    for listen, status, why in ((address, 1, "--listen"), ("nowhere", 2, "--listen: 'nowhere' is not HOST:PORT")):
        process = start("--address", server.address, "--listen", listen)
        _, said = process.communicate(timeout=60)
        assert process.returncode == status and why in said


def test_token_and_tls(binary, adapters, tmp_path):
    authority = Authority(tmp_path)
    cert, key, _ = authority.issue("server")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"control {TOKEN}\n")
    tokens.chmod(0o600)
    flags = [*SERVED, "--tls-cert", cert, "--tls-key", key, "--auth-token-file", tokens]
    tls = Tls(ca=authority.path)
    with ServerProcess(binary, PUSH_MODEL, list(map(str, flags)), token=TOKEN, tls=tls) as server:
        options = ["--address", server.address, "--http-address", server.http_address, "--tls-ca", authority.path]
        with sidecar(*options, "--token-file", tokens) as (address, line):
            assert f"is https://{server.http_address};" in line
            assert load(address, "policy", adapters / "one").status == 200
            assert ask(address, "POST", "/v1/completions", COMPLETION | {"model": "policy"}).status == 200
            stranger = {"Authorization": "Bearer no-such-token-0123456789"}
            assert ask(address, "GET", "/v1/models", headers=stranger).status == 401, "the caller's own goes first"
        assert [adapter.name for adapter in RolloutClient(server.address, token=TOKEN, tls=tls).adapters()] == [
            "policy"
        ]
