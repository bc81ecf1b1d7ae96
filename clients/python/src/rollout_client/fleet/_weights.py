"""The fleet's way to new weights: the pushes of a client, into all replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .._lora import adapter_parts, config_json
from .._segment import SegmentPool
from .._session import NamedTensors
from .._tensors import bytes_of
from ..aio import AsyncRolloutClient
from ..errors import InvalidArgument
from ..options import (
    BeginPushOptions,
    PushDeltaOptions,
    PushDirectoryOptions,
    PushFullOptions,
    PushKind,
    PushLoraOptions,
    check_begin_push,
    refuse_unknown,
)
from ..types import AdapterInfo, ParameterInfo, UpdateResult
from ._loop import Loop
from ._policy import Redo
from ._push import FleetPush, Transaction
from ._pushes import Pushes
from ._roster import Roster
from .types import FleetReceipt

if TYPE_CHECKING:
    from typing_extensions import Unpack

Resupply = Callable[[], NamedTensors]
"""Gives the tensors of the last full push once more."""


class FleetWeights:
    """Pushes of new weights into all replicas: each takes effect on all that take part, or on none.

    The guarantees are in `docs/ray.md`. A push that fails raises what the push of a client raises, and leaves the
    policy as it was, on all replicas; `PartialCommit` alone says that it is the fleet's policy nevertheless.
    """

    _loop: Loop
    _roster: Roster
    _pushes: Pushes
    _segments: SegmentPool
    _timeout: float | None
    _resupply: Resupply | None

    def push_lora(self, adapter: Any, config: Any = None, **options: Unpack[PushLoraOptions]) -> FleetReceipt:
        """As `RolloutClient.push_lora`, into all replicas.

        The tensors are copied and kept until the next push, for replicas that miss this one: they get them as soon as
        they can be reached.
        """
        refuse_unknown("push_lora", options, PushLoraOptions)
        tensors, adapter_config = adapter_parts(adapter, config)
        kept = {name: _copied(name, tensor) for name, tensor in tensors.items()}
        redo = _redo_lora(kept, adapter_config or None, options.get("name"))
        return self._push("lora", options, redo, lambda to, asked: to.push_lora(kept, adapter_config or None, asked))

    def push_full(self, named_tensors: NamedTensors, **options: Unpack[PushFullOptions]) -> FleetReceipt:
        """As `RolloutClient.push_full`, into all replicas. Each tensor is taken once, and sent to all.

        A replica that misses the push takes no requests until the next full push, or gets the tensors from the
        `resupply` that the fleet was made with.
        """
        refuse_unknown("push_full", options, PushFullOptions)
        return self._push("full", options, self._redo_full(), lambda to, asked: to.push_full(named_tensors, asked))

    def push_delta(
        self,
        old: Mapping[str, Any],
        new: Mapping[str, Any],
        *,
        base_version: int,
        **options: Unpack[PushDeltaOptions],
    ) -> FleetReceipt:
        """As `RolloutClient.push_delta`, into all replicas that have the base version.

        A replica that misses the push takes no requests until the next full push.
        """
        refuse_unknown("push_delta", options, PushDeltaOptions)
        given = {**options, "expected_version": base_version}
        return self._push("delta", given, None, lambda to, asked: to.push_delta(old, new, base_version, asked))

    def begin_push(self, kind: PushKind = "full", config: Any = None, **options: Unpack[BeginPushOptions]) -> FleetPush:
        """As `RolloutClient.begin_push`, into all replicas."""
        check_begin_push(kind, config, options)
        kept: dict[str, Any] = {}
        redo, keep = None, _nothing
        if kind == "lora":
            adapter_config = None if config is None else config_json(config)
            redo = _redo_lora(kept, adapter_config, options.get("name"))

            def keep(name: str, tensor: Any) -> None:
                kept[name] = _copied(name, tensor)

        elif kind == "full":
            redo = self._redo_full()
        given = dict(options)
        if kind == "delta":
            given["expected_version"] = options["base_version"]
        transaction = self._transaction(kind, given, redo)
        sender = transaction.begin()
        try:
            push = sender.begin_push(kind, config, transaction.options)
        except BaseException:
            transaction.abandon()
            raise
        return FleetPush(transaction, push, keep)

    def push_directory(
        self, path: str | os.PathLike[str], kind: str = "lora", **options: Unpack[PushDirectoryOptions]
    ) -> FleetReceipt:
        """As `RolloutClient.push_directory`: each replica reads the directory on its own machine."""
        refuse_unknown("push_directory", options, PushDirectoryOptions)
        if kind not in ("lora", "full"):
            raise InvalidArgument(f"kind: expected 'lora' or 'full', got {kind!r}")
        again = _again(options.get("name"))

        def redo(client: AsyncRolloutClient, version: int) -> Awaitable[UpdateResult]:
            return client.push_directory(path, kind, **again(version))

        return self._push(kind, options, redo, lambda to, asked: to.push_directory(path, kind, asked))

    def cancel_update(self) -> None:
        """Ends the push that is under way, on all replicas: there `Cancelled` is raised, and it never happened."""
        self._loop.make(self._pushes.cancel)

    def parameters(self) -> list[ParameterInfo]:
        """As `RolloutClient.parameters`; they are the same for all replicas."""
        return self._loop.run(self._parameters())

    def checksum(self, names: Iterable[str] | None = None) -> dict[int, dict[str, str]]:
        """As `RolloutClient.checksum`, of every replica that can be reached, by its number."""
        return self._loop.run(self._checksum(names))

    def adapters(self) -> dict[int, list[AdapterInfo]]:
        """As `RolloutClient.adapters`, of every replica that can be reached, by its number."""
        return self._loop.run(self._adapters())

    def remove_adapter(self, name: str) -> None:
        """As `RolloutClient.remove_adapter`, on all replicas; those that cannot be reached follow when they can."""
        self._loop.run(self._pushes.remove_adapter(name))

    async def _parameters(self) -> list[ParameterInfo]:
        return await self._roster.first(lambda client: client.parameters())

    async def _checksum(self, names: Iterable[str] | None) -> dict[int, dict[str, str]]:
        checked = None if names is None else list(names)
        return await self._roster.each(lambda client: client.checksum(checked))

    async def _adapters(self) -> dict[int, list[AdapterInfo]]:
        return await self._roster.each(lambda client: client.adapters())

    def _redo_full(self) -> Redo | None:
        resupply = self._resupply
        if resupply is None:
            return None
        again = _again(None)

        async def redo(client: AsyncRolloutClient, version: int) -> UpdateResult:
            tensors = await asyncio.to_thread(resupply)
            return await client.push_full(tensors, progress=False, **again(version))

        return redo

    def _transaction(self, kind: PushKind, options: Mapping[str, Any], redo: Redo | None) -> Transaction:
        """A push that waits for nothing yet."""
        return Transaction(self._loop, self._pushes, self._segments, kind=kind, options=options, redo=redo)

    def _push(
        self, kind: PushKind, options: Mapping[str, Any], redo: Redo | None, send: Callable[..., object]
    ) -> FleetReceipt:
        """A push in one call: `send(sender, options)`."""
        transaction = self._transaction(kind, options, redo)
        sender = transaction.begin()
        try:
            send(sender, transaction.options)
        except BaseException:
            transaction.abandon()
            raise
        return transaction.finish()


def _again(name: str | None) -> Callable[[int], dict[str, Any]]:
    """The options of a push that is made again, whatever the replica has; an adapter that stays has no version."""
    return lambda version: {"version": version, "force_version": True} if name is None else {"name": name}


def _redo_lora(kept: Mapping[str, Any], config: Any, name: str | None) -> Redo:
    again = _again(name)

    def redo(client: AsyncRolloutClient, version: int) -> Awaitable[UpdateResult]:
        return client.push_lora(kept, config, progress=False, **again(version))

    return redo


def _copied(name: str, tensor: Any) -> tuple[bytes, str, tuple[int, ...]]:
    """A tensor as it is now, whatever the trainer does to it afterwards."""
    given = bytes_of(name, tensor)
    return bytes(given.data), given.layout.dtype, given.layout.shape


def _nothing(name: str, tensor: Any) -> None:
    """Keeps nothing."""
