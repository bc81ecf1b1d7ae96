"""Converts the experts of tokens between `routing` and the messages of `rollout.v1`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ._fields import of_each, set_field
from .errors import Internal
from .routing import Routing, RoutingInfo, check_routing


def set_routing(fields: Sequence[Any], given: Sequence[Routing | None]) -> None:
    """Sets the experts of each prompt or sequence; raises `InvalidArgument`, starting with the path of wrong ones."""
    for i, (field, routing) in enumerate(zip(fields, of_each(given, len(fields), "routing"), strict=True)):
        if routing is None or (isinstance(routing, tuple) and not routing):
            continue
        checked = check_routing(routing, f"routing[{i}]")
        tokens, layers, top_k = checked.experts.shape
        if tokens == 0:
            continue
        set_field(field, "first_token", checked.first_token, f"routing[{i}].first_token")
        field.layers, field.top_k = layers, top_k
        field.experts = checked.experts.astype(checked.experts.dtype.newbyteorder("<")).tobytes()


def routing(message: Any, tokens: int) -> Routing:
    """The experts of so many tokens; how many bytes an expert takes follows from it."""
    return _routing(message, message.experts, tokens)


def routing_of_parts(messages: Sequence[Any], tokens: int) -> Routing:
    """The experts of so many tokens, which came in consecutive parts."""
    return _routing(messages[0], b"".join(message.experts for message in messages), tokens)


def _routing(message: Any, rows: bytes, tokens: int) -> Routing:
    shape = (tokens, message.layers, message.top_k)
    size = len(rows) // max(int(np.prod(shape)), 1) or 1
    if size > 2 or size * int(np.prod(shape)) != len(rows):  # noqa: PLR2004 bytes of a uint16
        raise Internal(f"the server sent {len(rows)} bytes for the experts {list(shape)} [tokens, layers, top_k]")
    experts = np.frombuffer(rows, f"<u{size}").astype(f"u{size}")
    return Routing(message.first_token, experts.reshape(shape))


def routing_info(info: Any) -> RoutingInfo:
    """The part of a `GetInfoResponse` about experts."""
    return RoutingInfo(list(info.layers), info.top_k, info.experts, info.returned)
