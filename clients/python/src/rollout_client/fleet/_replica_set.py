"""The replicas of a fleet, their states, and how they catch up with what they missed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..aio import AsyncRolloutClient
from ..errors import DataLoss, FailedPrecondition, RolloutError, Unavailable
from ..status import ServerStatus
from ..types import Lifecycle
from ._policy import Policy, PushHistory, digest_of_parameters
from ._replica import STATUS_SECONDS, Endpoint, Replica
from ._router import Route, Router
from .types import ReplicaState

HEALTHY_POLL_SECONDS = 2.0
"""How often a current replica is checked. Requests notice a broken connection at once."""
LOST_POLL_SECONDS = 0.5
"""How often a lost replica is checked."""

_T = TypeVar("_T")


class ReplicaSet:
    """All replicas, and the policy that they should have. Owned by one event loop."""

    def __init__(
        self, endpoints: Sequence[Endpoint], capacity: int, connect: Callable[[str], AsyncRolloutClient], quorum: int
    ) -> None:
        """Connects to nothing before `start`."""
        self.router = Router(Route(number, capacity) for number in range(len(endpoints)))
        self.replicas = [Replica(*pair) for pair in zip(endpoints, self.router.routes, strict=True)]
        self.quorum = quorum
        self.policy: Policy | None = None
        """None until the first replica was reached."""
        self.history = PushHistory()
        self.asleep: int | None = None
        """The level at which the fleet sleeps."""
        self.paused: bool | None = False
        """Whether the fleet is paused; None while that changes, or if not all replicas have confirmed it."""
        self.updating = asyncio.Lock()
        """Held while the policy of replicas changes: by a push, a sleep, a wake, or a replica that catches up."""
        self.dropped = False
        """Whether a sleep has dropped the policy, so that a push may repeat its version."""
        self.push_is_open = False
        """Whether a push holds `updating`, or waits for it."""
        self.checkpoint = ""
        """The digest of the checkpoint's parameters; empty until a replica serves the checkpoint."""
        self.changed = asyncio.Event()
        """Set, and replaced by a new event, when a replica's state has changed."""
        self.none_current_since: float | None = time.monotonic()
        """Since when no replica is current; None if one is."""
        self.on_lost: Callable[[int, RolloutError], None] = lambda number, error: None
        """Called when a replica is lost."""
        self._connect = connect
        self._watches: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Starts to check the replicas, until `close`."""
        self._watches = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def close(self) -> None:
        """Stops the checks, and closes the connections."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for replica in self.replicas:
            if replica.client is not None:
                await replica.client.close()

    def numbers(self, state: ReplicaState) -> list[int]:
        """The numbers of the replicas in this state."""
        return [replica.number for replica in self.replicas if replica.state is state]

    def describe(self) -> str:
        """The replicas that are not current, with the reasons."""
        return "; ".join(
            f"replica {replica.number} ({replica.address or 'no address'}) is {replica.state}: {replica.reason}"
            for replica in self.replicas
            if replica.state is not ReplicaState.CURRENT
        )

    def permanent_error(self) -> RolloutError | None:
        """Returns the error for requests if every replica needs a push or an operator, else None."""
        kinds = {type(replica.stuck) for replica in self.replicas}
        if type(None) in kinds:
            return None
        kind = kinds.pop() if len(kinds) == 1 else FailedPrecondition
        return kind(f"no replica has the fleet's policy: {self.describe()}")

    def set_state(self, replica: Replica, state: ReplicaState, reason: str = "") -> None:
        """Sets the state of a replica. The router moves its groups to other replicas once it is not current."""
        replica.reason, replica.stuck = reason, None
        if replica.state is not state:
            self.router.set_state(replica.route, state)
        if self.numbers(ReplicaState.CURRENT):
            self.none_current_since = None
        elif self.none_current_since is None:
            self.none_current_since = time.monotonic()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def mark_lost(self, replica: Replica, error: RolloutError) -> None:
        """Marks a replica that does not answer."""
        replica.status = None
        self.on_lost(replica.number, error)
        self.set_state(replica, ReplicaState.LOST, str(error))

    def mark_suspect(self, replica: Replica, error: RolloutError) -> None:
        """Marks a replica as lost after a failed call, and checks it at once."""
        self.mark_lost(replica, error)
        replica.check_now.set()

    def mark_stuck(self, replica: Replica, error: RolloutError) -> None:
        """Marks a replica that responds but needs a push or an operator before it can be current."""
        self.set_state(replica, ReplicaState.BEHIND, str(error))
        replica.stuck = error

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Holds `updating`.

        Raises:
            FailedPrecondition: a push is open, which may be the caller's own.
        """
        if self.push_is_open:
            raise FailedPrecondition("a push is open: do this after its end, or after cancel_update")
        async with self.updating:
            yield

    def recheck(self) -> None:
        """Checks the replicas that are not current, which may catch up now."""
        for replica in self.replicas:
            if replica.state is not ReplicaState.CURRENT:
                replica.stuck = None
                replica.check_now.set()

    def set_asleep(self, level: int | None) -> None:
        """Sets the level at which the fleet sleeps, or None. No group starts while it sleeps."""
        if self.asleep is None and level is not None:
            self.router.close_gate()
        elif self.asleep is not None and level is None:
            self.paused = False  # a wake ends a pause too
            self.router.open_gate()
        self.asleep = level

    def at_checkpoint(self, policy: Policy) -> Policy:
        """The policy after it was dropped."""
        return Policy(policy.version, self.checkpoint)

    def learn_checkpoint(self, digest: str) -> None:
        """Sets the digest of the checkpoint, which replaces the empty base of policies on the checkpoint."""
        if self.checkpoint:
            return
        self.checkpoint = digest
        if self.policy is not None and not self.policy.base:
            self.policy = replace(self.policy, base=digest)
        for replica in self.replicas:
            if replica.held is not None and not replica.held.base:
                replica.set_held(replace(replica.held, base=digest))

    async def refresh(self, replica: Replica) -> None:
        """Updates the status of a replica that can be reached."""
        if replica.state is not ReplicaState.LOST:
            try:
                replica.status = await replica.ask()
            except Unavailable as error:
                self.mark_suspect(replica, error)
            except RolloutError as error:
                replica.status = None
                self.mark_stuck(replica, error)

    def mark_uncertain(self) -> None:
        """After a failed sleep of level 2: keeps all replicas out until their status shows which policy they have."""
        for replica in self.replicas:
            replica.known = replace(replica.known, may_have_dropped=True)
            if replica.state is not ReplicaState.LOST:
                self.set_state(replica, ReplicaState.BEHIND, "it may have dropped its policy, and has not confirmed it")
            replica.check_now.set()

    async def resolve_unconfirmed(self) -> None:
        """Finds out the policy of replicas whose answer was lost, if they can be reached."""
        for replica in self.replicas:
            is_unsure = replica.known.unconfirmed is not None or replica.known.may_have_dropped
            if is_unsure and replica.state is not ReplicaState.LOST:
                try:
                    await self.ask(replica)
                except Unavailable as error:
                    self.mark_suspect(replica, error)
                except RolloutError as error:
                    self.mark_stuck(replica, error)

    async def each(self, use: Callable[[AsyncRolloutClient], Awaitable[_T]]) -> dict[int, _T]:
        """Calls all replicas that can be reached, at the same time; marks those that do not answer as lost.

        Raises:
            RolloutError: the call failed on a replica; raised when all have answered. Or no replica can be reached.
        """
        reached = [replica for replica in self.replicas if replica.state is not ReplicaState.LOST]
        found = await asyncio.gather(*(replica.call(use) for replica in reached), return_exceptions=True)
        results: dict[int, _T] = {}
        failure: BaseException | None = None
        for replica, result in zip(reached, found, strict=True):
            if isinstance(result, Unavailable):
                self.mark_suspect(replica, result)
            elif isinstance(result, BaseException):
                failure = failure or result
            else:
                results[replica.number] = result
        if failure is not None:
            raise failure
        if not results:
            raise Unavailable(f"no replica can be reached: {self.describe()}")
        return results

    async def first(self, use: Callable[[AsyncRolloutClient], Awaitable[_T]]) -> _T:
        """Calls one replica, a current one if there is any.

        Raises:
            Unavailable: no replica can be reached.
        """
        for state in (ReplicaState.CURRENT, ReplicaState.BEHIND):
            for replica in self.replicas:
                if replica.state is state:
                    return await replica.call(use)
        raise Unavailable(f"no replica can be reached: {self.describe()}")

    async def check(self, replica: Replica) -> None:
        """Checks a replica; one that is behind catches up, if it can."""
        try:
            status = await self.ask(replica)
            if not self._serves(replica, status):
                await self._while_it_answers(replica, self._join_in_turn(replica))
            elif _holds_without_pause(status):
                # A reload or a forced push has lowered the fleet's version, perhaps below what these groups wait for.
                self.router.revoke_newer(replica.route, self.policy.version)
        except Unavailable as error:
            self.mark_lost(replica, error)
        except RolloutError as error:
            self.mark_stuck(replica, error)
        except Exception as error:  # any error of the caller's `resupply`: the replica is checked again
            self.mark_stuck(replica, RolloutError(f"it could not catch up: {type(error).__name__}: {error}"))

    async def _while_it_answers(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        """Waits for work on a replica, which may take long, while the replica answers.

        Raises:
            RolloutError: the work failed, or the replica stopped answering, which cancels the work.
        """
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=HEALTHY_POLL_SECONDS)
                if not working.done():
                    await replica.ask()
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)
        working.result()

    def _serves(self, replica: Replica, status: ServerStatus) -> bool:
        """Whether the replica is current, and needs nothing."""
        if replica.state is not ReplicaState.CURRENT:
            return False
        return replica.held == self.policy and self._is_healthy(status)

    def _is_healthy(self, status: ServerStatus) -> bool:
        """Whether a server sleeps as the fleet does, or has a policy of the fleet's version.

        After a sleep that discarded the policy, servers are healthy without weights until the next push brings some.
        """
        if self.asleep is not None or status.asleep is not None:
            return self.asleep is not None and status.asleep is not None
        if status.lifecycle is Lifecycle.WEIGHTS_MISSING:
            return self.dropped
        return status.weight_version == self.policy.version

    async def ask(self, replica: Replica) -> ServerStatus:
        """Requests the status of a replica at its current address, and updates what is known about it.

        Raises:
            Unavailable: it does not answer, or shuts down.
            RolloutError: what it answers.
        """
        try:
            found = await asyncio.wait_for(replica.endpoint.resolve(), STATUS_SECONDS)
        except asyncio.TimeoutError:
            raise Unavailable(f"its address is not known after {STATUS_SECONDS:g} s") from None
        if found.address != replica.address:
            before, replica.client = replica.client, self._connect(found.address)
            where, replica.address = replica.address, found.address
            if before is not None:
                self.mark_lost(replica, Unavailable(f"it was lost at {where}"))
                await before.close()
        known = None
        while known is not replica.known:  # a late answer may be older than a push that has ended
            known, asked = replica.known, time.monotonic()
            status = await replica.ask()
        if status.lifecycle is Lifecycle.SHUTTING_DOWN:
            raise Unavailable("it is shutting down")
        replica.observe(found, status, asked)
        if replica.held is not None and _has_no_policy(status):
            replica.set_held(self.at_checkpoint(replica.held))
        return status

    async def _join_in_turn(self, replica: Replica) -> None:
        async with self.updating:
            status = await self.ask(replica)  # the policy may have changed while this waited
            if not self._serves(replica, status):
                await self._join(replica, status)

    async def _join(self, replica: Replica, status: ServerStatus) -> None:
        """Makes a replica current, if it has the policy or can catch up."""
        client = replica.client
        if replica.known.unconfirmed is not None:
            raise FailedPrecondition("a push is open on it, whose sender has left")
        if self.asleep is None and self._needs_wake(status):
            await self._wake(replica)
            status = await self.ask(replica)
        if replica.held is None and status.asleep is None:
            digest = digest_of_parameters(await client.checksum())
            replica.set_held(Policy(status.weight_version, digest, residents=await self._residents(replica)))
            if status.weight_version == 0:
                self.learn_checkpoint(digest)
            if self.policy is None:
                self.policy = replica.held
        if self.asleep is not None and status.asleep is None:
            await client.sleep(self.asleep, "abort")  # the trainer uses the memory now
        if replica.held is None or (self.asleep is not None and replica.held != self.policy):
            raise FailedPrecondition("it sleeps, and catches up when the fleet wakes")
        if replica.held != self.policy:
            await self._catch_up(replica)
        await self._pause_as_the_fleet(replica)
        if not self._is_healthy(await client.status()):
            raise FailedPrecondition(f"its weights are not those of version {self.policy.version}")
        self.set_state(replica, ReplicaState.CURRENT)

    async def _pause_as_the_fleet(self, replica: Replica) -> None:
        """Pauses or resumes a replica that missed a pause or a resume of the fleet, or of a killed trainer."""
        if self.paused is None or self.asleep is not None:
            return
        is_paused = (await replica.client.status()).lifecycle is Lifecycle.PAUSED
        if self.paused and not is_paused:
            await replica.client.pause("keep")
        elif is_paused and not self.paused:
            await replica.client.resume()

    def _needs_wake(self, status: ServerStatus) -> bool:
        """Whether a server sleeps, or has dropped a policy that the fleet still has, while the fleet is awake."""
        return status.asleep is not None or (status.lifecycle is Lifecycle.WEIGHTS_MISSING and not self.dropped)

    async def _wake(self, replica: Replica) -> None:
        """Wakes a replica that missed a wake of the fleet, or that a killed trainer has left asleep."""
        reload = self.policy is None or self.policy.base == self.checkpoint
        await replica.client.wake(reload=reload)

    async def _residents(self, replica: Replica) -> frozenset[tuple[str, str]]:
        """The adapters of a new server, with unknown digests, so that they are pushed again."""
        found = await replica.client.adapters()
        return frozenset((adapter.name, "") for adapter in found if not adapter.retired)

    async def _catch_up(self, replica: Replica) -> None:
        """Repeats the pushes that a replica missed, and compares the digests of the receipts.

        Raises:
            FailedPrecondition: a push that it missed cannot be repeated.
        """
        policy, version = self.policy, self.policy.version
        if await self._is_twin(replica):
            replica.set_held(Policy(version, policy.base, policy.adapter, replica.held.residents))
        if replica.held.base != policy.base:
            if self.history.base is None or not policy.base.startswith("full:"):
                raise FailedPrecondition(
                    f"its base is not the one of version {version}, which cannot be pushed again: push in full"
                )
            result = await self.history.base(replica.client, version)
            if f"full:{result.digest}" != policy.base:
                replica.set_held(None)
                raise DataLoss(f"what was pushed again has the digest {result.digest}, not that of {policy.base}")
            replica.set_held(Policy(version, policy.base, None, replica.held.residents))
        if (replica.held.adapter, replica.held.version) != (policy.adapter, version):
            await self._give_adapter(replica)
        for name, digest in sorted(policy.residents - replica.held.residents):
            repush = self.history.residents.get(name)
            result = None if repush is None else await repush(replica.client, version)
            if result is None or result.digest != digest:
                raise FailedPrecondition(f"it lacks the adapter {name!r}: push it again")
        for name in sorted({name for name, _ in replica.held.residents} - {name for name, _ in policy.residents}):
            await replica.client.remove_adapter(name)
        replica.set_held(policy)

    async def _give_adapter(self, replica: Replica) -> None:
        """Pushes the fleet's merged adapter to a replica."""
        policy, repush = self.policy, self.history.adapter
        if repush is None:
            raise FailedPrecondition(f"it missed version {policy.version}: it serves after the next push")
        result = await repush(replica.client, policy.version)
        replica.set_held(Policy(policy.version, policy.base, result.digest, replica.held.residents))
        if result.digest != policy.adapter:
            raise DataLoss(f"the adapter that was pushed again has the digest {result.digest}, not {policy.adapter}")

    async def _is_twin(self, replica: Replica) -> bool:
        """Whether a replica has the policy already, by its checksums, because only an answer was lost."""
        policy, held = self.policy, replica.held
        if replica.status.weight_version != policy.version or (held.base, held.adapter) == (
            policy.base,
            policy.adapter,
        ):
            return False
        others = [other for other in self.replicas if other.held == policy and other.status is not None]
        if not others or self.asleep is not None:
            return False
        checked = (twin.call(lambda client: client.checksum()) for twin in (replica, others[0]))
        mine, theirs = await asyncio.gather(*checked)
        return mine == theirs

    async def _watch(self, replica: Replica) -> None:
        """Checks a replica until the fleet is closed."""
        while True:
            replica.check_now.clear()
            await self.check(replica)
            every = LOST_POLL_SECONDS if replica.state is ReplicaState.LOST else HEALTHY_POLL_SECONDS
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(replica.check_now.wait(), every)


def _holds_without_pause(status: ServerStatus) -> bool:
    """Whether a server holds requests although it is neither paused nor updating: they wait for a newer policy."""
    return status.held_requests > 0 and status.lifecycle is Lifecycle.RUNNING and not status.updating


def _has_no_policy(status: ServerStatus) -> bool:
    """Whether a server has dropped its policy, so that an adapter is merged into the checkpoint."""
    if status.asleep is None:
        return status.lifecycle is Lifecycle.WEIGHTS_MISSING
    return status.asleep.level > 1 and "weights" not in status.asleep.resident and not status.asleep.pending_update
