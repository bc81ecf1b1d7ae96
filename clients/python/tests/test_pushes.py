"""Pushes against a fake server that checks every message: what arrives, and what happens when something goes wrong."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import pytest

import rollout_client
from fake_weights import MAX_CHUNK, Refused
from rollout_client import (
    Aborted,
    AsyncRolloutClient,
    DataLoss,
    DeadlineExceeded,
    InvalidArgument,
    Lifecycle,
    NotFound,
    ResourceExhausted,
    RolloutClient,
    Unavailable,
    _proto,
    _push,
    _segment,
    checksum_of,
    clean_stale_segments,
)

SHM = Path("/dev/shm")
DTYPE_NUMBERS = {np.dtype(np.float32): 1, np.dtype(ml_dtypes.bfloat16): 2, np.dtype(np.float16): 3}
TRANSPORTS = ["inline", "shared_memory", "auto"]


@pytest.fixture
def client(fake):
    with RolloutClient(fake.address, timeout=60) as client:
        yield client
    assert own_segments() == []


def own_segments():
    return [path.name for path in SHM.glob(f"rollout-{os.getpid()}-*")]


def random_state(rng, count=6, dtype=ml_dtypes.bfloat16, largest=300):
    return {
        f"model.t{i}.weight": rng.standard_normal(rng.integers(1, largest, rng.integers(1, 3))).astype(dtype)
        for i in range(count)
    }


def hold(fake, state):
    """Makes `state` the fake server's parameters."""
    fake.weights.parameters = {
        name: (DTYPE_NUMBERS[array.dtype], array.shape, array.tobytes()) for name, array in state.items()
    }


def held(fake):
    return {name: data for name, (_, _, data) in fake.weights.parameters.items()}


def in_bytes(state):
    return {name: array.tobytes() for name, array in state.items()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_full_pushes_arrive_bit_for_bit(call, fake, rng, transport):
    state = random_state(rng)
    state["large"] = rng.standard_normal((3, MAX_CHUNK // 2 + 17)).astype(np.float32)
    state["empty"] = np.empty((0, 4), np.float16)
    hold(fake, state)
    new = {name: rng.standard_normal(array.shape).astype(array.dtype) for name, array in state.items()}
    result = call(lambda client: client.push_full(new, version=7, running="recompute", transport=transport))
    assert held(fake) == in_bytes(new)
    (commit,) = fake.weights.commits
    assert (commit.header.new_version, commit.header.running, commit.header.in_place) == (7, 2, False)
    assert not commit.header.HasField("expected_version")
    assert (result.weight_version, result.parameters, result.adapter_generation) == (7, len(new), None)
    assert result.bytes == sum(array.nbytes for array in new.values())
    assert (result.pause_ms, result.staging_ms, result.pending, len(result.digest)) == (1.5, 2.5, False, 32)
    assert fake.weights.largest_message <= MAX_CHUNK
    assert own_segments() == []


def test_inline_declares_the_total_first_and_each_tensor_just_before_its_chunks(client, fake, rng):
    state = random_state(rng)
    hold(fake, state)
    kinds = []
    fake.weights.on_message = lambda number, request: kinds.append(request)
    client.push_full(state, transport="inline")
    assert kinds[0].header.total_bytes == sum(array.nbytes for array in state.values())
    assert not kinds[0].header.tensors
    names = [request.WhichOneof("kind") for request in kinds[1:]]
    assert names == ["manifest", "chunk"] * len(state) + ["commit"]
    assert [request.chunk.tensor for request in kinds[2:-1:2]] == list(range(len(state)))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_iterator_is_never_more_than_one_tensor_ahead(client, fake, rng, transport):
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

    client.push_full(gathered(), transport=transport)
    assert held(fake) == {f"t{i}": data for i, data in enumerate(sums)}
    assert most == [0] * len(shapes)


def test_an_iterators_total_comes_from_the_model_and_its_first_tensor(client, fake, rng):
    state = random_state(rng, dtype=ml_dtypes.bfloat16)
    hold(fake, state)
    wide = {name: array.astype(np.float32) for name, array in state.items()}
    fake.weights.on_message = lambda number, request: totals.append(request.header.total_bytes) if number == 0 else None
    totals = []
    client.push_full(iter(wide.items()), transport="inline")
    hold(fake, state)
    client.push_full(iter(wide.items()), transport="inline", total_bytes=10**9)
    assert totals == [sum(array.nbytes for array in wide.values()), 10**9]


def test_tensors_are_read_in_the_callers_thread(client, fake, rng):
    """Modes of torch such as no_grad, and its collectives, belong to a thread."""
    state = random_state(rng)
    hold(fake, state)
    threads = set()

    def gathered():
        for pair in state.items():
            threads.add(threading.get_ident())
            yield pair

    for transport in TRANSPORTS:
        client.push_full(gathered(), transport=transport)
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_error_while_gathering_is_raised_and_drops_the_push(client, fake, rng, transport):
    state = random_state(rng)
    hold(fake, state)
    before = held(fake)

    def gathered():
        yield from list(state.items())[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.push_full(gathered(), transport=transport)
    assert held(fake) == before and fake.weights.commits == []
    client.push_full(state, transport=transport)
    assert len(fake.weights.commits) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_lora_pushes_bring_tensors_and_config_at_once(call, fake, rng, transport):
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = {
        f"{name}.lora_A.weight": rng.standard_normal((4, 32), dtype=np.float32),
        f"{name}.lora_B.weight": rng.standard_normal((16, 4), dtype=np.float32),
    }
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    call(lambda client: client.push_lora(adapter, config, expected_version=0, running="abort", transport=transport))
    result = call(lambda client: client.push_lora(adapter, config, name="probe", expected_generation=0))
    assert result.adapter_generation == 2 and result.weight_version == 1
    first, second = fake.weights.commits
    assert {n: data for n, (_, data) in first.tensors.items()} == in_bytes(adapter)
    assert [tuple(entry.shape) for entry in first.header.tensors] == [(4, 32), (16, 4)]
    assert (first.header.kind, first.header.running, first.header.expected_version) == (1, 4, 0)
    assert first.header.adapter_config == second.header.adapter_config
    assert json.loads(first.header.adapter_config) == config
    assert (second.header.adapter, second.header.expected_generation) == ("probe", 0)
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
    call(lambda client: client.push_directory(Path("full"), "full", version=4))
    assert [request.WhichOneof("kind") for request in headers] == ["header", "commit"] * 2
    lora, full = headers[0].header, headers[2].header
    assert (lora.kind, lora.source.directory.path, lora.adapter) == (1, "step-3", "probe")
    assert (full.kind, full.source.directory.path, full.new_version) == (2, "full", 4)


@pytest.mark.parametrize(
    ("use", "says"),
    [
        (lambda client: client.push_full({"a": np.zeros(1, np.float64)}), "a: float64"),
        (lambda client: client.push_full({"a": np.zeros(1, np.float32)}, running="slowly"), "running: "),
        (lambda client: client.push_full({"a": np.zeros(1, np.float32)}, transport="pigeon"), "transport: "),
        (lambda client: client.push_full({"a": np.zeros(1, np.float32)}, version=-1), "version: "),
        (lambda client: client.push_lora({}, name=""), "name: "),
        (lambda client: client.push_directory("a", "delta"), "kind: "),
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
def test_a_refusal_at_any_message_is_raised_at_once(client, fake, transport, code, expected, at):  # noqa: PLR0917
    rng = np.random.default_rng(0)
    state = {f"t{i}": rng.standard_normal((512, 1024), dtype=np.float32) for i in range(12)}
    hold(fake, state)

    def refuse(number, request):
        if number == at:
            raise Refused(code, "the reason")

    fake.weights.on_message = refuse
    with pytest.raises(expected, match="the reason"):
        client.push_full(state, transport=transport)
    assert fake.weights.messages == at + 1 and fake.weights.commits == []


def test_bytes_that_change_on_the_way_are_data_loss(client, fake, monkeypatch, rng):
    state = random_state(rng)
    hold(fake, state)
    real = _push.chunk_request
    monkeypatch.setattr(_push, "chunk_request", lambda t, o, data: real(t, o, bytes([data[0] ^ 1]) + bytes(data[1:])))
    with pytest.raises(DataLoss):
        client.push_full(state, transport="inline")
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


def test_pushes_leave_no_thread_behind(client, fake, rng):
    state = random_state(rng)
    hold(fake, state)
    client.push_full(state, transport="inline")

    def refuse(number, request):
        raise Refused(grpc.StatusCode.ABORTED, "no")

    fake.weights.on_message = refuse
    before = threading.active_count()
    for _ in range(20):
        with pytest.raises(Aborted):
            client.push_full(state, transport="inline")
    deadline = time.monotonic() + 10
    while threading.active_count() > before + 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before + 2, threading.enumerate()


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


# Shared memory


def test_the_segment_is_kept_for_the_next_push_and_grows(client, fake, rng):
    small = {"a": rng.standard_normal(1000, dtype=np.float32)}
    large = {"a": rng.standard_normal(1 << 20, dtype=np.float32)}
    for state in (small, large):
        hold(fake, state)
    names = []
    for state in (small, small, large, small):
        hold(fake, state)
        client.push_full(state, transport="shared_memory")
        assert held(fake) == in_bytes(state)
        names.append(own_segments())
    assert all(len(n) == 1 for n in names)
    assert names[0] == names[1] != names[2] == names[3]


def test_auto_uses_shared_memory_for_large_pushes_to_this_host(client, fake, rng):
    for elements, shared in [(_push.SHARED_MEMORY_FROM // 4 - 1, False), (_push.SHARED_MEMORY_FROM // 4, True)]:
        state = {"a": rng.standard_normal(elements, dtype=np.float32)}
        hold(fake, state)
        client.push_full(state)
        assert fake.weights.commits[-1].header.source.HasField("shared_memory") is shared


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/tmp/socket", True),
        ("10.0.0.1:1", False),
        ("localhost.example:1", False),
        ("server:50051", False),
    ],
)
def test_only_a_local_server_is_offered_shared_memory(address, local):
    assert _push.choose_shared_memory("auto", address, 1 << 30) is local
    assert _push.choose_shared_memory("shared_memory", address, 1)
    assert not _push.choose_shared_memory("inline", address, 1 << 30)


@pytest.mark.parametrize("as_iterator", [False, True])
def test_a_server_with_another_shm_gets_it_inline(client, fake, rng, as_iterator):
    state = {f"t{i}": rng.standard_normal((1000, 1500), dtype=np.float32) for i in range(4)}
    hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
    fake.weights.hide_shared_memory = True
    client.push_full(iter(state.items()) if as_iterator else state)
    assert held(fake) == in_bytes(state)
    with pytest.raises(NotFound):
        client.push_full(state, transport="shared_memory")


def test_no_room_for_a_segment_is_inline_or_an_error(client, fake, rng, monkeypatch):
    state = {f"t{i}": rng.standard_normal((1000, 1500), dtype=np.float32) for i in range(4)}
    hold(fake, {name: np.zeros_like(array) for name, array in state.items()})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_segment.os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match="No space left"):
        client.push_full(state, transport="shared_memory")
    client.push_full(state)
    assert held(fake) == in_bytes(state) and own_segments() == []


def test_an_iterator_that_goes_past_its_total_is_refused_by_name(client, fake, rng):
    state = {f"t{i}": rng.standard_normal((1000, 1000), dtype=np.float32) for i in range(4)}
    hold(fake, state)
    for transport in ("inline", "shared_memory"):
        with pytest.raises(InvalidArgument, match="total_bytes"):
            client.push_full(iter(state.items()), total_bytes=5_000_000, transport=transport)
    assert fake.weights.commits == []


SEGMENT_CHILD = """
import sys, time
from rollout_client._segment import Segment
segment = Segment(1 << 20)
print(segment.name, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
"""
FORKING_CHILD = """
import os, sys
from rollout_client._segment import DIRECTORY, Segment
segment = Segment(1 << 20)
if os.fork() == 0:
    sys.exit()
os.wait()
print(segment.name, (DIRECTORY / segment.name).exists())
"""


def test_a_killed_clients_segment_goes_when_the_next_one_comes():
    child = subprocess.Popen([sys.executable, "-c", SEGMENT_CHILD, "wait"], stdout=subprocess.PIPE, text=True)
    try:
        name = child.stdout.readline().strip()
        assert name.startswith(f"rollout-{child.pid}-")
        assert name not in clean_stale_segments() and (SHM / name).exists()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert (SHM / name).exists()
    segment = _segment.Segment(1)
    try:
        assert not (SHM / name).exists()
        assert (SHM / segment.name).exists()
    finally:
        segment.close()
    assert not (SHM / segment.name).exists()


def test_segments_of_others_and_other_files_are_left_alone(monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, other = SHM / f"rollout-{dead.pid}-{'0' * 16}", SHM / f"rollout-{dead.pid}-file"
    stale.touch()
    other.touch()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(_segment.os, "getuid", lambda: os.geteuid() + 1)
            assert stale.name not in clean_stale_segments()
        with stale.open() as file:
            _segment.fcntl.flock(file, _segment.fcntl.LOCK_EX)
            assert stale.name not in clean_stale_segments()  # alive, in another namespace of processes
        assert stale.name in clean_stale_segments()
        assert other.exists()
    finally:
        stale.unlink(missing_ok=True)
        other.unlink()


def test_a_segment_goes_with_the_interpreter_but_not_with_its_forks():
    ended = subprocess.run(
        [sys.executable, "-c", SEGMENT_CHILD, "end"], capture_output=True, text=True, check=True, timeout=60
    )
    assert not (SHM / ended.stdout.strip()).exists()
    command = [sys.executable, "-W", "ignore", "-c", FORKING_CHILD]
    name, existed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert existed == "True" and not (SHM / name).exists()


# Progress


def test_progress_is_told_in_bytes(client, fake, rng):
    state = {f"t{i}": rng.standard_normal((1024, 1500), dtype=np.float32) for i in range(3)}
    hold(fake, state)
    total = sum(array.nbytes for array in state.values())
    told = []
    for transport in TRANSPORTS:
        told.clear()
        client.push_full(state, transport=transport, progress=lambda done, total: told.append((done, total)))
        assert told == sorted(told) and told[-1] == (total, total) and len(told) >= 3


def test_progress_is_quiet_unless_long_or_asked(client, fake, rng, capsys, monkeypatch):
    state = random_state(rng)
    hold(fake, state)
    client.push_full(state)
    client.push_full(state, progress=False)
    assert capsys.readouterr() == ("", "")
    client.push_full(state, progress=True)
    assert "weights: " in capsys.readouterr().err
    monkeypatch.setattr(rollout_client._progress, "_LONG_SECONDS", 0.0)
    client.push_full(state, progress=False)
    assert capsys.readouterr() == ("", "")
    client.push_full(state)
    assert "GB/s" in capsys.readouterr().err


# Lifecycle, parameters, checksums, adapters


@pytest.fixture
def sleeper(fake):
    """Notes the lifecycle's calls."""
    fake.answers["Sleep"] = lambda request, context: _proto.SLEEP.response(
        released=[{"tag": 1, "bytes": 100}, {"tag": 2, "bytes": 200}], resident_bytes=50, seconds=0.5
    )
    fake.answers["Wake"] = lambda request, context: _proto.WAKE.response(lifecycle=1, seconds=0.25)
    fake.answers["Pause"] = lambda request, context: _proto.PAUSE.response()
    fake.answers["Resume"] = lambda request, context: _proto.RESUME.response()
    return fake


def test_sleep_and_wake_say_what_they_did(call, sleeper):
    assert call(lambda client: client.sleep(2, "abort")) == rollout_client.SleepResult(
        {"weights": 100, "kv_cache": 200}, 50, 0.5
    )
    assert call(lambda client: client.wake(["weights"], reload=True)) == rollout_client.WakeResult(
        Lifecycle.RUNNING, 0.25
    )
    call(lambda client: client.wake())
    call(lambda client: client.pause("keep"))
    call(lambda client: client.resume())
    assert sleeper.requests == [
        _proto.SLEEP.request(level=2, mode=2),
        _proto.WAKE.request(tags=[1], reload=True),
        _proto.WAKE.request(),
        _proto.PAUSE.request(mode=3),
        _proto.RESUME.request(),
    ]


def kinds(fake):
    return [(type(request).__name__, *(value for _, value in request.ListFields())) for request in fake.requests]


def test_awake_sleeps_at_the_end_also_after_an_exception(sleeper):
    with RolloutClient(sleeper.address) as client:
        with client.awake(["weights"], level=2) as same:
            assert same is client
            assert kinds(sleeper) == [("WakeRequest", [1])]
        assert kinds(sleeper)[1:] == [("SleepRequest", 2, 1)]
        with pytest.raises(KeyError, match="mine"), client.awake():
            raise KeyError("mine")
        assert kinds(sleeper)[2:] == [("WakeRequest",), ("SleepRequest", 1, 2)]
        sleeper.answers["Sleep"] = lambda request, context: context.abort(grpc.StatusCode.INTERNAL, "cannot sleep")
        with pytest.raises(KeyError, match="mine"), client.awake():
            raise KeyError("mine")
        with pytest.raises(rollout_client.Internal, match="cannot sleep"), client.awake():
            pass


def test_awake_of_the_async_client_sleeps_also_when_its_task_is_cancelled(sleeper):
    async def main():
        async with AsyncRolloutClient(sleeper.address) as client:

            async def work():
                async with client.awake():
                    await asyncio.sleep(60)

            async with client.awake(level=2) as same:
                assert same is client
            task = asyncio.create_task(work())
            while len(sleeper.requests) < 3:
                await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert kinds(sleeper) == [("WakeRequest",), ("SleepRequest", 2, 1), ("WakeRequest",), ("SleepRequest", 1, 2)]


def test_a_wake_that_fails_does_not_sleep(sleeper):
    sleeper.answers["Wake"] = lambda request, context: context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no")
    with RolloutClient(sleeper.address) as client, pytest.raises(rollout_client.FailedPrecondition), client.awake():
        raise AssertionError("not reached")
    assert [name for name, *_ in kinds(sleeper)] == ["WakeRequest"]


def test_status_shows_the_lifecycle(call, fake):
    asleep = {"level": 1, "resident": [1], "pending_update": True}
    fake.answers["GetStatus"] = lambda request, context: _proto.GET_STATUS.response(
        lifecycle=4, asleep=asleep, held_requests=2, updating=True, updates=9
    )
    status = call(lambda client: client.status())
    assert status.lifecycle is Lifecycle.ASLEEP and str(status.lifecycle) == "asleep"
    assert status.asleep == rollout_client.Asleep(1, ["weights"], True)
    assert (status.held_requests, status.updating, status.updates) == (2, True, 9)
    fake.answers["GetStatus"] = lambda request, context: _proto.GET_STATUS.response(lifecycle=5)
    status = call(lambda client: client.status())
    assert status.lifecycle is Lifecycle.WEIGHTS_MISSING and status.asleep is None


def test_parameters_and_checksums_are_named(call, fake, rng):
    state = random_state(rng)
    hold(fake, state)
    infos = call(lambda client: client.parameters())
    assert infos == [rollout_client.ParameterInfo(n, a.shape, "bfloat16") for n, a in state.items()]
    assert call(lambda client: client.checksum()) == {n: checksum_of(a, "bfloat16") for n, a in state.items()}
    name = infos[2].name
    assert call(lambda client: client.checksum([name])) == {name: checksum_of(state[name], "bfloat16")}


def test_adapters_are_listed_and_removed(call, fake):
    fields = {"name": "a", "generation": 3, "rank": 8, "bytes": 512, "leases": 1, "retired": True}
    fake.answers["ListAdapters"] = lambda request, context: _proto.LIST_ADAPTERS.response(adapters=[fields])
    fake.answers["RemoveAdapter"] = lambda request, context: _proto.REMOVE_ADAPTER.response(generation=3)
    assert call(lambda client: client.adapters()) == [rollout_client.AdapterInfo(**fields)]
    assert call(lambda client: client.remove_adapter("a", 3)) == 3
    assert fake.requests[-1] == _proto.REMOVE_ADAPTER.request(name="a", expected_generation=3)


def test_both_clients_have_the_same_methods():
    def methods(cls):
        return {name: f for name, f in inspect.getmembers(cls, callable) if not name.startswith("_")}

    blocking, waiting = methods(RolloutClient), methods(AsyncRolloutClient)
    assert blocking.keys() == waiting.keys()
    for name, method in blocking.items():
        parameters = list(inspect.signature(method).parameters.values())
        assert parameters == list(inspect.signature(waiting[name]).parameters.values()), name
