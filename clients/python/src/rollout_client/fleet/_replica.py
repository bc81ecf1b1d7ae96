"""One replica of a fleet: its address, its status and its policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from ..aio import AsyncRolloutClient
from ..errors import DeadlineExceeded, RolloutError, Unavailable
from ..types import ServerStatus
from ._policy import Policy
from ._router import Route
from .types import ReplicaState

STATUS_SECONDS = 10.0
"""Time limit of a replica's status."""
BUSY_SECONDS = 600.0
"""The longest that one operation, such as a merge, may occupy its engine while its server answers."""
CLOCK_SLACK_SECONDS = 0.2
"""How far two clocks may drift between two checks."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class ResolvedEndpoint:
    """The address of a replica now."""

    address: str
    instance: str = ""
    """Changes with each start, if that is known; else empty."""
    is_local: bool = False
    """Whether it is on this machine, and can read its shared memory."""


class Endpoint(Protocol):
    """Finds the address of a replica."""

    async def resolve(self) -> ResolvedEndpoint:
        """The address now.

        Raises:
            Unavailable: it has no address.
        """


@dataclass(frozen=True)
class FixedEndpoint:
    """A server whose address does not change."""

    address: str

    async def resolve(self) -> ResolvedEndpoint:
        """Returns the address."""
        return ResolvedEndpoint(self.address, is_local=self.address.startswith(("127.", "localhost:", "[::1]:")))


@dataclass(frozen=True)
class UnconfirmedCommit:
    """A commit whose answer was lost. The replica's count of pushes will show whether it was applied."""

    updates: int
    """The number of pushes that it had applied before."""
    policy: Policy
    """The policy that it has if it has applied this one too."""


@dataclass(eq=False)
class Replica:
    """One server of the fleet."""

    endpoint: Endpoint
    route: Route
    address: str = ""
    client: AsyncRolloutClient | None = None
    reason: str = "it has not been looked for yet"
    held: Policy | None = None
    """The policy that it serves; None if unknown."""
    unconfirmed: UnconfirmedCommit | None = None
    """Set until it is known whether `held` is the policy before or after this commit."""
    may_have_dropped: bool = False
    """Whether an unconfirmed sleep of level 2 may have dropped its policy; its status will show."""
    changes: int = 0
    """How often one of these three was set. A status that was requested before such a change is out of date."""
    status: ServerStatus | None = None
    """The last status; None if the last request for it failed."""
    instance: str = ""
    is_local: bool = False
    started: tuple[float, float] | None = None
    """The earliest and latest time, by this process's clock, at which its server started."""
    stuck: RolloutError | None = None
    """The error that keeps it behind until a push or an operator resolves it; None otherwise."""
    check_now: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to check it now."""

    def __setattr__(self, name: str, value: object) -> None:
        """Counts the changes of what is known about its policy."""
        if name in ("held", "unconfirmed", "may_have_dropped"):
            self.changes = getattr(self, "changes", 0) + 1
        object.__setattr__(self, name, value)

    @property
    def number(self) -> int:
        """Its index in the fleet."""
        return self.route.number

    @property
    def state(self) -> ReplicaState:
        """Whether it takes requests."""
        return self.route.state

    @property
    def is_known(self) -> bool:
        """Whether its policy is known."""
        return self.held is not None and self.unconfirmed is None and not self.may_have_dropped

    async def call(self, use: Callable[[AsyncRolloutClient], Awaitable[_T]]) -> _T:
        """Calls the replica.

        Raises:
            Unavailable: its client was closed meanwhile.
            RolloutError: the call failed.
        """
        called = asyncio.ensure_future(use(self.client))
        try:
            await asyncio.wait({called})
        finally:
            called.cancel()
        if called.cancelled():  # by the close of the client, not with this task
            raise Unavailable("its connection was closed")
        return called.result()

    async def ask(self) -> ServerStatus:
        """Requests its status.

        Raises:
            Unavailable: it does not answer in time.
            RolloutError: the call failed.
        """
        begun = time.monotonic()
        asked = asyncio.ensure_future(self.call(lambda client: client.status()))
        try:
            while not (await asyncio.wait({asked}, timeout=STATUS_SECONDS))[0]:
                if time.monotonic() - begun >= BUSY_SECONDS:
                    raise Unavailable(f"its engine has not answered for {BUSY_SECONDS:g} s")
                # The engine answers between two operations, the server at once.
                await asyncio.wait_for(self.call(lambda client: client.info()), STATUS_SECONDS)
            return asked.result()
        except DeadlineExceeded as error:  # of the fleet's own timeout
            raise Unavailable(str(error)) from error
        except asyncio.TimeoutError:
            raise Unavailable(f"no answer within {STATUS_SECONDS:g} s") from None
        finally:
            asked.cancel()

    def observe(self, found: ResolvedEndpoint, status: ServerStatus, asked: float) -> None:
        """Updates what is known about its policy from its status; forgets it if the server has restarted."""
        begin, end = asked - status.uptime_seconds, time.monotonic() - status.uptime_seconds
        known = self.started
        again = known is None or found.instance != self.instance
        again = again or begin > known[1] + CLOCK_SLACK_SECONDS or end < known[0] - CLOCK_SLACK_SECONDS
        if again or (self.held is not None and status.weight_version < self.held.version):
            self.held = self.unconfirmed = None
        if self.unconfirmed is not None and not status.updating:
            if status.updates != self.unconfirmed.updates:
                self.held = self.unconfirmed.policy
            self.unconfirmed = None
        self.may_have_dropped = False
        self.instance, self.started = found.instance, (begin, end)
        self.is_local, self.status = found.is_local, status
