"""Reads adapters that PEFT has saved (`adapter_config.json`, `adapter_model.safetensors`), without torch."""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from pathlib import Path
from typing import Any

from ._tensors import ITEM_SIZES
from .errors import InvalidArgument

CONFIG, TENSORS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_LENGTH = struct.Struct("<Q")

FileTensor = tuple[memoryview, str, tuple[int, ...]]
"""Bytes, dtype and shape, as pushes take them. The bytes are mapped from the file."""


def read_adapter(directory: str | os.PathLike[str]) -> tuple[dict[str, FileTensor], dict[str, Any]]:
    """The tensors and the configuration of an adapter, for `push_lora(*read_adapter(directory))`.

    The file is mapped, not read: do not change it in place before the push has returned. Replacing it is fine.

    Args:
        directory: written by PEFT's `save_pretrained`.

    Raises:
        InvalidArgument: the directory or one of its files is missing or invalid; the message names it.
    """
    path = Path(directory)
    if not path.is_dir():
        raise InvalidArgument(f"{path}: no such directory; name one that PEFT's save_pretrained has written")
    if not (path / TENSORS).is_file() and (path / PICKLE).is_file():
        raise InvalidArgument(f"{path / PICKLE}: a pickle; save the adapter with safe_serialization=True")
    return _tensors(path / TENSORS), _config(path / CONFIG)


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise InvalidArgument(f"{path}: invalid JSON: {error}") from None
    except RecursionError:
        raise InvalidArgument(f"{path}: invalid JSON: it is nested too deeply") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path}: expected an object, got {type(config).__name__}")
    return config


def _tensors(path: Path) -> dict[str, FileTensor]:
    try:
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise InvalidArgument(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    try:
        (length,) = _LENGTH.unpack_from(data)
        header = json.loads(bytes(data[_LENGTH.size : _LENGTH.size + length]))
        body = data[_LENGTH.size + length :]
        return {name: _tensor(name, entry, body) for name, entry in header.items() if name != "__metadata__"}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"{path}: not a safetensors file: {error}") from None
    except RecursionError:
        raise InvalidArgument(f"{path}: not a safetensors file: its header is nested too deeply") from None


def _tensor(name: str, entry: dict[str, Any], body: memoryview) -> FileTensor:
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"{name} has dtype {entry['dtype']}; {', '.join(_DTYPES)} can be pushed")
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], tuple(entry["shape"]), entry["data_offsets"]
    if not 0 <= start <= end <= len(body) or end - start != math.prod(shape) * ITEM_SIZES[dtype]:
        raise ValueError(f"{name} of shape {shape} has bytes {start} to {end} of {len(body)}")
    return body[start:end], dtype, shape
