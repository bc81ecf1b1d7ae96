"""Sets and reads fields of messages, with errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .errors import Internal, InvalidArgument
from .types import TokenIds


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


def of_each(given: Sequence[Any], count: int, path: str) -> Sequence[Any]:
    """The list of each of `count` prompts or sequences; raises `InvalidArgument` if only some are given."""
    if len(given) not in (0, count):
        raise InvalidArgument(f"{path}: {len(given)} for {count} prompts; give a list for each")
    return given if len(given) else [()] * count


def set_rows(fields: Sequence[Any], given: Sequence[Sequence[TokenIds]], path: str) -> None:
    """Sets the rows of tokens of each prompt or sequence."""
    for i, (field, rows) in enumerate(zip(fields, of_each(given, len(fields), path), strict=True)):
        for j, row in enumerate(rows):
            if isinstance(row, (int, np.integer)):
                raise InvalidArgument(f"{path}[{i}][{j}]: expected a row of token ids, got {row!r}")
            extend(field.add().ids, row, f"{path}[{i}][{j}]")


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
