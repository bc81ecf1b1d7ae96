"""`returns` over HTTP: what gRPC returns beside log-probabilities, in the choices of three routes."""

from __future__ import annotations

import math

import pytest

from models import read_safetensors
from rollout_client import Returns, RolloutClient, SamplingParams, ServerProcess
from serving import FIXTURES, SMALL_CACHE
from vllm_answers import ask

PROMPT = [5, 6, 7, 8]
RETURNS = {"entropy": True, "support": True, "references": ["tuned", ""], "base": True, "current": True}
BODY = {"max_tokens": 6, "n": 2, "seed": 3, "temperature": 0.8, "top_p": 0.9, "ignore_eos": True, "returns": RETURNS}
ROUTES = {
    "/v1/completions": {**BODY, "prompt": PROMPT},
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": BODY},
}


@pytest.fixture(scope="module")
def served(binary):
    """A server with a resident adapter, and a client of it."""
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--dtype", "float32", "--max-adapters", "1", "--keep-base"]
    tuned = FIXTURES / "peft" / "plain"
    with ServerProcess(binary, FIXTURES / "llama-tied", flags) as server, RolloutClient(server.address) as client:
        config = (tuned / "adapter_config.json").read_text()
        client.push_lora(read_safetensors(tuned / "adapter_model.safetensors"), config, name="tuned")
        yield server, client


def same(given, expected):
    return all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(given, expected, strict=True))


@pytest.mark.parametrize("route", ROUTES)
def test_choices_have_what_grpc_returns(served, route):
    server, client = served
    sampling = SamplingParams(max_tokens=6, seed=3, temperature=0.8, top_p=0.9, ignore_eos=True)
    returns = Returns(entropy=True, support=True, references=["tuned", None], base=True, current=True)
    [output] = client.generate([PROMPT], 2, sampling, return_text=False, returns=returns)
    answer = ask(server.http_address, "POST", route, ROUTES[route])
    assert answer.status == 200, answer
    for choice, sample in zip(answer.body["choices"], output.samples, strict=True):
        found, expected = choice["returned"], sample.returned
        assert same(found["entropies"], expected.entropies) and same(found["raw_entropies"], expected.raw_entropies)
        assert found["support_sizes"] == expected.support_sizes.tolist()
        assert found["support_ids"] == [ids.tolist() for ids in expected.support_ids]
        assert same(found["support_log_masses"], expected.support_log_masses)
        policies = [*found["references"], found["base"], found["current"]]
        for given, score in zip(policies, [*sample.references, sample.base, sample.current], strict=True):
            assert given["weight_version"] == score.weight_version
            assert same(given["logprobs"], score.logprobs) and same(given["raw_logprobs"], score.raw_logprobs)


def test_only_what_is_asked_for_is_there(served):
    server, _ = served
    body = {"prompt": PROMPT, "max_tokens": 2}
    [plain] = ask(server.http_address, "POST", "/v1/completions", body).body["choices"]
    assert "returned" not in plain
    body["returns"] = {"entropy": True}
    [choice] = ask(server.http_address, "POST", "/v1/completions", body).body["choices"]
    assert set(choice["returned"]) == {"raw_entropies", "entropies"}


def test_a_misspelt_member_is_named(served):
    server, _ = served
    body = {"prompt": PROMPT, "max_tokens": 2, "returns": {"entropies": True}}
    answer = ask(server.http_address, "POST", "/v1/completions", body)
    assert "returns.entropies" in answer.headers["x-ignored-members"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"stream": True, "returns": {"entropy": True}}, "returns: is not available in a stream"),
        ({"returns": {"references": ["nobody"]}}, "returns.references[0]: 'nobody' is not resident"),
        ({"returns": {"max_support_ids": 3}}, "returns.max_support_ids: means nothing without returns.support"),
    ],
)
def test_wrong_returns_are_rejected(served, members, message):
    server, _ = served
    body = {"prompt": PROMPT, "max_tokens": 2, **members}
    answer = ask(server.http_address, "POST", "/v1/completions", body)
    said = answer.body["error"]["message"].replace('"', "'")
    assert answer.status in (400, 404) and message in said, said
