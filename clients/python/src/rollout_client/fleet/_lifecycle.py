"""Sleep, wake, pause and resume of all replicas."""

from __future__ import annotations

from dataclasses import replace

from ..errors import FailedPrecondition
from ..types import DrainMode, Lifecycle, MemoryTag, SleepResult, WakeResult
from ._policy import Memory
from ._replicas import Roster
from ._requests import Requests


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
            if roster.pushing:
                raise FailedPrecondition("a push is under way: the fleet sleeps after it, or after cancel_update")
            async with roster.updating:
                results = await roster.each(lambda client: client.sleep(level, mode))
                roster.set_asleep(level)
                if level > 1:
                    self._forget()
        finally:
            self._requests.draining = False
        return results

    async def wake(self, tags: list[MemoryTag] | None, reload: bool) -> dict[int, WakeResult]:
        """As `Fleet.wake`."""
        roster = self._roster
        async with roster.updating:
            results = await roster.each(lambda client: client.wake(tags, reload=reload))
            if all(result.lifecycle is not Lifecycle.ASLEEP for result in results.values()):
                roster.set_asleep(None)
            if reload:
                await self._note_reload(list(results))
        roster.look_again()
        return results

    async def pause(self, mode: DrainMode) -> None:
        """As `Fleet.pause`."""
        await self._roster.each(lambda client: client.pause(mode))

    async def resume(self) -> None:
        """As `Fleet.resume`."""
        await self._roster.each(lambda client: client.resume())

    def _forget(self) -> None:
        """Level 2 drops the policy: what comes next is the checkpoint's, or pushed."""
        roster = self._roster
        roster.memory, roster.dropped = Memory(), True
        roster.policy = roster.at_checkpoint(roster.policy)
        for replica in roster.replicas:
            replica.held = None if replica.held is None else roster.at_checkpoint(replica.held)

    async def _note_reload(self, numbers: list[int]) -> None:
        """What has read the checkpoint again has version 0."""
        roster = self._roster
        roster.dropped = False
        for number in numbers:
            replica = roster.replicas[number]
            status = await replica.client.status()
            if replica.held is not None and status.weight_version == 0:
                replica.held = replace(replica.held, version=0)
                roster.policy = replace(roster.policy, version=0)
