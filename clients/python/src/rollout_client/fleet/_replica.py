"""One replica of a fleet: where it is, what it says, and what it holds."""

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

LOOK_SECONDS = 10.0
"""How long a replica has to say how it is."""
BUSY_SECONDS = 600.0
"""How long its engine may do nothing but one thing, as a merge or a load of weights, while its server answers."""
CLOCK_SLACK_SECONDS = 0.2
"""By how much two clocks may drift between two looks."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Found:
    """Where a replica is now."""

    address: str
    instance: str = ""
    """Another one after each start, if whoever starts it can tell."""
    is_local: bool = False
    """Whether it is on this machine, and shared memory reaches it."""


class Place(Protocol):
    """Where a replica is to be found."""

    async def find(self) -> Found:
        """Its address now.

        Raises:
            Unavailable: it has none.
        """


@dataclass(frozen=True)
class FixedPlace:
    """A server that is always at the same address, whoever starts it."""

    address: str

    async def find(self) -> Found:
        """The address."""
        return Found(self.address, is_local=self.address.startswith(("127.", "localhost:", "[::1]:")))


@dataclass(frozen=True)
class Unanswered:
    """A commit that a replica has got, and whose answer was lost. The count of its pushes will tell."""

    updates: int
    """Pushes that it had applied before."""
    policy: Policy
    """What it holds if it has applied this one too."""


@dataclass(eq=False)
class Replica:
    """One server of the fleet."""

    place: Place
    route: Route
    address: str = ""
    client: AsyncRolloutClient | None = None
    reason: str = "it has not been looked for yet"
    held: Policy | None = None
    """What it serves; None is not known."""
    unanswered: Unanswered | None = None
    """Until it is known whether `held` is what was before this commit or after it."""
    may_have_dropped: bool = False
    """Whether it was told to drop its policy and has not confirmed it. Its status tells whether it has."""
    changes: int = 0
    """How often one of these three was set. A status that was asked for before tells of the time before."""
    status: ServerStatus | None = None
    """The last answer; None if there was none the last time."""
    instance: str = ""
    is_local: bool = False
    started: tuple[float, float] | None = None
    """Between which times of this process's clock its server started."""
    stuck: RolloutError | None = None
    """Why it was found to be behind for good: it waits for a push, or for somebody to mend what is wrong."""
    looked: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it looked at now."""

    def __setattr__(self, name: str, value: object) -> None:
        """Counts what is learned of its policy, whoever learns it."""
        if name in ("held", "unanswered", "may_have_dropped"):
            self.changes = getattr(self, "changes", 0) + 1
        object.__setattr__(self, name, value)

    @property
    def number(self) -> int:
        """Its place in the fleet."""
        return self.route.number

    @property
    def state(self) -> ReplicaState:
        """Whether it takes requests."""
        return self.route.state

    @property
    def is_known(self) -> bool:
        """Whether it is known what it holds."""
        return self.held is not None and self.unanswered is None and not self.may_have_dropped

    async def call(self, use: Callable[[AsyncRolloutClient], Awaitable[_T]]) -> _T:
        """Calls it.

        Raises:
            Unavailable: its connection was given up meanwhile.
            RolloutError: what it answers.
        """
        called = asyncio.ensure_future(use(self.client))
        try:
            await asyncio.wait({called})
        finally:
            called.cancel()
        if called.cancelled():  # and not whoever waits
            raise Unavailable("its connection was given up")
        return called.result()

    async def ask(self) -> ServerStatus:
        """Its status.

        Raises:
            Unavailable: it does not answer in time.
            RolloutError: what it answers.
        """
        begun = time.monotonic()
        asked = asyncio.ensure_future(self.call(lambda client: client.status()))
        try:
            while not (await asyncio.wait({asked}, timeout=LOOK_SECONDS))[0]:
                if time.monotonic() - begun >= BUSY_SECONDS:
                    raise Unavailable(f"its engine has not answered for {BUSY_SECONDS:g} s")
                # The engine answers between two of its orders, the server beside it at once.
                await asyncio.wait_for(self.call(lambda client: client.info()), LOOK_SECONDS)
            return asked.result()
        except DeadlineExceeded as error:  # of the fleet's own timeout
            raise Unavailable(str(error)) from error
        except asyncio.TimeoutError:
            raise Unavailable(f"no answer within {LOOK_SECONDS:g} s") from None
        finally:
            asked.cancel()

    def notice(self, found: Found, status: ServerStatus, asked: float) -> None:
        """Learns from its status what it holds: nothing that is known if its server is another than the last time."""
        begin, end = asked - status.uptime_seconds, time.monotonic() - status.uptime_seconds
        known = self.started
        again = known is None or found.instance != self.instance
        again = again or begin > known[1] + CLOCK_SLACK_SECONDS or end < known[0] - CLOCK_SLACK_SECONDS
        if again or (self.held is not None and status.weight_version < self.held.version):
            self.held = self.unanswered = None
        if self.unanswered is not None and not status.updating:
            if status.updates != self.unanswered.updates:
                self.held = self.unanswered.policy
            self.unanswered = None
        self.may_have_dropped = False
        self.instance, self.started = found.instance, (begin, end)
        self.is_local, self.status = found.is_local, status
