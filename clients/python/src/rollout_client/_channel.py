"""Channel options and call metadata that both clients share."""

from __future__ import annotations

import math
from typing import Any

from ._tls import TlsFiles
from .errors import InvalidArgument

CHANNEL_OPTIONS = [
    # A reply grows with prompts x samples x tokens, which the caller chose: no limit of our own.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A server that vanished without closing the connection is noticed in under a minute, also in the middle of a call.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # While a server starts, look again soon.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # What gRPC calls so is how long an attempt to connect may take: some round trips for TCP and TLS.
    ("grpc.min_reconnect_backoff_ms", 20_000),
]

ANSWER_SECONDS = 30.0
"""From the time limit of a generate call to its deadline, by which all that the server then sends must have come: a
step ends, and thousands of samples cross the network."""

READY_POLL_SECONDS = 0.05
"""Between two looks at a server that starts."""

READY_CALL_SECONDS = 5.0
"""For one such look: a server that accepts but does not answer is not ready."""


def make_channel(library: Any, address: str, tls: TlsFiles | None) -> Any:
    """A channel of `grpc` or `grpc.aio`."""
    if tls is None:
        return library.insecure_channel(address, options=CHANNEL_OPTIONS)
    return library.secure_channel(address, tls.credentials(), options=[*CHANNEL_OPTIONS, *tls.channel_options()])


def call_metadata(token: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata of every call.

    Raises:
        InvalidArgument: no header can carry the token, which is left out of the message.
    """
    if token is None:
        return ()
    if not token or not all("!" <= character <= "~" for character in token):
        raise InvalidArgument("token: is empty, or has spaces, line ends or characters outside of ASCII")
    return (("authorization", f"Bearer {token}"),)


def generate_timeouts(timeout: float | None, default: float | None) -> tuple[float | None, float | None]:
    """The time limit of a generate call, which the server keeps, and the deadline of its stream, which is later.

    Raises:
        InvalidArgument: it is no time.
    """
    limit = call_timeout(timeout, default)
    if limit is None:
        return None, None
    if not limit >= 0:
        raise InvalidArgument(f"timeout: {limit} is not a number of seconds from 0 on")
    return limit, limit + ANSWER_SECONDS


def call_timeout(timeout: float | None, default: float | None) -> float | None:
    """The timeout of one call in seconds as gRPC takes it; infinity overrides a default."""
    chosen = default if timeout is None else timeout
    return None if chosen is None or math.isinf(chosen) else chosen
