"""One replica of a fleet: its address, its status and its policy."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from ..aio import AsyncRolloutClient
from ..errors import DeadlineExceeded, RolloutError, Unavailable
from ..status import ServerStatus
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


@dataclass(frozen=True)
class KnownPolicy:
    """A replica's policy, as far as the fleet knows it."""

    held: Policy | None = None
    """The policy that it serves; None if unknown."""
    unconfirmed: UnconfirmedCommit | None = None
    """Set until it is known whether `held` is the policy before or after this commit."""
    may_have_dropped: bool = False
    """Whether an unconfirmed sleep of level 2 may have dropped the policy; the replica's status will show."""

    @property
    def is_certain(self) -> bool:
        """Whether the replica serves `held` for certain."""
        return self.held is not None and self.unconfirmed is None and not self.may_have_dropped


@dataclass(eq=False)
class Replica:
    """One server of the fleet."""

    endpoint: Endpoint
    route: Route
    address: str = ""
    client: AsyncRolloutClient | None = None
    reason: str = "it has not been looked for yet"
    known: KnownPolicy = KnownPolicy()
    """Replaced by each change. A status that was requested before the change is out of date."""
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

    @property
    def number(self) -> int:
        """Its index in the fleet."""
        return self.route.number

    @property
    def state(self) -> ReplicaState:
        """Whether it takes requests."""
        return self.route.state

    @property
    def held(self) -> Policy | None:
        """The policy that it serves; None if unknown."""
        return self.known.held

    def set_held(self, policy: Policy | None) -> None:
        """Sets the policy that it serves; the other facts about its policy stay."""
        self.known = replace(self.known, held=policy)

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
        known, started = self.known, self.started
        restarted = started is None or found.instance != self.instance
        restarted = restarted or begin > started[1] + CLOCK_SLACK_SECONDS or end < started[0] - CLOCK_SLACK_SECONDS
        if restarted or (known.held is not None and status.weight_version < known.held.version):
            known = KnownPolicy()
        if known.unconfirmed is not None and not status.updating:
            was_applied = status.updates != known.unconfirmed.updates
            known = KnownPolicy(known.unconfirmed.policy if was_applied else known.held)
        self.known = replace(known, may_have_dropped=False)
        self.instance, self.started = found.instance, (begin, end)
        self.is_local, self.status = found.is_local, status
