"""The elements that differ between two states of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from ._tensors import bits_of, layout_of
from .errors import InvalidArgument
from .types import DtypeName

# Index differences compress well and values hardly: a higher level costs time and saves almost nothing.
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
    """Compressed with Zstandard: `changed` little-endian u32 (the first index, then the differences between successive
    indices, which are flat, row-major and ascending), then as many little-endian values of `dtype`."""


def make_delta(old: Mapping[str, Any], new: Mapping[str, Any], dtype: DtypeName = "bfloat16") -> Iterator[DeltaTensor]:
    """Yields the changed elements of each tensor; unchanged tensors are left out.

    Both states are rounded to `dtype` first, and elements are compared by their bits, so that a change too small for
    the served weights is not sent.

    Args:
        old: arrays or tensors by name, as the server has them.
        new: the tensors that it will have, with the same names and shapes.
        dtype: of the parameters in the server.

    Raises:
        InvalidArgument: names or shapes differ; the message has the first that does.
    """
    if different := sorted(old.keys() ^ new.keys()):
        raise InvalidArgument(f"{different[0]}: is in {'old' if different[0] in old else 'new'} only")
    for name, tensor in new.items():
        delta = delta_of(name, old[name], tensor, dtype)
        if delta is not None:
            yield delta


def delta_of(name: str, old: Any, new: Any, dtype: DtypeName) -> DeltaTensor | None:
    """The changed elements of one tensor; None if there are none. Arguments and errors as for `make_delta`."""
    shape, before = layout_of(name, new).shape, layout_of(name, old).shape
    if shape != before:
        raise InvalidArgument(f"{name}: has shape {list(before)} in old and {list(shape)} in new")
    values = bits_of(name, new, dtype)
    indices = np.flatnonzero(values != bits_of(name, old, dtype))
    if not len(indices):
        return None
    return DeltaTensor(name, dtype, shape, len(indices), payload_of(name, indices, values[indices]))


def payload_of(name: str, indices: npt.NDArray[np.intp], values: npt.NDArray[np.unsignedinteger]) -> bytes:
    """The payload of changed elements of a tensor, as `DeltaTensor.payload`: at least one, by ascending indices."""
    gaps = np.diff(indices, prepend=0)
    if gaps.max() > _LARGEST_GAP:
        raise InvalidArgument(f"{name}: {gaps.max()} unchanged elements in a row are too many; push it whole")
    return zstandard.compress(gaps.astype("<u4").tobytes() + values.tobytes(), _ZSTD_LEVEL)
