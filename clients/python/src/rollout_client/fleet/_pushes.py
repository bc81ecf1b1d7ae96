"""Pushes into all replicas: which take part, the barrier around the commit, and the receipt."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

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
from ._policy import UNPROVED, Change, Policy, Repush
from ._replica import Replica, UnconfirmedCommit
from ._replica_set import ReplicaSet
from .types import FleetReceipt, PartialCommit, ReplicaReceipt, ReplicaState

PREPARE_SECONDS = 10.0
"""Time limit of a replica to confirm, before the commit, that the push is open on it."""
PREPARE_POLL_SECONDS = 0.02

# Errors after which a commit may still have been applied: they are not the server's refusal.
_NO_ANSWER = (Unavailable, Cancelled, DeadlineExceeded, Internal)


@dataclass(frozen=True)
class PushRequest:
    """The parameters of a push."""

    kind: PushKind
    name: str | None
    """The name of an adapter that becomes resident."""
    version: int | None
    expected: int | None
    """The version that the fleet's policy must have."""
    force: bool
    """Whether the version may be at or below the current one."""


@dataclass(eq=False)
class OpenPush:
    """One push of the fleet, from `begin` to `end`."""

    request: PushRequest
    change: Change | None = None
    """Its effect on the policy; known from its turn on."""
    targets: Sequence[Replica] = ()
    """The replicas that can be reached and that get the fleet's policy by this push."""
    clients: dict[int, RolloutClient] = field(default_factory=dict)
    """The clients of the push's calls, used in the caller's thread."""
    fan_out: FanOut | None = None
    gate_closed: bool = False
    updates: dict[int, int] = field(default_factory=dict)
    """The number of pushes that each replica had applied before the commit."""
    waiting: asyncio.Task[None] | None = None
    """The task that waits for the turn."""
    has_turn: bool = False
    cancelled: bool = False
    ended: bool = False

    @property
    def is_local(self) -> bool:
        """Whether all targets can read this host's shared memory."""
        return all(replica.is_local for replica in self.targets)


class Pushes:
    """Runs one push at a time: coroutines in the fleet's loop, other methods in the caller's thread."""

    def __init__(self, replica_set: ReplicaSet, connect: Callable[[str], RolloutClient]) -> None:
        """`connect` returns a blocking client for an address."""
        self._replica_set, self._connect = replica_set, connect
        self._open: OpenPush | None = None
        replica_set.on_lost = self._lost

    async def begin(self, push: OpenPush) -> None:
        """Waits for its turn, for example while a replica catches up.

        Raises:
            Aborted: another push is open, or the fleet has another version than the expected one.
            FailedPrecondition: the version goes back or repeats.
            Cancelled: by `cancel`.
            RolloutError: too few replicas can take part; of the class that says why.
        """
        replica_set = self._replica_set
        if push.cancelled:
            raise _cancelled()
        if replica_set.push_is_open:
            raise Aborted("another push of this fleet is open; retry after its end, or call cancel_update")
        replica_set.push_is_open, self._open = True, push
        try:
            await self._turn(push)
            self._admit(push)
        except BaseException:
            self._leave(push)
            raise

    async def _turn(self, push: OpenPush) -> None:
        push.waiting = asyncio.current_task()
        try:
            await self._replica_set.updating.acquire()
            push.has_turn = True
            await self._replica_set.resolve_unconfirmed()
        except asyncio.CancelledError:
            if push.cancelled:
                raise _cancelled() from None
            raise
        finally:
            push.waiting = None

    def _admit(self, push: OpenPush) -> None:
        """Decides which replicas take part."""
        replica_set = self._replica_set
        if replica_set.policy is None:
            raise Unavailable(f"no replica was found yet: {replica_set.describe()}")
        push.change = self._change(push.request, replica_set.policy.version)
        push.targets = [
            replica
            for replica in replica_set.replicas
            if replica.state is not ReplicaState.LOST and self._fits(push, replica)
        ]
        if len(push.targets) < replica_set.quorum:
            raise Unavailable(
                f"a push needs {replica_set.quorum} of {len(replica_set.replicas)} replicas, and "
                f"{len(push.targets)} can take it; the policy is as it was ({replica_set.describe()})"
            )
        push.clients = {replica.number: self._connect(replica.address) for replica in push.targets}

    def _fits(self, push: OpenPush, replica: Replica) -> bool:
        """Whether a push gives a replica the fleet's policy."""
        return push.change.fits(replica.held if replica.known.is_certain else None, self._replica_set.policy)

    def _leave(self, push: OpenPush) -> None:
        """Lets groups start, and other changes of the policy begin."""
        replica_set = self._replica_set
        if push.ended:
            return
        push.ended = True
        self._open, replica_set.push_is_open = None, False
        if push.gate_closed:
            replica_set.router.open_gate()
        if push.has_turn:
            replica_set.updating.release()
            replica_set.recheck()

    def withdraw(self, push: OpenPush) -> None:
        """Ends a push whose caller was interrupted before it sent anything."""
        self.cancel(push)
        if push.has_turn:
            self._leave(push)

    def _change(self, request: PushRequest, now: int) -> Change:
        if request.expected not in (None, now):
            raise Aborted(f"expected_version: the fleet's policy has version {now}, not {request.expected}")
        version = now + 1 if request.version is None else request.version
        if request.name is None and not request.force and version <= now and not self._replica_set.dropped:
            raise FailedPrecondition(
                f"version: {version} is not above {now}, the version of the fleet's policy; to push it anyway, pass "
                "force_version=True"
            )
        return Change(request.kind, version, request.name)

    def start_call(self, push: OpenPush, timeout: float | None, run: Callable[..., object]) -> FanOut:
        """Starts the calls of a push; again if a replica cannot read the shared memory."""

        def start(client: RolloutClient) -> Callable[[], ClientStream]:
            return lambda: client._pusher.start(timeout)

        class Barrier:
            def prepare(_, numbers: list[int]) -> dict[int, RolloutError]:
                return run(self._prepare(push, numbers))

        starts = {number: start(client) for number, client in push.clients.items()}
        push.fan_out = FanOut(starts, self._replica_set.quorum, Barrier())
        if push.cancelled:
            push.fan_out.cancel()
        return push.fan_out

    async def end(self, push: OpenPush, repush: Repush | None) -> FleetReceipt | None:
        """Records the result of the push, and lets groups start again.

        Returns:
            The receipt; None if no replica has committed it.

        Raises:
            PartialCommit: fewer replicas than the quorum have.
        """
        replica_set = self._replica_set
        try:
            fan_out = push.fan_out
            results = {
                number: _convert_weights.update_result(_proto.UPDATE.response.FromString(response))
                for number, response in (fan_out.responses if fan_out is not None else {}).items()
            }
            errors: dict[int, RolloutError] = dict(fan_out.errors) if fan_out is not None else {}
            if fan_out is not None:
                self._note_unconfirmed(push, fan_out.committing - results.keys(), errors)
            if not results:
                return None
            digest, _ = Counter(result.digest for result in results.values()).most_common(1)[0]
            for number in [n for n, result in results.items() if result.digest != digest]:
                errors[number] = DataLoss(f"it reports the digest {results.pop(number).digest}, others {digest}")
                replica_set.replicas[number].set_held(None)
            self._apply(push, results, errors, digest, repush)
            receipt = self._receipt(push, results, errors, digest)
            if len(results) < replica_set.quorum:
                raise PartialCommit(
                    f"version {receipt.weight_version} is committed, but only by {len(results)} of the quorum of "
                    f"{replica_set.quorum} replicas: {replica_set.describe()}",
                    receipt,
                )
            return receipt
        finally:
            self._leave(push)

    async def drop(self, push: OpenPush, roll_back: Callable[[], None]) -> None:
        """Rolls back a push that was garbage-collected."""
        try:
            await asyncio.to_thread(roll_back)
            for client in push.clients.values():
                await asyncio.to_thread(client.close)
        finally:
            self._leave(push)

    def cancel(self, push: OpenPush | None = None) -> None:
        """Ends a push; None is the one that is open."""
        push = self._open if push is None else push
        if push is None or push.ended:
            return
        push.cancelled = True
        if push.waiting is not None:
            push.waiting.cancel()
        if push.fan_out is not None:
            push.fan_out.cancel()

    async def remove_adapter(self, name: str) -> None:
        """Removes a resident adapter from the policy, and from all replicas that can be reached."""
        replica_set = self._replica_set
        async with replica_set.exclusive():
            if replica_set.policy is None or name not in dict(replica_set.policy.residents):
                raise NotFound(f"adapter: the fleet has no resident adapter {name!r}")
            replica_set.history.residents.pop(name, None)
            replica_set.policy = replica_set.policy.without(name)

            async def remove(client: AsyncRolloutClient) -> None:
                with contextlib.suppress(NotFound):
                    await client.remove_adapter(name)

            for number in await replica_set.each(remove):
                replica = replica_set.replicas[number]
                replica.set_held(None if replica.held is None else replica.held.without(name))

    async def _prepare(self, push: OpenPush, numbers: list[int]) -> dict[int, RolloutError]:
        """Closes the gate, and asks each replica whether the push is open on it, on the policy that it builds on."""
        if not push.gate_closed:
            push.gate_closed = True
            self._replica_set.router.close_gate()
        asked = [self._is_ready(push, self._replica_set.replicas[number]) for number in numbers]
        return {
            number: error
            for number, error in zip(numbers, await asyncio.gather(*asked), strict=True)
            if error is not None
        }

    async def _is_ready(self, push: OpenPush, replica: Replica) -> RolloutError | None:
        deadline = time.monotonic() + PREPARE_SECONDS
        try:
            while True:
                status = await self._replica_set.ask(replica)
                if not self._fits(push, replica):
                    return Unavailable("it has started again, or has dropped its policy, since the push began")
                push.updates[replica.number] = status.updates
                # The header may not have arrived yet. A call that has ended raises its own error later.
                if status.update is not None or push.fan_out.has_ended(replica.number):
                    return None
                if time.monotonic() >= deadline:
                    return Unavailable(f"it does not hold the push open after {PREPARE_SECONDS:g} s")
                await asyncio.sleep(PREPARE_POLL_SECONDS)
        except RolloutError as error:
            return error

    def _note_unconfirmed(self, push: OpenPush, numbers: Collection[int], errors: dict[int, RolloutError]) -> None:
        """Marks the replicas that may or may not have applied the commit, because their answer was lost."""
        for number in numbers:
            replica, error = self._replica_set.replicas[number], errors.get(number)
            if error is not None and not isinstance(error, _NO_ANSWER):
                continue
            after = push.change.applied(replica.held or Policy(0, ""), UNPROVED)
            replica.known = replace(replica.known, unconfirmed=UnconfirmedCommit(push.updates[number], after))
            if replica.state is not ReplicaState.LOST:
                self._replica_set.set_state(replica, ReplicaState.BEHIND, "its answer to the commit was lost")

    def _apply(
        self,
        push: OpenPush,
        results: dict[int, UpdateResult],
        errors: dict[int, RolloutError],
        digest: str,
        repush: Repush | None,
    ) -> None:
        """Makes the push the fleet's policy: replicas that have it are current, and no others."""
        replica_set, change = self._replica_set, push.change
        replica_set.policy = change.applied(replica_set.policy, digest)
        replica_set.history.record(change, repush)
        replica_set.dropped = replica_set.dropped and change.name is not None
        for replica in replica_set.replicas:
            if replica.number in results:
                after = change.applied(replica.held or Policy(0, ""), digest)
                replica.known = replace(replica.known, held=after, unconfirmed=None)
            if replica.number in results and replica.held == replica_set.policy:
                replica_set.set_state(replica, ReplicaState.CURRENT)
            elif replica.state is not ReplicaState.LOST:
                error = errors.get(replica.number, "it could not take part")
                reason = f"it missed version {replica_set.policy.version}: {error}"
                replica_set.set_state(replica, ReplicaState.BEHIND, reason)

    def _receipt(
        self, push: OpenPush, results: dict[int, UpdateResult], errors: dict[int, RolloutError], digest: str
    ) -> FleetReceipt:
        replicas = []
        for replica in self._replica_set.replicas:
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
        """Leaves a lost replica out of the push, so that it does not delay it."""
        if self._open is not None and self._open.fan_out is not None:
            self._open.fan_out.drop(number, error)


def _cancelled() -> Cancelled:
    return Cancelled("the push was cancelled by this client")
