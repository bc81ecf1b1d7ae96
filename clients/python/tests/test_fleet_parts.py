"""Decisions of a fleet, without servers: routes, quorums, seeds and policies."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from rollout_client import Cancelled, DataLoss, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from rollout_client._seeds import prompt_seed, sample_seed
from rollout_client.fleet import ReplicaState, _replica
from rollout_client.fleet import _fanout as fanout
from rollout_client.fleet._policy import Change, Policy, PushHistory, digest_of_parameters
from rollout_client.fleet._router import Route, Router

CURRENT, BEHIND, LOST = ReplicaState.CURRENT, ReplicaState.BEHIND, ReplicaState.LOST


def routed(*capacities):
    return Router(Route(number, capacity, CURRENT) for number, capacity in enumerate(capacities))


def test_groups_go_to_the_replica_with_the_fewest_samples():
    async def main():
        router = routed(100, 100, 100)
        assignments = [await router.assign(samples) for samples in (8, 4, 2, 1, 1, 1, 4)]
        assert [assignment.route.number for assignment in assignments] == [0, 1, 2, 2, 2, 1, 2]
        router.release(assignments[0])
        assert (await router.assign(8)).route.number == 0

    asyncio.run(main())


def test_a_group_waits_for_room_and_is_taken_alone_where_it_is_larger_than_all_of_it():
    async def main():
        router = routed(8)
        large = await router.assign(64)
        waiting = [asyncio.ensure_future(router.assign(samples)) for samples in (8, 1)]
        await asyncio.sleep(0)
        assert router.waiting == 2
        router.release(large)
        first = await waiting[0]
        await asyncio.sleep(0)
        assert not waiting[1].done(), "the smaller one may not overtake, and there is no room beside the first"
        router.release(first)
        assert (await waiting[1]).samples == 1

    asyncio.run(main())


def test_what_runs_on_a_replica_that_is_taken_out_is_revoked_and_nothing_goes_there():
    async def main():
        router = routed(100, 100)
        assignments = [await router.assign(1) for _ in range(4)]
        router.set_state(router.routes[1], BEHIND)
        assert [assignment.revoked.is_set() for assignment in assignments] == [False, True, False, True]
        assert [(await router.assign(1)).route.number for _ in range(3)] == [0, 0, 0]
        router.set_state(router.routes[1], CURRENT)
        for assignment in assignments:
            router.release(assignment)
        assert (await router.assign(1)).route.number == 1

    asyncio.run(main())


def test_only_groups_of_a_newer_version_are_taken_back():
    async def main():
        router = routed(100)
        assignments = [await router.assign(1) for _ in range(3)]
        for version, assignment in enumerate(assignments):
            assignment.version = version
        router.revoke_newer(router.routes[0], 1)
        assert [assignment.revoked.is_set() for assignment in assignments] == [False, False, True]

    asyncio.run(main())


def test_no_group_begins_while_the_gate_is_closed():
    async def main():
        router = routed(100)
        router.close_gate()
        router.close_gate()
        waiting = asyncio.ensure_future(router.assign(1))
        for _ in range(2):
            await asyncio.sleep(0)
            assert not waiting.done()
            router.open_gate()
        await waiting

    asyncio.run(main())


def test_a_group_that_gives_up_leaves_its_place(rng):
    async def main():
        router = routed(4, 4)
        waiting, held, gone = [], [], []
        for _ in range(3000):
            action = rng.integers(6)
            if action == 0:
                waiting.append(asyncio.ensure_future(router.assign(int(rng.integers(1, 7)))))
            elif action == 1 and waiting:
                gone.append(waiting.pop(rng.integers(len(waiting))))
                gone[-1].cancel()
            elif action == 2 and held:
                router.release(held.pop(rng.integers(len(held))))
            elif action == 3:
                route = router.routes[rng.integers(2)]
                router.set_state(route, [CURRENT, BEHIND, LOST][rng.integers(3)])
            elif action == 4:
                await asyncio.sleep(0)
            held += [task.result() for task in waiting if task.done() and not task.cancelled()]
            waiting = [task for task in waiting if not task.done()]
            for route in router.routes:
                assert len(route.assignments) == 1 or route.samples <= route.capacity or not route.assignments
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, *gone, return_exceptions=True)
        for assignment in held:
            router.release(assignment)
        assert router.waiting == 0 and not any(route.assignments for route in router.routes)

    asyncio.run(main())


class Stream:
    """The methods of a call that a fan-out uses."""

    def __init__(self, fails=None, at="send", response=b"", blocks=None):
        self.sent, self.fails, self.at, self.response, self.blocks = [], fails, at, response, blocks
        self.cancelled = self.closed = False

    def send(self, *parts):
        if self.blocks is not None:
            self.blocks.wait(60)
            raise Cancelled("cancelled")
        self.step("commit" if parts == (fanout.COMMIT,) else "send")
        self.sent.append(b"".join(map(bytes, parts)))

    def send_all(self, messages):
        for parts in messages:
            self.send(*parts)

    def finish(self):
        self.step("finish")
        return self.response

    def check(self):
        self.step("check")

    def step(self, name):
        assert not self.closed
        if self.fails is not None and self.at == name:
            raise self.fails

    def cancel(self):
        self.cancelled = True
        if self.blocks is not None:
            self.blocks.set()

    def close(self):
        self.cancel()
        self.closed = True


class Barrier:
    def __init__(self, unready=()):
        self.unready, self.asked = dict(unready), []

    def prepare(self, numbers):
        self.asked.append(numbers)
        return self.unready


def fan_out(quorum, *streams, barrier=None):
    starts = {number: lambda stream=stream: stream for number, stream in enumerate(streams)}
    return fanout.FanOut(starts, quorum, barrier or Barrier())


def test_all_replicas_get_every_message_and_the_commit_after_the_barrier():
    streams, barrier = [Stream(response=b"0"), Stream(response=b"1")], Barrier()
    with fan_out(2, *streams, barrier=barrier) as call:
        call.send(b"header")
        call.send(b"prefix", memoryview(b"data"))
        call.send(fanout.COMMIT)
        assert [stream.sent for stream in streams] == [[b"header", b"prefixdata"]] * 2 and not barrier.asked
        assert call.finish() == b"0"
    assert barrier.asked == [[0, 1]] and call.responses == {0: b"0", 1: b"1"} and not call.errors
    assert all(stream.sent[-1] == fanout.COMMIT and stream.closed for stream in streams)


@pytest.mark.parametrize("at", ["send", "check"])
def test_a_replica_that_fails_before_the_commit_is_left_out(at):
    broken, whole = Stream(Unavailable("gone"), at), Stream(response=b"1")
    with fan_out(1, broken, whole) as call:
        call.send(b"header")
        assert call.finish() == b"1"
    assert broken.closed and fanout.COMMIT not in broken.sent
    assert str(call.errors[0]) == "gone" and list(call.responses) == [1]


@pytest.mark.parametrize("at", ["send", "check", "barrier"])
def test_below_the_quorum_nothing_is_committed(at):
    broken, whole = Stream(Unavailable("gone"), at), Stream()
    barrier = Barrier({0: Unavailable("gone")} if at == "barrier" else {})
    said = r"needs 2 of 2 replicas, and has 1.*as it was.*replica 0: gone"
    with pytest.raises(Unavailable, match=said), fan_out(2, broken, whole, barrier=barrier) as call:
        call.send(b"header")
        call.finish()
    assert whole.cancelled and not any(fanout.COMMIT in stream.sent for stream in (broken, whole))


def test_a_commit_that_fails_on_one_replica_stands_on_the_other():
    broken, whole = Stream(Unavailable("gone"), "finish"), Stream(response=b"1")
    with fan_out(2, broken, whole) as call:
        assert call.finish() == b"1"
    assert call.committing and list(call.responses) == [1] and list(call.errors) == [0]


@pytest.mark.parametrize(
    ("errors", "expected"), [((DataLoss, DataLoss), DataLoss), ((DataLoss, Cancelled), Unavailable)]
)
def test_a_commit_that_fails_everywhere_raises_what_all_say(errors, expected):
    said = r"failed on all replicas.*replica 0: no; replica 1: no"
    streams = [Stream(error("no"), "finish") for error in errors]
    with pytest.raises(expected, match=said), fan_out(1, *streams) as call:
        call.finish()


@pytest.mark.parametrize("error", [InvalidArgument, NotFound])
def test_what_one_replica_refuses_for_the_contents_fails_the_push_for_all(error):
    refusing, other = Stream(error("tensors: no"), "send"), Stream()
    with pytest.raises(error, match="tensors: no"), fan_out(1, refusing, other) as call:
        call.send(b"header")
    assert other.cancelled


def test_a_replica_that_takes_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr(fanout, "STALLED_SECONDS", 0.05)
    stalled, whole = Stream(blocks=threading.Event()), Stream(response=b"1")
    with fan_out(1, stalled, whole) as call:
        call.send(b"header")
        assert call.finish() == b"1"
    assert isinstance(call.errors[0], DeadlineExceeded) and stalled.cancelled


def test_a_push_that_is_cancelled_raises():
    with fan_out(1, Stream(), Stream()) as call:
        call.cancel()
        with pytest.raises(Cancelled):
            call.send(b"header")


def test_seeds_differ_and_the_first_is_the_one_given():
    assert prompt_seed(7, 0) == sample_seed(7, 0) == 7
    seeds = {sample_seed(prompt_seed(7, prompt), sample) for prompt in range(50) for sample in range(50)}
    assert len(seeds) == 2500 and all(0 <= seed < 2**64 for seed in seeds)


def replica_that(status, info):
    """One whose calls take so many seconds, or never end."""

    def after(seconds, answer):
        async def call():
            await (asyncio.Event().wait() if seconds is None else asyncio.sleep(seconds))
            return answer

        return call

    client = SimpleNamespace(status=after(status, "status"), info=after(info, "info"))
    return _replica.Replica(_replica.FixedEndpoint("127.0.0.1:1"), Route(0, 1), client=client)


def test_a_replica_whose_engine_is_busy_is_waited_for(monkeypatch):
    monkeypatch.setattr(_replica, "STATUS_SECONDS", 0.05)
    assert asyncio.run(replica_that(0.3, 0).ask()) == "status"
    with pytest.raises(Unavailable, match=r"no answer within 0\.05 s"):
        asyncio.run(replica_that(None, None).ask())
    monkeypatch.setattr(_replica, "BUSY_SECONDS", 0.3)
    with pytest.raises(Unavailable, match=r"its engine has not answered for 0\.3 s"):
        asyncio.run(replica_that(None, 0).ask())


def test_policies_are_equal_only_after_the_same_pushes():
    base = Policy(0, "checkpoint")
    lora, other = Change("lora", 1), Change("lora", 2)
    assert lora.applied(base, "a") == lora.applied(other.applied(base, "b"), "a")
    assert lora.applied(base, "a") != lora.applied(base, "b") != other.applied(base, "b")
    full = Change("full", 3).applied(lora.applied(base, "a"), "f")
    assert full == Change("full", 3).applied(base, "f") and full.adapter is None
    delta = Change("delta", 4)
    assert delta.applied(full, "d") != delta.applied(base, "d")
    resident = Change("lora", 9, "probe").applied(full, "p")
    assert resident.version == 3 and resident != full and resident.without("probe") == full


def test_a_replica_takes_part_only_in_pushes_that_lead_it_to_the_same_policy():
    policy = Change("lora", 2).applied(Policy(0, "checkpoint"), "a")
    fresh, stranger = Policy(0, "checkpoint"), Policy(0, "other")
    assert Change("lora", 3).fits(fresh, policy) and not Change("lora", 3).fits(stranger, policy)
    assert Change("full", 3).fits(stranger, policy) and Change("full", 3).fits(None, policy)
    assert not Change("lora", 3).fits(None, policy)
    assert Change("delta", 3).fits(policy, policy) and not Change("delta", 3).fits(fresh, policy)


def test_what_is_kept_for_replicas_that_missed_it():
    history, repush = PushHistory(), object()
    history.record(Change("lora", 1), repush)
    history.record(Change("lora", 1, "probe"), repush)
    assert history == PushHistory(None, repush, {"probe": repush})
    history.record(Change("full", 2), None)
    assert history == PushHistory(None, None, {"probe": repush})
    history.record(Change("full", 3), repush)
    history.record(Change("delta", 4), repush)
    assert history.base is None, "the base is now the full push and the delta"


def test_the_digest_of_parameters_depends_on_names_and_values():
    digest = digest_of_parameters({"a": "1", "b": "2"})
    assert digest == digest_of_parameters({"b": "2", "a": "1"})
    assert len({digest, digest_of_parameters({"a": "2", "b": "1"}), digest_of_parameters({"a": "1"})}) == 3
