"""Adapters of `--adapters-dir`: loaded because requests name them, over gRPC and HTTP, with more names than slots."""

from __future__ import annotations

import random
import re
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from models import random_adapter, read_model, write_adapter
from rollout_client import (
    DeadlineExceeded,
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Returns,
    RolloutClient,
    SamplingParams,
    ServerProcess,
)
from serving import LONG, PUSH_MODEL, SMALL_CACHE, assert_idle, bits, wait_for
from vllm_answers import ask

SLOTS, NAMES, THREADS, ROUNDS = 8, 64, 16, 10
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SAMPLING = SamplingParams(max_tokens=4, seed=11, ignore_eos=True)


class Served:
    """A server with `SLOTS` slots, and the directory and adapters that it reads."""

    def __init__(self, process, client, root, adapters):
        self.process, self.client, self.root, self.adapters = process, client, root, adapters

    def sample(self, name, prompt=PROMPT, sampling=SAMPLING, client=None, **options):
        outputs = (client or self.client).generate([prompt], sampling=sampling, adapter=name, **options)
        return bits(outputs[0].samples[0])

    def complete(self, name, **members):
        body = {"model": name, "prompt": PROMPT, "max_tokens": 4, "seed": 11, "ignore_eos": True} | members
        return ask(self.process.http_address, "POST", "/v1/completions", body | {"return_token_ids": True})

    def resident(self):
        return {adapter.name for adapter in self.client.adapters()}

    def count(self, what):
        with urllib.request.urlopen(f"http://{self.process.http_address}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        return int(float(re.search(rf"^rollout:adapter_{what}_total (\S+)$", text, re.MULTILINE)[1]))


@pytest.fixture(scope="module")
def running(binary, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    rng, base = np.random.default_rng(7), read_model(PUSH_MODEL)
    adapters = {f"team{i % 4}/a{i}": random_adapter(rng, base, rank=2 + i % 3) for i in range(NAMES)}
    for name, adapter in adapters.items():
        write_adapter(root / "served" / name, *adapter)
    write_adapter(root / "outside", *adapters["team0/a0"])
    (root / "served/link").symlink_to(root / "outside")
    (root / "served/inside").symlink_to("team0/a0")
    broken = root / "served/broken"
    shutil.copytree(root / "outside", broken)
    file = broken / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-64])
    write_adapter(root / "served/large", *random_adapter(rng, base, rank=32))
    (root / "served/empty").mkdir()
    flags = ["--mem-util", "0.2", "--max-adapters", SLOTS, "--max-lora-rank", "16", "--adapters-dir", root / "served"]
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, *map(str, flags)]) as process:
        yield process, root / "served", adapters


@pytest.fixture
def served(running):
    """A server without resident adapters, which is idle afterwards."""
    process, root, adapters = running
    with RolloutClient(process.address, timeout=120) as client:
        yield Served(process, client, root, adapters)
        for adapter in client.adapters():
            client.remove_adapter(adapter.name)
        assert client.adapters() == []
        assert_idle(client)


def test_an_adapter_has_the_bits_of_a_pushed_one(served):
    name = "team1/a1"
    loaded = served.sample(name)
    assert served.resident() == {name}
    assert loaded != served.sample(None)
    score = served.client.score([PROMPT], adapter="team2/a2")[0].raw_logprobs
    for own, pushed in ((name, "one"), ("team2/a2", "two")):
        served.client.push_lora(*served.adapters[own], name=pushed)
    assert served.sample("one") == loaded == served.sample(name)
    assert served.client.score([PROMPT], adapter="two")[0].raw_logprobs == score
    listed = ask(served.process.http_address, "GET", "/v1/models").body["data"]
    roots = {entry["id"]: entry["root"] for entry in listed}
    assert roots[name] == str(served.root / name) and roots["one"] == "one"


def test_a_model_over_http_and_a_reference_are_loaded(served):
    answer = served.complete("team3/a3", logprobs=True)
    choice = answer.body["choices"][0]
    assert (answer.status, answer.body["model"]) == (200, "team3/a3")
    assert choice["token_ids"] == served.sample("team3/a3")[0]
    assert all(len(top) >= 1 for top in choice["logprobs"]["top_logprobs"])
    assert served.complete("team3/a3", logprobs=False).body["choices"][0]["logprobs"] is None
    returns = Returns(references=["team0/a4", None])
    outputs = served.client.generate([PROMPT], sampling=SAMPLING, adapter="team1/a5", returns=returns)
    assert served.resident() == {"team3/a3", "team0/a4", "team1/a5"}
    sample = outputs[0].samples[0]
    whole = served.client.score([[*PROMPT, *sample.token_ids]], adapter="team0/a4")[0].raw_logprobs
    assert list(sample.references[0].raw_logprobs) == whole[len(PROMPT) :]
    tokens = ask(served.process.http_address, "POST", "/tokenize", {"model": "team0/a8", "prompt": "a"})
    assert tokens.status == 200 and "team0/a8" not in served.resident(), "a name that can be loaded"


def test_64_names_share_8_slots_without_an_error(served):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice, names = random.Random(seed), sorted(served.adapters)
    counts = [served.count(what) for what in ("loads", "evictions")]
    # One after the other, each name alone.
    expected = {name: [served.sample(name, PROMPT[i:]) for i in range(2)] for name in names}
    assert len({str(found) for found in expected.values()}) == NAMES
    assert (len(served.resident()), served.count("load_failures")) == (SLOTS, 0)
    turns = [
        [(dice.choice(names), dice.randrange(2), dice.randrange(4)) for _ in range(ROUNDS)] for _ in range(THREADS)
    ]

    def run(turns):
        with RolloutClient(served.process.address, timeout=120) as client:
            for name, prompt, kind in turns:
                if kind == 0:
                    answer = served.complete(name, prompt=PROMPT[prompt:])
                    assert answer.status == 200, answer
                    assert answer.body["choices"][0]["token_ids"] == expected[name][prompt][0], name
                else:
                    assert served.sample(name, PROMPT[prompt:], client=client) == expected[name][prompt], name

    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(run, mine) for mine in turns]:
            done.result()
    assert served.count("load_failures") == 0 and len(served.resident()) <= SLOTS
    loads, evictions = (
        served.count(what) - before for what, before in zip(("loads", "evictions"), counts, strict=True)
    )
    assert loads >= NAMES and loads - evictions == len(served.resident())


def test_skyrl_samples_checkpoints_that_it_has_unpacked(served):
    names = sorted(served.adapters)[: 2 * SLOTS]

    def sample(name):
        # The calls of SkyRL's ExternalInferenceClient, which loads before each request and accepts that error alone.
        load = {"lora_name": name, "lora_path": str(served.root / name)}
        loaded = ask(served.process.http_address, "POST", "/v1/load_lora_adapter", load)
        assert loaded.status == 200 or "already" in loaded.body["error"]["message"], loaded
        sampling = {"n": 2, "seed": 11, "max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": -1}
        answer = served.complete(name, **sampling, logprobs=True, stream=False)
        assert answer.status == 200, answer
        return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in answer.body["choices"]]

    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(sample, names * 3))
    assert found[: len(names)] * 3 == found and served.resident() <= set(names)
    for name, samples in zip(names, found[: len(names)], strict=True):
        token_ids, logprobs, *_ = served.sample(name)
        assert samples[0][0] == token_ids and np.float32(samples[0][1]).tobytes() == logprobs, name
    missing = {"lora_name": "nothing", "lora_path": str(served.root / "nothing")}
    answer = ask(served.process.http_address, "POST", "/v1/load_lora_adapter", missing)
    assert answer.status == 404 and "does not exist below --adapters-dir" in answer.body["error"]["message"], answer
    # Any other path is read from --weights-dir, which this server lacks.
    for name, path in [("a", served.root / "team0/a0"), ("../outside", served.root / "../outside")]:
        answer = ask(
            served.process.http_address, "POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)}
        )
        assert answer.status == 400 and "--weights-dir" in answer.body["error"]["message"], answer


def test_a_request_waits_for_a_slot(served):
    names = sorted(served.adapters)[: SLOTS + 1]
    # An adapter that was pushed stays in its slot, so that one less is left.
    served.client.push_lora(*served.adapters[names[0]], name="pushed")
    with ThreadPoolExecutor(SLOTS) as pool:
        long = [pool.submit(served.sample, name, sampling=LONG) for name in names[1:SLOTS]]
        wait_for(served.client, lambda s: s.running_requests == SLOTS - 1, "running with all slots")
        served.client.pause(mode="keep")
        waiting = pool.submit(served.sample, names[SLOTS])
        wait_for(served.client, lambda s: s.held_requests == 1, "waiting")
        served.client.resume()
        served.sample(None)
        assert waiting.result() and all(done.result() for done in long)
        assert {"pushed", names[SLOTS]} <= served.resident()
    assert waiting.result() == served.sample(names[SLOTS])
    for name in names[1:SLOTS]:
        served.client.push_lora(*served.adapters[name], name=f"own/{name}")
    with pytest.raises(ResourceExhausted, match="--max-adapters 8"):
        served.sample("team3/a63")


def test_time_limits_and_deadlines_pass_while_an_adapter_is_awaited(served):
    served.client.pause()
    ended = served.client.generate([PROMPT], sampling=SAMPLING, adapter="team0/a0", timeout=0.2)[0].samples[0]
    assert (ended.finish_reason, list(ended.token_ids)) == (FinishReason.ABORTED, [])
    with pytest.raises(DeadlineExceeded):
        served.client.score([PROMPT], adapter="team0/a0", timeout=0.2)
    served.client.resume()
    assert_idle(served.client)
    assert served.sample("inside") == served.sample("team0/a0"), "a link within the directory is followed"


def test_a_wrong_adapter_fails_its_requests_alone(served):
    alone = served.sample("team2/a6")
    failures = served.count("load_failures")
    for name, error, said in [
        ("broken", InvalidArgument, '"broken" cannot be loaded'),
        ("large", InvalidArgument, "rank 32 is above --max-lora-rank 16"),
        ("empty", NotFound, "empty/adapter_config.json does not exist below --adapters-dir"),
        ("team0/a0/adapter_config.json", NotFound, "does not exist below --adapters-dir"),
        ("nothing", NotFound, '"nothing" is not resident .*does not exist below --adapters-dir'),
        ("link", InvalidArgument, "leads out of --adapters-dir"),
        ("../outside", NotFound, "it is no path below --adapters-dir"),
        (str(served.root / "team0/a0"), NotFound, "it is no path below --adapters-dir"),
        ("team0/../team0/a0", NotFound, "it is no path below --adapters-dir"),
    ]:
        with pytest.raises(error, match=said):
            served.sample(name)
        answer = served.complete(name)
        assert answer.status == (404 if error is NotFound else 400), answer
        assert answer.body["error"]["param"] == "model", answer
        if error is NotFound:
            assert "--adapters-dir has no adapter of this name" in answer.body["error"]["message"]
    assert served.count("load_failures") == failures + 18
    assert served.resident() == {"team2/a6"} and served.sample("team2/a6") == alone
    tokens = ask(served.process.http_address, "POST", "/tokenize", {"model": "nothing", "prompt": "a"})
    assert tokens.status == 404


def test_a_changed_file_is_read_at_the_next_load(served):
    path = served.root / "changing"
    write_adapter(path, *served.adapters["team0/a0"])
    first = served.sample("changing")
    shutil.rmtree(path)
    write_adapter(path, *served.adapters["team1/a1"])
    assert served.sample("changing") == first == served.sample("team0/a0")
    served.client.remove_adapter("changing")
    assert served.sample("changing") == served.sample("team1/a1") != first
    shutil.rmtree(path)
    assert served.sample("changing") == served.sample("team1/a1"), "a resident adapter needs no files"
    served.client.remove_adapter("changing")
    with pytest.raises(NotFound, match="does not exist below --adapters-dir"):
        served.sample("changing")


def test_a_loaded_adapter_sleeps_and_wakes_as_any_other(served):
    awake = served.sample("team2/a2")
    served.client.sleep()
    with pytest.raises(FailedPrecondition, match="asleep"):
        served.sample("team3/a3")
    assert served.resident() == {"team2/a2"}
    served.client.wake()
    assert served.sample("team2/a2") == awake
    served.client.sleep(level=2)
    assert served.resident() == set()
    served.client.wake(reload=True)
    assert served.sample("team2/a2") == awake, "level 2 removes it, and it is loaded again"
