# Generated from _async_stream.py by scripts/blocking_client.py: change that file, and run the script.
"""The events of a request for samples, as they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any

import grpc

from . import _convert, _proto
from ._connection import Connection
from .types import StreamEvent


class GenerateStream(Iterator[StreamEvent]):
    """The events of one request as they arrive. An iterator and a context manager; `generate_stream` makes it."""

    def __init__(self, connection: Connection, request: Any, deadline: float | None) -> None:
        """Sends the request, a `GenerateRequest` whose stream must end within `deadline` seconds."""
        self.request_id: str = request.request_id
        """The id that `abort` takes."""
        self._translated = connection.translated
        self._cancelled = False
        self._call = connection.stream(_proto.GENERATE, request, deadline)
        self._messages = self._call.__iter__()
        self._events = _convert.Events()

    def __next__(self) -> StreamEvent:
        """Waits for the next event.

        Raises:
            RolloutError: the request failed.
        """
        with self._translated:
            try:
                event = None
                while event is None:
                    event = self._events.event(self._messages.__next__())
                return event
            except (StopIteration, grpc.RpcError):
                raise
            except BaseException:  # the wait is interrupted, or a response is invalid
                self.cancel()
                raise

    def cancel(self) -> None:
        """Aborts the request on the server, if it still runs."""
        self._cancelled = True
        self._call.cancel()

    def __enter__(self) -> GenerateStream:
        """Returns the stream."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Aborts the request, if it still runs."""
        self.cancel()
