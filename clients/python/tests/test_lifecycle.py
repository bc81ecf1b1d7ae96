"""Sleep, wake, parameters, checksums and adapters against a fake server."""

from __future__ import annotations

import asyncio

import grpc
import pytest

import rollout_client
from fake_weights import hold, random_state
from rollout_client import (
    AsyncRolloutClient,
    Lifecycle,
    RolloutClient,
    _proto,
    checksum_of,
)


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
            entered = asyncio.Event()

            async def work():
                async with client.awake():
                    entered.set()
                    await asyncio.sleep(60)

            async with client.awake(level=2) as same:
                assert same is client
            task = asyncio.create_task(work())
            await entered.wait()
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
