"""The experts of samples for verl's routing replay (R3): joined and aligned by verl's own code, and from servers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from replicas import GREEDY, MODEL, PROMPT, in_time, rollout_config, server_alone
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from fake_server import completion, prompts, summary
from rollout_client import FailedPrecondition, InvalidArgument, RolloutError, Routing, _proto
from rollout_client.types import FinishReason, Sample, VersionSpan
from rollout_client.verl import NAME
from rollout_client.verl._sampling import output_fields, routed_experts
from serving import FIXTURES, server

EXPERTS = FIXTURES / "qwen3_moe"
LAYERS, NUM_LAYERS = [0, 2], 3
REPLAY = {"enable_rollout_routing_replay": True}


def output(rng, settings, prompt_tokens, tokens, dtype=np.uint8):
    """verl's output for a sample with made-up experts, and the experts."""
    experts = rng.integers(0, np.iinfo(np.uint8).max, (prompt_tokens + max(tokens - 1, 0), 2, 2)).astype(dtype)
    none, span = np.zeros(tokens, np.float32), [VersionSpan(3, 0, tokens)] if tokens else []
    reason = FinishReason.LENGTH if tokens else FinishReason.ABORTED
    own = Routing(prompt_tokens, experts[prompt_tokens:])
    sample = Sample(0, 0, list(range(tokens)), none, none, None, reason, span, 1, 0, [], [], own)
    found = routed_experts(Routing(0, experts[:prompt_tokens]), sample, LAYERS, NUM_LAYERS)
    return TokenOutput(**output_fields(sample, settings, True, 3, found)), experts


@pytest.fixture
def settings():
    return server_alone(rollout_config(None, {}, **REPLAY))._settings


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_verl_aligns_experts_with_tokens(rng, settings, dtype):
    made, experts = output(rng, settings, 5, 4, dtype)
    assert made.routed_experts.shape == (8, NUM_LAYERS, 2)
    assert made.routed_experts.dtype == (np.uint8 if dtype == np.uint8 else np.int16)
    loop = AgentLoopOutput(
        prompt_ids=list(range(5)),
        response_ids=made.token_ids,
        response_mask=[1] * 4,
        routed_experts=made.routed_experts,
        metrics=AgentLoopMetrics(),
    )
    aligned = loop.as_dict()["routed_experts"]
    assert aligned.shape == (9, NUM_LAYERS, 2) and aligned.dtype == torch.int16
    assert torch.equal(aligned[:8, LAYERS], torch.from_numpy(experts.astype(np.int16)))
    assert not aligned[8].any() and not aligned[:, 1].any(), "the last token was not run, layer 1 has no experts"


def test_verl_joins_the_parts_of_an_interrupted_sample(rng, settings, monkeypatch):
    (first, head), (nothing, _), (second, tail) = (output(rng, settings, *sizes) for sizes in [(5, 3), (8, 0), (8, 4)])
    first.stop_reason = "aborted"
    parts, lengths = [first, nothing, second], []

    async def generate(self, request_id, *, prompt_ids, **options):
        lengths.append(len(prompt_ids))
        return parts[len(lengths) - 1]

    monkeypatch.setattr(LLMServerClient, "generate", generate)
    rollout = {"name": NAME, "response_length": 7, "full_determinism": False}
    client = FullyAsyncLLMServerClient(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}}), None)
    joined = asyncio.run(client.generate("r", prompt_ids=[1] * 5, sampling_params={"max_tokens": 7}))
    assert lengths == [5, 8, 8] and len(joined.token_ids) == 7
    # The token at which the sample was interrupted was run when it went on.
    expected = np.concatenate([head, tail[7:]])
    assert joined.routed_experts.shape == (11, NUM_LAYERS, 2)
    assert np.array_equal(joined.routed_experts[:, LAYERS], expected)


def test_a_sample_of_which_nothing_was_run_has_no_experts():
    none = np.zeros(0, np.float32)
    sample = Sample(0, 0, [], none, none, None, FinishReason.ABORTED, [], 1, 0, [], [])
    assert routed_experts(None, sample, LAYERS, NUM_LAYERS) is None


@pytest.mark.parametrize(
    ("routing", "error", "words"),
    [
        (None, InvalidArgument, f"routing_replay=True: {EXPERTS} has no experts; set it to False"),
        ({"layers": [0, 2], "returned": False}, FailedPrecondition, "routing_replay=True: start .* --return-routing"),
    ],
)
def test_a_server_that_cannot_return_experts_is_an_error_at_the_start(fake, routing, error, words):
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response(routing=routing)
    alone = server_alone(rollout_config(None, {"addresses": [fake.address]}, **REPLAY), path=EXPERTS)
    with pytest.raises(error, match=rf"^rollout.enable_rollout_{words}"):
        in_time(alone.launch_server())


def test_experts_are_asked_for_only_if_verl_replays_them(fake):
    routing = {"layers": LAYERS, "top_k": 2, "experts": 8, "returned": True}
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response(routing=routing, max_model_len=99)
    rows = {"layers": 2, "top_k": 2, "first_token": 8, "experts": b"\x01\x02\x03\x04"}
    whole = {**rows, "first_token": 0, "experts": bytes(range(32))}
    event = _proto.GENERATE.response(prompt_routing={"routing": whole})
    fake.prompts = lambda request: [*prompts(request), *([event] if request.return_routing else [])]
    fake.answers["Generate"] = lambda request, context: iter(
        [completion(token_ids=[7, 8], **({"routing": rows} if request.return_routing else {})), summary()]
    )

    async def ask(**replay):
        alone = server_alone(rollout_config(None, {"addresses": [fake.address]}, **replay), path=EXPERTS)
        await alone.launch_server()
        return await alone.generate(PROMPT, {"max_tokens": 2}, "r")

    assert in_time(ask()).routed_experts is None
    found = in_time(ask(**REPLAY)).routed_experts
    assert [request.return_routing for request in fake.requests if hasattr(request, "return_routing")] == [False, True]
    assert found.shape == (9, NUM_LAYERS, 2) and found[:, LAYERS].ravel().tolist() == [*range(32), 1, 2, 3, 4]


def test_a_replica_returns_the_experts_that_its_server_returns(binary):
    alone = server_alone(rollout_config(binary, **REPLAY), path=EXPERTS)

    async def run():
        await alone.launch_server()
        try:
            return await alone.generate(PROMPT, GREEDY, "r")
        finally:
            await asyncio.to_thread(alone._process.stop)

    found = in_time(run())
    with server(binary, EXPERTS, "--dtype", "float32", "--return-routing") as client:
        (score,) = client.score([PROMPT + found.token_ids], return_routing=True)
    assert np.array_equal(found.routed_experts, score.routing.routed_experts(LAYERS, NUM_LAYERS))


def test_a_dense_model_has_no_experts_to_replay(binary):
    alone = server_alone(rollout_config(binary, **REPLAY), path=MODEL)
    with pytest.raises(RolloutError, match=r"--return-routing: .* has no experts"):
        in_time(alone.launch_server())
