"""Pushes that nobody ends: who holds them is seen, they end by themselves, by order, and with the server."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from models import perturbed, read_model
from rollout_client import Aborted, AsyncRolloutClient, RolloutClient, ServerProcess, Unavailable, _proto
from rollout_client._convert_weights import update_header
from serving import PUSH_MODEL, SMALL_CACHE, held, seen, server, start_group, wait_for


def open_push(client, version):
    """The stream of a FULL push that has sent its header and stays open."""
    header = update_header("full", {"version": version})
    header.total_bytes = 1000
    stream = client._pusher.start(60)
    stream.send(_proto.UPDATE.request(header=header).SerializeToString())
    wait_for(client, lambda status: status.update and status.update.new_version == version, "open")
    return stream


def test_a_push_that_sends_nothing_is_ended_and_the_next_one_comes_through(binary, rng):
    with server(binary, PUSH_MODEL, "--update-idle-seconds", "1") as client:
        before = seen(client)
        with open_push(client, 7) as stream:
            update = client.status().update
            assert (update.kind, update.adapter, update.committed) == ("full", None, False)
            assert update.peer.startswith("127.0.0.1:") and 0 <= update.idle_seconds <= update.open_seconds
            wait_for(client, lambda status: status.update is None, "without a push")
            with pytest.raises(Aborted, match="update-idle-seconds"):
                stream.finish()
        assert seen(client) == before and "update_staging" not in held(client.status())
        full = perturbed(rng, read_model(PUSH_MODEL))
        assert client.push_full(full, transport="inline").weight_version == 1


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_anybody_can_end_a_push(binary, kind):
    with server(binary, PUSH_MODEL) as client:
        before = seen(client)

        def cancel(*arguments):
            if kind == "sync":
                with RolloutClient(client.address) as other:
                    return other.cancel_update(*arguments)

            async def main():
                async with AsyncRolloutClient(client.address) as other:
                    return await other.cancel_update(*arguments)

            return asyncio.run(main())

        assert cancel() is None
        with open_push(client, 3) as stream:
            number = client.status().update.id
            assert cancel(number + 1) is None
            ended = cancel(number)
            assert (ended.id, ended.new_version, ended.kind) == (number, 3, "full")
            with pytest.raises(Aborted, match="CancelUpdate"):
                stream.finish()
        assert client.status().update is None and seen(client) == before


def test_a_commit_that_waits_for_requests_can_be_ended(binary, rng):
    with server(binary, PUSH_MODEL) as client:
        join = start_group(client)
        raised = []

        def push():
            with pytest.raises(Aborted, match="CancelUpdate") as error:
                client.push_full(perturbed(rng, read_model(PUSH_MODEL)), running="wait", transport="inline")
            raised.append(error)

        thread = threading.Thread(target=push)
        thread.start()
        wait_for(client, lambda status: status.update and status.update.committed, "committed")
        assert client.cancel_update().committed
        thread.join(60)
        assert raised and client.status().weight_version == 0
        assert {sample.weight_versions[-1].weight_version for sample in join()} == {0}


def test_a_push_that_is_open_does_not_hold_the_server_up_when_it_ends(binary):
    grace = 90
    flags = [*SMALL_CACHE, "--shutdown-grace-seconds", str(grace)]
    with ServerProcess(binary, PUSH_MODEL, flags) as process, open_push(process.client, 7) as stream:
        started = time.monotonic()
        process.process.send_signal(signal.SIGTERM)
        assert process.process.wait(60) == 0
        assert time.monotonic() - started < grace / 2
        with pytest.raises(Unavailable):
            stream.finish()
