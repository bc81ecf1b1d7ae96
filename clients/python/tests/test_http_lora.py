"""Adapters over HTTP: beside vLLM's recorded answers, beside gRPC to the bit, and as TRL's trainer drives them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time

import numpy as np
import pytest

from models import random_adapter, read_model, write_safetensors
from rollout_client import RolloutClient, SamplingParams, ServerProcess
from serving import PUSH_MODEL, SMALL_CACHE, assert_idle, held, wait_for
from vllm_answers import Answer, ask, assert_like_vllm, recorded

MODEL = str(PUSH_MODEL)
OURS_NAMES_IT = "our errors name the member by its path, and have one type"
OTHER_NAME = {"error.type": OURS_NAMES_IT, "error.param": OURS_NAMES_IT}
PLAIN = {"content_type": "text/plain; charset=utf-8"}
# What is recorded of vLLM, the adapters that are there before it, and the differences that are meant.
EXCHANGES = [
    ("load", [], PLAIN),
    ("load-again", ["policy-v1"], {}),
    ("load-again-other-path", ["policy-v1"], {}),
    ("load-base-name", [], {}),
    ("load-empty-name", [], {}),
    ("load-empty-path", [], {}),
    ("load-no-path", [], OTHER_NAME),
    ("load-hub-name", [], {}),
    ("load-missing-path", [], {}),
    ("load-no-config", [], {}),
    ("load-relative", [], PLAIN),
    ("load-extra", [], PLAIN),
    ("load-inplace", ["policy-v1"], PLAIN),
    ("load-inplace-new", [], PLAIN),
    ("unload", ["policy-v1"], PLAIN),
    ("unload-again", [], {}),
    ("unload-no-name", [], OTHER_NAME),
    ("unload-empty-name", [], {}),
    ("unload-base", [], {}),
    ("load-after-unload", [], PLAIN),
]


class Served:
    """A server with adapters below its directory: `one`, `two`, `big` of rank 32, and `empty`, which has none."""

    def __init__(self, address, client, root, adapters):
        self.address, self.client, self.root, self.adapters = address, client, root, adapters

    def post(self, path, body=None):
        return ask(self.address, "POST", path, body)

    def load(self, name, path, **members) -> Answer:
        return self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)} | members)

    def unload(self, name) -> Answer:
        return self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def models(self):
        return [entry["id"] for entry in ask(self.address, "GET", "/v1/models").body["data"]]

    def completion(self, model=None, prompt=(5, 6, 7), max_tokens=12, **members):
        body = {"model": model, "prompt": list(prompt), "max_tokens": max_tokens, "seed": 3, "ignore_eos": True}
        return self.post("/v1/completions", body | {"return_token_ids": True, "logprobs": 2} | members)

    def bits(self, model=None, **members):
        answer = self.completion(model, **members)
        assert answer.status == 200, answer
        choice = answer.body["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def write_adapter(path, tensors, config):
    path.mkdir(parents=True)
    write_safetensors(path / "adapter_model.safetensors", tensors)
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def running(binary, tmp_path_factory):
    root = tmp_path_factory.mktemp("weights")
    rng, base = np.random.default_rng(5), read_model(PUSH_MODEL)
    adapters = {name: random_adapter(rng, base, rank=rank) for name, rank in (("one", 4), ("two", 8), ("big", 32))}
    for name, (tensors, config) in adapters.items():
        write_adapter(root / name, tensors, config)
    write_adapter(root / "adapters" / "one", *adapters["one"])
    (root / "empty").mkdir()
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--max-adapters", "3", "--max-lora-rank", "16", "--weights-dir", root]
    with ServerProcess(binary, PUSH_MODEL, [str(flag) for flag in flags]) as server:
        yield server, root, adapters


@pytest.fixture
def served(running):
    """A server without adapters, which has none and is idle afterwards."""
    server, root, adapters = running
    with RolloutClient(server.address, timeout=120) as client:
        served = Served(server.http_address, client, root, adapters)
        yield served
        served.post("/resume")
        for name in served.models()[1:]:
            assert served.unload(name).status == 200
        wait_for(client, lambda _: client.adapters() == [], "without adapters")
        assert_idle(client)
        status = client.status()
        assert not status.updating and "update_staging" not in held(status)


@pytest.mark.parametrize("name, before, differences", EXCHANGES)
def test_answers_are_like_vllms(served, name, before, differences):
    for adapter in before:
        assert served.load(adapter, served.root / "one").status == 200
    exchange = recorded(f"lora/{name}")
    body = {member: MODEL if value == "MODEL" else value for member, value in exchange.request["body"].items()}
    if "lora_path" in body:
        path = "empty" if name == "load-no-config" else body["lora_path"]
        body["lora_path"] = path.replace("/ADAPTERS", str(served.root))
    ours = ask(served.address, exchange.request["method"], exchange.request["path"], body)
    assert_like_vllm(ours, exchange, differences)
    if ours.status == 200:
        assert ours.body == exchange.answer.body, "the same text"
    elif ours.status == 400 and differences == {}:
        theirs = exchange.answer.body["error"]["message"].replace("MODEL", MODEL)
        assert ours.body["error"]["message"] == theirs
    assert ours.headers.get("x-ignored-members") == ("what" if name == "load-extra" else None)


def test_a_loaded_adapter_is_one_pushed_over_grpc_to_the_bit(served):
    base = served.bits()
    assert served.load("http", served.root / "one").status == 200
    tensors, config = served.adapters["one"]
    served.client.push_lora(tensors, config, name="grpc")
    assert sorted(served.models()[1:]) == ["grpc", "http"]
    assert served.bits("http") == served.bits("grpc") != base
    sample = served.client.generate(
        [[5, 6, 7]], sampling=SamplingParams(max_tokens=12, seed=3, ignore_eos=True), adapter="http"
    )[0].samples[0]
    ids, logprobs = served.bits("http")
    assert sample.token_ids == ids and sample.logprobs.tobytes() == np.array(logprobs, np.float32).tobytes()
    assert served.bits() == base, "the policy has not changed"
    assert [a.rank for a in served.client.adapters()] == [4, 4]


@pytest.mark.parametrize("inplace", [True, False])
def test_other_tensors_under_a_name_and_path_are_never_answered_from_the_old_ones_cache(served, inplace):
    """vLLM answers a prompt that was asked before from the old adapter's keys and values."""
    prompt = [(i * 7) % 500 for i in range(300)]
    path = write_adapter(served.root / f"same-{inplace}", *served.adapters["one"])
    assert served.load("q", path).status == 200
    one = served.bits("q", prompt=prompt)
    assert served.bits("q", prompt=prompt) == one, "from the cache"
    shutil.rmtree(path)
    write_adapter(path, *served.adapters["two"])
    if not inplace:
        assert served.unload("q").status == 200
    assert served.load("q", path, load_inplace=inplace).status == 200
    two = served.bits("q", prompt=prompt)
    assert served.load("fresh", served.root / "two").status == 200
    assert two == served.bits("fresh", prompt=prompt) != one
    shutil.rmtree(path)
    assert served.bits("q", prompt=prompt) == two, "the directory is not read again"


@pytest.mark.parametrize("change", [
    lambda served: served.load("a", served.root / "two", load_inplace=True),
    lambda served: served.unload("a"),
])  # fmt: skip
def test_a_running_request_keeps_its_adapter(served, change):
    """When the adapter is replaced in place, and when it is unloaded."""
    assert served.load("a", served.root / "one").status == 200
    alone, found = served.bits("a", max_tokens=900), []
    thread = threading.Thread(target=lambda: found.append(served.bits("a", max_tokens=900)))
    start = served.client.status().generated_tokens
    thread.start()
    wait_for(served.client, lambda s: s.generated_tokens > start + 10, "generating")
    assert change(served).status == 200
    thread.join(120)
    assert found == [alone]
    after = served.completion("a")
    assert after.status == 404 or after.body["choices"][0]["token_ids"] != alone[0][:12]


def test_an_unload_answers_while_its_adapter_is_in_use(served):
    assert served.load("a", served.root / "one").status == 200
    answers = []
    start = served.client.status().generated_tokens
    thread = threading.Thread(target=lambda: answers.append(served.completion("a", max_tokens=900)))
    thread.start()
    wait_for(served.client, lambda s: s.generated_tokens > start + 5, "generating")
    served.post("/pause?mode=keep")
    assert served.unload("a").status == 200, "though its request stands still"
    assert served.unload("a").status == 404
    assert served.models() == [MODEL] and [a.retired for a in served.client.adapters()] == [True]
    assert served.load("a", served.root / "two").status == 200, "beside the retired one"
    served.post("/resume")
    thread.join(120)
    assert answers[0].status == 200 and len(answers[0].body["choices"][0]["token_ids"]) == 900


def test_a_load_beyond_the_slots_replaces_the_least_recently_used_adapter(served):
    for name in ("a", "b", "c"):
        assert served.load(name, served.root / "one").status == 200
    assert served.completion("a").status == 200
    assert served.load("c", served.root / "two", load_inplace=True).status == 200
    assert served.load("d", served.root / "one").status == 200
    assert served.models() == [MODEL, "a", "c", "d"], "b was used least recently"
    gone = served.completion("b")
    assert gone.status == 404 and "`b` does not exist" in gone.body["error"]["message"], gone
    assert all(f"`{name}`" in gone.body["error"]["message"] for name in (MODEL, "a", "c", "d")), gone


def test_a_load_that_fails_costs_no_other_adapter_its_place(served):
    for name in ("a", "b", "c"):
        assert served.load(name, served.root / "one").status == 200
    tensors, config = served.adapters["one"]
    root, damaged = served.root, write_adapter(served.root / "damaged", tensors, config | {"r": 5})
    for path, status in ((root / "nothing", 404), (root / "empty", 404), ("/etc", 400), (damaged, 400), ("big", 400)):
        refused = served.load("d", path)
        assert refused.status == status, refused
    assert served.models() == [MODEL, "a", "b", "c"]


def test_adapters_in_use_are_never_replaced(served):
    for name in ("a", "b", "c"):
        assert served.load(name, served.root / "one").status == 200
    requests = [threading.Thread(target=served.completion, args=(name,), kwargs={"max_tokens": 900}) for name in "abc"]
    served.post("/pause?mode=keep")
    for request in requests:
        request.start()
    wait_for(served.client, lambda s: s.held_requests == 3, "held")
    served.post("/resume")
    wait_for(served.client, lambda s: s.running_requests == 3, "running")
    served.post("/pause?mode=keep")
    refused = served.load("d", served.root / "one")
    assert refused.status == 429 and "--max-adapters 3" in refused.body["error"]["message"], refused
    served.post("/abort_requests", {})
    for request in requests:
        request.join(60)
    served.post("/resume")
    assert served.load("d", served.root / "one").status == 200


def test_an_adapter_is_listed_with_its_directory(served):
    assert served.load("a", served.root / "one").status == 200
    listed = ask(served.address, "GET", "/v1/models").body["data"]
    assert [(model["id"], model["root"], model["parent"]) for model in listed] == [
        (MODEL, MODEL, None), ("a", str(served.root / "one"), MODEL)
    ]  # fmt: skip
    for model in listed:
        assert ask(served.address, "GET", f"/v1/models/{model['id'].lstrip('/')}").body == model
    missing = ask(served.address, "GET", "/v1/models/gpt-4")
    assert missing.status == 404 and MODEL in missing.body["error"]["message"]


def test_a_server_without_slots_or_directory_says_what_is_missing(binary):
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        body = {"lora_name": "x", "lora_path": "/tmp/x"}
        refused = ask(server.http_address, "POST", "/v1/load_lora_adapter", body)
        assert refused.status == 400 and "--max-adapters" in refused.body["error"]["message"]
        assert "max_staleness + 2" in refused.body["error"]["message"]
        config = ask(server.http_address, "GET", "/server_info?config_format=json").body["vllm_config"]
        assert config["lora_config"] is None
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2", "--max-adapters", "1"]) as server:
        refused = ask(server.http_address, "POST", "/v1/load_lora_adapter", body)
        assert refused.status == 400 and "--weights-dir" in refused.body["error"]["message"]
        assert refused.body["error"]["param"] == "lora_path"


def test_paths_lead_nowhere_else(served, tmp_path):
    outside = write_adapter(tmp_path / "outside", *served.adapters["one"])
    (served.root / "link").symlink_to(outside)
    (served.root / "linked").mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (served.root / "linked" / file).symlink_to(outside / file)
    (served.root / "inner").symlink_to("one")
    for path in (
        outside, f"{served.root}/../{outside.name}", "../outside", f"one/../../{outside.name}", "link", "linked",
        "/etc", "/", f"{served.root}x/one", f"{served.root}/link/../one/../../x",
    ):  # fmt: skip
        refused = served.load("x", path)
        assert refused.status in (400, 404), refused
        assert refused.status == 404 or "--weights-dir" in refused.body["error"]["message"], refused
    assert served.load("x", "one/\0").status == 400
    assert served.load("x", "x" * 100_000).status == 400
    assert served.load("x", "inner").status == 200, "a link that stays inside"
    assert served.models() == [MODEL, "x"]


@pytest.mark.parametrize("break_it, said", [
    (lambda p: (p / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    (lambda p: (p / "adapter_config.json").write_text("{"), "adapter_config"),
    (lambda p: (p / "adapter_model.safetensors").write_bytes(b"\xff" * 100), "safetensors"),
    (lambda p: (p / "adapter_model.safetensors").write_bytes((p / "adapter_model.safetensors").read_bytes()[:-8]),
     "safetensors"),
    (lambda p: (p / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 5, "lora_alpha": 1,
                                                                  "target_modules": ["q_proj"]})), ""),
])  # fmt: skip
def test_what_is_no_adapter_is_refused_and_nothing_stays(served, break_it, said):
    path = write_adapter(served.root / f"broken-{time.monotonic_ns()}", *served.adapters["one"])
    break_it(path)
    before = served.client.status().memory.entries
    refused = served.load("x", path)
    assert refused.status in (400, 404) and said in refused.body["error"]["message"], refused
    assert served.models() == [MODEL] and served.client.status().memory.entries == before


def test_a_rank_above_the_limit_is_named(served):
    refused = served.load("big", served.root / "big")
    assert refused.status == 400 and "--max-lora-rank 16" in refused.body["error"]["message"], refused


@pytest.mark.parametrize("body", [
    [], "x", {}, {"lora_name": 1, "lora_path": "one"}, {"lora_name": "x", "lora_path": None},
    {"lora_name": "x", "lora_path": "one", "load_inplace": "yes"}, {"lora_name": None, "lora_path": "one"},
    {"lora_name": "x" * 300, "lora_path": "one"}, "{", "",
])  # fmt: skip
def test_wrong_bodies_load_nothing(served, body):
    refused = served.post("/v1/load_lora_adapter", body)
    assert refused.status == 400 and set(refused.body["error"]) == {"message", "type", "param", "code"}, refused
    assert served.post("/v1/unload_lora_adapter", body).status in (400, 404)
    assert served.models() == [MODEL]


def test_names_may_be_anything_that_is_text(served):
    for name in ("org/name", "ä😀", "a\nb\u0000c", "token_id:1", " "):
        assert served.load(name, "one").status == 200
        assert name in served.models()
        assert served.bits(name) != served.bits()
        assert served.unload(name).status == 200


def test_loads_wait_for_each_other_and_a_push_over_grpc_is_told(served):
    answers = []
    threads = [
        threading.Thread(target=lambda i=i: answers.append(served.load(f"n{i}", "one", load_inplace=True).status))
        for i in (0, 1, 2, 0, 1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [200] * 6
    same = []
    for _ in range(2):
        served.unload("n0")
        threads = [threading.Thread(target=lambda: same.append(served.load("n0", "one").status)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert sorted(same) == [200, 200] + [400] * 6, "each name is given once"


def test_adapters_come_and_go_while_paused_but_not_asleep(served):
    served.post("/pause?mode=keep")
    assert served.load("a", "one").status == 200 and served.unload("a").status == 200
    served.post("/sleep")
    refused = served.load("a", "one")
    assert refused.status == 409 and "wake" in refused.body["error"]["message"], refused
    served.post("/wake_up")
    assert served.load("a", "one").status == 200
    served.post("/sleep?level=2")
    served.post("/wake_up?reload=true")
    assert served.models() == [MODEL], "level 2 drops them"


def test_a_client_that_vanishes_leaves_nothing_behind(served):
    host, _, port = served.address.rpartition(":")
    body = json.dumps({"lora_name": "gone", "lora_path": "two", "load_inplace": True})
    request = f"POST /v1/load_lora_adapter HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"  # noqa: E501
    for pause in (0, 0.0005, 0.001, 0.002, 0.005, 0.01):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(request.encode())
            time.sleep(pause)
    wait_for(served.client, lambda s: not s.updating, "without an open push")
    assert served.load("after", "one").status == 200


def test_trls_async_trainer_finds_all_that_it_calls(served):
    """The calls of TRL 1.16's AsyncGRPOTrainer with a LoRA model, in its order, with max_staleness 1."""

    def get(path):
        return ask(served.address, "GET", path)

    staleness, answers = 1, []
    assert get("/health").status == 200
    config = get("/server_info?config_format=json").body["vllm_config"]
    assert config["lora_config"]["max_lora_rank"] >= 4 and config["lora_config"]["max_loras"] >= staleness + 2
    assert config["parallel_config"]["data_parallel_size"] == 1 and config["weight_transfer_config"] is None
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["model_config"]["dtype"].startswith("torch.")
    assert get("/v1/models").body["data"][0]["max_model_len"] == served.client.info().max_model_len

    def rollout(version, seed):
        body = {"model": f"trl-policy-v{version}", "prompt": [3, 1, 4], "max_tokens": 200, "temperature": 0.9}
        body |= {"top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0, "n": 1, "return_token_ids": True}
        answers.append((version, seed, served.post("/v1/completions", body | {"logprobs": 0, "seed": seed})))

    threads = []
    for version in range(1, 6):
        path = served.root / "out" / ".vllm_lora" / f"trl-policy-v{version}"
        assert served.post("/pause?mode=keep").status == 200
        write_adapter(path, *served.adapters["one" if version % 2 else "two"])
        assert served.load(f"trl-policy-v{version}", path, load_inplace=False).status == 200
        assert served.post("/resume").status == 200
        stale = version - (staleness + 1)
        if stale > 0:
            assert served.unload(f"trl-policy-v{stale}").status == 200
        if stale > 1:
            shutil.rmtree(path.parent / f"trl-policy-v{stale - 1}")
        for seed in (2**63 - 1, 5):
            threads.append(threading.Thread(target=rollout, args=(version, seed)))
            threads[-1].start()
        for thread in threads[:-2]:
            thread.join(60)
    for thread in threads:
        thread.join(60)
    same = {}
    for version, seed, answer in answers:
        assert answer.status == 200, (version, answer)
        choice = answer.body["choices"][0]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
        same.setdefault((version % 2, seed), []).append((choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    assert all(found == [found[0]] * len(found) for found in same.values()), "a version is its tensors, to the bit"
    assert len({str(found[0]) for found in same.values()}) == 4
    assert served.models() == [MODEL, "trl-policy-v4", "trl-policy-v5"]


def test_adapters_of_the_command_line_are_loaded_before_the_first_request(binary, tmp_path):
    rng = np.random.default_rng(6)
    tensors, config = random_adapter(rng, read_model(PUSH_MODEL), rank=4)
    path = write_adapter(tmp_path / "one", tensors, config)
    flags = [
        *SMALL_CACHE,
        "--enable-lora",
        "--lora-modules",
        f"one={path}",
        json.dumps({"name": "b", "path": str(path)}),
    ]
    with ServerProcess(binary, PUSH_MODEL, flags) as server:
        listed = ask(server.http_address, "GET", "/v1/models").body["data"]
        assert [(model["id"], model["root"]) for model in listed[1:]] == [("one", str(path)), ("b", str(path))]
        served = Served(server.http_address, server.client, tmp_path, {})
        server.client.push_lora(tensors, config, name="grpc")
        assert served.bits("one") == served.bits("b") == served.bits("grpc") != served.bits()


@pytest.mark.parametrize("module, said", [
    ("one={path}/nothing", "there is no such directory"),
    ("one={path}", "the directory needs adapter_config.json and adapter_model.safetensors"),
    (f"{MODEL}={{path}}", "the model itself has this name"),
    ("one", "is not NAME=DIRECTORY"),
])  # fmt: skip
def test_an_adapter_that_cannot_be_loaded_ends_the_start(binary, tmp_path, module, said):
    command = [
        binary,
        MODEL,
        *SMALL_CACHE,
        "--port",
        "0",
        "--enable-lora",
        "--lora-modules",
        module.format(path=tmp_path),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0 and said in ended.stderr, ended
