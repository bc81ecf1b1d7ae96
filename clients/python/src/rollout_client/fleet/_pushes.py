"""Pushes into all replicas: who takes part, the barrier around the commit, and what a push has come to."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from .. import _convert_weights, _proto
from .._http2 import ClientStream
from ..aio import AsyncRolloutClient
from ..client import RolloutClient
from ..errors import Aborted, DataLoss, FailedPrecondition, NotFound, RolloutError, Unavailable
from ..options import PushKind
from ..types import Lifecycle, UpdateResult
from ._fanout import FanOut
from ._policy import Change, Policy, Redo
from ._replicas import LOOK_SECONDS, Replica, Roster, silent
from .types import FleetReceipt, PartialCommit, ReplicaReceipt, ReplicaState

PREPARE_SECONDS = 10.0
"""How long a replica has, before the commit, to say that it holds the push open."""
PREPARE_POLL_SECONDS = 0.02


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

    change: Change
    targets: list[Replica]
    """Those that can be reached, and that come to the fleet's policy by this push."""
    clients: dict[int, RolloutClient] = field(default_factory=dict)
    """Whose calls the push makes, in the caller's thread."""
    fan_out: FanOut | None = None
    gate_closed: bool = False

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

    async def begin(self, wanted: Wanted) -> Pushing:
        """Waits for its turn.

        Raises:
            Aborted: the fleet has another version than the expected one.
            FailedPrecondition: the version goes back or repeats.
            RolloutError: too few replicas can take part; of the class that says why.
        """
        roster = self._roster
        await roster.updating.acquire()
        try:
            if roster.policy is None:
                raise Unavailable(f"no replica was found yet: {roster.describe()}")
            change = self._change(wanted, roster.policy.version)
            targets = [
                replica
                for replica in roster.replicas
                if replica.state is not ReplicaState.LOST and change.fits(replica.held, roster.policy)
            ]
            if len(targets) < roster.quorum:
                raise Unavailable(
                    f"a push needs {roster.quorum} of {len(roster.replicas)} replicas, and {len(targets)} can take it; "
                    f"the policy is as it was ({roster.describe()})"
                )
            self._now = Pushing(change, targets, {r.number: self._connect(r.address) for r in targets})
            roster.pushing = True
            return self._now
        except BaseException:
            roster.updating.release()
            raise

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
            return lambda: client._start_update(timeout)

        class Barrier:
            def prepare(_, numbers: list[int]) -> dict[int, RolloutError]:
                return run(self._prepare(pushing, numbers))

        starts = {number: start(client) for number, client in pushing.clients.items()}
        pushing.fan_out = FanOut(starts, self._roster.quorum, Barrier())
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
            if fan_out is not None and fan_out.committing:
                await self._note_unknown(pushing, results)
            if not results:
                return None
            digest, _ = Counter(result.digest for result in results.values()).most_common(1)[0]
            for number in [n for n, result in results.items() if result.digest != digest]:
                errors[number] = DataLoss(f"it reports the digest {results.pop(number).digest}, others {digest}")
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
            self._now, roster.pushing = None, False
            if pushing.gate_closed:
                roster.router.open_gate()
            roster.updating.release()
            roster.look_again()

    def cancel(self) -> None:
        """Ends the push that is under way."""
        if self._now is not None and self._now.fan_out is not None:
            self._now.fan_out.cancel()

    async def remove_adapter(self, name: str) -> None:
        """Takes a resident adapter out of the policy, and off all replicas that can be reached."""
        roster = self._roster
        async with roster.updating:
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
        """Closes the gate, and asks whether each replica holds the push open and goes on serving."""
        if not pushing.gate_closed:
            pushing.gate_closed = True
            self._roster.router.close_gate()
        asked = [self._is_ready(self._roster.replicas[number]) for number in numbers]
        return {
            number: error
            for number, error in zip(numbers, await asyncio.gather(*asked), strict=True)
            if error is not None
        }

    async def _is_ready(self, replica: Replica) -> RolloutError | None:
        deadline = time.monotonic() + PREPARE_SECONDS
        try:
            while True:
                status = await asyncio.wait_for(replica.client.status(), LOOK_SECONDS)
                if status.lifecycle is Lifecycle.SHUTTING_DOWN:
                    return Unavailable("it is shutting down")
                # The header may still be on its way; a call that has ended is noticed after this, with its own error.
                if status.update is not None or self._now.fan_out.has_ended(replica.number):
                    return None
                if time.monotonic() >= deadline:
                    return Unavailable(f"it does not hold the push open after {PREPARE_SECONDS:g} s")
                await asyncio.sleep(PREPARE_POLL_SECONDS)
        except asyncio.TimeoutError:
            return silent()
        except RolloutError as error:
            return error

    async def _note_unknown(self, pushing: Pushing, results: dict[int, UpdateResult]) -> None:
        """Of replicas whose answer to the commit was lost: those that have it all the same are out until verified."""
        for replica in pushing.targets:
            if replica.number in results or replica.state is ReplicaState.LOST:
                continue
            try:
                status = await asyncio.wait_for(replica.client.status(), LOOK_SECONDS)
            except (RolloutError, asyncio.TimeoutError) as error:
                self._roster.lost(replica, error if isinstance(error, RolloutError) else silent())
                continue
            if replica.held is not None and status.weight_version != replica.held.version:
                replica.status = status
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
                replica.held = change.applied(replica.held or Policy(0, ""), digest)
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
