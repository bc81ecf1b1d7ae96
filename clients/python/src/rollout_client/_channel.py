"""Channel options, call metadata, time limits and errors: the same for both clients."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType
from typing import Any

import grpc

from ._tls import TlsFiles, explained
from .errors import InvalidArgument, Unavailable, from_rpc_error

CHANNEL_OPTIONS = [
    # Replies have no size limit: the caller chooses prompts x samples x tokens.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Detect a server that vanished without closing the connection in under a minute, even in the middle of a call.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Reconnect quickly while a server starts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, this is the time limit of one attempt to connect: a few round trips for TCP and TLS.
    ("grpc.min_reconnect_backoff_ms", 20_000),
]

ANSWER_SECONDS = 30.0
"""From the time limit of a generate call to its gRPC deadline: time for the running step to end and for thousands of
samples to cross the network."""

READY_POLL_SECONDS = 0.05
"""Between two status calls to a server that is starting."""

READY_CALL_SECONDS = 5.0
"""Time limit of one such call: a server that accepts connections but does not answer is not ready."""


def make_channel(library: Any, address: str, tls: TlsFiles | None) -> Any:
    """A channel of `library`, which is `grpc` or `grpc.aio`."""
    if tls is None:
        return library.insecure_channel(address, options=CHANNEL_OPTIONS)
    return library.secure_channel(address, tls.credentials(), options=[*CHANNEL_OPTIONS, *tls.channel_options()])


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call.

    Raises:
        InvalidArgument: the token is not a valid header value. The message does not contain the token.
    """
    if token is None:
        return ()
    if not token or not all("!" <= character <= "~" for character in token):
        raise InvalidArgument("token: is empty, or contains spaces, line breaks or non-ASCII characters")
    return (("authorization", f"Bearer {token}"),)


def generate_timeouts(timeout: float | None, default: float | None) -> tuple[float | None, float | None]:
    """The time limit of a generate call, which the server enforces, and the later deadline of its stream, in seconds.

    Raises:
        InvalidArgument: the timeout is negative or NaN.
    """
    limit = call_timeout(timeout, default)
    if limit is None:
        return None, None
    if not limit >= 0:
        raise InvalidArgument(f"timeout: expected seconds, at least 0, got {limit}")
    return limit, limit + ANSWER_SECONDS


def call_timeout(timeout: float | None, default: float | None) -> float | None:
    """The timeout of one call in seconds, as gRPC takes it; infinity overrides the default with no limit."""
    chosen = default if timeout is None else timeout
    return None if chosen is None or math.isinf(chosen) else chosen


class Translated:
    """Turns a `grpc.RpcError` raised inside into its `RolloutError`. A context manager, blocking and asyncio."""

    def __init__(self, address: str, tls: TlsFiles | None) -> None:
        """For calls to this server; a failed connection is probed, to explain it."""
        self._address, self._tls = address, tls

    def __enter__(self) -> None:
        """Has no effect."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises the `RolloutError`."""
        if isinstance(error, grpc.RpcError):
            raise explained(from_rpc_error(error), self._address, self._tls) from error

    async def __aenter__(self) -> None:
        """Has no effect."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises the `RolloutError`."""
        if isinstance(error, grpc.RpcError):
            found = from_rpc_error(error)
            if isinstance(found, Unavailable):  # the probe blocks
                found = await asyncio.to_thread(explained, found, self._address, self._tls)
            raise found from error
