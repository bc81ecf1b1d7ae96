"""What has changed between two states of a model, element by element."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from ._tensors import bits_of, layout_of
from .errors import InvalidArgument
from .types import DtypeName

# Gaps compress well and values hardly: a higher level costs time and saves next to nothing.
_ZSTD_LEVEL = 1
_LARGEST_GAP = 2**32 - 1


@dataclass(frozen=True)
class DeltaTensor:
    """The changed elements of one tensor."""

    name: str
    dtype: DtypeName
    shape: tuple[int, ...]
    """Of the whole tensor."""
    changed: int
    """Elements in the payload."""
    payload: bytes
    """Zstandard of `changed` little-endian u32 (the first index, then each index less the one before it; indices are
    flat, row-major and ascending), then as many values, little-endian, of `dtype`."""


def make_delta(old: Mapping[str, Any], new: Mapping[str, Any], dtype: DtypeName = "bfloat16") -> Iterator[DeltaTensor]:
    """What turns `old` into `new`, tensor by tensor; tensors without a change are left out.

    Both are rounded to `dtype` first, and elements differ if their bits do, so that a change too small for the served
    weights costs nothing.

    Args:
        old: arrays or tensors by name: what the server has.
        new: what it shall have; the same names and shapes.
        dtype: in which the server serves.

    Raises:
        InvalidArgument: names or shapes differ; in the message the first of them.
    """
    if different := sorted(old.keys() ^ new.keys()):
        raise InvalidArgument(f"{different[0]}: is in {'old' if different[0] in old else 'new'} only")
    for name, tensor in new.items():
        delta = delta_of(name, old[name], tensor, dtype)
        if delta is not None:
            yield delta


def delta_of(name: str, old: Any, new: Any, dtype: DtypeName) -> DeltaTensor | None:
    """What turns one tensor into another; None if nothing. Arguments and errors as for `make_delta`."""
    shape, before = layout_of(name, new).shape, layout_of(name, old).shape
    if shape != before:
        raise InvalidArgument(f"{name}: has shape {list(before)} in old and {list(shape)} in new")
    values = bits_of(name, new, dtype)
    indices = np.flatnonzero(values != bits_of(name, old, dtype))
    if not len(indices):
        return None
    gaps = np.diff(indices, prepend=0)
    if gaps.max() > _LARGEST_GAP:
        raise InvalidArgument(f"{name}: {gaps.max()} unchanged elements in a row are too many; push it whole")
    payload = zstandard.compress(gaps.astype("<u4").tobytes() + values[indices].tobytes(), _ZSTD_LEVEL)
    return DeltaTensor(name, dtype, shape, len(indices), payload)
