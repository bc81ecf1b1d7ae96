"""Sends pushes of the asyncio client, in threads.

Not generated: a push reads tensors and writes sockets and shared memory, which would block the event loop, so each runs
in a thread with a blocking `Pusher` of its own.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ._async_connection import AsyncConnection
from ._connection import Connection
from ._pusher import Pusher
from ._segment import SegmentPool
from ._session import AsyncPush
from .errors import InvalidArgument
from .options import BeginPushOptions, PushKind, check_begin_push

_T = TypeVar("_T")


class AsyncPusher:
    """Runs pushes in threads; their segment is shared."""

    def __init__(self, connection: AsyncConnection, segments: SegmentPool) -> None:
        """Sends nothing yet."""
        self._connection, self._segments = connection, segments
        self._may_use_ipc = True
        self._running: weakref.WeakSet[_ThreadPusher] = weakref.WeakSet()

    async def run(self, push: Callable[[Pusher], _T]) -> _T:
        """Calls `push` in a thread. Cancelling the task that waits ends the push."""
        pusher = self._make()
        try:
            return await asyncio.to_thread(push, pusher)
        finally:
            pusher.cancel()
            self._may_use_ipc = pusher.may_use_ipc

    def begin_push(self, kind: PushKind, config: Any, options: BeginPushOptions) -> AsyncPush:
        """As `AsyncWeightSync.begin_push`."""
        check_begin_push(kind, config, options)
        if options.get("transport") == "device_memory":
            raise InvalidArgument("transport: 'device_memory' is for push_full and push_lora, or the blocking client")
        pusher = self._make()
        return AsyncPush(lambda: pusher.begin_push(kind, config, options), pusher.cancel)

    def cancel(self) -> None:
        """Ends the pushes that are open."""
        for pusher in list(self._running):
            pusher.cancel()

    def _make(self) -> _ThreadPusher:
        connection = self._connection
        blocking = Connection(connection.address, connection.timeout, connection.token, connection.tls)
        pusher = _ThreadPusher(blocking, self._segments)
        pusher.may_use_ipc = self._may_use_ipc
        self._running.add(pusher)
        return pusher


class _ThreadPusher(Pusher):
    """A pusher with a connection of its own."""

    def cancel(self) -> None:
        """As `Pusher.cancel`; also ends the other calls."""
        super().cancel()
        self._connection.close()
