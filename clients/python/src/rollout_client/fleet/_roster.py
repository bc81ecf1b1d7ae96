"""The replicas of a fleet: where they are, how they are, and how those that missed something catch up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ..aio import AsyncRolloutClient
from ..errors import DataLoss, FailedPrecondition, RolloutError, Unavailable
from ..types import Lifecycle, ServerStatus
from ._policy import Memory, Policy, digest_of_parameters
from ._replica import LOOK_SECONDS, Place, Replica
from ._router import Route, Router
from .types import ReplicaState

HEALTHY_POLL_SECONDS = 2.0
"""How often one that is current is asked. A broken connection is noticed at once, by the requests on it."""
LOST_POLL_SECONDS = 0.5
"""How often one that is lost is looked for."""

_T = TypeVar("_T")


class Roster:
    """All replicas, with the policy that they should have. Owned by one event loop."""

    def __init__(
        self, places: Sequence[Place], capacity: int, connect: Callable[[str], AsyncRolloutClient], quorum: int
    ) -> None:
        """Nothing is looked for before `start`."""
        self.router = Router(Route(number, capacity) for number in range(len(places)))
        self.replicas = [Replica(*pair) for pair in zip(places, self.router.routes, strict=True)]
        self.quorum = quorum
        self.policy: Policy | None = None
        """None until the first replica was found."""
        self.memory = Memory()
        self.asleep: int | None = None
        """The level at which the fleet sleeps."""
        self.paused: bool | None = False
        """Whether the fleet is paused; None while that changes, or was not told to all."""
        self.updating = asyncio.Lock()
        """Held by whoever changes the policy of replicas: a push, a sleep, a wake, a replica that catches up."""
        self.dropped = False
        """Whether a sleep has dropped the policy, so that a push may bring it back with its own version."""
        self.pushing = False
        """Whether a push holds it, or waits for it."""
        self.checkpoint = ""
        """The digest of the checkpoint's parameters; empty until a replica was found that serves the checkpoint."""
        self.changed = asyncio.Event()
        """Set, and made anew, whenever a replica's state has changed."""
        self.none_since: float | None = time.monotonic()
        """Since when no replica is current; None if one is."""
        self.on_lost: Callable[[int, RolloutError], None] = lambda number, error: None
        """Told of replicas that are lost."""
        self._connect = connect
        self._watches: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to look for the replicas, from now on all the time."""
        self._watches = [asyncio.create_task(self._watch(replica)) for replica in self.replicas]

    async def close(self) -> None:
        """Stops looking, and ends the connections."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for replica in self.replicas:
            if replica.client is not None:
                await replica.client.close()

    def numbers(self, state: ReplicaState) -> list[int]:
        """Of the replicas in this state."""
        return [replica.number for replica in self.replicas if replica.state is state]

    def describe(self) -> str:
        """Those that are not current, with the reasons."""
        return "; ".join(
            f"replica {replica.number} ({replica.address or 'no address'}) is {replica.state}: {replica.reason}"
            for replica in self.replicas
            if replica.state is not ReplicaState.CURRENT
        )

    def hopeless(self) -> RolloutError | None:
        """The error of requests if no replica can become current by itself: of the class that all of them have."""
        kinds = {type(replica.stuck) for replica in self.replicas}
        if type(None) in kinds:
            return None
        kind = kinds.pop() if len(kinds) == 1 else FailedPrecondition
        return kind(f"no replica has the fleet's policy: {self.describe()}")

    def set_state(self, replica: Replica, state: ReplicaState, reason: str = "") -> None:
        """Notes how a replica is; what runs on one that is not current any more goes elsewhere."""
        replica.reason, replica.stuck = reason, None
        if replica.state is not state:
            self.router.set_state(replica.route, state)
        if self.numbers(ReplicaState.CURRENT):
            self.none_since = None
        elif self.none_since is None:
            self.none_since = time.monotonic()
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def lost(self, replica: Replica, error: RolloutError) -> None:
        """A replica does not answer."""
        replica.status = None
        self.on_lost(replica.number, error)
        self.set_state(replica, ReplicaState.LOST, str(error))

    def suspect(self, replica: Replica, error: RolloutError) -> None:
        """A call of a replica failed: it is lost until it answers, and asked at once."""
        self.lost(replica, error)
        replica.looked.set()

    def stick(self, replica: Replica, error: RolloutError) -> None:
        """A replica answers, and cannot serve for now."""
        self.set_state(replica, ReplicaState.BEHIND, str(error))
        replica.stuck = error

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Waits for the turn to change the policy of replicas.

        Raises:
            FailedPrecondition: a push is under way, which may be the caller's own.
        """
        if self.pushing:
            raise FailedPrecondition("a push is under way: do this after its end, or after cancel_update")
        async with self.updating:
            yield

    def look_again(self) -> None:
        """Those that are not current may become so now."""
        for replica in self.replicas:
            if replica.state is not ReplicaState.CURRENT:
                replica.stuck = None
                replica.looked.set()

    def set_asleep(self, level: int | None) -> None:
        """The fleet sleeps, or is awake again. While it sleeps no group begins."""
        if (level is None) != (self.asleep is None):
            (self.router.open_gate if level is None else self.router.close_gate)()
        self.asleep = level

    def at_checkpoint(self, policy: Policy) -> Policy:
        """What a policy has become when it was dropped."""
        return Policy(policy.version, self.checkpoint)

    def learn_checkpoint(self, digest: str) -> None:
        """A replica serves the checkpoint. Policies on the checkpoint had an empty base until now."""
        if self.checkpoint:
            return
        self.checkpoint = digest
        if self.policy is not None and not self.policy.base:
            self.policy = replace(self.policy, base=digest)
        for replica in self.replicas:
            if replica.held is not None and not replica.held.base:
                replica.held = replace(replica.held, base=digest)

    async def refresh(self, replica: Replica) -> None:
        """Asks a replica that can be reached for its status."""
        if replica.state is not ReplicaState.LOST:
            try:
                replica.status = await replica.ask()
            except Unavailable as error:
                self.suspect(replica, error)
            except RolloutError as error:
                replica.status = None
                self.stick(replica, error)

    def doubt(self) -> None:
        """Takes out all replicas, after a failed order to drop the policy, until their status says what they hold."""
        for replica in self.replicas:
            replica.may_have_dropped = True
            if replica.state is not ReplicaState.LOST:
                self.set_state(replica, ReplicaState.BEHIND, "it was told to drop its policy, and has not confirmed it")
            replica.looked.set()

    async def settle(self) -> None:
        """Finds out what those replicas hold whose answer to an order was lost, as far as they can be reached."""
        for replica in self.replicas:
            is_unsure = replica.unanswered is not None or replica.may_have_dropped
            if is_unsure and replica.state is not ReplicaState.LOST:
                try:
                    await self.ask(replica)
                except Unavailable as error:
                    self.suspect(replica, error)
                except RolloutError as error:
                    self.stick(replica, error)

    async def each(self, use: Callable[[AsyncRolloutClient], Awaitable[_T]]) -> dict[int, _T]:
        """Calls all replicas that can be reached at the same time; those that do not answer are lost.

        Raises:
            RolloutError: what a replica answered, once all have; or none can be reached.
        """
        reached = [replica for replica in self.replicas if replica.state is not ReplicaState.LOST]
        found = await asyncio.gather(*(replica.call(use) for replica in reached), return_exceptions=True)
        results: dict[int, _T] = {}
        failure: BaseException | None = None
        for replica, result in zip(reached, found, strict=True):
            if isinstance(result, Unavailable):
                self.suspect(replica, result)
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
        """Calls one replica, of those that are current if there are any.

        Raises:
            Unavailable: none can be reached.
        """
        for state in (ReplicaState.CURRENT, ReplicaState.BEHIND):
            for replica in self.replicas:
                if replica.state is state:
                    return await replica.call(use)
        raise Unavailable(f"no replica can be reached: {self.describe()}")

    async def look(self, replica: Replica) -> None:
        """Finds out how a replica is; one that is behind catches up, if it can."""
        try:
            status = await self.ask(replica)
            if not self._serves(replica, status):
                await self._while_it_answers(replica, self._join_in_turn(replica))
        except Unavailable as error:
            self.lost(replica, error)
        except RolloutError as error:
            self.stick(replica, error)
        except (
            Exception
        ) as error:  # of `resupply`, which is the caller's: whatever it is, the replica is looked at again
            self.stick(replica, RolloutError(f"it could not catch up: {type(error).__name__}: {error}"))

    async def _while_it_answers(self, replica: Replica, work: Coroutine[Any, Any, None]) -> None:
        """Works for a replica, which may take long: others push first, or much is pushed to it.

        Raises:
            RolloutError: what the work raises, or the replica when it is asked meanwhile, which ends the work.
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
        """Whether nothing has to be done for it."""
        if replica.state is not ReplicaState.CURRENT:
            return False
        return replica.held == self.policy and (self.updating.locked() or self._is_healthy(status))

    def _is_healthy(self, status: ServerStatus) -> bool:
        """Whether a server sleeps if the fleet does, and has a policy of the fleet's version otherwise."""
        if self.asleep is not None or status.asleep is not None:
            return self.asleep is not None and status.asleep is not None
        return status.lifecycle is not Lifecycle.WEIGHTS_MISSING and status.weight_version == self.policy.version

    async def ask(self, replica: Replica) -> ServerStatus:
        """Asks a replica how it is, where it is now, and notes what it holds by that.

        Raises:
            Unavailable: it does not answer, or shuts down.
            RolloutError: what it answers.
        """
        try:
            found = await asyncio.wait_for(replica.place.find(), LOOK_SECONDS)
        except asyncio.TimeoutError:
            raise Unavailable(f"its address is not known after {LOOK_SECONDS:g} s") from None
        if found.address != replica.address:
            before, replica.client = replica.client, self._connect(found.address)
            where, replica.address = replica.address, found.address
            if before is not None:
                self.lost(replica, Unavailable(f"it was lost at {where}"))
                await before.close()
        changes = None
        while changes != replica.changes:  # an answer may be so late that it does not know of a push that has ended
            changes, asked = replica.changes, time.monotonic()
            status = await replica.ask()
        if status.lifecycle is Lifecycle.SHUTTING_DOWN:
            raise Unavailable("it is shutting down")
        replica.notice(found, status, asked)
        if replica.held is not None and _has_no_policy(status):
            replica.held = self.at_checkpoint(replica.held)
        return status

    async def _join_in_turn(self, replica: Replica) -> None:
        async with self.updating:
            status = await self.ask(replica)  # the policy may have changed while this waited
            if not self._serves(replica, status):
                await self._join(replica, status)

    async def _join(self, replica: Replica, status: ServerStatus) -> None:
        """Takes a replica among those that are current, if it has the policy, or can be given it."""
        client = replica.client
        if replica.unanswered is not None:
            raise FailedPrecondition("a push is under way on it, whose sender has left")
        if self.asleep is None and self._needs_wake(status):
            await self._wake(replica)
            status = await self.ask(replica)
        if replica.held is None and status.asleep is None:
            digest = digest_of_parameters(await client.checksum())
            replica.held = Policy(status.weight_version, digest, residents=await self._residents(replica))
            if status.weight_version == 0:
                self.learn_checkpoint(digest)
            if self.policy is None:
                self.policy = replica.held
        if self.asleep is not None and status.asleep is None:
            await client.sleep(self.asleep, "abort")  # the trainer has the memory now
        if replica.held is None or (self.asleep is not None and replica.held != self.policy):
            raise FailedPrecondition("it sleeps, and catches up when the fleet wakes")
        if replica.held != self.policy:
            await self._catch_up(replica)
        await self._pause_as_the_fleet(replica)
        if not self._is_healthy(await client.status()):
            raise FailedPrecondition(f"its weights are not those of version {self.policy.version}")
        self.set_state(replica, ReplicaState.CURRENT)

    async def _pause_as_the_fleet(self, replica: Replica) -> None:
        """Pauses a replica that has missed that, and resumes one that a resume or a killed trainer has left paused."""
        if self.paused is None or self.asleep is not None:
            return
        is_paused = (await replica.client.status()).lifecycle is Lifecycle.PAUSED
        if self.paused and not is_paused:
            await replica.client.pause("keep")
        elif is_paused and not self.paused:
            await replica.client.resume()

    def _needs_wake(self, status: ServerStatus) -> bool:
        """Whether a server sleeps, or has no policy though the fleet's was not dropped, and the fleet is awake."""
        return status.asleep is not None or (status.lifecycle is Lifecycle.WEIGHTS_MISSING and not self.dropped)

    async def _wake(self, replica: Replica) -> None:
        """Wakes a replica that has missed a wake of the fleet, or that a killed trainer has left asleep."""
        reload = self.policy is None or self.policy.base == self.checkpoint
        await replica.client.wake(reload=reload)

    async def _residents(self, replica: Replica) -> frozenset[tuple[str, str]]:
        """Adapters of a server that is new here; their digests are not known, so that they are pushed again."""
        found = await replica.client.adapters()
        return frozenset((adapter.name, "") for adapter in found if not adapter.retired)

    async def _catch_up(self, replica: Replica) -> None:
        """Pushes what a replica lacks, and compares the digests of the receipts.

        Raises:
            FailedPrecondition: what it lacks cannot be pushed again.
        """
        policy, held, version = self.policy, replica.held, self.policy.version
        if await self._is_twin(replica):
            replica.held = held = Policy(version, policy.base, policy.adapter, held.residents)
        if held.base != policy.base:
            if self.memory.base is None or not policy.base.startswith("full:"):
                raise FailedPrecondition(
                    f"its base is not the one of version {version}, which cannot be pushed again: push in full"
                )
            result = await self.memory.base(replica.client, version)
            if f"full:{result.digest}" != policy.base:
                replica.held = None
                raise DataLoss(f"what was pushed again has the digest {result.digest}, not that of {policy.base}")
            replica.held = held = Policy(version, policy.base, None, held.residents)
        if (held.adapter, held.version) != (policy.adapter, version):
            await self._give_adapter(replica)
        for name, digest in sorted(policy.residents - replica.held.residents):
            redo = self.memory.residents.get(name)
            result = None if redo is None else await redo(replica.client, version)
            if result is None or result.digest != digest:
                raise FailedPrecondition(f"it lacks the adapter {name!r}: push it again")
        for name in sorted({name for name, _ in replica.held.residents} - {name for name, _ in policy.residents}):
            await replica.client.remove_adapter(name)
        replica.held = policy

    async def _give_adapter(self, replica: Replica) -> None:
        """Merges the adapter that the fleet has into the base of a replica."""
        policy, redo = self.policy, self.memory.adapter
        if redo is None:
            raise FailedPrecondition(f"it missed version {policy.version}: it serves after the next push")
        result = await redo(replica.client, policy.version)
        replica.held = Policy(policy.version, policy.base, result.digest, replica.held.residents)
        if result.digest != policy.adapter:
            raise DataLoss(f"the adapter that was pushed again has the digest {result.digest}, not {policy.adapter}")

    async def _is_twin(self, replica: Replica) -> bool:
        """Whether a replica has the policy already: an answer was lost, and the parameters have the same digest."""
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
        """Looks at a replica until the fleet is closed."""
        while True:
            replica.looked.clear()
            await self.look(replica)
            every = LOST_POLL_SECONDS if replica.state is ReplicaState.LOST else HEALTHY_POLL_SECONDS
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(replica.looked.wait(), every)


def _has_no_policy(status: ServerStatus) -> bool:
    """Whether a server has dropped its policy, so that an adapter is merged into the checkpoint."""
    if status.asleep is None:
        return status.lifecycle is Lifecycle.WEIGHTS_MISSING
    return status.asleep.level > 1 and "weights" not in status.asleep.resident and not status.asleep.pending_update
