"""The methods of a fleet: those of a client, for all replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .._session import NamedTensors
from ..errors import RolloutError
from ..options import (
    BeginPushOptions,
    GenerateOptions,
    PushDeltaOptions,
    PushDirectoryOptions,
    PushFullOptions,
    PushKind,
    PushLoraOptions,
    ScoreOptions,
)
from ..types import (
    AbortResult,
    AdapterInfo,
    DrainMode,
    MemoryTag,
    ParameterInfo,
    PromptInput,
    PromptOutput,
    SamplingInput,
    Score,
    ServerInfo,
    SleepResult,
    TokenIds,
    WakeResult,
)
from ._core import Core
from ._push import AsyncFleetPush
from .types import FleetReceipt, FleetStatus

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class AsyncFleetMethods:
    """The methods of a fleet, with the arguments and errors of the clients' methods.

    A push reaches all replicas that take part, or none; `docs/ray.md` has the guarantees. If it fails, it raises the
    error of a client's push, and all replicas keep the policy that they had. The exception is `PartialCommit`: the new
    policy is the fleet's, although too few replicas have confirmed it.
    """

    _core: Core

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """Waits until all replicas are current.

        Args:
            timeout: in seconds; None is the fleet's `patience`.

        Raises:
            RolloutError: no replica can become current by itself, for example because the token is wrong.
            Unavailable: fewer replicas than the quorum are current at the timeout. With the quorum or more, the call
                returns then, and the others join when they can.
        """
        await self._core.async_run(self._core.until_ready(timeout))

    async def generate(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PromptOutput]:
        """As `RolloutClient.generate`, spread over the replicas, with the samples that one server gives for the seed.

        If a prompt's replica is lost or misses a push, another replica samples the prompt from its beginning.
        `progress` counts the samples of finished prompts, and is called in the fleet's thread.
        """
        return await self._core.async_run(self._core.requests.generate(prompts, n, sampling, options))

    async def score(self, sequences: Sequence[TokenIds], **options: Unpack[ScoreOptions]) -> list[Score]:
        """As `RolloutClient.score`, spread over the replicas."""
        return await self._core.async_run(self._core.requests.score(sequences, options))

    async def abort(self, request_ids: str | Iterable[str] = (), *, all: bool = False) -> AbortResult:
        """As `RolloutClient.abort`, for requests of this fleet; with `all` also for other clients of the servers."""
        return await self._core.async_run(self._core.requests.abort(request_ids, all=all))

    async def info(self) -> ServerInfo:
        """As `RolloutClient.info`, of one replica."""
        return await self._core.async_run(self._core.replica_set.first(lambda client: client.info()))

    async def status(self) -> FleetStatus:
        """The policy's version and the state of every replica; asks each server that can be reached."""
        return await self._core.async_run(self._core.status())

    async def reset_prefix_cache(self) -> int:
        """As `RolloutClient.reset_prefix_cache`, of all replicas; returns the sum of the blocks."""
        blocks = await self._core.async_run(self._core.replica_set.each(lambda client: client.reset_prefix_cache()))
        return sum(blocks.values())

    async def sleep(self, level: int = 1, mode: DrainMode = "wait") -> dict[int, SleepResult]:
        """As `RolloutClient.sleep`, of all replicas; returns each replica's result by its number.

        A replica that restarts while the fleet sleeps is put to sleep too.
        """
        return await self._core.async_run(self._core.lifecycle.sleep(level, mode))

    async def wake(self, tags: Iterable[MemoryTag] | None = None, *, reload: bool = False) -> dict[int, WakeResult]:
        """As `RolloutClient.wake`, of all replicas; returns each replica's result by its number."""
        listed = None if tags is None else list(tags)
        return await self._core.async_run(self._core.lifecycle.wake(listed, reload))

    @asynccontextmanager
    async def awake(self, tags: Iterable[MemoryTag] | None = None, level: int = 1) -> AsyncIterator[Self]:
        """As `RolloutClient.awake`, of all replicas."""
        await self.wake(tags)
        try:
            yield self
        except BaseException:
            with suppress(RolloutError):
                await self.sleep(level, "abort")
            raise
        await self.sleep(level)

    async def pause(self, mode: DrainMode = "wait") -> None:
        """As `RolloutClient.pause`, of all replicas."""
        await self._core.async_run(self._core.lifecycle.pause(mode))

    async def resume(self) -> None:
        """As `RolloutClient.resume`, of all replicas."""
        await self._core.async_run(self._core.lifecycle.resume())

    async def push_lora(self, adapter: Any, config: Any = None, **options: Unpack[PushLoraOptions]) -> FleetReceipt:
        """As `RolloutClient.push_lora`, into all replicas.

        The fleet keeps a copy of the tensors until the next push. Replicas that miss this push get them as soon as
        they can be reached.
        """
        return await self._core.async_push(lambda pusher: pusher.push_lora(adapter, config, options))

    async def push_full(self, named_tensors: NamedTensors, **options: Unpack[PushFullOptions]) -> FleetReceipt:
        """As `RolloutClient.push_full`, into all replicas. Each tensor is read once and sent to all.

        A replica that misses the push serves again after the next full push, or after it got the tensors from the
        fleet's `resupply`.
        """
        return await self._core.async_push(lambda pusher: pusher.push_full(named_tensors, options))

    async def push_delta(
        self,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        *,
        base_version: int,
        **options: Unpack[PushDeltaOptions],
    ) -> FleetReceipt:
        """As `RolloutClient.push_delta`, into all replicas that have the base version.

        A replica that misses the push serves again after the next full push.
        """
        return await self._core.async_push(lambda pusher: pusher.push_delta(old, new, base_version, options))

    def begin_push(
        self, kind: PushKind = "full", config: Any = None, **options: Unpack[BeginPushOptions]
    ) -> AsyncFleetPush:
        """As `RolloutClient.begin_push`, into all replicas; its `receipt` is a `FleetReceipt`."""
        return self._core.async_begin_push(kind, config, options)

    async def push_directory(
        self, path: str | os.PathLike[str], kind: str = "lora", **options: Unpack[PushDirectoryOptions]
    ) -> FleetReceipt:
        """As `RolloutClient.push_directory`: each replica reads the directory on its own machine."""
        return await self._core.async_push(lambda pusher: pusher.push_directory(path, kind, options))

    async def cancel_update(self) -> None:
        """Ends the push that is open, on all replicas: its sender gets `Cancelled`, and the policy stays as it is."""
        await asyncio.to_thread(self._core.cancel_update)

    async def parameters(self) -> list[ParameterInfo]:
        """As `RolloutClient.parameters`; they are the same for all replicas."""
        return await self._core.async_run(self._core.replica_set.first(lambda client: client.parameters()))

    async def checksum(self, names: Iterable[str] | None = None) -> dict[int, dict[str, str]]:
        """As `RolloutClient.checksum`, of every replica that can be reached, by its number."""
        listed = None if names is None else list(names)
        return await self._core.async_run(self._core.replica_set.each(lambda client: client.checksum(listed)))

    async def adapters(self) -> dict[int, list[AdapterInfo]]:
        """As `RolloutClient.adapters`, of every replica that can be reached, by its number."""
        return await self._core.async_run(self._core.replica_set.each(lambda client: client.adapters()))

    async def remove_adapter(self, name: str) -> None:
        """As `RolloutClient.remove_adapter`, on all replicas; those that cannot be reached follow when they can."""
        await self._core.async_run(self._core.pushes.remove_adapter(name))

    async def __aenter__(self) -> Self:
        """Waits until the fleet is ready, and returns it."""
        try:
            await self.wait_until_ready()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the fleet."""
        await self.close()
