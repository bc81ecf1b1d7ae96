"""Arrays and tensors of any library as bytes, without a copy if they are contiguous in memory.

Only numpy is imported: a torch tensor exists only where torch is imported.
"""

from __future__ import annotations

import functools
import hashlib
import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .errors import InvalidArgument
from .types import DtypeName

ITEM_SIZES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
_BITS = {4: np.dtype("<u4"), 2: np.dtype("<u2")}
_RAW_PARTS = 3


@dataclass(frozen=True)
class Layout:
    """The dtype and shape of a tensor."""

    dtype: DtypeName
    shape: tuple[int, ...]

    @functools.cached_property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @functools.cached_property
    def size(self) -> int:
        """The number of bytes."""
        return self.elements * ITEM_SIZES[self.dtype]


class TensorBytes(NamedTuple):
    """A tensor's values, row-major and little-endian."""

    layout: Layout
    data: memoryview
    """Flat, in bytes; a view of the tensor's own memory if that is possible."""


def layout_of(name: str, tensor: Any) -> Layout:
    """The dtype and shape of an array, a tensor or `(bytes, dtype, shape)`.

    Raises:
        InvalidArgument: the argument is none of these, its dtype cannot be pushed, or this process has only a part of
            the tensor.
    """
    if _is_raw(tensor):
        _, dtype, shape = tensor
        return _layout(_known_dtype(name, str(dtype)), tuple(shape))
    if not (hasattr(tensor, "dtype") and hasattr(tensor, "shape")):
        raise InvalidArgument(f"{name}: expected an array, a tensor or (bytes, dtype, shape), got {_type_name(tensor)}")
    if isinstance(tensor, np.ndarray):
        shape = tensor.shape
    else:
        shape = tuple(int(size) for size in tensor.shape)
        _refuse_part(name, tensor, shape)
    return _layout(_known_dtype(name, _dtype_name(tensor.dtype)), shape)


def bytes_of(name: str, tensor: Any) -> TensorBytes:
    """The tensor's values; a tensor in device memory is copied to the host.

    Raises:
        InvalidArgument: as `layout_of`; or the number of raw bytes does not match dtype and shape.
    """
    layout = layout_of(name, tensor)
    if _is_raw(tensor):
        data = memoryview(tensor[0]).cast("B")
    else:
        array = _numpy_of(name, tensor)
        if array.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        data = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    if len(data) != layout.size:
        raise InvalidArgument(
            f"{name}: {layout.dtype} of shape {list(layout.shape)} takes {layout.size} bytes, got {len(data)}"
        )
    return TensorBytes(layout, data)


def local_tensor(tensor: Any) -> Any:
    """The whole tensor of a `DTensor` that `layout_of` has accepted; any other tensor unchanged."""
    # It is whole on this rank, so no other rank takes part.
    return tensor.full_tensor() if _is_distributed(tensor) else tensor


def bits_of(name: str, tensor: Any, dtype: DtypeName) -> npt.NDArray[np.unsignedinteger]:
    """The values in `dtype`, as flat unsigned integers of its width; rounds to nearest, ties to even."""
    _known_dtype(name, dtype)
    given = bytes_of(name, tensor)
    return _cast(np.frombuffer(given.data, _BITS[ITEM_SIZES[given.layout.dtype]]), given.layout.dtype, dtype)


def checksum_of(tensor: Any, dtype: DtypeName) -> str:
    """The checksum that `RolloutClient.checksum` returns for a parameter with these values.

    Args:
        tensor: an array, a tensor or `(bytes, dtype, shape)`.
        dtype: the parameter's (`ParameterInfo.dtype`); the values are rounded to it as the server does.

    Returns:
        SHA-256 of the row-major little-endian bytes, in hexadecimal.
    """
    return hashlib.sha256(bits_of("tensor", tensor, dtype)).hexdigest()


@functools.lru_cache(1024)  # a mixture of experts has thousands of tensors of two layouts
def _layout(dtype: DtypeName, shape: tuple[int, ...]) -> Layout:
    return Layout(dtype, tuple(map(int, shape)))


def _cast(bits: npt.NDArray[Any], source: str, target: str) -> npt.NDArray[Any]:
    if source == target:
        return bits
    wide = _to_float32(bits, source)
    if target == "float32":
        return wide.view(_BITS[4])
    if target == "float16":
        with np.errstate(over="ignore"):  # overflow gives infinity
            return wide.astype("<f2").view(_BITS[2])
    return _round_to_bfloat16(wide.view(_BITS[4]))


def _to_float32(bits: npt.NDArray[Any], source: str) -> npt.NDArray[Any]:
    if source == "float32":
        return bits.view("<f4")
    if source == "float16":
        return bits.view("<f2").astype("<f4")
    return (bits.astype(_BITS[4]) << np.uint32(16)).view("<f4")


def _round_to_bfloat16(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The upper half of each value, rounded to nearest, ties to even."""
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)).astype(_BITS[2])
    # A NaN must not become infinity.
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        rounded[is_nan] = (bits[is_nan] >> np.uint32(16)).astype(_BITS[2]) | np.uint16(0x40)
    return rounded


def _refuse_part(name: str, tensor: Any, shape: tuple[int, ...]) -> None:
    """Raises `InvalidArgument` if this process has only a part of the tensor."""
    whole = getattr(tensor, "ds_shape", None)
    if (whole is not None and tuple(whole) != shape) or shape == (0,):
        raise InvalidArgument(
            f"{name}: is partitioned, of shape {list(shape)} here, as by DeepSpeed ZeRO-3; push inside `with "
            "deepspeed.zero.GatheredParameters(parameters)`, which every rank must enter, and on one of them"
        )
    if _is_distributed(tensor) and not all(placement.is_replicate() for placement in tensor.placements):
        ranks = tensor.device_mesh.size()
        if ranks > 1:
            raise InvalidArgument(
                f"{name}: is sharded over {ranks} ranks; gather it with `full_tensor()`, which every rank must call, "
                "and push on one of them what it gives"
            )
    if getattr(tensor, "is_meta", False):
        raise InvalidArgument(f"{name}: has no values (device meta), as of a model that is offloaded or not loaded")


def _is_distributed(tensor: Any) -> bool:
    """Whether it is a `DTensor`, such as a parameter under FSDP2."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "device_mesh")


def _numpy_of(name: str, tensor: Any) -> npt.NDArray[Any]:
    if isinstance(tensor, np.ndarray):
        return tensor
    tensor = local_tensor(tensor)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        tensor = tensor.detach().cpu().contiguous()
        # numpy has no bfloat16, and only the bits are needed.
        return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    try:
        return np.asarray(tensor)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name}: {_type_name(tensor)} does not become an array: {error}") from None


def _is_raw(tensor: Any) -> bool:
    return (
        isinstance(tensor, tuple)
        and len(tensor) == _RAW_PARTS
        and isinstance(tensor[0], (bytes, bytearray, memoryview))
    )


@functools.cache  # numpy builds the name at each access, which would dominate here
def _dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def _known_dtype(name: str, dtype: str) -> DtypeName:
    if dtype not in ITEM_SIZES:
        raise InvalidArgument(f"{name}: {dtype} cannot be pushed; convert it to one of {list(ITEM_SIZES)}")
    return dtype  # type: ignore[return-value]


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__name__}"
