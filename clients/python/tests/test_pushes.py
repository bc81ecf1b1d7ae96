"""Pushes against a fake server that checks every message: what arrives, and what happens when something goes wrong."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pytest

import rollout_client
from fake_weights import MAX_CHUNK, Refused, held, hold, in_bytes, random_state
from rollout_client import (
    Aborted,
    AsyncRolloutClient,
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
    RolloutClient,
    Unavailable,
    _pusher,
    _senders,
)

TRANSPORTS = ["inline", "shared_memory", "auto"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_full_pushes_arrive_bit_for_bit(call, fake, rng, transport, new_segments):
    state = random_state(rng)
    state["large"] = rng.standard_normal((3, MAX_CHUNK // 2 + 17)).astype(np.float32)
    state["empty"] = np.empty((0, 4), np.float16)
    hold(fake, state)
    new = {name: rng.standard_normal(array.shape).astype(array.dtype) for name, array in state.items()}
    result = call(lambda client: client.push_full(new, version=7, running="recompute", transport=transport))
    assert held(fake) == in_bytes(new)
    (commit,) = fake.weights.commits
    assert (commit.header.new_version, commit.header.running, commit.header.in_place) == (7, 2, False)
    assert not commit.header.HasField("expected_version") and not commit.header.force_version
    assert (result.weight_version, result.parameters, result.adapter_generation) == (7, len(new), None)
    assert result.bytes == sum(array.nbytes for array in new.values())
    assert (result.pause_ms, result.staging_ms, result.pending, len(result.digest)) == (1.5, 2.5, False, 32)
    assert fake.weights.largest_message <= MAX_CHUNK
    assert new_segments() == []


def test_inline_declares_the_total_first_and_small_tensors_together_before_their_chunks(pusher, fake, rng):
    state = random_state(rng, largest=150)
    state["large"] = rng.standard_normal((2, _senders.CHUNK_BYTES // 4 + 5), dtype=np.float32)
    state |= {f"last{i}": array for i, array in enumerate(random_state(rng, largest=150).values())}
    hold(fake, state)
    requests = []
    fake.weights.on_message = lambda number, request: requests.append(request)
    pusher.push_full(state, transport="inline")
    assert requests[0].header.total_bytes == sum(array.nbytes for array in state.values())
    assert not requests[0].header.tensors
    kinds = [request.WhichOneof("kind") for request in requests[1:]]
    assert kinds == ["manifest"] + ["chunk"] * 8 + ["manifest"] + ["chunk"] * 7 + ["commit"]
    manifests = [[entry.name for entry in r.manifest.tensors] for r in requests if r.HasField("manifest")]
    assert manifests == [list(state)[:7], list(state)[7:]]
    chunks = [request.chunk for request in requests if request.HasField("chunk")]
    assert [chunk.tensor for chunk in chunks] == [0, 1, 2, 3, 4, 5, 6, 6, 6, 7, 8, 9, 10, 11, 12]


def test_small_tensors_of_64_kib_come_with_as_many_as_a_frame_holds(pusher, fake, rng):
    state = {f"t{i}": rng.standard_normal((128, 128), dtype=np.float32) for i in range(40)}
    hold(fake, state)
    for named_tensors in (state, iter(state.items())):
        requests = []
        fake.weights.on_message = lambda number, request, requests=requests: requests.append(request)
        pusher.push_full(named_tensors, transport="inline")
        declared = [len(request.manifest.tensors) for request in requests if request.HasField("manifest")]
        assert declared == [16, 15, 9] and held(fake) == in_bytes(state)


class GatheredOneByOne(Mapping):
    """A state dict whose tensors are gathered into the same memory when they are asked for."""

    def __init__(self, state):
        self.state, self.memory = state, np.empty(max(array.size for array in state.values()), np.float32)

    def __getitem__(self, name):
        self.memory[: self.state[name].size] = self.state[name].reshape(-1)
        return self.memory[: self.state[name].size].reshape(self.state[name].shape)

    def __iter__(self):
        return iter(self.state)

    def __len__(self):
        return len(self.state)


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
@pytest.mark.parametrize("given", [GatheredOneByOne, lambda state: iter(GatheredOneByOne(state).items())])
def test_memory_that_the_next_tensor_is_gathered_into_is_sent_before(pusher, fake, rng, transport, given):
    sizes = [1, 100, 1 << 10, 1 << 14, 1 << 16, 1 << 18]
    state = {f"t{i}": rng.standard_normal(int(rng.choice(sizes)), dtype=np.float32) for i in range(60)}
    hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
    pusher.push_full(given(state), transport=transport)
    assert held(fake) == in_bytes(state)


def test_shared_memory_declares_tensors_as_they_are_written(pusher, fake, rng):
    """So that the server reads the first while the last are written. In place, and for a DELTA, all at once."""
    state = {f"t{i}": rng.standard_normal((1 << 20, 3), dtype=np.float32) for i in range(5)}
    hold(fake, state)
    requests, declared = [], []
    fake.weights.on_message = lambda number, request: requests.append(request)

    def gathered():
        for pair in state.items():
            yield pair
            # The first of them is declared before the last is gathered.
            declared.append(sum(len(request.manifest.tensors) for request in list(requests)))
            time.sleep(0.1)

    pusher.push_full(gathered(), transport="shared_memory")
    kinds = [request.WhichOneof("kind") for request in requests]
    assert kinds == ["header"] + ["manifest"] * 3 + ["commit"] and declared[-1] > 0
    total = sum(array.nbytes for array in state.values())
    assert requests[0].header.total_bytes == total + _pusher.BUFFER_BYTES
    requests.clear()
    pusher.push_full(state, transport="shared_memory", in_place=True)
    assert [request.WhichOneof("kind") for request in requests] == ["header", "commit"]
    assert [entry.name for entry in requests[0].header.tensors] == list(state)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_iterator_is_never_more_than_one_tensor_ahead(pusher, fake, rng, transport):
    """The last one is released before the next is gathered: a weak reference to each sees it go."""
    shapes = [(1 << 20, 3)] * 6
    hold(fake, {f"t{i}": np.zeros(shape, np.float32) for i, shape in enumerate(shapes)})
    alive, most, sums = [], [], []

    class Memory(bytearray):
        """What a tensor's values lie in; unlike arrays it does not hand its place over to a base."""

    def gathered():
        for i, shape in enumerate(shapes):
            gc.collect()
            most.append(sum(memory() is not None for memory in alive))
            memory = Memory(rng.bytes(4 * shape[0] * shape[1]))
            alive.append(weakref.ref(memory))
            sums.append(bytes(memory))
            pair = f"t{i}", np.frombuffer(memory, np.float32).reshape(shape)
            del memory
            yield pair
            del pair

    pusher.push_full(gathered(), transport=transport)
    assert held(fake) == {f"t{i}": data for i, data in enumerate(sums)}
    assert most == [0] * len(shapes)


def test_an_iterators_total_comes_from_the_model_and_its_first_tensor(pusher, fake, rng):
    state = random_state(rng, dtype=ml_dtypes.bfloat16)
    hold(fake, state)
    wide = {name: array.astype(np.float32) for name, array in state.items()}
    fake.weights.on_message = lambda number, request: totals.append(request.header.total_bytes) if number == 0 else None
    totals = []
    pusher.push_full(iter(wide.items()), transport="inline")
    hold(fake, state)
    pusher.push_full(iter(wide.items()), transport="inline", total_bytes=10**9)
    assert totals == [sum(array.nbytes for array in wide.values()) + _pusher.BUFFER_BYTES, 10**9]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_iterators_later_tensors_may_be_of_a_wider_type(pusher, fake, rng, transport):
    """As of trainers that keep the norms in float32. In shared memory such a segment grows on the way."""
    state = {f"t{i}": rng.standard_normal((1 << 20, 3), dtype=np.float32) for i in range(3)}
    state = {"first": rng.standard_normal(10).astype(ml_dtypes.bfloat16), **state}
    hold(fake, state)
    pusher.push_full(iter(state.items()), transport=transport)
    assert held(fake) == in_bytes(state)


def test_tensors_are_read_in_the_callers_thread(pusher, fake, rng):
    """Modes of torch such as no_grad, and its collectives, belong to a thread."""
    state = random_state(rng)
    hold(fake, state)
    threads = set()

    def gathered():
        for pair in state.items():
            threads.add(threading.get_ident())
            yield pair

    for transport in TRANSPORTS:
        pusher.push_full(gathered(), transport=transport)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_while_gathering_is_raised_and_drops_the_push(pusher, fake, rng, transport):
    state = random_state(rng)
    hold(fake, state)
    before = held(fake)

    def gathered():
        yield from list(state.items())[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pusher.push_full(gathered(), transport=transport)
    assert held(fake) == before and fake.weights.commits == []
    pusher.push_full(state, transport=transport)
    assert len(fake.weights.commits) == 1


def test_a_dropped_push_is_cancelled_and_not_left_to_the_server(pusher, fake, rng):
    started = threading.Event()

    def stall(requests, context):
        context.add_callback(fake.cancelled.set)
        started.set()
        fake.cancelled.wait(20)

    fake.answers["Update"] = stall

    def gathered():
        yield "a", rng.standard_normal(10, dtype=np.float32)
        assert started.wait(20)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pusher.push_full(gathered(), total_bytes=40, transport="inline")
    assert fake.cancelled.wait(5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lora_pushes_bring_tensors_and_config_at_once(call, fake, rng, transport):
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {
        f"{name}.lora_A.weight": rng.standard_normal((4, 32), dtype=np.float32),
        f"{name}.lora_B.weight": rng.standard_normal((16, 4), dtype=np.float32),
    }
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    call(lambda client: client.push_lora(adapter, config, expected_version=0, running="abort", transport=transport))
    result = call(lambda client: client.push_lora(adapter, config, name="probe", expected_generation=0, evict=True))
    assert result.adapter_generation == 2 and result.weight_version == 1
    first, second = fake.weights.commits
    assert {n: data for n, (_, data) in first.tensors.items()} == in_bytes(adapter)
    assert [tuple(entry.shape) for entry in first.header.tensors] == [(4, 32), (16, 4)]
    assert (first.header.kind, first.header.running, first.header.expected_version) == (1, 4, 0)
    assert first.header.adapter_config == second.header.adapter_config
    assert json.loads(first.header.adapter_config) == config
    assert (second.header.adapter, second.header.expected_generation) == ("probe", 0)
    assert (first.header.evict_adapter, second.header.evict_adapter) == (False, True)
    assert first.header.adapter == "" and not first.header.HasField("expected_generation")


def test_no_adapter_is_the_base(call, fake):
    call(lambda client: client.push_lora(None))
    (commit,) = fake.weights.commits
    assert commit.header.adapter_config == "" and commit.tensors == {} and commit.header.kind == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_delta_pushes_turn_old_into_new(call, fake, rng, transport, dtype):
    old = random_state(rng, dtype=dtype)
    hold(fake, old)
    new = {name: np.where(rng.random(a.shape) < 0.1, a * dtype(1.5), a) for name, a in old.items()}
    result = call(lambda client: client.push_delta(old, new, base_version=0, version=3, transport=transport))
    assert held(fake) == in_bytes(new) and result.weight_version == 3
    assert fake.weights.commits[0].header.expected_version == 0
    with pytest.raises(Aborted, match="version 3"):
        call(lambda client: client.push_delta(new, old, base_version=2, transport=transport))
    assert held(fake) == in_bytes(new)


def test_directories_are_only_named(call, fake):
    headers = []
    fake.weights.on_message = lambda number, request: headers.append(request)
    call(lambda client: client.push_directory("step-3", name="probe"))
    call(lambda client: client.push_directory(Path("full"), "full", version=4, force_version=True))
    assert [request.WhichOneof("kind") for request in headers] == ["header", "commit"] * 2
    lora, full = headers[0].header, headers[2].header
    assert (lora.kind, lora.source.directory.path, lora.adapter) == (1, "step-3", "probe")
    assert (full.kind, full.source.directory.path, full.new_version) == (2, "full", 4)
    assert full.force_version


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda client: client.push_full({"a": np.zeros(1, np.float64)}), "a: float64"),
        (lambda client: client.push_full({"a": np.zeros(1, np.float32)}, running="slowly"), "running: "),
        (lambda client: client.push_full({"a": np.zeros(1, np.float32)}, transport="pigeon"), "transport: "),
        (lambda client: client.push_full({"a": np.zeros(1, np.float32)}, version=-1), "version: "),
        (lambda client: client.push_lora({}, name=""), "name: "),
        (lambda client: client.push_directory("a", "patch"), "kind: "),
        (lambda client: client.push_directory("a", "delta"), "version: "),
        (lambda client: client.sleep(3), "level: "),
        (lambda client: client.sleep(True), "level: "),
        (lambda client: client.sleep(mode="soon"), "mode: "),
        (lambda client: client.pause("soon"), "mode: "),
        (lambda client: client.wake("weights"), "tags: "),
        (lambda client: client.wake(["cache"]), r"tags\[0\]: "),
        (lambda client: client.wake([]), "tags: "),
        (lambda client: client.checksum("a"), "names: "),
        (lambda client: client.checksum([3]), "names: "),
    ],
)
def test_what_cannot_be_said_is_refused_by_name(call, fake, use, says):
    with pytest.raises(InvalidArgument, match=f"^{says}"):
        call(use)
    assert fake.weights.commits == []


# What can go wrong on the way


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (grpc.StatusCode.DATA_LOSS, DataLoss),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ResourceExhausted),
        (grpc.StatusCode.ABORTED, Aborted),
    ],
)
@pytest.mark.parametrize("at", [0, 1])
def test_a_refusal_at_any_message_is_raised_at_once(pusher, fake, transport, code, expected, at):  # noqa: PLR0917
    rng = np.random.default_rng(0)
    state = {f"t{i}": rng.standard_normal((512, 1024), dtype=np.float32) for i in range(12)}
    hold(fake, state)

    def refuse(number, request):
        if number == at:
            raise Refused(code, "the reason")

    fake.weights.on_message = refuse
    with pytest.raises(expected, match="the reason"):
        pusher.push_full(state, transport=transport)
    assert fake.weights.messages == at + 1 and fake.weights.commits == []


def test_bytes_that_change_on_the_way_are_data_loss(pusher, fake, monkeypatch, rng):
    state = random_state(rng)
    hold(fake, state)
    real = _senders.chunk_request
    monkeypatch.setattr(
        _senders, "chunk_request", lambda t, o, data: real(t, o, bytes([data[0] ^ 1]) + bytes(data[1:]))
    )
    with pytest.raises(DataLoss):
        pusher.push_full(state, transport="inline")
    assert held(fake) == in_bytes(state)


def test_the_deadline_ends_a_push_that_is_not_taken(call, fake, rng):
    state = {f"t{i}": rng.standard_normal((512, 1024), dtype=np.float32) for i in range(12)}
    hold(fake, state)
    fake.weights.on_message = lambda number, request: time.sleep(0.5)
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        call(lambda client: client.push_full(state, transport="inline", timeout=0.3))
    assert time.monotonic() - start < 5
    assert fake.weights.commits == []


def test_a_server_that_is_not_there_is_unavailable(rng):
    with RolloutClient("127.0.0.1:1", timeout=5) as client, pytest.raises(Unavailable):
        client.push_lora(None)


def test_pushes_that_break_leave_no_thread_behind(pusher, fake, rng):
    """One reads what the server says until the push ends."""
    tensor = rng.standard_normal(10, dtype=np.float32)

    def gathered():
        yield "a", tensor
        raise KeyError("mine")

    hold(fake, {"a": tensor})
    pusher.push_full({"a": tensor}, transport="inline")
    before = threading.active_count()
    for _ in range(20):
        with pytest.raises(KeyError, match="mine"):
            pusher.push_full(gathered(), total_bytes=80, transport="inline")
    deadline = time.monotonic() + 10
    # The fake server's own threads, at most eight, come and go.
    while threading.active_count() > before + 8 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 8, threading.enumerate()


def test_cancelling_an_async_push_drops_it(fake, rng):
    state = {f"t{i}": rng.standard_normal((512, 1024), dtype=np.float32) for i in range(12)}
    hold(fake, state)
    started = threading.Event()

    def slowly(number, request):
        started.set()
        time.sleep(0.05)

    fake.weights.on_message = slowly

    async def main():
        async with AsyncRolloutClient(fake.address) as client:
            task = asyncio.create_task(client.push_full(state, transport="inline"))
            await asyncio.to_thread(started.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    deadline = time.monotonic() + 10
    while not fake.weights.broken and time.monotonic() < deadline:
        time.sleep(0.01)
    assert fake.weights.broken == 1 and fake.weights.commits == []


# Progress


def test_progress_is_told_in_bytes(pusher, fake, rng):
    state = {f"t{i}": rng.standard_normal((1024, 1500), dtype=np.float32) for i in range(3)}
    hold(fake, state)
    total = sum(array.nbytes for array in state.values())
    told = []
    for transport in TRANSPORTS:
        told.clear()
        pusher.push_full(state, transport=transport, progress=lambda done, total: told.append((done, total)))
        assert told == sorted(told) and told[-1] == (total, total) and len(told) >= 3
    fake.weights.hide_shared_memory = True
    for tensors in (state, iter(state.items())):
        told.clear()
        pusher.push_full(tensors, total_bytes=total, progress=lambda done, total: told.append((done, total)))
        assert told == sorted(told) and told[-1] == (total, total)


def test_progress_is_quiet_unless_long_or_asked(pusher, fake, rng, capsys, monkeypatch):
    state = random_state(rng)
    hold(fake, state)
    pusher.push_full(state)
    pusher.push_full(state, progress=False)
    assert capsys.readouterr() == ("", "")
    pusher.push_full(state, progress=True)
    assert "weights: " in capsys.readouterr().err
    monkeypatch.setattr(rollout_client._progress, "_LONG_SECONDS", 0.0)
    pusher.push_full(state, progress=False)
    assert capsys.readouterr() == ("", "")
    pusher.push_full(state)
    assert "GB/s" in capsys.readouterr().err
