"""The asyncio fleet: the methods of `Fleet`, awaited."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from .._session import AsyncPush, NamedTensors
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
    check_begin_push,
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
from ._fleet import Fleet
from ._loop import closed
from ._policy import Redo
from ._push import Transaction
from ._weights import FleetWeights
from .types import FleetReceipt, FleetStatus

if TYPE_CHECKING:
    from typing_extensions import Unpack

_T = TypeVar("_T")


class _OnePush(FleetWeights):
    """The fleet for one push, which can be ended from another thread, wherever it is."""

    def __init__(self, fleet: Fleet) -> None:
        self._loop, self._roster, self._pushes = fleet._loop, fleet._roster, fleet._pushes
        self._segments, self._timeout, self._resupply = fleet._segments, fleet._timeout, fleet._resupply
        self._begun: Transaction | None = None

    def _transaction(self, kind: PushKind, options: Mapping[str, Any], redo: Redo | None) -> Transaction:
        self._begun = super()._transaction(kind, options, redo)
        return self._begun

    def _end_calls(self) -> None:
        if self._begun is not None:
            self._begun.cancel()


class AsyncFleet:
    """A fleet with methods to await, in any event loop. The fleet itself can be used beside it.

    Cancelling a task that waits for a request drops its work on the servers; one that waits for a push drops the push.
    """

    def __init__(self, fleet: Fleet) -> None:
        """Uses a fleet, which `close` closes."""
        self.fleet = fleet

    async def wait_until_ready(self, timeout: float | None = None) -> None:
        """As `Fleet.wait_until_ready`."""
        await self._submitted(self.fleet._until_ready(timeout))

    async def generate(
        self,
        prompts: Sequence[PromptInput],
        n: int = 1,
        sampling: SamplingInput = None,
        **options: Unpack[GenerateOptions],
    ) -> list[PromptOutput]:
        """As `Fleet.generate`."""
        return await self._submitted(self.fleet._generate(prompts, n, sampling, options))

    async def score(self, sequences: Sequence[TokenIds], **options: Unpack[ScoreOptions]) -> list[Score]:
        """As `Fleet.score`."""
        return await self._submitted(self.fleet._score(sequences, options))

    async def abort(self, request_ids: str | Iterable[str] = (), *, all: bool = False) -> AbortResult:
        """As `Fleet.abort`."""
        return await self._submitted(self.fleet._abort(request_ids, all))

    async def info(self) -> ServerInfo:
        """As `Fleet.info`."""
        return await self._submitted(self.fleet._info())

    async def status(self) -> FleetStatus:
        """As `Fleet.status`."""
        return await self._submitted(self.fleet._status())

    async def reset_prefix_cache(self) -> int:
        """As `Fleet.reset_prefix_cache`."""
        return await self._submitted(self.fleet._reset_prefix_cache())

    async def sleep(self, level: int = 1, mode: DrainMode = "wait") -> dict[int, SleepResult]:
        """As `Fleet.sleep`."""
        return await self._submitted(self.fleet._orders.sleep(level, mode))

    async def wake(self, tags: Iterable[MemoryTag] | None = None, *, reload: bool = False) -> dict[int, WakeResult]:
        """As `Fleet.wake`."""
        return await self._submitted(self.fleet._orders.wake(None if tags is None else list(tags), reload))

    @asynccontextmanager
    async def awake(self, tags: Iterable[MemoryTag] | None = None, level: int = 1) -> AsyncIterator[AsyncFleet]:
        """As `Fleet.awake`."""
        await self.wake(tags)
        try:
            yield self
        except BaseException:
            with suppress(RolloutError):
                await self.sleep(level, "abort")
            raise
        await self.sleep(level)

    async def pause(self, mode: DrainMode = "wait") -> None:
        """As `Fleet.pause`."""
        await self._submitted(self.fleet._orders.pause(mode))

    async def resume(self) -> None:
        """As `Fleet.resume`."""
        await self._submitted(self.fleet._orders.resume())

    async def push_lora(self, adapter: Any, config: Any = None, **options: Unpack[PushLoraOptions]) -> FleetReceipt:
        """As `Fleet.push_lora`."""
        return await self._pushed(lambda weights: weights.push_lora(adapter, config, **options))

    async def push_full(self, named_tensors: NamedTensors, **options: Unpack[PushFullOptions]) -> FleetReceipt:
        """As `Fleet.push_full`; an iterator is called in a thread of its own."""
        return await self._pushed(lambda weights: weights.push_full(named_tensors, **options))

    async def push_delta(
        self,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        *,
        base_version: int,
        **options: Unpack[PushDeltaOptions],
    ) -> FleetReceipt:
        """As `Fleet.push_delta`."""
        return await self._pushed(lambda weights: weights.push_delta(old, new, base_version=base_version, **options))

    def begin_push(self, kind: PushKind = "full", config: Any = None, **options: Unpack[BeginPushOptions]) -> AsyncPush:
        """As `AsyncRolloutClient.begin_push`, into all replicas; its `receipt` is a `FleetReceipt`."""
        check_begin_push(kind, config, options)
        weights = _OnePush(self.fleet)
        return AsyncPush(lambda: weights.begin_push(kind, config, **options), weights._end_calls)

    async def push_directory(
        self, path: str | os.PathLike[str], kind: str = "lora", **options: Unpack[PushDirectoryOptions]
    ) -> FleetReceipt:
        """As `Fleet.push_directory`."""
        return await self._pushed(lambda weights: weights.push_directory(path, kind, **options))

    async def cancel_update(self) -> None:
        """As `Fleet.cancel_update`."""
        await asyncio.to_thread(self.fleet.cancel_update)

    async def parameters(self) -> list[ParameterInfo]:
        """As `Fleet.parameters`."""
        return await self._submitted(self.fleet._parameters())

    async def checksum(self, names: Iterable[str] | None = None) -> dict[int, dict[str, str]]:
        """As `Fleet.checksum`."""
        return await self._submitted(self.fleet._checksum(names))

    async def adapters(self) -> dict[int, list[AdapterInfo]]:
        """As `Fleet.adapters`."""
        return await self._submitted(self.fleet._adapters())

    async def remove_adapter(self, name: str) -> None:
        """As `Fleet.remove_adapter`."""
        await self._submitted(self.fleet._pushes.remove_adapter(name))

    async def close(self) -> None:
        """As `Fleet.close`."""
        await asyncio.to_thread(self.fleet.close)

    async def __aenter__(self) -> AsyncFleet:
        """The fleet, ready."""
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

    async def _submitted(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.wrap_future(self.fleet._loop.submit(coroutine))
        try:
            await asyncio.wait({future})
        finally:
            future.cancel()
        if future.cancelled():  # and not this task
            raise closed()
        return future.result()

    async def _pushed(self, push: Callable[[FleetWeights], FleetReceipt]) -> FleetReceipt:
        """Pushes in a thread; a task that is cancelled ends its push."""
        weights = _OnePush(self.fleet)
        running = asyncio.ensure_future(asyncio.to_thread(push, weights))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            weights._end_calls()
            await asyncio.wait({running})  # until then the thread may read tensors
            with suppress(Exception):
                running.result()
            raise
