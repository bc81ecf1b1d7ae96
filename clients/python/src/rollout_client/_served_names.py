"""The server's parameters of a vision-language model, whose names in a trainer's memory are others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Beginnings of the names in memory, and of the server's, which are those of the checkpoint.
_LAYOUTS = (("model.language_model.", "model."), ("model.visual.", "visual."))
_TOWER_QKV = ".attn.qkv."
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def served_parameters(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """The server's parameters, by name, that a trainer's tensor has.

    The server has the queries, keys and values of the tower's `qkv` as three parameters.

    Args:
        name: the tensor's name without prefixes of wrappers.
        tensor: an array, a tensor or `(bytes, dtype, shape)`.
    """
    for in_memory, own in _LAYOUTS:
        if name.startswith(in_memory):
            name = own + name.removeprefix(in_memory)
            break
    if not name.startswith("visual.") or _TOWER_QKV not in name:
        yield name, tensor
        return
    for projection, part in zip(_PROJECTIONS, _thirds(tensor), strict=True):
        yield name.replace(".qkv.", f".{projection}."), part


def _thirds(tensor: Any) -> list[Any]:
    if isinstance(tensor, tuple):
        data, dtype, (rows, *columns) = tensor
        size = len(data) // 3
        return [(data[i * size : (i + 1) * size], dtype, (rows // 3, *columns)) for i in range(3)]
    size = len(tensor) // 3
    return [tensor[i * size : (i + 1) * size] for i in range(3)]
