"""vLLM's control routes: beside its recorded answers, mixed with gRPC, and what they do to requests and memory."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import urllib.request

import pytest

from rollout_client import FailedPrecondition, RolloutClient, SamplingParams, ServerProcess
from serving import FIXTURES, SMALL_CACHE, assert_idle, outputs, wait_for
from vllm_answers import ask, assert_like_vllm, recorded, same_request

MODEL = str(FIXTURES / "llama-tied")
OURS_NAMES_IT = "our errors name the member or argument by its path, and have one type"
ONE_TYPE = {"error.type": OURS_NAMES_IT}
OTHER_NAME = ONE_TYPE | {"error.param": OURS_NAMES_IT}
NO_DETAIL = {"detail": "every error of ours has one shape", "error": "every error of ours has one shape"}

# What is recorded of vLLM, the orders before it, and the differences that are meant.
EXCHANGES = [
    ("weight_info", [], {}),
    ("weight_checker", [], {}),
    ("weight_checker-compare-part", [], {}),
    ("weight_checker-no-baseline", [], OTHER_NAME),
    ("weight_checker-unknown", [], OTHER_NAME),
    ("update_weight_version-missing", [], OTHER_NAME),
    ("update_weight_version-number", [], OTHER_NAME),
    ("update_weight_version-null", [], OTHER_NAME),
    ("is_paused", [], {}),
    ("pause-keep", [], {}),
    ("pause-again", ["/pause?mode=keep"], {}),
    ("pause-body", [], {}),
    ("pause-bad-mode", [], ONE_TYPE),
    ("pause-get", [], NO_DETAIL),
    ("pause-wait-inflight", [], {}),
    ("is_paused-keep", ["/pause?mode=keep"], {}),
    ("is_paused-resumed", ["/pause?mode=keep", "/resume"], {}),
    ("resume", ["/pause?mode=keep"], {}),
    ("resume-again", [], {}),
    ("abort_requests-none", [], {}),
    ("reset_prefix_cache", [], {}),
    ("reset_prefix_cache-paused", ["/pause"], {}),
    ("reset_mm_cache", [], {}),
    ("reset_encoder_cache", [], {}),
    ("sleep-0", [], {}),
    ("sleep-1", [], {}),
    ("sleep-3", [], ONE_TYPE),
    ("is_sleeping", [], {}),
    ("is_sleeping-0", ["/sleep?level=0"], {}),
    ("is_paused-0", ["/sleep?level=0"], {}),
    ("is_sleeping-1", ["/sleep?level=1"], {}),
    ("is_sleeping-weights", ["/sleep?level=1", "/wake_up?tags=weights"], {}),
    ("is_sleeping-kv", ["/sleep", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"], {}),
    ("wake_up", [], {}),
    ("wake_up-0", ["/sleep?level=0"], {}),
    ("wake_up-weights", ["/sleep?level=1"], {}),
    ("wake_up-kv_cache", ["/sleep?level=1", "/wake_up?tags=weights"], {}),
]
# Of each completion that runs while orders come.
SAMPLES = 16
# Values that must be the same too.
SAME = {"is_paused", "is_sleeping", "status", "level", "tags", "success", "aborted"}

SERVER_EXCHANGES = [
    ("server_info", {
        "vllm_config.model_config.seed": "requests have seeds, the server has none",
        "vllm_config.model_config.enable_sleep_mode": "sleep works here",
        "vllm_config.lora_config": "this server keeps no adapters",
        "vllm_config.cache_config.gpu_memory_utilization": "the ceiling is --mem-util, of the host's memory",
        "vllm_config.scheduler_config": "what vLLM has too, and the recording has left out",
    }),
    ("server_info-bad", ONE_TYPE),
    ("get_world_size", {}),
    ("get_world_size-no-dp", {}),
    ("load", {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def shared(binary):
    with ServerProcess(binary, FIXTURES / MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as server:
        yield server


@pytest.fixture
def served(shared):
    """A running server with its gRPC client; it runs again and is idle afterwards."""
    with RolloutClient(shared.address, timeout=120) as client:
        yield Served(shared.http_address, client)
        for path in ("/wake_up?reload=true", "/resume"):
            assert ask(shared.http_address, "POST", path).status == 200, path
        assert_idle(client)


class Served:
    def __init__(self, address, client):
        self.address, self.client = address, client

    def post(self, path, body=None, **headers):
        return ask(self.address, "POST", path, body, headers)

    def get(self, path):
        return ask(self.address, "GET", path)

    def done(self, path, body=None):
        """The answer to an order that is carried out."""
        answer = self.post(path, body)
        assert answer.status == 200, answer
        return answer.body

    def completion(self, max_tokens=8, **members):
        body = {"prompt": [5, 6, 7], "max_tokens": max_tokens, "ignore_eos": True, "return_token_ids": True, "seed": 3}
        return self.post("/v1/completions", body | members)

    def running(self, count=1):
        """That many completions which generate, each in a thread; `join` gives their answers. They have so many samples
        that no processor is done with them before the orders of a test have come."""
        answers = [None] * count

        def run(i):
            answers[i] = self.completion(900, request_id=f"run-{i}", n=SAMPLES)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
        for thread in threads:
            thread.start()
        start = wait_for(self.client, lambda s: s.running_requests == count, "running").generated_tokens
        wait_for(self.client, lambda s: s.generated_tokens >= start + 12 * count * SAMPLES, "generating")

        def join():
            for thread in threads:
                thread.join(120)
            return answers

        return join


@pytest.mark.parametrize("name, before, differences", EXCHANGES)
def test_answers_are_like_vllms(served, name, before, differences):
    exchange = recorded(f"control/{name}")
    for path in before:
        served.done(path)
    ours = same_request(served.address, exchange, MODEL)
    assert_like_vllm(ours, exchange, differences)
    if ours.status == 200 and isinstance(ours.body, dict):
        for member in SAME & ours.body.keys():
            assert ours.body[member] == exchange.answer.body[member], member


@pytest.mark.parametrize("name, differences", SERVER_EXCHANGES)
def test_facts_are_like_vllms(served, name, differences):
    exchange = recorded(f"server/{name}")
    assert_like_vllm(same_request(served.address, exchange, MODEL), exchange, differences)


def test_facts_are_true(served):
    info = served.client.info()
    config = served.get("/server_info?config_format=json").body["vllm_config"]
    assert config["model_config"]["dtype"] == f"torch.{info.dtype}"
    assert config["model_config"]["max_model_len"] == info.max_model_len
    assert config["parallel_config"]["world_size"] == info.tensor_parallel_size
    assert json.loads(served.get("/server_info").body["vllm_config"]) == config
    assert served.get("/load").body == {"server_load": 0}
    join = served.running(2)
    assert served.get("/load").body == {"server_load": 2}
    assert served.done("/abort_requests", {})["aborted"] == 2
    join()


def test_keep_freezes_requests_and_holds_new_ones(served):
    alone = served.completion(900).body["choices"][0]["token_ids"]
    join = served.running()
    assert served.done("/pause?mode=keep") == {"status": "paused"}
    before = served.client.status()
    held = threading.Thread(target=lambda: late.append(served.completion()))
    late = []
    held.start()
    wait_for(served.client, lambda s: s.held_requests == 1, "held")
    assert served.client.status().generated_tokens == before.generated_tokens and not late
    served.client.resume()
    held.join(60)
    [ran] = join()
    assert ran.body["choices"][0] | {"finish_reason": "length"} == ran.body["choices"][0]
    assert ran.body["choices"][0]["token_ids"] == alone
    assert late[0].status == 200


def test_abort_ends_requests_with_what_they_have(served):
    served.completion(900)
    join = served.running(2)
    served.done("/pause")
    assert served.client.status().lifecycle == "paused"
    for answer in join():
        assert answer.status == 200
        choices = answer.body["choices"]
        assert all(c["finish_reason"] == "abort" and 10 <= len(c["token_ids"]) < 900 for c in choices)
        assert answer.body["usage"]["completion_tokens"] == sum(len(c["token_ids"]) for c in choices)
    assert served.client.status().cached_blocks == 0, "cleared, as is the default"


def test_clear_cache_is_taken_at_its_word(served):
    served.completion(200)
    cached = served.client.status().cached_blocks
    assert cached > 0
    for query in ("mode=keep", "mode=keep&clear_cache=true", "mode=abort&clear_cache=False", "mode=wait&clear_cache=0"):
        served.done(f"/pause?{query}")
        assert served.client.status().cached_blocks == cached, query
    served.done("/pause?mode=wait")
    assert served.client.status().cached_blocks == 0


def test_wait_lets_requests_finish_and_resume_calls_it_off(served):
    join = served.running()
    answers = []
    pause = threading.Thread(target=lambda: answers.append(served.post("/pause?mode=wait")))
    pause.start()
    pause.join(60)
    assert join()[0].body["choices"][0]["finish_reason"] == "length"
    assert answers[0].body == {"status": "paused"} and served.client.status().lifecycle == "paused"
    served.done("/resume")
    join = served.running()
    pause = threading.Thread(target=lambda: answers.append(served.post("/pause?mode=wait")))
    pause.start()
    while not answers[1:]:
        served.done("/resume")
    assert answers[1].status in (200, 409), answers[1]
    served.done("/resume")
    assert all(len(choice["token_ids"]) == 900 for choice in join()[0].body["choices"])


@pytest.mark.parametrize("mode", ["abort", "wait"])
def test_new_requests_are_rejected_over_http_and_held_over_grpc(served, mode):
    """As in vLLM since 0.33."""
    served.done(f"/pause?mode={mode}")
    for route, body in (
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2}),
        ("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 2, "stream": True}),
        ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}),
    ):
        refused = served.post(route, body)
        assert refused.status == 503 and "generation is paused" in refused.body["error"]["message"], refused
    held = []
    thread = threading.Thread(target=lambda: held.append(served.client.generate([[1, 2, 3]], return_text=False)))
    thread.start()
    wait_for(served.client, lambda s: s.held_requests == 1, "held")
    served.done("/resume")
    thread.join(60)
    assert len(held) == 1 and served.completion().status == 200


def test_a_pause_that_waits_rejects_new_requests(served):
    join = served.running()
    pause = threading.Thread(target=lambda: served.post("/pause?mode=wait"))
    pause.start()
    while (refused := served.completion()).status == 200:
        pass
    assert refused.status == 503, refused
    pause.join(60)
    assert join()[0].body["choices"][0]["finish_reason"] == "length"


def test_requests_are_aborted_by_name_or_all(served):
    join = served.running(3)
    assert served.done("/abort_requests", {"request_ids": ["run-1", "nobody"]}) == {"status": "aborted", "aborted": 1}
    assert served.done("/inference/v1/abort_requests", {"request_ids": ["cmpl-run-0"]}) == ""
    assert served.done("/inference/v1/abort_requests", {"request_ids": []}) == ""
    wait_for(served.client, lambda s: s.running_requests == 1, "one left")
    assert served.done("/abort_requests", {"request_ids": None})["aborted"] == 1
    assert [answer.body["choices"][0]["finish_reason"] for answer in join()] == ["abort"] * 3
    # Held requests end too. Nothing was computed for them, so their answer is an error.
    served.done("/pause?mode=keep")
    held = threading.Thread(target=lambda: answers.append(served.completion()))
    answers = []
    held.start()
    wait_for(served.client, lambda s: s.held_requests == 1, "held")
    assert served.done("/abort_requests", {"request_ids": []})["aborted"] == 1
    held.join(60)
    assert answers[0].status == 409 and "aborted while it waited" in answers[0].body["error"]["message"], answers


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_gives_memory_back_and_a_wake_the_same_bits(served, level):
    client = served.client
    before, entries = outputs(client), client.status().memory.entries
    assert served.done(f"/sleep?level={level}") == {"status": "sleeping", "level": level}
    status = client.status()
    assert status.lifecycle == "asleep" and status.asleep.level == level
    assert "kv_cache" not in status.memory.entries or status.memory.entries["kv_cache"] == 0
    refused = served.completion()
    assert refused.status == 409 and "asleep" in refused.body["error"]["message"]
    assert served.post("/pause").status == served.post("/resume").status == 409
    with pytest.raises(FailedPrecondition):
        client.generate([[1, 2]])
    assert served.done("/wake_up?tags=weights") == {"status": "sleeping", "tags": ["weights"]}
    assert served.get("/is_sleeping").body == {"is_sleeping": True}
    if level == 2:
        assert served.done("/wake_up") == {"status": "awake", "tags": None}
        assert client.status().lifecycle == "weights_missing"
        assert served.completion().status == 409
        assert served.done("/wake_up?reload=true") == {"status": "awake", "tags": None}
    else:
        assert served.done("/wake_up?tags=kv_cache&tags=weights") == {
            "status": "awake",
            "tags": ["kv_cache", "weights"],
        }
    assert client.status().lifecycle == "running" and client.status().memory.entries == entries
    assert outputs(client) == before


def test_sleep_ends_what_runs_unless_it_shall_be_kept(served):
    alone = served.completion(900).body["choices"][0]["token_ids"]
    join = served.running()
    served.done("/sleep")
    assert join()[0].body["choices"][0]["finish_reason"] == "abort"
    served.done("/wake_up")
    join = served.running()
    served.done("/sleep?mode=keep")
    served.done("/wake_up?tags=scheduling")
    assert served.get("/is_sleeping").body == {"is_sleeping": True}
    served.done("/wake_up")
    assert join()[0].body["choices"][0]["token_ids"] == alone
    served.done("/pause?mode=keep")
    served.done("/wake_up?tags=scheduling")
    assert served.client.status().lifecycle == "running"


def test_the_cache_is_reset_as_far_as_nobody_holds_it(served):
    served.completion(200)
    join = served.running()
    assert served.done("/reset_prefix_cache") == {"success": False}
    assert served.client.status().cached_blocks == 0
    served.done("/abort_requests", {})
    join()
    assert served.done("/reset_prefix_cache") == {"success": True}


def test_a_version_is_set_without_a_push(served):
    client = served.client
    before, updates = outputs(client), client.status().updates
    assert served.done("/update_weight_version", {"new_version": "7"}) == {"success": True, "new_version": "7"}
    assert served.get("/weight_info").body == {"weight_version": "7"} and client.status().weight_version == 7
    sample = client.generate([[1, 2, 3]], if_weight_version=7)[0].samples[0]
    assert [span.weight_version for span in sample.weight_versions] == [7]
    assert client.status().updates == updates and outputs(client) == before
    assert client.push_lora({}).weight_version == 8
    for wrong in ("v1", "", "-1", "+1", "01", "1.0", " 1", str(2**64), "1" * 5000):
        refused = served.post("/update_weight_version", {"new_version": wrong})
        assert refused.status == 400 and refused.body["error"]["param"] == "new_version", wrong
        assert len(refused.body["error"]["message"]) < 300
    served.done("/update_weight_version", {"new_version": str(2**64 - 1)})
    assert served.get("/weight_info").body == {"weight_version": str(2**64 - 1)}
    for old in ("0", str(2**64 - 1)):
        refused = served.post("/update_weight_version", {"new_version": old})
        assert refused.status == 409 and "force_version" in refused.body["error"]["message"]
        refused = served.post("/update_weight_version", {"new_version": old, "force_version": False})
        assert refused.status == 409
    served.done("/update_weight_version", {"new_version": "0", "force_version": True})
    served.done("/sleep?level=2")
    assert served.post("/update_weight_version", {"new_version": "5"}).status == 409


def test_checksums_are_those_of_grpc_and_are_compared(served):
    sums = served.done("/weight_checker", {"action": "checksum"})["checksums"]
    assert sums == served.client.checksum() and len(sums) > 5
    same = served.done("/weight_checker", {"action": "compare", "baseline": sums})
    assert same == {"match": True, "mismatches": []}
    name = sorted(sums)[2]
    other = served.done("/weight_checker", {"action": "compare", "baseline": sums | {name: "0" * 64, "no such": ""}})
    assert other == {"match": False, "mismatches": sorted([name, "no such"])}
    none = served.done("/weight_checker", {"action": "compare", "baseline": {}})
    assert none == {"match": False, "mismatches": sorted(sums)}
    refused = served.post("/weight_checker", {"action": "reset"})
    assert refused.status == 501 and "reload=true" in refused.body["error"]["message"]
    assert served.client.checksum() == sums, "nothing was zeroed"
    served.done("/sleep")
    assert served.post("/weight_checker", {"action": "checksum"}).status == 409


@pytest.mark.parametrize("path", [
    "/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights",
    "/finish_weight_update", "/shutdown_weight_transfer_engine", "/collective_rpc", "/release_kv_cache_memory",
])  # fmt: skip
def test_routes_without_a_meaning_say_what_to_use(served, path):
    for body in (None, {}, {"init_info": {"master_address": "127.0.0.1"}}, "no JSON"):
        answer = served.post(path, body)
        assert answer.status == 501 and set(answer.body) == {"error"}, answer
        message = answer.body["error"]["message"]
        assert path in message and ("push_full" in message or "/wake_up" in message)
    assert served.get(path).status == 405


@pytest.mark.parametrize("path, param", [
    ("/pause?mode=", "query.mode"), ("/pause?mode=KEEP", "query.mode"), ("/pause?mode=keep&mode=x", "query.mode"),
    ("/pause?clear_cache=maybe", "query.clear_cache"), ("/pause?mode=" + "x" * 5000, "query.mode"),
    ("/pause?mode=%00%0a%ff", "query.mode"), ("/sleep?level=-1", "query.level"), ("/sleep?level=1.0", "query.level"),
    ("/sleep?level=two", "query.level"), ("/sleep?level=2&mode=now", "query.mode"),
    ("/wake_up?tags=nothing", "query.tags"), ("/wake_up?tags=weights&tags=", "query.tags"),
    ("/wake_up?tags=weights,kv_cache", "query.tags"), ("/wake_up?reload=2", "query.reload"),
    ("/wake_up?tags=kv_cache&reload=true", "query.reload"),
])  # fmt: skip
def test_wrong_arguments_change_nothing(served, path, param):
    answer = served.post(path)
    assert answer.status == 400 and answer.body["error"]["param"] == param, answer
    assert len(answer.body["error"]["message"]) < 400
    assert served.client.status().lifecycle == "running"


@pytest.mark.parametrize("path, body, param", [
    ("/abort_requests", [], "body"), ("/abort_requests", {"request_ids": "a"}, "request_ids"),
    ("/abort_requests", {"request_ids": [1]}, "request_ids[0]"), ("/abort_requests", "{", "body"),
    ("/abort_requests", {"request_ids": ["x" * 300]}, "request_ids[0]"), ("/abort_requests", "", "body"),
    ("/inference/v1/abort_requests", {}, "body"),
    ("/inference/v1/abort_requests", {"request_ids": None}, "request_ids"),
    ("/weight_checker", {}, "body"), ("/weight_checker", {"action": "compare", "baseline": {"a": 1}}, "baseline.a"),
    ("/weight_checker", {"action": None}, "action"), ("/update_weight_version", {"new_version": ["1"]}, "new_version"),
])  # fmt: skip
def test_wrong_bodies_change_nothing(served, path, body, param):
    answer = served.post(path, body)
    assert answer.status == 400 and answer.body["error"]["param"] == param, answer


def test_what_has_no_effect_is_named(served):
    assert served.post("/pause?mode=keep&clear_caches=1", {"mode": "abort"}).headers["x-ignored-members"] == (
        "query.clear_caches, body"
    )
    assert served.post("/resume", "").headers.get("x-ignored-members") is None
    assert served.post("/abort_requests", {"all": True}).headers["x-ignored-members"] == "all"


def test_pages_of_other_sites_give_no_orders(served):
    for origin in ("https://evil.example", "null"):
        for path in ("/pause", "/sleep", "/wake_up", "/resume", "/reset_prefix_cache"):
            assert served.post(path, origin=origin).status == 403, path
    assert served.client.status().lifecycle == "running"
    assert served.post("/pause", origin=f"http://{served.address}").status == 200


@pytest.mark.parametrize("path", ["/pause?mode=wait", "/sleep?mode=wait"])
def test_a_caller_that_vanishes_takes_its_order_back(served, path):
    join = served.running(2)
    host, _, port = served.address.rpartition(":")
    taken_back = threading.Event()

    def ask_until_then():
        # Requests that arrive before the order are not held. They use gRPC, because HTTP rejects requests while paused.
        while not taken_back.is_set():
            served.client.generate([[1, 2, 3]], sampling=SamplingParams(max_tokens=2), return_text=False)

    with socket.create_connection((host, int(port))) as gone:
        gone.sendall(f"POST {path} HTTP/1.1\r\nhost: {served.address}\r\n\r\n".encode())
        asking = threading.Thread(target=ask_until_then)
        asking.start()
        wait_for(served.client, lambda s: s.held_requests == 1, "held while the order waits")
        taken_back.set()
    wait_for(served.client, lambda s: s.held_requests == 0, "taken in again")
    assert [len(answer.body["choices"][0]["token_ids"]) for answer in join()] == [900, 900]
    asking.join(60)
    assert served.client.status().lifecycle == "running"


def num_connections(served):
    """Connections that are open, this request's own included."""
    with urllib.request.urlopen(f"http://{served.address}/metrics", timeout=60) as answer:
        return int(re.search(r"^rollout:connections (\d+)", answer.read().decode(), re.MULTILINE)[1])


def test_clients_that_vanish_everywhere_cost_nothing(served):
    """Each route's request is sent and its connection closed at once, in the middle of it or before its answer."""
    description = served.get("/openapi.json").body
    host, _, port = served.address.rpartition(":")
    memory = served.client.status().memory
    orders = [
        (method, path) for path, item in description["paths"].items() for method in item if method != "parameters"
    ]
    assert len(orders) > 30
    before = num_connections(served)
    body = json.dumps({"prompt": [1, 2], "max_tokens": 900, "request_ids": ["nobody"], "action": "checksum"}).encode()
    for method, path in orders:
        head = f"{method.upper()} {path} HTTP/1.1\r\nhost: {served.address}\r\ncontent-type: application/json\r\n"
        whole = head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body
        for part in (whole, whole[:-5], whole[: len(head) - 3]):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(part)
    # The server may still be reading the last of them, and a sleep among these would follow the wake.
    wait_for(served.client, lambda _: num_connections(served) <= before, "without the clients that vanished")
    for path in ("/wake_up?reload=true", "/resume"):
        served.done(path)
    assert_idle(served.client)
    status = served.client.status()
    assert status.lifecycle == "running" and status.memory.traffic_bytes <= memory.traffic_bytes + 1000
    assert served.completion().status == 200


def test_many_orders_at_once_end_in_one_of_their_states(served):
    def orders(seed):
        for i in range(12):
            path = ["/pause?mode=keep", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/abort_requests"]
            answer = served.post(path[(seed * 5 + i * 7) % 6], {})
            assert answer.status in (200, 409), answer

    threads = [threading.Thread(target=orders, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    served.done("/wake_up")
    assert served.client.status().lifecycle == "running"
    assert served.completion().status == 200


def test_a_connection_is_used_again_after_an_order_with_a_body(served):
    host, _, port = served.address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=60)
    for _ in range(3):
        connection.request(
            "POST", "/pause?mode=keep", json.dumps({"mode": "keep"}), {"content-type": "application/json"}
        )
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read()) == {"status": "paused"}
    connection.close()
