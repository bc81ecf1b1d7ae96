"""The asyncio client's way to new weights: the blocking client's, in a thread, as tensors are read there."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from . import _convert_weights, _proto
from ._model import Model
from ._segment import SegmentPool
from ._session import AsyncPush, NamedTensors
from ._tls import TlsFiles
from .client import RolloutClient
from .errors import InvalidArgument
from .options import (
    BeginPushOptions,
    PushDeltaOptions,
    PushDirectoryOptions,
    PushFullOptions,
    PushKind,
    PushLoraOptions,
    check_begin_push,
)
from .types import AdapterInfo, OpenUpdate, ParameterInfo, UpdateResult

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AsyncWeightSync:
    """The pushes of `WeightSync`, awaited. Iterators and `progress` are called in a thread of their own.

    Cancelling a task that waits for a push drops the push.
    """

    address: str
    _segments: SegmentPool
    _pushing: weakref.WeakSet[RolloutClient]
    """Clients of pushes that may still run."""
    _timeout: float | None
    _may_lend = True
    _token: str | None
    _tls: TlsFiles | None
    _call: Callable[..., Any]

    async def push_lora(self, adapter: Any, config: Any = None, **options: Unpack[PushLoraOptions]) -> UpdateResult:
        """As `RolloutClient.push_lora`."""
        return await self._in_thread(lambda client: client.push_lora(adapter, config, **options))

    async def push_full(self, named_tensors: NamedTensors | Model, **options: Unpack[PushFullOptions]) -> UpdateResult:
        """As `RolloutClient.push_full`."""
        return await self._in_thread(lambda client: client.push_full(named_tensors, **options))

    async def push_delta(
        self,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        *,
        base_version: int,
        **options: Unpack[PushDeltaOptions],
    ) -> UpdateResult:
        """As `RolloutClient.push_delta`."""
        return await self._in_thread(lambda client: client.push_delta(old, new, base_version=base_version, **options))

    def begin_push(self, kind: PushKind = "full", config: Any = None, **options: Unpack[BeginPushOptions]) -> AsyncPush:
        """As `RolloutClient.begin_push`; nothing is sent before the `async with` block, or the first call, begins."""
        check_begin_push(kind, config, options)
        if options.get("transport") == "device_memory":
            raise InvalidArgument("transport: 'device_memory' is for push_full and push_lora, or the blocking client")
        client = self._blocking()
        return AsyncPush(client, lambda: client.begin_push(kind, config, **options))

    async def push_directory(
        self, path: str | os.PathLike[str], kind: str = "lora", **options: Unpack[PushDirectoryOptions]
    ) -> UpdateResult:
        """As `RolloutClient.push_directory`."""
        return await self._in_thread(lambda client: client.push_directory(path, kind, **options))

    async def cancel_update(self, update_id: int | None = None) -> OpenUpdate | None:
        """As `RolloutClient.cancel_update`."""
        response = await self._call(_proto.CANCEL_UPDATE, _convert_weights.cancel_update_request(update_id))
        return _convert_weights.cancelled_update(response)

    async def parameters(self) -> list[ParameterInfo]:
        """As `RolloutClient.parameters`."""
        return _convert_weights.parameter_infos(
            await self._call(_proto.LIST_PARAMETERS, _proto.LIST_PARAMETERS.request())
        )

    async def checksum(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """As `RolloutClient.checksum`."""
        return _convert_weights.checksums(await self._call(_proto.CHECKSUM, _convert_weights.checksum_request(names)))

    async def adapters(self) -> list[AdapterInfo]:
        """As `RolloutClient.adapters`."""
        return _convert_weights.adapter_infos(await self._call(_proto.LIST_ADAPTERS, _proto.LIST_ADAPTERS.request()))

    async def remove_adapter(self, name: str, expected_generation: int | None = None) -> int:
        """As `RolloutClient.remove_adapter`."""
        request = _convert_weights.remove_adapter_request(name, expected_generation)
        return (await self._call(_proto.REMOVE_ADAPTER, request)).generation

    async def _in_thread(self, use: Callable[[RolloutClient], UpdateResult]) -> UpdateResult:
        """Uses a blocking client whose calls end with this task."""
        client = self._blocking()
        try:
            return await asyncio.to_thread(use, client)
        finally:
            client._end_calls()
            self._may_lend = client._may_lend

    def _blocking(self) -> RolloutClient:
        """A blocking client that shares this one's segment."""
        client = RolloutClient(self.address, self._timeout, self._token, tls=self._tls)
        client._segments, client._may_lend = self._segments, self._may_lend
        self._pushing.add(client)
        return client

    def _end_pushes(self) -> None:
        for client in list(self._pushing):
            client._end_calls()
