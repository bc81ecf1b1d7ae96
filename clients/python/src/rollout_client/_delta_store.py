"""Versions of a policy in files, whole or as the changes of the version before, for servers to read."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ._delta import payload_of
from ._model import is_model, model_parameters
from ._session import NamedTensors
from ._tensors import ITEM_SIZES, bits_of, layout_of
from .errors import InvalidArgument
from .types import DtypeName

_INDEX = "model.safetensors.index.json"
_FILE = "model-00000-of-00001.safetensors"
_PREFIX = "weight_v"
_STORED_AS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ALIGNMENT = 8

_Bits = npt.NDArray[np.unsignedinteger]
_StoredTensor = tuple[str, str, Sequence[int], memoryview]
"""Name, dtype as safetensors writes it, shape, and bytes."""


class DeltaStore:
    """A directory with each version of a policy: whole at first, then as the changes of the version before.

    A server that has the directory below its `--weights-dir` serves a version when `push_directory(path, "delta",
    version=…)` names it, and finds the changes between what it has and that version by itself.

    The store keeps a copy of the last version in memory, to compare the next one with. It is for one trainer at a time.

    >>> store = DeltaStore(directory, dtype="float32")
    >>> store.save(state_dict, version=1).name
    'weight_v000001'
    >>> store.save({**state_dict, "lm_head.weight": state_dict["lm_head.weight"] + 1}, version=2).name
    'weight_v000002'
    >>> store.versions()
    [1, 2]
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, dtype: DtypeName = "bfloat16", whole_every: int = 100
    ) -> None:
        """Makes the directory, if it does not exist.

        Args:
            directory: of the store; below the `--weights-dir` of the servers that read it.
            dtype: in which values are stored and compared; that of the servers (`info().dtype`) is best.
            whole_every: save a whole version instead of the changes if so many versions came after the last whole one.
        """
        if dtype not in ITEM_SIZES:
            raise InvalidArgument(f"dtype: expected one of {list(ITEM_SIZES)}, got {dtype!r}")
        if whole_every < 1:
            raise InvalidArgument(f"whole_every: expected at least 1, got {whole_every}")
        self.directory = Path(directory)
        self.dtype: DtypeName = dtype
        self._whole_every = whole_every
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._bits: dict[str, _Bits] = {}
        self._last: int | None = None
        self._deltas = 0
        self.directory.mkdir(parents=True, exist_ok=True)

    def versions(self) -> list[int]:
        """The versions that are complete in the directory, in ascending order."""
        names = (path.name.removeprefix(_PREFIX) for path in self.directory.glob(f"{_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def save(self, named_tensors: NamedTensors, version: int) -> Path:
        """Saves a version. Readers see all of it or nothing.

        The first version of this object is saved whole, and needs every parameter. Later ones may leave out tensors
        that have not changed.

        Args:
            named_tensors: a model, a state dict, or pairs of name and tensor, as for `push_full`.
            version: above all versions in the directory.

        Returns:
            The directory of the version.

        Raises:
            InvalidArgument: the version is not above the others, or a tensor does not fit those of before; the message
                names it. Nothing is saved.
        """
        versions = self.versions()
        if not isinstance(version, int) or version < 0 or (versions and version <= versions[-1]):
            newest = f"above {versions[-1]}, the newest in {self.directory}" if versions else "a number from 0 on"
            raise InvalidArgument(f"version: expected {newest}, got {version!r}")
        if is_model(named_tensors):
            named_tensors = model_parameters(named_tensors)
        pairs = iter(named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors)
        if self._last is None or self._deltas >= self._whole_every:
            return self._save_whole(pairs, version)
        return self._save_changes(pairs, version, self._last)

    def _save_whole(self, pairs: Iterator[tuple[str, Any]], version: int) -> Path:
        shapes, bits = dict(self._shapes), dict(self._bits)
        for name, tensor in pairs:
            shapes[name], values = self._read(name, tensor)
            bits[name] = np.array(values)
        if not bits:
            raise InvalidArgument("named_tensors: empty; the first version needs every parameter")
        stored = _STORED_AS[self.dtype]
        tensors = [(name, stored, shapes[name], memoryview(values).cast("B")) for name, values in bits.items()]
        path = self._write(version, tensors, {}, {"total_size": sum(len(data) for *_, data in tensors)})
        self._shapes, self._bits, self._last, self._deltas = shapes, bits, version, 0
        return path

    def _save_changes(self, pairs: Iterator[tuple[str, Any]], version: int, base: int) -> Path:
        tensors: list[_StoredTensor] = []
        changes: list[tuple[_Bits, npt.NDArray[np.intp], _Bits]] = []
        for name, tensor in pairs:
            _, values = self._read(name, tensor)
            before = self._bits[name]
            indices = np.flatnonzero(values != before)
            if len(indices):
                changed = values[indices]
                payload = payload_of(name, indices, changed)
                tensors.append((name, "U8", (len(payload),), memoryview(payload)))
                changes.append((before, indices, changed))
        digests = {name: xxhash.xxh3_128(data).hexdigest() for name, _, _, data in tensors}
        described = {
            "version": f"{version:06d}",
            "base_version": f"{base:06d}",
            "delta_encoding": "elements",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
            "dtype": self.dtype,
        }
        path = self._write(version, tensors, digests, described)
        for before, indices, changed in changes:
            before[indices] = changed
        self._last, self._deltas = version, self._deltas + 1
        return path

    def _read(self, name: str, tensor: Any) -> tuple[tuple[int, ...], _Bits]:
        """The shape and the values of a tensor that fits the versions before."""
        shape = layout_of(name, tensor).shape
        if self._last is not None and self._shapes.get(name) != shape:
            known = self._shapes.get(name)
            expected = "not in the versions before" if known is None else f"expected shape {list(known)}"
            raise InvalidArgument(f"{name}: {expected}, got shape {list(shape)}")
        return shape, bits_of(name, tensor, self.dtype)

    def _write(
        self, version: int, tensors: list[_StoredTensor], texts: dict[str, str], described: dict[str, Any]
    ) -> Path:
        path = self.directory / f"{_PREFIX}{version:06d}"
        unfinished = self.directory / f".{path.name}.{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        try:
            if tensors:
                with (unfinished / _FILE).open("wb") as file:
                    file.write(_header(tensors, texts))
                    for *_, data in tensors:
                        file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            index = {"metadata": described, "weight_map": {name: _FILE for name, *_ in tensors}}
            (unfinished / _INDEX).write_text(json.dumps(index))
            unfinished.rename(path)
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return path


def _header(tensors: list[_StoredTensor], texts: dict[str, str]) -> bytes:
    """The header of a safetensors file with these tensors, one behind the other."""
    header: dict[str, Any] = {"__metadata__": texts} if texts else {}
    end = 0
    for name, dtype, shape, data in tensors:
        start, end = end, end + len(data)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
