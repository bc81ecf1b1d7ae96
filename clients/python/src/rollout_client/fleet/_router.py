"""Decides which replica samples the next group. Owned by one event loop, so without locks."""

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
    """The most samples at a time. Further groups wait here for the first replica with room."""
    state: ReplicaState = ReplicaState.LOST
    assignments: set[Assignment] = field(default_factory=set)

    @property
    def samples(self) -> int:
        """The number of running samples."""
        return sum(assignment.samples for assignment in self.assignments)

    def has_room(self, samples: int) -> bool:
        """Whether a group of this many samples may start; a group above the capacity runs alone."""
        return self.state is ReplicaState.CURRENT and (not self.assignments or self.samples + samples <= self.capacity)


@dataclass(eq=False)
class Assignment:
    """A group on a replica, from its start to its end."""

    route: Route
    samples: int
    version: int = 0
    """The policy's version when the group was sent. The server holds the group until it has this version."""
    revoked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the group must leave the replica: it moves to another one, or is sent again."""


class Router:
    """Assigns each group to the least loaded replica, first come, first served.

    A group is never split. While the gate is closed, no group starts.
    """

    def __init__(self, routes: Iterable[Route]) -> None:
        """Starts with an open gate."""
        self.routes = list(routes)
        self._closed = 0
        self._waiting: deque[tuple[int, asyncio.Future[Assignment]]] = deque()

    async def assign(self, samples: int) -> Assignment:
        """Waits until a current replica has room for a group of this many samples."""
        future: asyncio.Future[Assignment] = asyncio.get_running_loop().create_future()
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

    def release(self, assignment: Assignment) -> None:
        """The group has ended, or moves to another replica."""
        assignment.route.assignments.discard(assignment)
        self.serve()

    def set_state(self, route: Route, state: ReplicaState) -> None:
        """Sets whether a replica takes requests; if not, its groups move to other replicas."""
        route.state = state
        if state is not ReplicaState.CURRENT:
            for assignment in route.assignments:
                assignment.revoked.set()
        self.serve()

    def revoke_newer(self, route: Route, version: int) -> None:
        """Takes back the groups that were sent when the policy had a higher version than this one."""
        for assignment in route.assignments:
            if assignment.version > version:
                assignment.revoked.set()

    def close_gate(self) -> None:
        """No group starts until each call of this was followed by an `open_gate`."""
        self._closed += 1

    def open_gate(self) -> None:
        """Undoes one `close_gate`."""
        self._closed -= 1
        self.serve()

    @property
    def waiting(self) -> int:
        """The number of groups that wait."""
        return len(self._waiting)

    def serve(self) -> None:
        """Assigns waiting groups, the first one first."""
        while self._waiting and not self._closed:
            samples, future = self._waiting[0]
            if future.done():  # the waiting task was cancelled, and has not run since
                self._waiting.popleft()
                continue
            free = [route for route in self.routes if route.has_room(samples)]
            if not free:
                return
            route = min(free, key=lambda route: (route.samples, route.number))
            assignment = Assignment(route, samples)
            route.assignments.add(assignment)
            self._waiting.popleft()
            future.set_result(assignment)
