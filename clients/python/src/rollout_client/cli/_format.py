"""Formats sizes, times and JSON for the subcommands."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from enum import Enum
from typing import Any

_UNITS, _STEP = ("B", "KiB", "MiB", "GiB", "TiB"), 1024
_WHOLE_FROM = 100


def size(count: float) -> str:
    """A number of bytes with up to three digits, in powers of 1024."""
    power = 0
    while count >= _STEP and power < len(_UNITS) - 1:
        count, power = count / _STEP, power + 1
    return f"{count:.0f} {_UNITS[power]}" if power == 0 or count >= _WHOLE_FROM else f"{count:.1f} {_UNITS[power]}"


def seconds(value: float) -> str:
    """A duration in a suitable unit."""
    minute, hour = 60, 3600
    if value >= hour:
        return f"{value // hour:.0f} h {value % hour // minute:.0f} min"
    if value >= minute:
        return f"{value // minute:.0f} min {value % minute:.0f} s"
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def to_json(value: Any) -> str:
    """One line of JSON from one of the client's dataclasses, or from values that contain some."""
    return json.dumps(value, default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be converted to JSON")
