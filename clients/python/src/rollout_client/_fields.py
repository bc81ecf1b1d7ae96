"""Sets and reads fields of messages, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import Internal, InvalidArgument


def set_field(message: Any, name: str, value: Any, path: str) -> None:
    """Sets a field; raises `InvalidArgument`, starting with `path`, if the value has the wrong type or range."""
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}") from None


def extend(field: Any, values: Any, path: str) -> None:
    """Appends to a repeated field; arrays go through `tolist`, which is faster and gives plain numbers."""
    try:
        field.extend(values.tolist() if hasattr(values, "tolist") else values)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}") from None


def number(table: Mapping[int, Any], value: Any, path: str) -> int:
    """The enum's number of a value."""
    for key, meaning in table.items():
        if meaning == value and type(meaning) is type(value):
            return key
    raise InvalidArgument(f"{path}: expected one of {list(table.values())}, got {value!r}")


def known(table: Mapping[int, Any], value: int) -> Any:
    """The value of an enum's number."""
    if value not in table:
        raise Internal(f"the server sent an enum value that this client does not know ({value}); update rollout-client")
    return table[value]
