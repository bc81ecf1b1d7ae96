"""The parts of a fleet: its event loop, replicas, requests, pushes and lifecycle, and how callers wait for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from .._segment import SegmentPool
from ..aio import AsyncRolloutClient
from ..client import RolloutClient
from ..errors import InvalidArgument, RolloutError, Unavailable
from ..options import BeginPushOptions, PushKind, check_begin_push
from ..types import Lifecycle
from ._lifecycle import FleetLifecycle
from ._loop import Loop, closed
from ._push import AsyncFleetPush, FleetPush
from ._pusher import FleetPusher, Resupply
from ._pushes import Pushes
from ._replica import Endpoint
from ._replica_set import ReplicaSet
from ._requests import Requests
from .types import FleetReceipt, FleetStatus, ReplicaState, ReplicaStatus

CAPACITY = 512
"""Samples that a replica is given at once: twice what a server runs at once by default, so that its queue is never
empty, and few enough that a slow replica leaves prompts to the others."""
PATIENCE_SECONDS = 300.0
"""How long requests wait when no replica can be reached: a server of a large model takes minutes to start."""
READY_POLL_SECONDS = 0.2

_T = TypeVar("_T")


class Core:
    """A fleet without its public methods. An event loop in a thread of its own owns the replicas.

    `run` and `push` are for the blocking fleet; their twins whose names begin with `async_` are for the asyncio fleet,
    whose event loop is another one.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        connection: dict[str, Any],
        *,
        quorum: int | None,
        capacity: int,
        patience: float,
        resupply: Resupply | None,
    ) -> None:
        """Starts the loop, which looks for the replicas.

        Args:
            endpoints: where the replicas are to be found.
            connection: keyword arguments of the clients.
            quorum, capacity, patience, resupply: as for `Fleet`.

        Raises:
            InvalidArgument: an argument is out of bounds.
        """
        if not endpoints:
            raise InvalidArgument("addresses: expected the address of at least one server")
        quorum = (len(endpoints) + 1) // 2 if quorum is None else quorum
        if not 1 <= quorum <= len(endpoints):
            raise InvalidArgument(f"quorum: expected a number from 1 to {len(endpoints)}, got {quorum}")
        if capacity < 1:
            raise InvalidArgument(f"capacity: expected at least 1, got {capacity}")
        self.patience, self.resupply = patience, resupply
        self.segments = SegmentPool(connection["segment_mode"])
        self.loop = Loop()

        def make() -> ReplicaSet:
            replicas = ReplicaSet(
                endpoints, capacity, lambda address: AsyncRolloutClient(address, **connection), quorum
            )
            self.requests = Requests(replicas, patience, connection["timeout"])
            self.pushes = Pushes(replicas, lambda address: RolloutClient(address, **connection))
            self.lifecycle = FleetLifecycle(replicas, self.requests)
            replicas.start()
            return replicas

        self.replica_set = self.loop.make(make)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine in the fleet's loop, and waits for it."""
        return self.loop.run(coroutine)

    async def async_run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """As `run`; cancelling the task that waits cancels the coroutine."""
        future = asyncio.wrap_future(self.loop.submit(coroutine))
        try:
            await asyncio.wait({future})
        finally:
            future.cancel()
        if future.cancelled():  # by the close of the fleet, not with this task
            raise closed()
        return future.result()

    def push(self, push: Callable[[FleetPusher], FleetReceipt]) -> FleetReceipt:
        """Pushes in the caller's thread."""
        return push(self._pusher())

    async def async_push(self, push: Callable[[FleetPusher], FleetReceipt]) -> FleetReceipt:
        """Pushes in a thread of its own; cancelling the task that waits ends the push."""
        pusher = self._pusher()
        running = asyncio.ensure_future(asyncio.to_thread(push, pusher))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            pusher.cancel()
            await asyncio.wait({running})  # until then the thread may read tensors
            with suppress(Exception):
                running.result()
            raise

    def begin_push(self, kind: PushKind, config: Any, options: BeginPushOptions) -> FleetPush:
        """Opens a push in the caller's thread."""
        return self._pusher().begin_push(kind, config, options)

    def async_begin_push(self, kind: PushKind, config: Any, options: BeginPushOptions) -> AsyncFleetPush:
        """Returns a push that is opened in a thread of its own, by its first call."""
        check_begin_push(kind, config, options)
        pusher = self._pusher()
        return AsyncFleetPush(lambda: pusher.begin_push(kind, config, options), pusher.cancel)

    def cancel_update(self) -> None:
        """Ends the push that is open."""
        self.loop.make(self.pushes.cancel)

    def close(self) -> None:
        """Ends the calls and the connections; the servers keep running."""
        with suppress(RolloutError):  # it is closed already
            self.cancel_update()
        self.loop.close(self.replica_set.close)
        self.segments.close()

    async def status(self) -> FleetStatus:
        """As `Fleet.status`."""
        found = self.replica_set
        await asyncio.gather(*(found.refresh(replica) for replica in found.replicas))
        replicas = [
            ReplicaStatus(r.number, r.address, r.state, r.reason, r.route.samples, r.status) for r in found.replicas
        ]
        known = sorted((r for r in replicas if r.server is not None), key=lambda r: r.state is not ReplicaState.CURRENT)
        lifecycle = known[0].server.lifecycle if known else Lifecycle.SHUTTING_DOWN
        version = 0 if found.policy is None else found.policy.version
        return FleetStatus(lifecycle, version, found.quorum, replicas)

    async def until_ready(self, timeout: float | None) -> None:
        """As `Fleet.wait_until_ready`."""
        timeout = self.patience if timeout is None else timeout
        await self.until_current(timeout, time.monotonic() + timeout)

    async def until_current(self, timeout: float, deadline: float) -> None:
        """Waits for the replicas until the deadline, which is after `timeout` seconds."""
        found = self.replica_set
        while (ready := len(found.numbers(ReplicaState.CURRENT))) < len(found.replicas):
            if time.monotonic() >= deadline:
                break
            if (error := found.permanent_error()) is not None:
                raise error
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(found.changed.wait(), READY_POLL_SECONDS)
        if ready < found.quorum:
            raise Unavailable(
                f"{ready} of {len(found.replicas)} replicas are ready after {timeout:g} s: {found.describe()}"
            )

    def _pusher(self) -> FleetPusher:
        return FleetPusher(self.loop, self.pushes, self.segments, self.resupply)
