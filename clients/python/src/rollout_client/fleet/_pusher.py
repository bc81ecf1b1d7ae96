"""Pushes into all replicas, and how a replica that misses one gets it later."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from .._lora import adapter_parts, config_json
from .._pusher import Pusher
from .._segment import SegmentPool
from .._session import NamedTensors
from .._tensors import bytes_of
from ..aio import AsyncRolloutClient
from ..options import (
    BeginPushOptions,
    PushDeltaOptions,
    PushDirectoryOptions,
    PushFullOptions,
    PushKind,
    PushLoraOptions,
    check_begin_push,
    check_push_directory,
    refuse_unknown,
)
from ..types import UpdateResult
from ._loop import Loop
from ._policy import Repush
from ._push import FleetPush, Transaction
from ._pushes import Pushes
from .types import FleetReceipt

Resupply = Callable[[], NamedTensors]
"""Returns the tensors of the last full push again."""


class FleetPusher:
    """Sends one push to all replicas. Blocks, and reads tensors in the thread that calls it."""

    def __init__(self, loop: Loop, pushes: Pushes, segments: SegmentPool, resupply: Resupply | None) -> None:
        """Sends nothing yet."""
        self._loop, self._pushes, self._segments, self._resupply = loop, pushes, segments, resupply
        self._transaction: Transaction | None = None

    def push_lora(self, adapter: Any, config: Any, options: PushLoraOptions) -> FleetReceipt:
        """As `Fleet.push_lora`."""
        refuse_unknown("push_lora", options, PushLoraOptions)
        tensors, adapter_config = adapter_parts(adapter, config)
        kept = {name: _copied(name, tensor) for name, tensor in tensors.items()}
        repush = _repush_lora(kept, adapter_config or None, options.get("name"))
        return self._push("lora", options, repush, lambda to, asked: to.push_lora(kept, adapter_config or None, asked))

    def push_full(self, named_tensors: NamedTensors, options: PushFullOptions) -> FleetReceipt:
        """As `Fleet.push_full`."""
        refuse_unknown("push_full", options, PushFullOptions)
        return self._push("full", options, self._repush_full(), lambda to, asked: to.push_full(named_tensors, asked))

    def push_delta(
        self, old: Mapping[str, Any], new: Mapping[str, Any], base_version: int, options: PushDeltaOptions
    ) -> FleetReceipt:
        """As `Fleet.push_delta`."""
        refuse_unknown("push_delta", options, PushDeltaOptions)
        given = {**options, "expected_version": base_version}
        return self._push("delta", given, None, lambda to, asked: to.push_delta(old, new, base_version, asked))

    def push_directory(self, path: str | os.PathLike[str], kind: str, options: PushDirectoryOptions) -> FleetReceipt:
        """As `Fleet.push_directory`."""
        refuse_unknown("push_directory", options, PushDirectoryOptions)
        check_push_directory(kind, options)
        again = _again(options.get("name"))

        def repush(client: AsyncRolloutClient, version: int) -> Awaitable[UpdateResult]:
            return client.push_directory(path, kind, **again(version))

        # A version of a delta store is a whole policy, whatever a replica has: each finds the changes that it lacks.
        effect = "full" if kind == "delta" else kind
        return self._push(effect, options, repush, lambda to, asked: to.push_directory(path, kind, asked))

    def begin_push(self, kind: PushKind, config: Any, options: BeginPushOptions) -> FleetPush:
        """As `Fleet.begin_push`."""
        check_begin_push(kind, config, options)
        kept: dict[str, Any] = {}
        repush, keep = None, _nothing
        if kind == "lora":
            adapter_config = None if config is None else config_json(config)
            repush = _repush_lora(kept, adapter_config, options.get("name"))

            def keep(name: str, tensor: Any) -> None:
                kept[name] = _copied(name, tensor)

        elif kind == "full":
            repush = self._repush_full()
        given = dict(options)
        if kind == "delta":
            given["expected_version"] = options["base_version"]
        transaction = self._begin(kind, given, repush)
        sender = transaction.begin(keep)
        try:
            return sender.begin_push(kind, config, transaction.options)
        except BaseException:
            transaction.abandon()
            raise

    def cancel(self) -> None:
        """Ends the push, whether it waits for its turn or is being sent. For any thread."""
        if self._transaction is not None:
            self._transaction.cancel()

    def _repush_full(self) -> Repush | None:
        resupply = self._resupply
        if resupply is None:
            return None
        again = _again(None)

        async def repush(client: AsyncRolloutClient, version: int) -> UpdateResult:
            tensors = await asyncio.to_thread(resupply)
            return await client.push_full(tensors, progress=False, **again(version))

        return repush

    def _begin(self, kind: PushKind, options: Mapping[str, Any], repush: Repush | None) -> Transaction:
        """A push that does not wait for its turn yet."""
        self._transaction = Transaction(
            self._loop, self._pushes, self._segments, kind=kind, options=options, repush=repush
        )
        return self._transaction

    def _push(
        self,
        kind: PushKind,
        options: Mapping[str, Any],
        repush: Repush | None,
        send: Callable[[Pusher, dict[str, Any]], object],
    ) -> FleetReceipt:
        """A push in one call; `send` gets the pusher to all replicas, and its options."""
        transaction = self._begin(kind, options, repush)
        sender = transaction.begin(_nothing)
        try:
            send(sender, transaction.options)
        except BaseException:
            transaction.abandon()
            raise
        return transaction.finish()


def _again(name: str | None) -> Callable[[int], dict[str, Any]]:
    """The options of a repeated push, whatever the replica has; a resident adapter has no version."""
    return lambda version: {"version": version, "force_version": True} if name is None else {"name": name}


def _repush_lora(kept: Mapping[str, Any], config: Any, name: str | None) -> Repush:
    again = _again(name)

    def repush(client: AsyncRolloutClient, version: int) -> Awaitable[UpdateResult]:
        return client.push_lora(kept, config, progress=False, **again(version))

    return repush


def _copied(name: str, tensor: Any) -> tuple[bytes, str, tuple[int, ...]]:
    """A copy of the tensor, which the trainer may change afterwards."""
    given = bytes_of(name, tensor)
    return bytes(given.data), given.layout.dtype, given.layout.shape


def _nothing(name: str, tensor: Any) -> None:
    """Keeps nothing."""
