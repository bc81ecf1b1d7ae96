"""The events of a request for samples, as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import grpc

from . import _convert, _proto
from ._async_connection import AsyncConnection
from .errors import Cancelled
from .types import StreamEvent


class AsyncGenerateStream(AsyncIterator[StreamEvent]):
    """The events of one request as they arrive. An iterator and a context manager; `generate_stream` makes it."""

    def __init__(self, connection: AsyncConnection, request: Any, deadline: float | None) -> None:
        """Sends the request, a `GenerateRequest` whose stream must end within `deadline` seconds."""
        self.request_id: str = request.request_id
        """The id that `abort` takes."""
        self._translated = connection.translated
        self._cancelled = False
        self._call = connection.stream(_proto.GENERATE, request, deadline)
        self._messages = self._call.__aiter__()
        self._events = _convert.Events()

    async def __anext__(self) -> StreamEvent:
        """Waits for the next event.

        Raises:
            RolloutError: the request failed.
        """
        async with self._translated:
            try:
                event = None
                while event is None:
                    event = self._events.event(await self._messages.__anext__())
                return event
            except (StopAsyncIteration, grpc.RpcError):
                raise
            # asyncio only: gRPC raises this both for `cancel` and for a cancelled task
            except asyncio.CancelledError as error:
                if self._cancelled:
                    raise Cancelled("the stream was cancelled by this client") from error
                self.cancel()
                raise
            except BaseException:  # the wait is interrupted, or a response is invalid
                self.cancel()
                raise

    def cancel(self) -> None:
        """Aborts the request on the server, if it still runs."""
        self._cancelled = True
        self._call.cancel()

    async def __aenter__(self) -> AsyncGenerateStream:
        """Returns the stream."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Aborts the request, if it still runs."""
        self.cancel()
