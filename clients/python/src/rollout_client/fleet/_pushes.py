"""Pushes into all replicas: who takes part, the barrier around the commit, and what a push has come to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from .. import _convert_weights, _proto
from .._http2 import ClientStream
from ..aio import AsyncRolloutClient
from ..client import RolloutClient
from ..errors import (
    Aborted,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NotFound,
    RolloutError,
    Unavailable,
)
from ..options import PushKind
from ..types import UpdateResult
from ._fanout import FanOut
from ._policy import UNPROVED, Change, Policy, Redo
from ._replica import Replica, Unanswered
from ._roster import Roster
from .types import FleetReceipt, PartialCommit, ReplicaReceipt, ReplicaState

PREPARE_SECONDS = 10.0
"""How long a replica has, before the commit, to say that it holds the push open."""
PREPARE_POLL_SECONDS = 0.02

# Errors of a commit that may have been applied all the same: not the server's own no.
_NO_ANSWER = (Unavailable, Cancelled, DeadlineExceeded, Internal)


@dataclass(frozen=True)
class Wanted:
    """What a caller wants to push."""

    kind: PushKind
    name: str | None
    """Under which an adapter is to become resident."""
    version: int | None
    expected: int | None
    """The version that the fleet's policy must have."""
    force: bool
    """Whether the version may go back or repeat."""


@dataclass(eq=False)
class Pushing:
    """One push of the fleet, from `begin` to `end`."""

    wanted: Wanted
    change: Change | None = None
    """What it makes of the policy; from its turn on."""
    targets: Sequence[Replica] = ()
    """Those that can be reached, and that come to the fleet's policy by this push."""
    clients: dict[int, RolloutClient] = field(default_factory=dict)
    """Whose calls the push makes, in the caller's thread."""
    fan_out: FanOut | None = None
    gate_closed: bool = False
    updates: dict[int, int] = field(default_factory=dict)
    """Pushes that each replica had applied before the commit."""
    waiting: asyncio.Task[None] | None = None
    """What waits for the turn, and for what has to be known then."""
    has_turn: bool = False
    cancelled: bool = False
    ended: bool = False

    @property
    def is_local(self) -> bool:
        """Whether shared memory reaches all of them."""
        return all(replica.is_local for replica in self.targets)


class Pushes:
    """One push at a time. What is a coroutine here runs in the fleet's loop, everything else in the caller's thread."""

    def __init__(self, roster: Roster, connect: Callable[[str], RolloutClient]) -> None:
        """`connect` makes a blocking client of an address."""
        self._roster, self._connect = roster, connect
        self._now: Pushing | None = None
        roster.on_lost = self._lost

    async def begin(self, pushing: Pushing) -> None:
        """Waits for its turn, while a replica catches up.

        Raises:
            Aborted: another push is under way, or the fleet has another version than the expected one.
            FailedPrecondition: the version goes back or repeats.
            Cancelled: by `cancel`.
            RolloutError: too few replicas can take part; of the class that says why.
        """
        roster = self._roster
        if pushing.cancelled:
            raise _cancelled()
        if roster.pushing:
            raise Aborted("another push of this fleet is under way; try again when it has ended, or call cancel_update")
        roster.pushing, self._now = True, pushing
        try:
            await self._turn(pushing)
            self._admit(pushing)
        except BaseException:
            self._leave(pushing)
            raise

    async def _turn(self, pushing: Pushing) -> None:
        pushing.waiting = asyncio.current_task()
        try:
            await self._roster.updating.acquire()
            pushing.has_turn = True
            await self._roster.settle()
        except asyncio.CancelledError:
            if pushing.cancelled:
                raise _cancelled() from None
            raise
        finally:
            pushing.waiting = None

    def _admit(self, pushing: Pushing) -> None:
        """Decides who takes part."""
        roster = self._roster
        if roster.policy is None:
            raise Unavailable(f"no replica was found yet: {roster.describe()}")
        pushing.change = self._change(pushing.wanted, roster.policy.version)
        pushing.targets = [
            replica
            for replica in roster.replicas
            if replica.state is not ReplicaState.LOST and self._fits(pushing, replica)
        ]
        if len(pushing.targets) < roster.quorum:
            raise Unavailable(
                f"a push needs {roster.quorum} of {len(roster.replicas)} replicas, and {len(pushing.targets)} can take "
                f"it; the policy is as it was ({roster.describe()})"
            )
        pushing.clients = {replica.number: self._connect(replica.address) for replica in pushing.targets}

    def _fits(self, pushing: Pushing, replica: Replica) -> bool:
        """Whether a replica comes to the fleet's policy by a push."""
        return pushing.change.fits(replica.held if replica.is_known else None, self._roster.policy)

    def _leave(self, pushing: Pushing) -> None:
        """Lets groups, and others who change the policy, begin again."""
        roster = self._roster
        if pushing.ended:
            return
        pushing.ended = True
        self._now, roster.pushing = None, False
        if pushing.gate_closed:
            roster.router.open_gate()
        if pushing.has_turn:
            roster.updating.release()
            roster.look_again()

    def give_up(self, pushing: Pushing) -> None:
        """Ends a push whose sender has left before it began to send."""
        self.cancel(pushing)
        if pushing.has_turn:
            self._leave(pushing)

    def _change(self, wanted: Wanted, now: int) -> Change:
        if wanted.expected not in (None, now):
            raise Aborted(f"expected_version: the fleet's policy has version {now}, not {wanted.expected}")
        version = now + 1 if wanted.version is None else wanted.version
        if wanted.name is None and not wanted.force and version <= now and not self._roster.dropped:
            raise FailedPrecondition(
                f"version: {version} is not above {now}, which the fleet's policy has; to go back or repeat, say "
                "force_version=True"
            )
        return Change(wanted.kind, version, wanted.name)

    def start_call(self, pushing: Pushing, timeout: float | None, run: Callable[..., object]) -> FanOut:
        """The calls of a push; once more where what lies in shared memory cannot be seen by a replica."""

        def start(client: RolloutClient) -> Callable[[], ClientStream]:
            return lambda: client._pusher.start(timeout)

        class Barrier:
            def prepare(_, numbers: list[int]) -> dict[int, RolloutError]:
                return run(self._prepare(pushing, numbers))

        starts = {number: start(client) for number, client in pushing.clients.items()}
        pushing.fan_out = FanOut(starts, self._roster.quorum, Barrier())
        if pushing.cancelled:
            pushing.fan_out.cancel()
        return pushing.fan_out

    async def end(self, pushing: Pushing, redo: Redo | None) -> FleetReceipt | None:
        """Notes what the push has come to, and lets groups begin again.

        Returns:
            The receipt; None if no replica has committed it.

        Raises:
            PartialCommit: fewer replicas than the quorum have.
        """
        roster = self._roster
        try:
            fan_out = pushing.fan_out
            results = {
                number: _convert_weights.update_result(_proto.UPDATE.response.FromString(response))
                for number, response in (fan_out.responses if fan_out is not None else {}).items()
            }
            errors: dict[int, RolloutError] = dict(fan_out.errors) if fan_out is not None else {}
            if fan_out is not None:
                self._note_unanswered(pushing, fan_out.committing - results.keys(), errors)
            if not results:
                return None
            digest, _ = Counter(result.digest for result in results.values()).most_common(1)[0]
            for number in [n for n, result in results.items() if result.digest != digest]:
                errors[number] = DataLoss(f"it reports the digest {results.pop(number).digest}, others {digest}")
                roster.replicas[number].held = None
            self._apply(pushing, results, errors, digest, redo)
            receipt = self._receipt(pushing, results, errors, digest)
            if len(results) < roster.quorum:
                raise PartialCommit(
                    f"version {receipt.weight_version} is committed, but only by {len(results)} of the quorum of "
                    f"{roster.quorum} replicas: {roster.describe()}",
                    receipt,
                )
            return receipt
        finally:
            self._leave(pushing)

    async def drop(self, pushing: Pushing, roll_back: Callable[[], None]) -> None:
        """Rolls back a push whose sender does not refer to it any more."""
        try:
            await asyncio.to_thread(roll_back)
            for client in pushing.clients.values():
                await asyncio.to_thread(client.close)
        finally:
            self._leave(pushing)

    def cancel(self, pushing: Pushing | None = None) -> None:
        """Ends a push; None is the one that is under way."""
        pushing = self._now if pushing is None else pushing
        if pushing is None or pushing.ended:
            return
        pushing.cancelled = True
        if pushing.waiting is not None:
            pushing.waiting.cancel()
        if pushing.fan_out is not None:
            pushing.fan_out.cancel()

    async def remove_adapter(self, name: str) -> None:
        """Takes a resident adapter out of the policy, and off all replicas that can be reached."""
        roster = self._roster
        async with roster.turn():
            if roster.policy is None or name not in dict(roster.policy.residents):
                raise NotFound(f"adapter: the fleet has no resident adapter {name!r}")
            roster.memory.residents.pop(name, None)
            roster.policy = roster.policy.without(name)

            async def remove(client: AsyncRolloutClient) -> None:
                with contextlib.suppress(NotFound):
                    await client.remove_adapter(name)

            for number in await roster.each(remove):
                replica = roster.replicas[number]
                replica.held = None if replica.held is None else replica.held.without(name)

    async def _prepare(self, pushing: Pushing, numbers: list[int]) -> dict[int, RolloutError]:
        """Closes the gate, and asks whether each replica holds the push open, on what it is a push to."""
        if not pushing.gate_closed:
            pushing.gate_closed = True
            self._roster.router.close_gate()
        asked = [self._is_ready(pushing, self._roster.replicas[number]) for number in numbers]
        return {
            number: error
            for number, error in zip(numbers, await asyncio.gather(*asked), strict=True)
            if error is not None
        }

    async def _is_ready(self, pushing: Pushing, replica: Replica) -> RolloutError | None:
        deadline = time.monotonic() + PREPARE_SECONDS
        try:
            while True:
                status = await self._roster.ask(replica)
                if not self._fits(pushing, replica):
                    return Unavailable("it has started again, or has dropped its policy, since the push began")
                pushing.updates[replica.number] = status.updates
                # The header may still be on its way; a call that has ended is noticed after this, with its own error.
                if status.update is not None or pushing.fan_out.has_ended(replica.number):
                    return None
                if time.monotonic() >= deadline:
                    return Unavailable(f"it does not hold the push open after {PREPARE_SECONDS:g} s")
                await asyncio.sleep(PREPARE_POLL_SECONDS)
        except RolloutError as error:
            return error

    def _note_unanswered(self, pushing: Pushing, numbers: Collection[int], errors: dict[int, RolloutError]) -> None:
        """Of replicas whose answer to the commit was lost it is to be found out whether they have applied it."""
        for number in numbers:
            replica, error = self._roster.replicas[number], errors.get(number)
            if error is not None and not isinstance(error, _NO_ANSWER):
                continue
            after = pushing.change.applied(replica.held or Policy(0, ""), UNPROVED)
            replica.unanswered = Unanswered(pushing.updates[number], after)
            if replica.state is not ReplicaState.LOST:
                self._roster.set_state(replica, ReplicaState.BEHIND, "its answer to the commit was lost")

    def _apply(
        self,
        pushing: Pushing,
        results: dict[int, UpdateResult],
        errors: dict[int, RolloutError],
        digest: str,
        redo: Redo | None,
    ) -> None:
        """The push is the fleet's policy: replicas that have it are current, and no others."""
        roster, change = self._roster, pushing.change
        roster.policy = change.applied(roster.policy, digest)
        roster.memory.note(change, redo)
        roster.dropped = roster.dropped and change.name is not None
        for replica in roster.replicas:
            if replica.number in results:
                replica.held, replica.unanswered = change.applied(replica.held or Policy(0, ""), digest), None
            if replica.number in results and replica.held == roster.policy:
                roster.set_state(replica, ReplicaState.CURRENT)
            elif replica.state is not ReplicaState.LOST:
                error = errors.get(replica.number, "it could not take part")
                reason = f"it missed version {roster.policy.version}: {error}"
                roster.set_state(replica, ReplicaState.BEHIND, reason)

    def _receipt(
        self, pushing: Pushing, results: dict[int, UpdateResult], errors: dict[int, RolloutError], digest: str
    ) -> FleetReceipt:
        replicas = []
        for replica in self._roster.replicas:
            result, error = results.get(replica.number), errors.get(replica.number, replica.reason)
            found = None if result is None else result.digest
            replicas.append(
                ReplicaReceipt(replica.number, replica.address, found, result, "" if result is not None else str(error))
            )
        first = results[min(results)]
        return FleetReceipt(
            weight_version=first.weight_version,
            digest=digest,
            parameters=first.parameters,
            bytes=first.bytes,
            pause_ms=max(result.pause_ms for result in results.values()),
            staging_ms=max(result.staging_ms for result in results.values()),
            pending=any(result.pending for result in results.values()),
            adapter_generation=first.adapter_generation,
            replicas=tuple(replicas),
        )

    def _lost(self, number: int, error: RolloutError) -> None:
        """A replica that is lost can hold up a push no longer."""
        if self._now is not None and self._now.fan_out is not None:
            self._now.fan_out.drop(number, error)


def _cancelled() -> Cancelled:
    return Cancelled("the push was cancelled on this side")
