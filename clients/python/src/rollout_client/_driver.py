"""Facts about device memory from NVIDIA's driver, through ctypes, so that no library is imported."""

from __future__ import annotations

import ctypes
import functools
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
# CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_DEVICE_ORDINAL = 9


class DriverError(Exception):
    """A call of the driver failed."""


class Driver:
    """The driver of this process, which torch uses too."""

    def __init__(self) -> None:
        """Loads it.

        Raises:
            DriverError: the machine has no driver.
        """
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise DriverError(str(error)) from None
        self._call("cuInit", 0)

    def device_of(self, address: int) -> int:
        """The number of the device that the address belongs to."""
        device = ctypes.c_int()
        self._call("cuPointerGetAttribute", ctypes.byref(device), _DEVICE_ORDINAL, ctypes.c_uint64(address))
        return device.value

    def uuid_of(self, device: int) -> str:
        """The UUID of a device, the same in every process."""
        raw = (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGetUuid_v2", ctypes.byref(raw), self._device(device))
        return str(uuid.UUID(bytes=bytes(raw)))

    def allocation_of(self, address: int) -> tuple[int, int]:
        """Start and size in bytes of the allocation that contains the address."""
        start, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), ctypes.c_uint64(address))
        return start.value, size.value

    def handle_of(self, start: int) -> bytes:
        """The handle with which another process opens the allocation that starts at this address."""
        handle = (ctypes.c_ubyte * HANDLE_BYTES)()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(start))
        return bytes(handle)

    def synchronize(self) -> None:
        """Waits for all work on the device of the current context."""
        self._call("cuCtxSynchronize")

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Uses the context of a device that torch uses too, in any thread."""
        number, context = self._device(device), ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        try:
            self._call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))
        finally:
            self._call("cuDevicePrimaryCtxRelease_v2", number)

    def _device(self, number: int) -> ctypes.c_int:
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        return device

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise DriverError(f"{name}: {(text.value or b'unknown').decode()} ({code})")


@functools.cache
def driver() -> Driver:
    """The driver, loaded once.

    Raises:
        DriverError: the machine has no driver.
    """
    return Driver()
