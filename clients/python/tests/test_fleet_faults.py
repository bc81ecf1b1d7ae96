"""A fleet when something goes wrong: ended calls, orders that cross requests, pushes whose end no caller sees."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import threading

import numpy as np
import pytest

from fleets import (
    BASE,
    BEHIND,
    CURRENT,
    LONG,
    LOST,
    PROMPTS,
    all_bits,
    ask,
    states,
    versions,
    wait_until,
    wait_until_true,
)
from models import perturbed, random_adapter
from rollout_client import (
    Aborted,
    Cancelled,
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    Lifecycle,
    RolloutError,
    Unauthenticated,
    Unavailable,
)
from rollout_client._http2 import ClientStream
from rollout_client.fleet import AsyncFleet, Fleet, _replica
from rollout_client.fleet._core import Core
from rollout_client.fleet._fanout import COMMIT
from rollout_client.fleet._replica import FixedEndpoint, ResolvedEndpoint
from rollout_client.fleet._replica_set import ReplicaSet
from rollout_client.fleet._requests import Requests
from serving import wait_for

TIMEOUT = 60.0


def in_thread(use):
    """Calls a function in a thread; `join` gives what it returned, or the error that it raised."""
    results = []

    def run():
        try:
            results.append(use())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def join():
        thread.join(TIMEOUT)
        return results[0]

    return join


def samples_of(groups):
    return [sample for group in groups for sample in group.samples]


def reasons(groups):
    return {sample.finish_reason for sample in samples_of(groups)}


def addresses(servers):
    return [proxy.address for proxy in servers[1]]


def in_loop(fleet, coroutine):
    return fleet._core.loop.run(coroutine)


@pytest.mark.parametrize(
    "call",
    [
        lambda client, version: client.generate([]),
        lambda client, version: client.score([]),
        lambda client, version: client.score(iter([])),
        lambda client, version: ask(client, timeout=-1),
        lambda client, version: client.score(PROMPTS, timeout=0),
        lambda client, version: ask(client, if_weight_version=version - 1),
        lambda client, version: client.score(PROMPTS, if_weight_version=version - 1),
    ],
)
def test_what_is_wrong_raises_what_one_server_raises(fleet, servers, call):
    (first, _), _ = servers
    version = first.client.status().weight_version
    with pytest.raises(RolloutError) as expected:
        call(first.client, version)
    with pytest.raises(RolloutError) as found:
        call(fleet, version)
    assert type(found.value) is type(expected.value)
    assert re.split("[:;]", str(found.value))[0] == re.split("[:;]", str(expected.value))[0]


def test_a_call_that_could_not_begin_holds_up_no_sleep(fleet):
    with pytest.raises(TypeError):
        fleet.score(5)
    assert set(in_thread(fleet.sleep)()) == {0, 1}
    fleet.wake()


def test_the_fleets_timeout_is_for_calls_without_their_own(servers):
    (first, second), _ = servers
    with Fleet(addresses(servers), timeout=2.0, capacity=2) as fleet, contextlib.ExitStack() as stack:
        for server in (first, second):
            server.client.pause("keep")
            stack.callback(server.client.resume)
        unlimited = in_thread(lambda: ask(fleet, timeout=math.inf))
        wait_until_true(lambda: sum(replica.samples for replica in fleet.status().replicas) > 0)
        assert reasons(ask(fleet, timeout=None)) == {FinishReason.ABORTED}
        stack.close()
        assert reasons(unlimited()) == {FinishReason.LENGTH}


def late(replica, until):
    """Holds the requests to a replica back until `until` (a function) says so."""
    send = replica.client.generate

    async def generate(*arguments, **options):
        while not until():
            await asyncio.sleep(0.01)
        return await send(*arguments, **options)

    replica.client.generate = generate


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_group_that_meets_a_sleeping_server_ends_or_waits_as_the_others_do(fleet, servers, mode):
    (_, second), _ = servers
    late(fleet._core.replica_set.replicas[1], lambda: second.client.status().lifecycle is Lifecycle.ASLEEP or woken)
    woken = False
    outputs = in_thread(lambda: ask(fleet))
    wait_until_true(lambda: fleet.status().replicas[1].samples > 0)
    fleet.sleep(mode=mode)
    if mode == "abort":
        found = outputs()
    else:
        wait_until_true(lambda: fleet.status().replicas[1].samples == 0)
    woken = True
    fleet.wake()
    if mode == "keep":
        found = outputs()
    assert isinstance(found, list), found
    assert len(samples_of(found)) == 3 * len(PROMPTS)
    assert (FinishReason.ABORTED in reasons(found)) == (mode == "abort")


def test_an_abort_of_all_ends_groups_that_are_on_their_way(fleet, servers):
    replica, aborted = fleet._core.replica_set.replicas[1], threading.Event()
    late(replica, aborted.is_set)
    send = replica.client.abort

    async def abort(*arguments, **options):
        result = await send(*arguments, **options)
        aborted.set()
        return result

    replica.client.abort = abort
    outputs = in_thread(lambda: fleet.generate(PROMPTS, 2, LONG, return_text=False))
    wait_until_true(lambda: fleet.status().replicas[1].samples > 0)
    fleet.abort(all=True)
    assert FinishReason.LENGTH not in {s.finish_reason for g in outputs()[1::2] for s in g.samples}


def test_a_score_that_is_aborted_says_so(servers):
    (first, second), _ = servers
    with Fleet(addresses(servers), capacity=1) as fleet, contextlib.ExitStack() as stack:
        for server in (first, second):
            server.client.pause("keep")
            stack.callback(server.client.resume)
        scores = in_thread(lambda: fleet.score(PROMPTS))
        wait_until_true(lambda: sum(replica.samples for replica in fleet.status().replicas) == 2)
        fleet.abort(all=True)
        assert isinstance(scores(), Aborted)


def test_requests_wait_as_long_as_was_said_from_the_loss_of_the_last_replica(monkeypatch):
    """Not from when they began to wait for room on one that was well."""
    now = [0.0]

    async def main():
        for module in ("_replica_set", "_requests"):
            monkeypatch.setattr(f"rollout_client.fleet.{module}.time.monotonic", lambda: now[0])
        replica_set = ReplicaSet([FixedEndpoint("localhost:1")], 1, lambda address: None, 1)
        replica = replica_set.replicas[0]
        replica_set.set_state(replica, CURRENT)
        requests = Requests(replica_set, 100.0, None)
        await replica_set.router.assign(1)
        with requests._call(None, None) as call:
            waiting = asyncio.ensure_future(requests._assign(call, 1))
            await asyncio.sleep(0)
            for now[0], expected in [(99.0, False), (101.0, False), (198.0, False), (200.0, True)]:
                replica_set.mark_lost(replica, Unavailable("gone"))
                for _ in range(5):
                    await asyncio.sleep(0)
                assert waiting.done() == expected, now
            with pytest.raises(Unavailable, match="100 s"):
                waiting.result()

    asyncio.run(main())


def test_a_fleet_does_not_wait_for_itself(fleet):
    """Progress is called in the fleet's thread, which has to answer whatever is asked there."""
    with pytest.raises(FailedPrecondition, match="own thread"):
        ask(fleet, progress=lambda *counts: fleet.status())
    assert states(fleet) == [CURRENT, CURRENT]


def test_calls_that_run_when_a_fleet_is_closed_raise_cancelled(servers):
    (first, second), _ = servers

    async def main():
        fleet = Fleet(addresses(servers))
        other = AsyncFleet(fleet)
        await other.wait_until_ready()
        for server in (first, second):
            server.client.pause("keep")
        asked = asyncio.ensure_future(other.generate(PROMPTS, 2, LONG, return_text=False))
        blocking = in_thread(lambda: fleet.generate(PROMPTS, 2, LONG, return_text=False))
        while not all(replica.samples for replica in (await other.status()).replicas):
            await asyncio.sleep(0.01)
        await other.close()
        with pytest.raises(Cancelled, match="closed"):
            await asked
        assert isinstance(blocking(), Cancelled)
        with pytest.raises(FailedPrecondition, match="closed"):
            await other.status()
        fleet.close()

    try:
        asyncio.run(main())
    finally:
        for server in (first, second):
            server.client.resume()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout-fleet"]


def test_a_push_that_is_open_when_a_fleet_is_closed_is_cancelled(servers, rng):
    with Fleet(addresses(servers)) as fleet, pytest.raises(ZeroDivisionError), fleet.begin_push() as push:
        push.write_all(list(BASE.items())[:2])
        fleet.close()
        with pytest.raises(Cancelled):
            push.write_all(list(BASE.items())[2:])
        raise ZeroDivisionError


def test_a_task_that_waited_leaves_no_thread_behind(servers):
    (_, _), (near, _) = servers
    near.cut()

    async def main():
        fleet = Fleet([near.address])
        other = AsyncFleet(fleet)
        for wait in (other.wait_until_ready, other.info, other.checksum):
            with pytest.raises((asyncio.TimeoutError, Unavailable)):
                await asyncio.wait_for(wait(), 0.1)
        assert asyncio.get_running_loop()._default_executor is None
        fleet.close()

    asyncio.run(main())


def test_inside_a_push_nothing_waits_for_its_end(fleet, rng):
    adapter, config = random_adapter(rng, BASE)
    with fleet.begin_push() as push:
        with pytest.raises(Aborted, match="is open"):
            fleet.push_lora(adapter, config)
        for order in (fleet.wake, fleet.sleep, lambda: fleet.remove_adapter("probe")):
            with pytest.raises(FailedPrecondition, match="push is open"):
                order()
        push.write_all(BASE)
    assert push.receipt.missed == []
    assert fleet.push_lora(adapter, config).missed == []


def test_a_task_that_is_cancelled_drops_its_own_push_alone(fleet, rng):
    adapter, config = random_adapter(rng, BASE)
    version = fleet.status().weight_version

    async def main():
        other = AsyncFleet(fleet)
        async with other.begin_push() as push:
            second = asyncio.ensure_future(other.push_lora(adapter, config))
            await asyncio.sleep(0)
            second.cancel()
            with pytest.raises((asyncio.CancelledError, Aborted)):
                await second
            await push.write_all(BASE)
        assert push.receipt.weight_version == version + 1
        in_loop(fleet, fleet._core.replica_set.updating.acquire())  # as a replica that catches up
        waits = asyncio.ensure_future(other.push_lora(adapter, config))
        while not fleet._core.replica_set.push_is_open:
            await asyncio.sleep(0.01)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        fleet._core.loop.make(fleet._core.replica_set.updating.release)

    asyncio.run(main())
    assert fleet.status().weight_version == version + 1
    assert fleet.push_lora(adapter, config).weight_version == version + 2


@pytest.fixture
def interrupted():
    """Set by the first SIGINT, which raises KeyboardInterrupt; later ones are ignored."""
    event = threading.Event()

    def interrupt(*_):
        if not event.is_set():
            event.set()
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, interrupt)
    yield event
    signal.signal(signal.SIGINT, previous)


def test_an_interrupted_wait_for_the_receipt_leaves_the_push_whole(fleet, servers, rng, interrupted):
    """Control-C when all replicas have committed."""
    adapter, config = random_adapter(rng, BASE)
    version, end = fleet.status().weight_version, fleet._core.pushes.end

    async def late_end(*arguments):
        # Python misses a signal that arrives just before the main thread waits: a second one ends the wait.
        while not interrupted.is_set():
            await asyncio.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)
        return await end(*arguments)

    fleet._core.pushes.end = late_end
    with pytest.raises(KeyboardInterrupt):
        fleet.push_lora(adapter, config)
    wait_until_true(lambda: fleet.status().weight_version == version + 1)
    assert states(fleet) == [CURRENT, CURRENT] and versions(ask(fleet)) == {version + 1}


@pytest.fixture
def uncommitted(monkeypatch):
    """Addresses to which no commit comes."""
    lost, send = set(), ClientStream.send

    def sent(stream, *parts):
        if parts == (COMMIT,) and stream._address in lost:
            raise Unavailable("the commit was lost")
        send(stream, *parts)

    monkeypatch.setattr(ClientStream, "send", sent)
    return lost


@pytest.fixture
def unconfirmed(monkeypatch):
    """Addresses whose answers to commits are lost."""
    lost, finish = set(), ClientStream.finish

    def finished(stream):
        response = finish(stream)
        if stream._address in lost:
            raise Unavailable("the answer was lost")
        return response

    monkeypatch.setattr(ClientStream, "finish", finished)
    return lost


def test_a_push_that_one_replica_has_unheard_is_no_base_for_the_next(fleet, servers, uncommitted, unconfirmed, rng):
    """The other has not got the commit, so that the push has failed."""
    (first, second), (near, far) = servers
    adapter, config = random_adapter(rng, BASE)
    before = first.client.checksum()
    uncommitted.add(near.address), unconfirmed.add(far.address)
    with pytest.raises(Unavailable, match="failed on all"):
        fleet.push_full(perturbed(rng, BASE), transport="inline")
    uncommitted.clear(), unconfirmed.clear()
    assert first.client.checksum() == before != second.client.checksum()
    wait_until(fleet, [CURRENT, BEHIND])
    receipt = fleet.push_lora(adapter, config)
    assert receipt.missed == [1], "it would be merged into an unknown base"
    assert fleet.push_full(BASE).missed == []
    assert first.client.checksum() == second.client.checksum()


@pytest.mark.parametrize("applied", [True, False])
def test_a_fleet_whose_adapter_nobody_confirmed_takes_the_next(fleet, servers, uncommitted, unconfirmed, applied):
    (first, second), proxies = servers
    adapter = random_adapter(np.random.default_rng(applied), BASE)
    version = fleet.status().weight_version
    (unconfirmed if applied else uncommitted).update(proxy.address for proxy in proxies)
    with pytest.raises(Unavailable, match="failed on all"):
        fleet.push_lora(*adapter)
    unconfirmed.clear(), uncommitted.clear()
    assert first.client.status().weight_version == version + applied
    if not applied:
        wait_until(fleet, [CURRENT, CURRENT])
        assert versions(ask(fleet)) == {version}
    receipt = fleet.push_lora(*adapter, version=version + 5)
    assert receipt.missed == [] and first.client.checksum() == second.client.checksum()


def test_a_replica_whose_answer_was_lost_proves_what_it_has(fleet, servers, unconfirmed, rng):
    (first, second), (_, far) = servers
    unconfirmed.add(far.address)
    receipt = fleet.push_full(perturbed(rng, BASE))
    unconfirmed.clear()
    assert receipt.missed == [1]
    fleet.wait_until_ready(TIMEOUT)
    assert states(fleet) == [CURRENT, CURRENT] and first.client.checksum() == second.client.checksum()


@pytest.mark.parametrize("level", [1, 2])
def test_a_replica_that_missed_a_wake_is_woken(fleet, servers, level):
    (_, second), (_, far) = servers
    fleet.push_lora(None)
    fleet.sleep(level)
    far.cut()
    wait_until(fleet, [CURRENT, LOST])
    assert set(fleet.wake(reload=level == 2)) == {0}
    far.mend()
    fleet.wait_until_ready(TIMEOUT)
    assert states(fleet) == [CURRENT, CURRENT]
    assert second.client.status().lifecycle is Lifecycle.RUNNING
    assert len(samples_of(ask(fleet))) == 3 * len(PROMPTS)


def test_a_replica_that_missed_a_part_of_a_wake_holds_up_nobody(fleet, servers):
    (_, second), (_, far) = servers
    fleet.sleep()
    far.cut()
    wait_until(fleet, [CURRENT, LOST])
    fleet.wake(["weights"])
    far.mend()
    wait_until(fleet, [CURRENT, CURRENT])
    fleet.wake(["kv_cache"])
    assert len(samples_of(ask(fleet))) == 3 * len(PROMPTS)
    fleet.wait_until_ready(TIMEOUT)
    assert second.client.status().lifecycle is Lifecycle.RUNNING


def test_a_replica_that_missed_a_resume_serves_again(fleet, servers):
    (first, second), (_, far) = servers
    fleet.pause("keep")
    far.cut()
    wait_until(fleet, [CURRENT, LOST])
    fleet.resume()
    far.mend()
    wait_until(fleet, [CURRENT, CURRENT])
    assert [server.client.status().lifecycle for server in (first, second)] == [Lifecycle.RUNNING] * 2
    assert len(samples_of(ask(fleet, timeout=TIMEOUT))) == 3 * len(PROMPTS)


def test_a_replica_that_comes_while_the_fleet_is_paused_is_paused(fleet, servers):
    (_, second), (_, far) = servers
    far.cut()
    wait_until(fleet, [CURRENT, LOST])
    fleet.pause("keep")
    far.mend()
    wait_until(fleet, [CURRENT, CURRENT])
    assert second.client.status().lifecycle is Lifecycle.PAUSED
    fleet.resume()
    assert second.client.status().lifecycle is Lifecycle.RUNNING


def test_servers_that_a_killed_trainer_left_paused_are_resumed(servers):
    (first, second), proxies = servers
    first.client.pause("keep")
    with Fleet([proxy.address for proxy in proxies]) as fleet:
        assert len(samples_of(ask(fleet, timeout=TIMEOUT))) == 3 * len(PROMPTS)
    assert [server.client.status().lifecycle for server in (first, second)] == [Lifecycle.RUNNING] * 2


class GpuTensor:
    """The parts of torch's tensor on a GPU that the client uses; it can read them only by a copy to the host."""

    is_cuda = True

    def __init__(self, array):
        self._array, self.dtype, self.shape = array, array.dtype, array.shape

    def detach(self):
        return self

    def data_ptr(self):
        raise AssertionError("its address is of no use to a fleet")

    def __array__(self, dtype=None, copy=None):
        return self._array


def test_tensors_on_a_gpu_are_sent_to_all_replicas(fleet, servers, rng):
    new = perturbed(rng, BASE)
    on_gpu = {name: GpuTensor(array) for name, array in new.items()}
    fleet.push_full(new)
    expected = [server.client.checksum() for server in servers[0]]
    fleet.push_full(BASE)
    fleet.push_full(on_gpu)
    assert [server.client.checksum() for server in servers[0]] == expected
    with pytest.raises(InvalidArgument, match="transport: a fleet does not read device memory"):
        fleet.push_full(on_gpu, transport="device_memory")
    fleet.push_lora(None)


class Moving:
    """A place whose server is somewhere else from now on."""

    def __init__(self, address):
        self.address = address

    async def resolve(self):
        return ResolvedEndpoint(self.address)


def test_requests_on_a_server_that_is_somewhere_else_now_begin_anew(servers):
    """The old one does not break their connections: it hangs."""
    (first, second), _ = servers
    place, fleet = Moving(first.address), object.__new__(Fleet)
    connection = {"timeout": None, "token": None, "tls": None, "segment_mode": 0o600}
    fleet._core = Core([place], connection, quorum=None, capacity=64, patience=TIMEOUT, resupply=None)
    with fleet, contextlib.ExitStack() as stack:
        first.client.pause("keep")
        stack.callback(first.client.resume)
        outputs = in_thread(lambda: ask(fleet))
        wait_for(first.client, lambda status: status.held_requests + status.waiting_samples > 0, "asked")
        place.address = second.address
        assert all_bits(outputs()) == all_bits(ask(second.client))


def test_a_replica_that_hangs_while_it_catches_up_holds_up_no_push(servers, monkeypatch, rng):
    monkeypatch.setattr(_replica, "STATUS_SECONDS", 1.0)
    _, (_, far) = servers
    state, stalled = perturbed(rng, BASE), threading.Event()

    def supply():
        for number, pair in enumerate(state.items()):
            if number == 3 and not stalled.is_set():
                far.stall()
                stalled.set()
            yield pair

    with Fleet(addresses(servers), resupply=supply) as fleet:
        far.cut()
        assert fleet.push_full(state).missed == [1]
        far.mend()
        assert stalled.wait(TIMEOUT)
        receipt = in_thread(lambda: fleet.push_lora(None))()
        assert not isinstance(receipt, BaseException) and receipt.missed == [1]
        far.mend()
        fleet.wait_until_ready(TIMEOUT)


def test_what_supplies_a_push_again_runs_in_a_thread_of_its_own_and_may_fail(servers, rng):
    _, (_, far) = servers
    state, threads, failures = perturbed(rng, BASE), [], [KeyError("shard")]

    def supply():
        threads.append(threading.current_thread().name)
        if failures:
            raise failures[0]
        return state

    with Fleet(addresses(servers), resupply=supply) as fleet:
        far.cut()
        assert fleet.push_full(state).missed == [1]
        far.mend()
        wait_until(fleet, [CURRENT, BEHIND], stuck=1)
        assert "KeyError: 'shard'" in fleet.status().replicas[1].reason
        failures.clear()
        fleet.wait_until_ready(TIMEOUT)
    assert "rollout-fleet" not in threads


def test_a_replica_that_refuses_is_told_of_and_not_raised(fleet):
    replica = fleet._core.replica_set.replicas[1]

    async def refuse():
        raise Unauthenticated("token: expired")

    replica.client.status = refuse
    status = fleet.status()
    assert [r.state for r in status.replicas] == [CURRENT, BEHIND]
    assert status.replicas[1].reason == "token: expired" and status.replicas[1].server is None
