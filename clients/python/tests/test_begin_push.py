"""Pushes whose tensors are handed over one by one, against a fake server that checks every message."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref

import grpc
import ml_dtypes
import numpy as np
import pytest

from fake_weights import Refused, held, hold, in_bytes, random_state
from rollout_client import (
    Aborted,
    AsyncRolloutClient,
    Cancelled,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RolloutClient,
    Unavailable,
    _senders,
)
from waited import WaitedClient

TRANSPORTS = ["inline", "shared_memory", "auto"]
CLIENTS = {"sync": RolloutClient, "async": WaitedClient}
MODULE = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIG = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


@pytest.fixture(params=CLIENTS)
def either(request, fake, new_segments):
    """A client of the fake server, of either kind, which leaves no shared memory behind."""
    with CLIENTS[request.param](fake.address, timeout=60) as client:
        yield client
    assert new_segments() == []


@pytest.fixture
def large(rng, fake):
    """A state of 18 MiB, which `auto` sends through shared memory; the fake server's is all zeros."""
    state = {f"t{i}": rng.standard_normal((512, 1024), dtype=np.float32) for i in range(9)} | random_state(rng)
    state["empty"] = np.empty((0, 4), np.float16)
    hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
    return state


def adapter(rng):
    return {
        f"{MODULE}.lora_A.weight": rng.standard_normal((4, 32), dtype=np.float32),
        f"{MODULE}.lora_B.weight": rng.standard_normal((16, 4), dtype=np.float32),
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_is_written_arrives_bit_for_bit(either, fake, large, transport):
    with either.begin_push(version=7, running="recompute", expected_version=0, transport=transport) as push:
        for name, tensor in large.items():
            assert push.write(name, tensor) is None
        assert fake.weights.commits == []
    assert held(fake) == in_bytes(large)
    (commit,) = fake.weights.commits
    assert (commit.header.new_version, commit.header.running, commit.header.expected_version) == (7, 2, 0)
    assert commit.header.source.HasField("shared_memory") is (transport != "inline")
    receipt = push.receipt
    assert (receipt.weight_version, receipt.parameters) == (7, len(large))
    assert receipt.bytes == sum(array.nbytes for array in large.values())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_tensor_may_change_as_soon_as_it_is_written(either, fake, large, transport):
    """One memory for all tensors, as trainers that gather into a bucket have it."""
    bucket = bytearray(max(array.nbytes for array in large.values()))
    with either.begin_push(transport=transport) as push:
        for name, tensor in large.items():
            bucket[: tensor.nbytes] = tensor.tobytes()
            push.write(name, (memoryview(bucket)[: tensor.nbytes], tensor.dtype.name, tensor.shape))
            bucket[:] = b"\xff" * len(bucket)
    assert held(fake) == in_bytes(large)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_adapter_is_kept_and_sent_at_the_commit(either, fake, rng, transport):
    tensors, messages = adapter(rng), []
    fake.weights.on_message = lambda number, request: messages.append(request.WhichOneof("kind"))
    memory = np.empty(1000, np.float32)
    with either.begin_push("lora", CONFIG, name="probe", expected_generation=0, transport=transport) as push:
        for name, tensor in tensors.items():
            view = memory[: tensor.size].reshape(tensor.shape)
            view[...] = tensor
            push.write(name, view)
            view[...] = 0
        assert messages == []
    (commit,) = fake.weights.commits
    assert {name: data for name, (_, data) in commit.tensors.items()} == in_bytes(tensors)
    assert [entry.name for entry in commit.header.tensors] == list(tensors)
    assert json.loads(commit.header.adapter_config) == CONFIG
    assert (commit.header.kind, commit.header.adapter, commit.header.expected_generation) == (1, "probe", 0)


def test_an_adapter_of_nothing_is_the_base(either, fake):
    assert either.begin_push("lora").commit().weight_version == 1
    (commit,) = fake.weights.commits
    assert commit.header.adapter_config == "" and commit.tensors == {} and commit.header.kind == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_delta_turns_old_into_new(either, fake, rng, transport):
    old = random_state(rng)
    hold(fake, old)
    new = {name: np.where(rng.random(a.shape) < 0.3, a * ml_dtypes.bfloat16(1.5), a) for name, a in old.items()}
    same = next(iter(new))
    new[same] = old[same]
    with either.begin_push("delta", base_version=0, version=3, transport=transport) as push:
        for name in old:
            push.write(name, new[name], old[name])
    assert held(fake) == in_bytes(new)
    (commit,) = fake.weights.commits
    assert commit.header.expected_version == 0 and same not in commit.tensors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_iterators_are_never_more_than_one_tensor_ahead(either, fake, rng, transport):
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

    with either.begin_push(transport=transport) as push:
        push.write_all(gathered())
    assert held(fake) == {f"t{i}": data for i, data in enumerate(sums)}
    assert most == [0] * len(shapes)


def test_tensors_are_read_and_iterators_run_in_the_callers_thread(either, fake, rng):
    """Modes of torch such as no_grad, and its collectives, belong to a thread."""
    state, threads = random_state(rng), set()
    hold(fake, state)

    class Tensor:
        """An array of a library that this one does not know."""

        def __init__(self, array):
            self.array, self.dtype, self.shape = array, array.dtype, array.shape

        def __array__(self, *_, **__):
            threads.add(threading.get_ident())
            return self.array

    def gathered():
        for name, array in state.items():
            threads.add(threading.get_ident())
            yield name, Tensor(array)

    for transport in TRANSPORTS:
        with either.begin_push(transport=transport) as push:
            push.write_all(gathered())
        assert held(fake) == in_bytes(state)
    assert threads == {threading.get_ident()}


def test_asynchronous_iterators_are_written_too(fake, rng):
    state = random_state(rng)
    hold(fake, state)

    async def gathered():
        for pair in state.items():
            await asyncio.sleep(0)
            yield pair

    async def main():
        async with AsyncRolloutClient(fake.address) as client, client.begin_push() as push:
            await push.write_all(gathered())
        return push.receipt

    assert asyncio.run(main()).parameters == len(state)


# The end


def test_commit_and_rollback_end_a_push_and_are_final(either, fake, large):
    push = either.begin_push()
    push.write_all(large)
    assert push.commit().weight_version == 1
    for use in (push.commit, push.rollback, lambda: push.write("t0", large["t0"])):
        with pytest.raises(FailedPrecondition, match="the push is committed; begin another"):
            use()
    push = either.begin_push()
    push.write("t0", large["t0"])
    push.rollback()
    push.rollback()
    for use in (push.commit, lambda: push.write("t0", large["t0"])):
        with pytest.raises(FailedPrecondition, match="the push was rolled back; begin another"):
            use()
    with either.begin_push() as push:
        push.rollback()
    with either.begin_push() as push:
        push.write_all(large)
        push.commit()
    assert len(fake.weights.commits) == 2


def test_an_asynchronous_push_that_is_dropped_before_it_began_sends_nothing(fake):
    async def main():
        async with AsyncRolloutClient(fake.address) as client:
            push = client.begin_push()
            assert push.is_open
            await push.rollback()
            await push.rollback()
            assert not push.is_open
            for use in (push.commit(), push.write("a", np.zeros(1, np.float32)), push.__aenter__()):
                with pytest.raises(FailedPrecondition, match="was rolled back; begin another"):
                    await use

    asyncio.run(main())
    assert fake.requests == []


def test_there_is_no_receipt_before_the_commit(fake, large):
    with RolloutClient(fake.address) as client, client.begin_push() as push:
        with pytest.raises(FailedPrecondition, match="not committed"):
            _ = push.receipt
        assert push.is_open
        push.write_all(large)
        receipt = push.commit()
        assert push.receipt is receipt and not push.is_open


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_an_exception_in_the_block_rolls_back_and_is_raised(either, fake, large, rng, transport, kind):  # noqa: PLR0917
    before = held(fake)
    tensors, config = (large, None) if kind == "full" else (adapter(rng), CONFIG)
    with pytest.raises(KeyboardInterrupt), either.begin_push(kind, config, transport=transport) as push:
        push.write(*next(iter(tensors.items())))
        raise KeyboardInterrupt
    assert held(fake) == before and fake.weights.commits == []
    with either.begin_push(kind, config, transport=transport) as push:
        push.write_all(tensors)
    assert len(fake.weights.commits) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("code", "expected"), [(grpc.StatusCode.DATA_LOSS, DataLoss), (grpc.StatusCode.ABORTED, Aborted)]
)
def test_what_the_server_refuses_is_raised_by_a_write_and_again_by_the_end(  # noqa: PLR0917
    either, fake, large, transport, code, expected, monkeypatch
):
    def refuse(number, request):
        if number == 1:
            raise Refused(code, "the reason")

    fake.weights.on_message = refuse
    monkeypatch.setattr(_senders, "_LATE_SECONDS", 0.0)  # the first tensor is sent at once
    with pytest.raises(expected, match="the reason"), either.begin_push(transport=transport) as push:
        push.write("first", np.zeros(1, np.float32))
        with pytest.raises(expected, match="the reason"):
            for i in range(20_000):
                push.write(f"more{i}", np.zeros(1, np.float32))
                time.sleep(0.001)
        with pytest.raises(expected, match="the reason"):
            push.write("another", np.zeros(1, np.float32))
    push.rollback()
    assert fake.weights.commits == []


def test_a_tensor_that_cannot_be_pushed_is_refused_by_name_and_the_push_goes_on(either, fake, large, rng):
    with either.begin_push() as push:
        for name, tensor in large.items():
            with pytest.raises(InvalidArgument, match=f"{name}: float64"):
                push.write(name, np.zeros(3))
            with pytest.raises(InvalidArgument, match=f"{name}: only a delta"):
                push.write(name, tensor, tensor)
            push.write(name, tensor)
    assert held(fake) == in_bytes(large)
    with either.begin_push("lora") as push, pytest.raises(InvalidArgument, match=r"^config: "):
        push.write(*next(iter(adapter(rng).items())))
    with either.begin_push("delta", base_version=2) as push:
        with pytest.raises(InvalidArgument, match=r"t0: a delta needs the old tensor"):
            push.write("t0", large["t0"])
        with pytest.raises(InvalidArgument, match=r"t0: has shape \[512, 1024\] in old and \[3\] in new"):
            push.write("t0", np.zeros(3, np.float32), large["t0"])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        (("base",), {}, InvalidArgument, "kind: "),
        (("full", CONFIG), {}, InvalidArgument, "config: is for 'lora'"),
        (("full",), {"name": "probe"}, InvalidArgument, "name: is for 'lora'"),
        (("lora",), {"in_place": True}, InvalidArgument, "in_place: is for 'full'"),
        (("lora",), {"base_version": 3}, InvalidArgument, "base_version: is for 'delta'"),
        (("delta",), {}, InvalidArgument, "base_version: missing"),
        (("delta",), {"base_version": 1, "expected_version": 1}, InvalidArgument, "expected_version: "),
        (("full",), {"buffer": None}, TypeError, "begin_push"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_before_anything_is_sent(either, fake, arguments, options, error, says):  # noqa: PLR0917
    with pytest.raises(error, match=f"^{says}"):
        either.begin_push(*arguments, **options)
    assert fake.requests == []


def test_bytes_past_the_announced_total_end_the_push(either, fake, large):
    for transport in ("inline", "shared_memory"):
        with (
            pytest.raises(InvalidArgument, match="total_bytes"),
            either.begin_push(total_bytes=5_000_000, transport=transport) as push,
        ):
            push.write_all(large)
    assert fake.weights.commits == []


def test_a_server_that_is_not_there_is_unavailable():
    for client_type in CLIENTS.values():
        with client_type("127.0.0.1:1", timeout=5) as client:
            for options in ({}, {"total_bytes": 10}, {"kind": "lora"}):
                with pytest.raises(Unavailable), client.begin_push(**options):
                    pass


# Beside other calls


def test_a_server_with_another_shm_gets_it_inline(either, fake, large):
    fake.weights.hide_shared_memory = True
    with either.begin_push() as push:
        push.write_all(large)
    assert held(fake) == in_bytes(large)
    with pytest.raises(NotFound), either.begin_push(transport="shared_memory") as push:
        push.write_all(large)


def test_other_pushes_of_the_client_do_not_wait_for_one_that_is_open(either, fake, large, new_segments):
    """They have a segment of their own, or none; what a real server says of a second push is for it to say."""
    with either.begin_push(transport="shared_memory") as push:
        push.write_all(large)
        for transport in TRANSPORTS:
            either.push_full(large, transport=transport)
        assert len(new_segments()) == 2
    assert len(fake.weights.commits) == 4 and len(new_segments()) == 1


def test_a_client_that_closes_ends_its_open_pushes(fake, large, new_segments):
    for transport in ("inline", "shared_memory"):
        with RolloutClient(fake.address) as client:
            push = client.begin_push(transport=transport)
            push.write("t0", large["t0"])
        with pytest.raises(Cancelled):
            push.commit()
        assert new_segments() == []
    assert fake.weights.commits == []


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_an_asyncio_client_that_closes_ends_its_open_pushes(fake, large, transport, new_segments):
    taken = threading.Event()

    def stall(requests, context):
        context.add_callback(fake.cancelled.set)
        taken.set()
        fake.cancelled.wait(20)

    fake.answers["Update"] = stall

    async def main():
        client = AsyncRolloutClient(fake.address)
        task = asyncio.create_task(client.push_full(large, transport=transport))
        await asyncio.to_thread(taken.wait, 10)
        await client.close()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(task, 10)

    asyncio.run(main())
    assert fake.cancelled.wait(10) and fake.weights.commits == [] and new_segments() == []


def test_small_tensors_do_not_wait_for_long_to_be_sent_together(either, fake, rng, monkeypatch):
    """The server would take a push that sends nothing for idle."""
    monkeypatch.setattr(_senders, "_LATE_SECONDS", 0.0)
    state = random_state(rng, count=4)
    hold(fake, state)
    for transport in ("inline", "shared_memory"):
        kinds = []
        fake.weights.on_message = lambda number, request, kinds=kinds: kinds.append(request.WhichOneof("kind"))
        with either.begin_push(transport=transport) as push:
            push.write_all(state)
        assert kinds.count("manifest") == 4


def test_progress_is_told_in_bytes(either, fake, large, rng):
    told, total = [], sum(array.nbytes for array in large.values())
    for transport in TRANSPORTS:
        told.clear()
        with either.begin_push(
            total_bytes=total, transport=transport, progress=lambda done, total: told.append((done, total))
        ) as push:
            push.write_all(large)
        assert told == sorted(told) and told[-1] == (total, total) and len(told) >= 3
    told.clear()
    with either.begin_push("lora", CONFIG, progress=lambda done, total: told.append((done, total))) as push:
        push.write_all(adapter(rng))
    assert told[-1] == (768, 768)


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_cancelling_a_task_that_waits_for_a_write_drops_the_push(fake, large, transport, new_segments):
    taken = threading.Event()

    def stall(requests, context):
        context.add_callback(fake.cancelled.set)
        taken.set()
        fake.cancelled.wait(20)

    fake.answers["Update"] = stall

    async def main():
        async with AsyncRolloutClient(fake.address) as client:

            async def push_all():
                async with client.begin_push(transport=transport) as push:
                    await push.write_all(large)
                    await push.commit()

            task = asyncio.create_task(push_all())
            await asyncio.to_thread(taken.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert fake.cancelled.wait(5) and fake.weights.commits == [] and new_segments() == []
