"""Sleep, wake, pause and resume of all replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

from ..types import DrainMode, Lifecycle, MemoryTag, SleepResult, WakeResult
from ._policy import PushHistory
from ._replica_set import ReplicaSet
from ._requests import Requests
from .types import ReplicaState


class FleetLifecycle:
    """Changes the lifecycle of all replicas that can be reached. The others follow when they can."""

    def __init__(self, replica_set: ReplicaSet, requests: Requests) -> None:
        """Starts awake."""
        self._replica_set, self._requests = replica_set, requests

    async def sleep(self, level: int, mode: DrainMode) -> dict[int, SleepResult]:
        """As `Fleet.sleep`."""
        replica_set = self._replica_set
        self._requests.draining = True
        try:
            if mode == "wait":
                await self._requests.drain()
            elif mode == "abort":
                self._requests.end_all()
            async with replica_set.exclusive():
                replica_set.router.close_gate()
                try:
                    results = await replica_set.each(lambda client: client.sleep(level, mode))
                    replica_set.set_asleep(level)
                except BaseException:
                    if level > 1:
                        replica_set.mark_uncertain()
                    raise
                finally:
                    replica_set.router.open_gate()
                if level > 1:
                    self._forget(results)
        finally:
            self._requests.draining = False
        return results

    async def wake(self, tags: list[MemoryTag] | None, reload: bool) -> dict[int, WakeResult]:
        """As `Fleet.wake`."""
        replica_set = self._replica_set
        async with replica_set.exclusive():
            results = await replica_set.each(lambda client: client.wake(tags, reload=reload))
            if reload:  # before groups start: they accept no version below the policy's
                await self._note_reload(list(results))
            asleep = [number for number, result in results.items() if result.lifecycle is Lifecycle.ASLEEP]
            if len(asleep) < len(results):
                for number in asleep:
                    replica_set.set_state(replica_set.replicas[number], ReplicaState.BEHIND, "it has missed a wake")
                replica_set.set_asleep(None)
        replica_set.recheck()
        return results

    async def pause(self, mode: DrainMode) -> None:
        """As `Fleet.pause`."""
        self._replica_set.paused = None
        await self._replica_set.each(lambda client: client.pause(mode))
        self._replica_set.paused = True

    async def resume(self) -> None:
        """As `Fleet.resume`."""
        self._replica_set.paused = None
        await self._replica_set.each(lambda client: client.resume())
        self._replica_set.paused = False

    def _forget(self, asleep: Collection[int]) -> None:
        """Records that level 2 has dropped the policy of these replicas: a reload or a push must follow."""
        replica_set = self._replica_set
        replica_set.history, replica_set.dropped = PushHistory(), True
        replica_set.policy = None if replica_set.policy is None else replica_set.at_checkpoint(replica_set.policy)
        for replica in replica_set.replicas:
            known = replica.number in asleep and replica.held is not None
            replica.set_held(replica_set.at_checkpoint(replica.held) if known else None)

    async def _note_reload(self, numbers: list[int]) -> None:
        """Records that these replicas have reloaded the checkpoint, which has version 0."""
        replica_set = self._replica_set
        replicas = [replica_set.replicas[number] for number in numbers]
        await asyncio.gather(*(replica_set.refresh(replica) for replica in replicas))
        was_dropped, replica_set.dropped = replica_set.dropped, False
        for replica in replicas:
            if replica.status is None or replica.status.weight_version != 0:
                continue
            held = replica.held  # None if it was seen to have reloaded before the others were awake
            if was_dropped:
                replica.set_held(None if held is None else replace(held, version=0))
                replica_set.policy = None if replica_set.policy is None else replace(replica_set.policy, version=0)
            elif held is not None and held.version != 0:
                # after a failed sleep it had dropped a policy that the fleet still has
                replica.set_held(None)
                replica_set.set_state(replica, ReplicaState.BEHIND, "it has read its checkpoint again")
