"""Sleep, wake, pause and resume of all replicas."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..errors import Unavailable
from ..types import DrainMode, Lifecycle, MemoryTag, SleepResult, WakeResult
from ._policy import Memory
from ._requests import Requests
from ._roster import Roster
from .types import ReplicaState


class LifecycleOrders:
    """Gives an order to all replicas that can be reached. The others follow when they are found."""

    def __init__(self, roster: Roster, requests: Requests) -> None:
        """Nothing sleeps."""
        self._roster, self._requests = roster, requests

    async def sleep(self, level: int, mode: DrainMode) -> dict[int, SleepResult]:
        """As `Fleet.sleep`."""
        roster = self._roster
        self._requests.draining = True
        try:
            if mode == "wait":
                await self._requests.drain()
            elif mode == "abort":
                self._requests.end_all()
            async with roster.turn():
                roster.router.close_gate()
                try:
                    results = await roster.each(lambda client: client.sleep(level, mode))
                    roster.set_asleep(level)
                except BaseException:
                    if level > 1:
                        roster.doubt()
                    raise
                finally:
                    roster.router.open_gate()
                if level > 1:
                    self._forget(results)
        finally:
            self._requests.draining = False
        return results

    async def wake(self, tags: list[MemoryTag] | None, reload: bool) -> dict[int, WakeResult]:
        """As `Fleet.wake`."""
        roster = self._roster
        async with roster.turn():
            results = await roster.each(lambda client: client.wake(tags, reload=reload))
            asleep = [number for number, result in results.items() if result.lifecycle is Lifecycle.ASLEEP]
            if len(asleep) < len(results):
                for number in asleep:
                    roster.set_state(roster.replicas[number], ReplicaState.BEHIND, "it has missed a wake")
                roster.set_asleep(None)
            if reload:
                await self._note_reload(list(results))
        roster.look_again()
        return results

    async def pause(self, mode: DrainMode) -> None:
        """As `Fleet.pause`."""
        self._roster.paused = None
        await self._roster.each(lambda client: client.pause(mode))
        self._roster.paused = True

    async def resume(self) -> None:
        """As `Fleet.resume`."""
        self._roster.paused = None
        await self._roster.each(lambda client: client.resume())
        self._roster.paused = False

    def _forget(self, asleep: Collection[int]) -> None:
        """Level 2 drops the policy of those that sleep: what comes next is the checkpoint's, or pushed."""
        roster = self._roster
        roster.memory, roster.dropped = Memory(), True
        roster.policy = None if roster.policy is None else roster.at_checkpoint(roster.policy)
        for replica in roster.replicas:
            known = replica.number in asleep and replica.held is not None
            replica.held = roster.at_checkpoint(replica.held) if known else None

    async def _note_reload(self, numbers: list[int]) -> None:
        """What has read the checkpoint again has version 0."""
        roster = self._roster
        was_dropped, roster.dropped = roster.dropped, False
        for number in numbers:
            replica = roster.replicas[number]
            try:
                status = await replica.ask()
            except Unavailable as error:
                roster.suspect(replica, error)
                continue
            if status.weight_version != 0:
                continue
            held = replica.held  # None if it has told of this before the others had woken
            if was_dropped:
                replica.held = None if held is None else replace(held, version=0)
                roster.policy = None if roster.policy is None else replace(roster.policy, version=0)
            elif held is not None and held.version != 0:
                # a sleep that has failed has made it drop a policy that the fleet still has
                replica.held = None
                roster.set_state(replica, ReplicaState.BEHIND, "it has read its checkpoint again")
