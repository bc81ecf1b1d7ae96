"""From messages to results, errors, timeouts and cancellation."""

from __future__ import annotations

import asyncio
import gc
import math
import random
import signal
import threading
import time

import grpc
import numpy as np
import pytest

import rollout_client
from fake_server import GenerateResponse, completion, summary
from rollout_client import (
    AsyncRolloutClient,
    DeadlineExceeded,
    FinishReason,
    Internal,
    InvalidArgument,
    Lifecycle,
    PromptLogprobs,
    PromptTokens,
    RolloutClient,
    RolloutError,
    Sample,
    Summary,
    TokenDelta,
    Unavailable,
    VersionSpan,
    _proto,
)


def test_completion_becomes_a_sample(call, fake):
    logprobs = [-0.1, -2.5e-8, -1e30]
    message = completion(
        token_ids=[3, 1, 2],
        logprobs=logprobs,
        raw_logprobs=[-1.0, -2.0, -3.0],
        top_logprobs=[{"token_ids": [3, 9], "logprobs": [-1.0, -1.5]}] * 3,
        ranks=[1, 7, 1],
        finish_reason=3,
        weight_versions=[{"weight_version": 4, "start": 0, "end": 2}, {"weight_version": 5, "start": 2, "end": 3}],
        seed=2**64 - 1,
        cached_tokens=16,
        text="",
    )
    fake.answers["Generate"] = lambda request, context: iter([message, summary()])
    (output,) = call(lambda client: client.generate(["a"]))
    (sample,) = output.samples
    assert output.prompt_index == 0 and output.prompt_logprobs is None
    assert sample.token_ids == [3, 1, 2]
    assert sample.logprobs.dtype == sample.raw_logprobs.dtype == np.float32
    assert sample.logprobs.tobytes() == np.array(logprobs, dtype=np.float32).tobytes()
    assert sample.raw_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert [list(top.items()) for top in sample.top_logprobs] == [[(3, -1.0), (9, -1.5)]] * 3
    assert sample.ranks == [1, 7, 1]
    assert sample.finish_reason is FinishReason.STOP_STRING and str(sample.finish_reason) == "stop_string"
    assert sample.weight_versions == [VersionSpan(4, 0, 2), VersionSpan(5, 2, 3)]
    assert (sample.seed, sample.cached_tokens, sample.text) == (2**64 - 1, 16, "")


def test_text_that_was_not_asked_is_none(call, fake):
    fake.answers["Generate"] = lambda request, context: iter([completion(), summary()])
    assert call(lambda client: client.generate([[1]], return_text=False))[0].samples[0].text is None


def test_samples_are_grouped_in_order_whatever_the_arrival(call, fake):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)

    def generate(request, context):
        pairs = [(p, s) for p in range(len(request.prompts)) for s in range(request.n)]
        rng.shuffle(pairs)
        for p, s in pairs:
            yield GenerateResponse(delta={"prompt_index": p, "sample_index": s})
            yield completion(p, s, [100 * p + s])
        yield summary()

    fake.answers["Generate"] = generate
    out = call(lambda client: client.generate(["a", "b", "c"], n=4))
    assert [[s.token_ids for s in o.samples] for o in out] == [[[100 * p + s] for s in range(4)] for p in range(3)]


def test_prompt_logprobs_start_with_none(call, fake):
    message = {"prompt_index": 1, "token_ids": [7, 8], "raw_logprobs": [math.nan, -0.5]}
    answers = [completion(0), completion(1), GenerateResponse(prompt_logprobs=message), summary()]
    fake.answers["Generate"] = lambda request, context: iter(answers)
    out = call(lambda client: client.generate(["a", "b"], prompt_logprobs=True))
    assert out[0].prompt_logprobs is None
    assert out[1].prompt_logprobs == PromptLogprobs(1, [7, 8], [None, -0.5], [], [])


def test_named_tokens_are_listed_beside_the_prompts_last(call, fake):
    named = [{}, {}, {"token_ids": [9, 3], "logprobs": [-1.5, -math.inf]}]
    raw = [math.nan, math.nan, -0.5]
    message = {"prompt_index": 0, "token_ids": [7, 8, 9], "raw_logprobs": raw, "token_id_logprobs": named}
    answers = [completion(0), GenerateResponse(prompt_logprobs=message), summary()]
    fake.answers["Generate"] = lambda request, context: iter(answers)
    (out,) = call(lambda client: client.generate(["a"], prompt_logprob_token_ids=[[[9, 3]]]))
    listed = [{}, {}, {9: -1.5, 3: -math.inf}]
    assert out.prompt_logprobs == PromptLogprobs(0, [7, 8, 9], [None, None, -0.5], [], [], listed)


def test_stream_gives_events_as_they_come(fake):
    answers = [
        GenerateResponse(delta={"token_ids": [5], "logprobs": [-0.5], "raw_logprobs": [-0.25], "text": "a"}),
        completion(),
        summary(request_id="r", prompt_tokens=3, cached_tokens=1, completion_tokens=1, seconds=0.5),
    ]
    fake.answers["Generate"] = lambda request, context: iter(answers)
    with RolloutClient(fake.address) as client:
        stream = client.generate_stream(["a"], stream_tokens=True, request_id="r")
        prompt, delta, sample, last = list(stream)
    assert fake.requests[0].stream_tokens and stream.request_id == "r"
    assert prompt == PromptTokens(0, [1])
    assert isinstance(delta, TokenDelta) and (delta.token_ids, delta.text) == ([5], "a")
    assert isinstance(sample, Sample)
    assert last == Summary("r", 3, 1, 1, 0.5)


def test_scores_start_with_none(call, fake):
    first = {
        "raw_logprobs": [math.nan, -1.0],
        "logprobs": [math.nan, -2.0],
        "top_logprobs": [{}, {"token_ids": [4], "logprobs": [-0.5]}],
        "weight_version": 6,
    }
    rest = {"raw_logprobs": [-3.0], "logprobs": [-4.0], "top_logprobs": [{}], "weight_version": 6}
    second = {"raw_logprobs": [math.nan], "logprobs": [math.nan]}
    parts = [(1, 0, second), (0, 0, first), (0, 2, rest)]
    answer = [_proto.SCORE.response(sequence_index=i, start=start, score=score) for i, start, score in parts]
    fake.answers["Score"] = lambda request, context: iter(answer)
    first, second = call(lambda client: client.score([[1, 2, 5], [3]]))
    assert (first.raw_logprobs, first.logprobs) == ([None, -1.0, -3.0], [None, -2.0, -4.0])
    assert (first.top_logprobs, first.weight_version) == ([{}, {4: -0.5}, {}], 6)
    assert (second.raw_logprobs, second.logprobs, second.top_logprobs) == ([None], [None], [])


def test_a_score_that_never_came_is_an_error(call, fake):
    answer = _proto.SCORE.response(score={"raw_logprobs": [math.nan], "logprobs": [math.nan]}, sequence_index=1)
    fake.answers["Score"] = lambda request, context: iter([answer])
    with pytest.raises(Internal, match="1 of 2 sequences"):
        call(lambda client: client.score([[1], [2]]))


def test_abort_info_status_reset(call, fake):
    fake.answers["Abort"] = lambda request, context: _proto.ABORT.response(aborted=["a"], unknown=["b"])
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response(
        model="m", vocab_size=512, eos_token_ids=[0, 2], has_tokenizer=True
    )
    memory = {"total_bytes": 10, "ceiling_bytes": 5, "entries": [{"name": "weights", "bytes": 3}], "resident_bytes": 4}
    fake.answers["GetStatus"] = lambda request, context: _proto.GET_STATUS.response(
        lifecycle=1,
        memory=memory,
        total_blocks=8,
        free_blocks=7,
        tokens_per_second=1.5,
        stall={"reported": 5, "phase": "decode", "seconds": 61.5},
        tool_calls=[{"format": "hermes", "parsed": 5, "unknown_tool": 1, "unclosed": 2}],
        tenants=[{"name": "a", "running_samples": 1, "kv_blocks": 3, "prompt_tokens": 4}, {"waiting_samples": 2}],
    )
    fake.answers["ResetPrefixCache"] = lambda request, context: _proto.RESET_PREFIX_CACHE.response(blocks=9)
    assert call(lambda client: client.abort("a")) == rollout_client.AbortResult(["a"], ["b"])
    info = call(lambda client: client.info())
    assert (info.model, info.vocab_size, info.eos_token_ids, info.has_tokenizer) == ("m", 512, [0, 2], True)
    status = call(lambda client: client.status())
    assert status.lifecycle is Lifecycle.RUNNING
    assert status.memory == rollout_client.MemoryLedger(10, 5, {"weights": 3}, 4)
    assert status.host_memory is None
    assert (status.total_blocks, status.free_blocks, status.tokens_per_second) == (8, 7, 1.5)
    assert status.tool_calls == {"hermes": rollout_client.ToolCalls(5, 1, 0, 2)}
    assert status.tool_calls["hermes"].malformed == 3
    tenant = rollout_client.TenantStatus
    assert status.tenants == {"a": tenant(1, 0, 3, 4, 0), "": tenant(0, 2, 0, 0, 0)}
    assert status.stall == rollout_client.Stall(5, "decode", None, 61.5, False)
    assert call(lambda client: client.reset_prefix_cache()) == 9


def test_a_device_with_memory_of_its_own_has_a_ledger_beside_the_hosts(call, fake):
    memory = {"total_bytes": 10, "ceiling_bytes": 5, "entries": [{"name": "context", "bytes": 3}]}
    host = {"total_bytes": 90, "ceiling_bytes": 45, "entries": [{"name": "process", "bytes": 7}], "traffic_bytes": 1}
    fake.answers["GetStatus"] = lambda request, context: _proto.GET_STATUS.response(
        lifecycle=1, memory=memory, host_memory=host
    )
    status = call(lambda client: client.status())
    assert status.memory == rollout_client.MemoryLedger(10, 5, {"context": 3}, 0)
    assert status.host_memory == rollout_client.MemoryLedger(90, 45, {"process": 7}, 0, 1)


def test_timeline(call, fake):
    spans = [
        {"track": "engine", "id": 3, "phase": "decode", "start": 10, "end": 20, "steps": 2, "sampled_tokens": 8},
        {"track": "engine", "id": 4, "phase": "brief", "start": 20, "parts": [{"phase": "idle", "share": 0.5}]},
    ]
    fake.answers["GetTimeline"] = lambda request, context: _proto.GET_TIMELINE.response(
        started=1, start=10, now=30, spans=spans, phases=[{"phase": "decode", "seconds": 1e-8, "share": 0.5}]
    )
    timeline = call(lambda client: client.timeline(since=2**63, max_spans=7))
    assert (fake.requests[-1].since, fake.requests[-1].max_spans) == (2**63, 7)
    assert (timeline.started, timeline.start, timeline.now, timeline.truncated) == (1, 10, 30, False)
    decode, brief = timeline.spans
    assert (decode.phase, decode.end, decode.steps, decode.sampled_tokens, decode.parts) == ("decode", 20, 2, 8, [])
    assert (brief.id, brief.end, brief.parts) == (4, None, [rollout_client.PhaseTime("idle", 0.0, 0.5)])
    assert timeline.phases == [rollout_client.PhaseTime("decode", 1e-8, 0.5)]
    with pytest.raises(InvalidArgument, match="since"):
        call(lambda client: client.timeline(since=-1))


@pytest.mark.parametrize(
    "answers",
    [
        [summary()],
        [completion(0), summary()],
        [completion(0), completion(1), completion(2), summary()],
        [completion(0), completion(1, finish_reason=0), summary()],
    ],
    ids=["no sample", "one missing", "one too many", "unknown enum value"],
)
def test_a_server_that_breaks_the_contract_is_an_error(call, fake, answers):
    fake.answers["Generate"] = lambda request, context: iter(answers)
    with pytest.raises(Internal):
        call(lambda client: client.generate(["a", "b"]))


def test_each_output_has_the_token_ids_of_its_prompt(call, fake):
    fake.answers["Generate"] = lambda request, context: iter([completion(1), completion(0), summary()])
    outputs = call(lambda client: client.generate(["a", [2**21, 7, 7]]))
    assert [output.prompt_token_ids for output in outputs] == [[1], [2**21, 7, 7]]
    fake.prompts = lambda request: iter([GenerateResponse(prompt={"prompt_index": 1, "token_ids": [3]})])
    with pytest.raises(Internal, match="token ids of 1 of 2 prompts"):
        call(lambda client: client.generate(["a", "b"]))


def test_events_that_only_a_newer_server_has_are_passed_over(call, fake):
    newer = GenerateResponse.FromString(b"\xf2\x07\x02ok")  # field 126, a message
    fake.answers["Generate"] = lambda request, context: iter([newer, completion(), newer, summary(), newer])
    (output,) = call(lambda client: client.generate(["a"]))
    assert [sample.token_ids for sample in output.samples] == [[5]]

    with RolloutClient(fake.address) as client:
        assert [type(event) for event in client.generate_stream(["a"])] == [PromptTokens, Sample, Summary]


def test_an_older_server_which_sends_no_prompts_is_said_to_be_older(call, fake):
    fake.prompts = lambda request: iter([])
    fake.answers["Generate"] = lambda request, context: iter([completion(), summary()])
    with pytest.raises(Internal, match="the server is older than this client: update rollout-server"):
        call(lambda client: client.generate(["a"]))


def test_a_call_that_an_older_server_does_not_know_says_so(call, fake):
    fake.answers["GetTimeline"] = lambda request, context: context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
    with pytest.raises(RolloutError, match="older than this client; update rollout-server"):
        call(lambda client: client.timeline())


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, rollout_client.InvalidArgument),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, rollout_client.ResourceExhausted),
        (grpc.StatusCode.FAILED_PRECONDITION, rollout_client.FailedPrecondition),
        (grpc.StatusCode.ABORTED, rollout_client.Aborted),
        (grpc.StatusCode.NOT_FOUND, rollout_client.NotFound),
        (grpc.StatusCode.ALREADY_EXISTS, rollout_client.AlreadyExists),
        (grpc.StatusCode.UNAVAILABLE, rollout_client.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, rollout_client.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, rollout_client.Cancelled),
        (grpc.StatusCode.UNAUTHENTICATED, rollout_client.Unauthenticated),
        (grpc.StatusCode.INTERNAL, rollout_client.Internal),
        (grpc.StatusCode.UNIMPLEMENTED, RolloutError),
    ],
)
def test_each_status_has_its_exception(call, fake, code, cls):
    fake.answers["Generate"] = fake.answers["Score"] = lambda request, context: context.abort(code, "sampling.n: why")
    for use in (lambda client: client.generate(["a"]), lambda client: client.score([[1]])):
        with pytest.raises(RolloutError) as error:
            call(use)
        assert type(error.value) is cls and error.value.code is code and "sampling.n: why" in str(error.value)


def test_no_server_is_unavailable(fake):
    with RolloutClient(f"127.0.0.1:{rollout_client.process.free_port()}") as client, pytest.raises(Unavailable):
        client.status()


@pytest.mark.parametrize("own", [True, False], ids=["of the call", "of the client"])
def test_a_server_that_does_not_answer_at_the_timeout_is_deadline_exceeded(call, fake, own, monkeypatch):
    monkeypatch.setattr("rollout_client._channel.ANSWER_SECONDS", 0.1)
    fake.stall(completion())
    timeouts = ({"timeout": 0.3}, {}) if own else ({}, {"timeout": 0.3})
    with pytest.raises(DeadlineExceeded) as error:
        call(lambda client: client.generate(["a"], n=2, **timeouts[0]), **timeouts[1])
    assert isinstance(error.value, TimeoutError)
    assert fake.cancelled.wait(10)
    assert fake.requests[0].time_limit_seconds == 0.3


def test_a_timeout_that_is_none_is_refused(call, fake):
    for wrong in (-1.0, math.nan):
        with pytest.raises(InvalidArgument, match="timeout: "):
            call(lambda client, wrong=wrong: client.generate(["a"], timeout=wrong))
    assert fake.requests == []


def test_an_infinite_timeout_overrides_the_clients(call, fake):
    seen = []

    def generate(request, context):
        seen.append(context.time_remaining())
        yield completion()
        yield summary()

    fake.answers["Generate"] = generate
    call(lambda client: client.generate(["a"], timeout=math.inf), timeout=5.0)
    call(lambda client: client.generate(["a"]), timeout=5.0)
    # A call without a deadline has "about 292 years" left in some versions of gRPC.
    assert seen[0] is None or seen[0] > 1e6
    assert 5.1 < seen[1] < 5.1 + rollout_client._channel.ANSWER_SECONDS
    assert not fake.requests[0].HasField("time_limit_seconds") and fake.requests[1].time_limit_seconds == 5.0


def test_leaving_a_stream_tells_the_server(fake):
    fake.stall(completion())
    with RolloutClient(fake.address) as client:
        with client.generate_stream(["a"], n=2) as stream:
            assert [type(next(stream)) for _ in range(2)] == [PromptTokens, Sample]
        assert fake.cancelled.wait(10)
        with pytest.raises(rollout_client.Cancelled):
            next(stream)


def test_a_forgotten_stream_tells_the_server(fake):
    fake.stall(completion())
    with RolloutClient(fake.address) as client:
        next(client.generate_stream(["a"], n=2))
        gc.collect()
        assert fake.cancelled.wait(10)


@pytest.mark.parametrize("use", ["generate", "generate_stream", "score"])
def test_keyboard_interrupt_tells_the_server(fake, use):
    fake.stall(completion())

    def stalled_score(request, context):
        context.add_callback(fake.cancelled.set)
        fake.cancelled.wait(20)
        yield _proto.SCORE.response()

    fake.answers["Score"] = stalled_score

    def interrupt():
        while not fake.requests:
            time.sleep(0.01)
        time.sleep(0.1)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with RolloutClient(fake.address) as client:
        thread.start()
        with pytest.raises(KeyboardInterrupt) as held:
            if use == "generate":
                client.generate(["a"], n=2)
            elif use == "generate_stream":
                held_stream = client.generate_stream(["a"], n=2)
                list(held_stream)
            else:
                client.score([[1, 2]])
        assert fake.cancelled.wait(10)
        del held
    thread.join()


def test_cancelling_a_task_tells_the_server(fake):
    fake.stall(completion())

    async def main():
        async with AsyncRolloutClient(fake.address) as client:
            task = asyncio.create_task(client.generate(["a"], n=2))
            while not fake.requests:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(fake.cancelled.wait, 10)

    asyncio.run(main())


def test_leaving_an_async_stream_tells_the_server(fake):
    fake.stall(completion())

    async def main():
        async with AsyncRolloutClient(fake.address) as client:
            async with client.generate_stream(["a"], n=2) as stream:
                assert [type(await anext(stream)) for _ in range(2)] == [PromptTokens, Sample]
            assert await asyncio.to_thread(fake.cancelled.wait, 10)
            with pytest.raises(rollout_client.Cancelled):
                await anext(stream)

    asyncio.run(main())


def test_async_calls_run_together(fake):
    """Two calls that each wait for the other on the server both end."""
    barrier = threading.Barrier(2)

    def generate(request, context):
        barrier.wait(10)
        yield completion()
        yield summary()

    fake.answers["Generate"] = generate

    async def main():
        async with AsyncRolloutClient(fake.address) as client:
            return await asyncio.gather(client.generate(["a"]), client.generate(["b"]))

    assert [len(out) for out in asyncio.run(main())] == [1, 1]


def test_wait_until_ready_waits_for_running(call, fake):
    states = iter([2, 2, 1])
    fake.answers["GetStatus"] = lambda request, context: _proto.GET_STATUS.response(lifecycle=next(states))
    call(lambda client: client.wait_until_ready(20))
    assert len(fake.requests) == 3


def test_wait_until_ready_gives_up_with_the_reason(call, fake):
    fake.answers["GetStatus"] = lambda request, context: _proto.GET_STATUS.response(lifecycle=2)
    with pytest.raises(Unavailable, match=r"not ready after 2 s: the server is shutting_down"):
        call(lambda client: client.wait_until_ready(2.0))
