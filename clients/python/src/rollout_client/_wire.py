"""Messages of pushes encoded by hand: protobuf would copy the data three times, and take longer for each tensor."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from . import _proto
from ._convert_weights import DTYPES
from ._tensors import Layout

Message = tuple[bytes | memoryview, ...]
"""An encoded message, in parts."""

_DTYPE_NUMBERS = {name: number for number, name in DTYPES.items()}
_DIGEST_BYTES = 16
# Most numbers have seven bits.
_ONE_BYTE = [bytes([value]) for value in range(0x80)]
# Keys of fields: their numbers, and how they are encoded.
_HEADER, _MANIFEST, _CHUNK = b"\x0a", b"\x12", b"\x1a"
_HEADER_TENSORS, _MANIFEST_TENSORS = b"\x2a", b"\x0a"


def request(**kind: Any) -> bytes:
    """An `UpdateRequest` of this kind, encoded by protobuf."""
    return _proto.UPDATE.request(**kind).SerializeToString()


def header_request(header: Any, tensors: Iterable[bytes]) -> bytes:
    """An `UpdateRequest` with a `Header` that declares these tensors, which `encoded_entry` has encoded."""
    fields = header.SerializeToString() + b"".join(_field(_HEADER_TENSORS, tensor) for tensor in tensors)
    return _field(_HEADER, fields)


def manifest_request(tensors: Iterable[bytes]) -> bytes:
    """An `UpdateRequest` with a `Manifest` of these tensors."""
    return _field(_MANIFEST, b"".join(_field(_MANIFEST_TENSORS, tensor) for tensor in tensors))


def chunk_request(tensor: int, offset: int, data: memoryview | bytes) -> Message:
    """The two parts of an `UpdateRequest` with a `Chunk`."""
    fields = b"\x08" + varint(tensor) + (b"\x10" + varint(offset) if offset else b"") + b"\x1a" + varint(len(data))
    return _CHUNK + varint(len(fields) + len(data)) + fields, data


def encoded_entry(
    name: str, layout: Layout, digest: bytes, *, offset: int = 0, changed: int = 0, payload_bytes: int = 0
) -> bytes:
    """A `Tensor`."""
    encoded = _field(b"\x0a", name.encode()) + _layout_fields(layout.dtype, layout.shape)
    encoded += b"\x22\x10" + digest if len(digest) == _DIGEST_BYTES else _field(b"\x22", digest)
    if changed:
        encoded += b"\x28" + varint(changed)
    if payload_bytes:
        encoded += b"\x30" + varint(payload_bytes)
    return encoded + b"\x38" + varint(offset) if offset else encoded


def varint(value: int) -> bytes:
    """A number as protobuf encodes it."""
    if 0 <= value < len(_ONE_BYTE):
        return _ONE_BYTE[value]
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004 seven bits a byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _field(key: bytes, value: bytes) -> bytes:
    return key + varint(len(value)) + value


@functools.lru_cache(1024)  # a model has few shapes, and many tensors of each
def _layout_fields(dtype: str, shape: tuple[int, ...]) -> bytes:
    encoded = b"\x10" + varint(_DTYPE_NUMBERS[dtype])
    return encoded + _field(b"\x1a", b"".join(map(varint, shape))) if shape else encoded
