"""`/inference/v1/generate`: beside vLLM's recorded answers, beside gRPC to the bit, and as SkyRL and TRL use it."""

from __future__ import annotations

import base64
import io
import json
import socket
import threading

import numpy as np
import pytest

from models import random_adapter, read_model
from rollout_client import RolloutClient, SamplingParams, ServerProcess
from serving import FIXTURES, SMALL_CACHE, assert_idle, wait_for
from vllm_answers import RECORDED, ask, assert_like_vllm, events, recorded, same_request

MODEL = str(FIXTURES / "llama")
VOCABULARY = 512
"""Ids of the recorded prompts are taken modulo this, because the fixture's vocabulary is small."""

OURS_NAMES_IT = "our errors name the member by its path, and have one type"
DIFFERENCES = {
    "stream": {},
    "wrong-type": {"error.type": OURS_NAMES_IT, "error.param": OURS_NAMES_IT},
    "no-params": {"error.type": OURS_NAMES_IT, "error.param": OURS_NAMES_IT},
    "empty": {"error.type": OURS_NAMES_IT, "error.param": OURS_NAMES_IT},
    "too-long": {"error.param": OURS_NAMES_IT},
    "beyond": {"error.param": OURS_NAMES_IT},
    "default-max": {"choices.0.finish_reason": "this model does not end its text"},
    "max_tokens-too-many": {"choices.0.finish_reason": "it was told not to end its text"},
}
# Greedy groups give equal samples here, up to 100 most likely tokens can be had, and texts are another route's.
OTHERWISE = {"greedy-n": 200, "logprobs-21": 200, "text": 400}


class Served:
    def __init__(self, address, client):
        self.address, self.client = address, client

    def generate(self, *prompt, headers=None, **members):
        sampling = {"max_tokens": 8, "seed": 3, "ignore_eos": True} | members.pop("sampling", {})
        body = {"token_ids": list(prompt or (5, 6, 7)), "sampling_params": sampling} | members
        return ask(self.address, "POST", "/inference/v1/generate", body, headers)


@pytest.fixture(scope="module")
def shared(binary):
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--max-adapters", "2"]
    with ServerProcess(binary, FIXTURES / MODEL, flags) as server:
        yield server


@pytest.fixture
def served(shared):
    with RolloutClient(shared.address, timeout=120) as client:
        yield Served(shared.http_address, client)
        ask(shared.http_address, "POST", "/resume")
        assert_idle(client)


def names():
    for line in (RECORDED / "generate.jsonl").read_text().splitlines():
        yield json.loads(line)["name"].removeprefix("generate/")


@pytest.mark.parametrize("name", list(names()))
def test_answers_are_like_vllms(served, name):
    exchange = recorded(f"generate/{name}")
    body = exchange.request["body"]
    ids = [token if token == 60000 else token % VOCABULARY for token in body["token_ids"]]
    changes = {"token_ids": ids * 300 if name == "too-long" else ids}
    if name == "max_tokens-too-many":
        changes["sampling_params"] = body["sampling_params"] | {"ignore_eos": True}
    if name == "stop":  # a text that this model makes
        made = served.generate(*ids, sampling=body["sampling_params"] | {"stop": None}).body["choices"][0]["token_ids"]
        text = ask(served.address, "POST", "/v1/completions", {"prompt": ids, "max_tokens": 8, "temperature": 0}).body
        changes["sampling_params"] = body["sampling_params"] | {"stop": [text["choices"][0]["text"][:3]]}
        assert made
    ours = same_request(served.address, exchange, MODEL, changes)
    print(ours)
    if name in OTHERWISE:
        assert ours.status == OTHERWISE[name]
        return
    differences = DIFFERENCES.get(name, {})
    assert_like_vllm(ours, exchange, differences)
    if ours.status == 200 and name != "stream":
        for choice in ours.body["choices"]:
            assert choice["weight_versions"] == [{"version": "0", "start": 0, "end": len(choice["token_ids"])}]


@pytest.mark.parametrize("sampling", [
    {}, {"temperature": 0.7, "top_p": 0.9, "top_k": 20}, {"temperature": 0}, {"min_p": 0.05, "repetition_penalty": 1.2},
    {"logit_bias": {"7": 3}, "presence_penalty": 0.5, "frequency_penalty": 0.2}, {"allowed_token_ids": [3, 4, 5, 6]},
])  # fmt: skip
def test_tokens_and_bits_are_those_of_grpc(served, sampling):
    answer = served.generate(sampling=sampling | {"n": 3, "logprobs": 2}).body
    params = sampling | {"max_tokens": 8, "seed": 3, "ignore_eos": True}
    if "logit_bias" in params:
        params["logit_bias"] = {7: 3}
    group = served.client.generate([[5, 6, 7]], n=3, sampling=SamplingParams(**params))[0]
    for choice, sample in zip(answer["choices"], group.samples, strict=True):
        assert choice["token_ids"] == sample.token_ids
        content = choice["logprobs"]["content"]
        assert [entry["token_id"] for entry in content] == sample.token_ids
        mine = np.array([entry["logprob"] for entry in content], np.float32)
        theirs = sample.raw_logprobs if sampling.get("temperature") == 0 else sample.logprobs
        assert mine.tobytes() == theirs.tobytes()
        for entry in content:
            first, *others = entry["top_logprobs"]
            assert first == {name: entry[name] for name in ("token_id", "logprob", "rank")}
            ranks = [other["rank"] for other in others]
            assert ranks == sorted(set(ranks)) and all(other["token_id"] != entry["token_id"] for other in others)
            assert all((other["rank"] < entry["rank"]) == (other["logprob"] > entry["logprob"]) for other in others)
    assert answer["usage"]["completion_tokens"] == 24 and answer["usage"]["prompt_tokens"] == 3


def test_a_stream_has_the_tokens_of_an_answer(served):
    whole = served.generate(sampling={"n": 2, "logprobs": 1}).body["choices"]
    options = {"include_usage": True}
    stream = served.generate(
        sampling={"n": 2, "logprobs": 1}, stream=True, stream_options=options, return_token_ids=True
    )
    parts = events(stream.body)
    assert parts[0]["prompt_token_ids"] == [5, 6, 7] and all("prompt_token_ids" not in part for part in parts[1:])
    assert parts[-1]["choices"] == [] and parts[-1]["usage"]["completion_tokens"] == 16
    for choice in whole:
        mine = [part["choices"][0] for part in parts[:-1] if part["choices"][0]["index"] == choice["index"]]
        assert [token for part in mine for token in part["token_ids"]] == choice["token_ids"]
        content = [entry for part in mine for entry in part["logprobs"]["content"]]
        assert content == choice["logprobs"]["content"]
        assert [part["finish_reason"] for part in mine] == [None] * 7 + ["length"]
        assert mine[-1]["weight_versions"] == choice["weight_versions"]


def test_the_context_is_the_limit(served):
    context = served.client.info().max_model_len
    for sampling in ({"max_tokens": None}, {"max_tokens": context * 10}):
        body = served.generate(sampling=sampling).body
        assert body["usage"]["total_tokens"] == context and body["choices"][0]["finish_reason"] == "length"
    assert (
        len(served.generate(*[1] * (context - 1), sampling={"max_tokens": None}).body["choices"][0]["token_ids"]) == 1
    )
    refused = served.generate(*[1] * context)
    assert refused.status == 400 and str(context) in refused.body["error"]["message"]


def test_an_adapter_is_a_model(served):
    rng = np.random.default_rng(4)
    served.client.push_lora(*random_adapter(rng, read_model(FIXTURES / MODEL)), name="mine")
    ours = served.generate(model="mine").body
    theirs = served.client.generate(
        [[5, 6, 7]], sampling=SamplingParams(max_tokens=8, seed=3, ignore_eos=True), adapter="mine"
    )
    assert ours["model"] == "mine" and ours["choices"][0]["token_ids"] == theirs[0].samples[0].token_ids
    assert ours["choices"][0]["token_ids"] != served.generate().body["choices"][0]["token_ids"]
    for base in (MODEL, "", None):
        assert served.generate(model=base).body["model"] == MODEL
    served.client.remove_adapter("mine")
    gone = served.generate(model="mine")
    assert gone.status == 404 and gone.body["error"]["param"] == "model"


def test_spans_say_which_version_made_which_tokens(served):
    answers = []
    long = {"max_tokens": 900, "logprobs": 0}
    thread = threading.Thread(target=lambda: answers.append(served.generate(sampling=long)))
    start = served.client.status().generated_tokens
    thread.start()
    wait_for(served.client, lambda s: s.generated_tokens > start + 10, "generating")
    served.client.push_lora({}, version=7)
    thread.join(60)
    spans = answers[0].body["choices"][0]["weight_versions"]
    assert [span["version"] for span in spans] == ["0", "7"]
    assert spans[0]["start"] == 0 and spans[0]["end"] == spans[1]["start"] and spans[1]["end"] == 900
    ask(served.address, "POST", "/update_weight_version", {"new_version": "0", "force_version": True})


@pytest.mark.parametrize("how", ["member", "header", "stream"])
def test_a_request_is_aborted_by_its_name(served, how):
    answers, members = [], {"headers": {"X-Request-Id": "r1"}} if how == "header" else {"request_id": "r1"}
    members |= {"stream": True} if how == "stream" else {}
    thread = threading.Thread(target=lambda: answers.append(served.generate(sampling={"max_tokens": 900}, **members)))
    start = served.client.status().generated_tokens
    thread.start()
    wait_for(served.client, lambda s: s.generated_tokens > start + 10, "generating")
    again = served.generate(request_id="r1")
    assert again.status == 409, again
    done = ask(served.address, "POST", "/abort_requests", {"request_ids": ["generate-tokens-r1"]})
    assert done.body == {"status": "aborted", "aborted": 1}
    thread.join(60)
    last = events(answers[0].body)[-1] if how == "stream" else answers[0].body
    assert last["request_id"] == "generate-tokens-r1" and last["choices"][0]["finish_reason"] == "abort"


def test_requests_are_held_while_paused_and_refused_while_asleep(served):
    ask(served.address, "POST", "/pause?mode=keep")
    answers = []
    thread = threading.Thread(target=lambda: answers.append(served.generate()))
    thread.start()
    wait_for(served.client, lambda s: s.held_requests == 1, "held")
    ask(served.address, "POST", "/resume")
    thread.join(60)
    assert answers[0].status == 200
    ask(served.address, "POST", "/sleep")
    assert served.generate().status == 409
    ask(served.address, "POST", "/wake_up")
    assert served.generate().body["choices"] == answers[0].body["choices"]


def test_nothing_is_dropped_in_silence(served):
    refused = served.generate(sampling={"best_of": 2})
    assert refused.status == 400 and "best_of: is not supported" in refused.body["error"]["message"]
    plain = served.generate()
    trl = served.generate(features=None, priority=3, sampling={"output_kind": 2, "detokenize": False})
    assert trl.body["choices"] == plain.body["choices"]
    assert trl.headers["x-ignored-members"] == ("sampling_params.output_kind, sampling_params.detokenize, priority")
    assert served.generate(sampling={"stream": True}).content_type.startswith("text/event-stream"), "wherever it stands"


@pytest.mark.parametrize("members, param", [
    ({"features": {"mm_hashes": {}}}, "features"), ({"output_mode": "text"}, "output_mode"),
    ({"output_mode": "bytes"}, "output_mode"), ({"token_ids": "abc"}, "token_ids"),
    ({"token_ids": [[1]]}, "token_ids[0]"),
    ({"token_ids": [1.5]}, "token_ids[0]"), ({"token_ids": [-1]}, "token_ids[0]"), ({"token_ids": None}, "token_ids"),
    ({"sampling_params": None}, "sampling_params"), ({"sampling_params": []}, "sampling_params"),
    ({"sampling_params": {"temperature": -1}}, "temperature"),
    ({"sampling_params": {"truncate_prompt_tokens": 3}}, "sampling_params.truncate_prompt_tokens"),
    ({"sampling_params": {"max_tokens": 0}}, "max_tokens"),
    ({"sampling_params": {"max_tokens": -1}}, "sampling_params.max_tokens"),
    ({"sampling_params": {"logprobs": 101}}, "sampling_params.logprobs"), ({"sampling_params": {"n": 0}}, "n"),
    ({"stream": True, "sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"), ({"request_id": "x" * 300}, "request_id"),
])  # fmt: skip
def test_wrong_members_are_named(served, members, param):
    answer = served.generate(**members)
    assert answer.status == 400 and answer.body["error"]["param"] == param, answer


def test_a_client_that_vanishes_takes_its_request_along(served):
    host, _, port = served.address.rpartition(":")
    for stream in (False, True):
        body = {
            "token_ids": [1, 2],
            "stream": stream,
            "sampling_params": {"max_tokens": 900, "n": 8, "ignore_eos": True},
        }
        text = json.dumps(body)
        head = "POST /inference/v1/generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
        aborted = served.client.status().aborted_requests
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(f"{head}\r\ncontent-length: {len(text)}\r\n\r\n{text}".encode())
            wait_for(served.client, lambda s: s.running_samples == 8, "running")
        wait_for(served.client, lambda s, before=aborted: s.aborted_requests == before + 1, "aborted")
        assert_idle(served.client)


def test_log_probabilities_of_named_tokens_of_the_prompt(served):
    """A table of numpy's, with the bits of gRPC's scores, as vLLM answers it."""
    prompt, rows = [11, 22, 33, 44, 55], [[33, -1, 7], [-1, 44], [55]]
    sampling = {"prompt_logprobs": 0, "prompt_logprob_token_ids": rows, "prompt_logprob_start": 1}
    answer = served.generate(*prompt, sampling=sampling).body
    found = np.load(io.BytesIO(base64.b64decode(answer["prompt_token_id_logprobs"])), allow_pickle=False)

    def score(before, token):
        return -np.inf if token < 0 else served.client.score([[*before, token]])[0].raw_logprobs[-1]

    padded = [row + [-1] * (3 - len(row)) for row in rows]
    expected = [[score(prompt[: 2 + i], token) for token in row] for i, row in enumerate(padded)]
    assert found.dtype == np.float32 and found.shape == (3, 3)
    assert found.tobytes() == np.float32(expected).tobytes()
    of_prompt = [next(iter(entry.values()))["logprob"] for entry in answer["prompt_logprobs"][2:]]
    assert np.float32(of_prompt).tobytes() == found[[0, 1, 2], [0, 1, 0]].tobytes()
    alone = served.generate(*prompt, sampling={**sampling, "prompt_logprobs": None}).body
    assert (alone["prompt_logprobs"], alone["prompt_token_id_logprobs"]) == (None, answer["prompt_token_id_logprobs"])
    beside = served.generate(*prompt, sampling={**sampling, "prompt_logprobs": 3}).body
    assert beside["prompt_token_id_logprobs"] == answer["prompt_token_id_logprobs"]
    without = served.generate(*prompt, sampling={"prompt_logprobs": 3}).body
    assert (without["prompt_logprobs"], without["prompt_token_id_logprobs"]) == (beside["prompt_logprobs"], None)


@pytest.mark.parametrize(
    ("members", "param", "says"),
    [
        ({"prompt_logprob_token_ids": [[1]]}, "", "1 rows, and the prompt has 2 scored rows"),
        ({"prompt_logprob_token_ids": [[], []]}, "", "has no tokens"),
        ({"prompt_logprob_token_ids": [[1], [512]]}, "[1][0]", "512 is not below the vocabulary size 512"),
        ({"prompt_logprob_token_ids": [[1], [-2]]}, "[1][0]", "-2 is neither -1 nor a token"),
        ({"prompt_logprob_token_ids": [[0] * 129, []]}, "[0]", "129 tokens are more than 128"),
        ({"prompt_logprob_token_ids": [1, 2]}, "[0]", "expected a sequence"),
        ({"prompt_logprob_token_ids": [[1.5], []]}, "[0][0]", "expected i32"),
    ],
)
def test_wrong_tables_of_named_tokens_are_refused(served, members, param, says):
    answer = served.generate(sampling=members)
    path = f"sampling_params.prompt_logprob_token_ids{param}"
    assert (answer.status, answer.body["error"]["param"]) == (400, path) and says in answer.body["error"]["message"]


def test_a_stream_has_no_table_and_a_start_needs_one(served):
    answer = served.generate(sampling={"prompt_logprob_token_ids": [[1], [2]]}, stream=True)
    assert answer.status == 400 and "are not available in a stream" in answer.body["error"]["message"]
    answer = served.generate(sampling={"prompt_logprob_start": 1})
    assert (answer.status, answer.body["error"]["param"]) == (400, "sampling_params.prompt_logprob_start")


def test_wrong_members_are_named_by_their_path(served):
    for sampling, path, says in (
        ({"suffix": "x"}, "sampling_params.suffix", "is not supported; leave it out"),
        ({"logit_bias": {"seven": 1}}, "sampling_params.logit_bias", '"seven" is not a token id'),
    ):
        error = served.generate(sampling=sampling).body["error"]
        assert error["param"] == path and says in error["message"], error
