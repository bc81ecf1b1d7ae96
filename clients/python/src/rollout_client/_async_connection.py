"""A connection to one server: its channel, and how calls are made on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from . import _proto
from ._channel import Translated, call_metadata, call_timeout, make_channel
from ._tls import TlsInput, tls_files


class AsyncConnection:
    """The calls of one client."""

    def __init__(self, address: str, timeout: float | None, token: str | None, tls: TlsInput) -> None:
        """Connects lazily, when the first call is made. The arguments are those of the clients."""
        self.address, self.timeout, self.token, self.tls = address, timeout, token, tls_files(tls)
        self.metadata = call_metadata(token)
        self.translated = Translated(address, self.tls)
        self._channel = make_channel(grpc.aio, address, self.tls)

    async def call(self, method: _proto.Method, request: Any = None, timeout: float | None = None) -> Any:
        """Makes a call with one response, and returns it.

        Args:
            method: the RPC.
            request: its message; None is an empty one.
            timeout: seconds; None is the client's timeout.

        Raises:
            RolloutError: the call failed.
        """
        request = method.request() if request is None else request
        async with self.translated:
            return await self._callable(method)(request, **self._options(timeout))

    async def gather(self, method: _proto.Method, request: Any, timeout: float | None) -> list[Any]:
        """Makes a call with several responses, and returns all of them; otherwise as `call`."""
        async with self.translated:
            call = self._callable(method, stream=True)(request, **self._options(timeout))
            try:
                return [response async for response in call]
            except BaseException:  # the wait is interrupted (a cancelled task, KeyboardInterrupt): stop the server too
                call.cancel()
                raise

    def stream(self, method: _proto.Method, request: Any, deadline: float | None) -> Any:
        """Starts a call with several responses, which must end within `deadline` seconds; returns gRPC's call."""
        with self.translated:
            return self._callable(method, stream=True)(request, timeout=deadline, metadata=self.metadata)

    async def close(self) -> None:
        """Closes the channel, which ends its calls."""
        await self._channel.close()

    def _options(self, timeout: float | None) -> dict[str, Any]:
        return {"timeout": call_timeout(timeout, self.timeout), "metadata": self.metadata}

    def _callable(self, method: _proto.Method, stream: bool = False) -> Callable[..., Any]:
        make = self._channel.unary_stream if stream else self._channel.unary_unary
        return make(
            method.path,
            request_serializer=method.request.SerializeToString,
            response_deserializer=method.response.FromString,
        )
