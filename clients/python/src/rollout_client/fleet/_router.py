"""Which replica samples the next group, and which ones may. Decides only; owned by one event loop, so without locks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .types import ReplicaState


@dataclass(eq=False)
class Route:
    """A replica as the router sees it."""

    number: int
    capacity: int
    """Samples that it is given at once. What is above that waits here, for whichever replica has room first."""
    state: ReplicaState = ReplicaState.LOST
    leases: set[Lease] = field(default_factory=set)

    @property
    def samples(self) -> int:
        """Samples under way."""
        return sum(lease.samples for lease in self.leases)

    def has_room(self, samples: int) -> bool:
        """Whether it may begin a group of so many; a group that is larger than all of it is taken alone."""
        return self.state is ReplicaState.CURRENT and (not self.leases or self.samples + samples <= self.capacity)


@dataclass(eq=False)
class Lease:
    """A group's place on a replica, from its start to its end."""

    route: Route
    samples: int
    revoked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the replica takes no requests any more: the group must go elsewhere."""


class Router:
    """Gives each group to the replica that is least loaded, in the order in which they came.

    A group is never split. While the gate is closed, no group begins.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        """The gate is open."""
        self.routes = list(routes)
        self._closed = 0
        self._waiting: deque[tuple[int, asyncio.Future[Lease]]] = deque()

    async def lease(self, samples: int) -> Lease:
        """A place for a group of so many samples, as soon as a replica that is current has room."""
        future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        entry = (samples, future)
        self._waiting.append(entry)
        self.serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            elif entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def release(self, lease: Lease) -> None:
        """The group has ended, or goes elsewhere."""
        lease.route.leases.discard(lease)
        self.serve()

    def set_state(self, route: Route, state: ReplicaState) -> None:
        """A replica takes requests from now on, or none any more; what runs on it then goes elsewhere."""
        route.state = state
        if state is not ReplicaState.CURRENT:
            for lease in route.leases:
                lease.revoked.set()
        self.serve()

    def close_gate(self) -> None:
        """No group begins until `open_gate`, which is called once for each call of this."""
        self._closed += 1

    def open_gate(self) -> None:
        """Undoes one `close_gate`."""
        self._closed -= 1
        self.serve()

    @property
    def waiting(self) -> int:
        """Groups without a place."""
        return len(self._waiting)

    def serve(self) -> None:
        """Gives places to those who wait, the first first."""
        while self._waiting and not self._closed:
            samples, future = self._waiting[0]
            if future.done():  # whoever waited was cancelled, and has not run since
                self._waiting.popleft()
                continue
            free = [route for route in self.routes if route.has_room(samples)]
            if not free:
                return
            route = min(free, key=lambda route: (route.samples, route.number))
            lease = Lease(route, samples)
            route.leases.add(lease)
            self._waiting.popleft()
            future.set_result(lease)
