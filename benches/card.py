#!/usr/bin/env python3
"""A card seen through its driver: whether there is one, its free memory, and how fast it copies and multiplies.

    benches/card.py             # what the card is, and its limits
    benches/card.py --context   # what a context takes of its memory

The libraries are libcuda.so.1, which comes with a driver, and libcublas.so.13, which `make cuda` lays out, called with
ctypes: no package is needed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from ctypes import byref, c_char_p, c_float, c_int, c_size_t, c_uint64, c_void_p
from dataclasses import asdict, dataclass

DRIVER = "libcuda.so.1"
BLAS = "libcublas.so.13"
ATTRIBUTES = {"major": 75, "minor": 76, "multiprocessors": 16}
"""Numbers of CUdevice_attribute."""
BF16, SUMS_IN_F32, ANY_ALGORITHM, OF_ROWS = 14, 68, -1, 1
"""Of cuBLAS: CUDA_R_16BF, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT, CUBLAS_OP_T."""
BLOCK_BYTES = 2 << 20
"""Smaller allocations share a block of the driver's, and a handle for other processes is of the whole block."""
ITEM_BYTES = {"bfloat16": 2, "float32": 4}
RUNS = 5
"""Each limit is the best of so many runs, since other processes can only slow a run down."""


class NoCardError(Exception):
    """There is no card that a program could use; the message says what is missing."""


class CardError(Exception):
    """A call of the driver or of cuBLAS has failed."""


@dataclass(frozen=True)
class Sizes:
    """What is copied and multiplied to find the limits."""

    copied: int
    """Bytes, from one place of the device's memory to another."""
    sent: int
    """Bytes, between the host's page-locked memory and the device."""
    side: int
    """Rows and columns of the matrices."""


ON_A_CARD = Sizes(copied=4 << 30, sent=1 << 30, side=8192)
EMULATED = Sizes(copied=1 << 20, sent=1 << 20, side=64)


@dataclass(frozen=True)
class CardLimits:
    """What a card reaches at best, as it was measured."""

    copy_gb_per_s: float
    """Bytes read and bytes written together."""
    to_device_gb_per_s: float
    to_host_gb_per_s: float
    bf16_tflops: float
    """Of cuBLAS, with float32 sums."""


@dataclass(frozen=True)
class DeviceTensor:
    """What the client asks of a tensor of torch on a GPU."""

    dtype: str
    shape: tuple[int, ...]
    address: int
    is_cuda = True

    def detach(self) -> DeviceTensor:
        """Itself, as it knows no gradients."""
        return self

    def is_contiguous(self) -> bool:
        """Always."""
        return True

    def data_ptr(self) -> int:
        """Address of its first value."""
        return self.address


class Card:
    """The first device of the driver, with a context of this process."""

    def __init__(self, *, emulated: bool = False) -> None:
        """Opens it, or the emulator's.

        Raises:
            NoCardError: there is no driver, or it has no device.
            CardError: the driver refuses; there is the emulator unasked.
        """
        try:
            self.driver = ctypes.CDLL(DRIVER)
        except OSError as error:
            raise NoCardError(f"no driver: {error}") from None
        if hasattr(self.driver, "cuemu_calls") and not emulated:
            raise CardError(f"{DRIVER} is the emulator's: LD_LIBRARY_PATH names its folder")
        if status := self.driver.cuInit(0):
            raise NoCardError(f"{DRIVER} is there, but cuInit gives {self.name_of(status)}")
        count, self.device = c_int(), c_int()
        self.call("cuDeviceGetCount", byref(count))
        if count.value == 0:
            raise NoCardError(f"{DRIVER} is there, but knows no device (CUDA_VISIBLE_DEVICES?)")
        self.devices = count.value
        self.call("cuDeviceGet", byref(self.device), 0)
        self.context = c_void_p()
        self.call("cuDevicePrimaryCtxRetain", byref(self.context), self.device)
        self.call("cuCtxSetCurrent", self.context)

    def name_of(self, status: int) -> str:
        """Name of an error of the driver."""
        name = c_char_p()
        self.driver.cuGetErrorName(status, byref(name))
        return name.value.decode() if name.value else f"error {status}"

    def call(self, name: str, *arguments: object) -> None:
        """Calls the driver."""
        if status := getattr(self.driver, name)(*arguments):
            raise CardError(f"{name} gives {self.name_of(status)}")

    def attribute(self, name: str) -> int:
        """One of ATTRIBUTES."""
        value = c_int()
        self.call("cuDeviceGetAttribute", byref(value), ATTRIBUTES[name], self.device)
        return value.value

    def memory(self) -> tuple[int, int]:
        """Free and total bytes of the device, of all its users."""
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def describe(self) -> dict:
        """What the card and the driver say of themselves."""
        name, version = ctypes.create_string_buffer(100), c_int()
        self.call("cuDeviceGetName", name, 100, self.device)
        self.call("cuDriverGetVersion", byref(version))
        free, total = self.memory()
        return {
            "name": name.value.decode(),
            "devices": self.devices,
            "capability": f"{self.attribute('major')}.{self.attribute('minor')}",
            "multiprocessors": self.attribute("multiprocessors"),
            "driver_takes_cuda": f"{version.value // 1000}.{version.value % 1000 // 10}",
            "free_bytes": free,
            "total_bytes": total,
        }

    def close(self) -> None:
        """Gives the context back."""
        self.call("cuDevicePrimaryCtxRelease_v2", self.device)

    def allocate(self, size: int) -> c_uint64:
        """Memory of the device."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address

    def tensor(self, dtype: str, shape: tuple[int, ...], values: bytes | None = None) -> DeviceTensor:
        """A tensor in an allocation of its own, with these bytes, or else with the number 2^-7 everywhere if it is
        bfloat16.
        """
        size = -(-math.prod(shape) * ITEM_BYTES[dtype] // BLOCK_BYTES) * BLOCK_BYTES
        tensor = DeviceTensor(dtype, shape, self.allocate(size).value)
        if values is None:
            self.call("cuMemsetD16_v2", c_uint64(tensor.address), 0x3C00, c_size_t(math.prod(shape)))
        else:
            self.call("cuMemcpyHtoD_v2", c_uint64(tensor.address), values, c_size_t(len(values)))
        return tensor

    def free(self, tensor: DeviceTensor) -> None:
        """Gives its memory back."""
        self.call("cuMemFree_v2", c_uint64(tensor.address))

    def seconds(self, work: Callable[[c_void_p], None], repeats: int) -> float:
        """Least time of one `work(stream)`, by events of the device around `repeats` of them."""
        stream, before, after, milliseconds = c_void_p(), c_void_p(), c_void_p(), c_float()
        self.call("cuStreamCreate", byref(stream), 1)
        for event in (before, after):
            self.call("cuEventCreate", byref(event), 0)
        least = float("inf")
        # The first run is not counted.
        for _ in range(RUNS + 1):
            self.call("cuEventRecord", before, stream)
            for _ in range(repeats):
                work(stream)
            self.call("cuEventRecord", after, stream)
            self.call("cuEventSynchronize", after)
            self.call("cuEventElapsedTime", byref(milliseconds), before, after)
            taken, first = milliseconds.value / 1e3 / repeats, least == float("inf")
            least = 1e9 if first else min(least, taken)
        self.call("cuStreamDestroy_v2", stream)
        return least

    def limits(self, sizes: Sizes) -> CardLimits:
        """Measures them; gives all memory back that this takes."""
        to_device, to_host = self.link(sizes.sent)
        return CardLimits(self.copy(sizes.copied), to_device, to_host, self.products(sizes.side))

    def copy(self, size: int) -> float:
        """GB/s of a copy within the device, of bytes read and written together."""
        source, target = self.allocate(size), self.allocate(size)
        self.call("cuMemsetD8_v2", source, 7, c_size_t(size))
        seconds = self.seconds(lambda s: self.call("cuMemcpyDtoDAsync_v2", target, source, c_size_t(size), s), 4)
        for memory in (source, target):
            self.call("cuMemFree_v2", memory)
        return 2 * size / seconds / 1e9

    def link(self, size: int) -> tuple[float, float]:
        """GB/s from page-locked memory of the host to the device, and back."""
        device, host = self.allocate(size), c_void_p()
        self.call("cuMemHostAlloc", byref(host), c_size_t(size), 0)
        ctypes.memset(host, 7, size)
        there = self.seconds(lambda s: self.call("cuMemcpyHtoDAsync_v2", device, host, c_size_t(size), s), 2)
        back = self.seconds(lambda s: self.call("cuMemcpyDtoHAsync_v2", host, device, c_size_t(size), s), 2)
        self.call("cuMemFreeHost", host)
        self.call("cuMemFree_v2", device)
        return size / there / 1e9, size / back / 1e9

    def products(self, side: int) -> float:
        """TFLOP/s of a bfloat16 product of square matrices. Their values are random, as a card that multiplies zeros
        takes less power and runs faster.
        """
        blas, handle = ctypes.CDLL(BLAS), c_void_p()

        def check(status: int) -> None:
            if status:
                raise CardError(f"{BLAS} gives status {status}")

        check(blas.cublasCreate_v2(byref(handle)))
        size = 2 * side * side
        # Bits of bfloat16 numbers between 2^-7 and 2^-5, of both signs.
        some = bytearray(os.urandom(min(size, 1 << 20)))
        some[0::2], some[1::2] = some[0::2], bytes(0x3C | (byte & 0x80) for byte in some[1::2])
        values, matrices = (ctypes.c_char * len(some)).from_buffer(some), [self.allocate(size) for _ in range(3)]
        for matrix in matrices[:2]:
            for start in range(0, size, len(some)):
                part = c_size_t(min(len(some), size - start))
                self.call("cuMemcpyHtoD_v2", c_uint64(matrix.value + start), values, part)
        one, zero = c_float(1.0), c_float(0.0)

        def multiply(stream: c_void_p) -> None:
            check(blas.cublasSetStream_v2(handle, stream))
            a, b, c = ((matrix, BF16, side) for matrix in matrices)
            kind = (SUMS_IN_F32, ANY_ALGORITHM)
            sides = (OF_ROWS, 0, side, side, side)
            check(blas.cublasGemmEx(handle, *sides, byref(one), *a, *b, byref(zero), *c, *kind))

        seconds = self.seconds(multiply, 8)
        check(blas.cublasDestroy_v2(handle))
        for matrix in matrices:
            self.call("cuMemFree_v2", matrix)
        return 2 * side**3 / seconds / 1e12


def context_bytes(card: Card) -> int:
    """What the context of a process that does nothing takes of the device's memory, by another process that has one."""
    before, _ = card.memory()
    command = [sys.executable, __file__, "--hold", *["--emulated"] * hasattr(card.driver, "cuemu_calls")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "held":
            raise CardError("a second process gets no context; is the card in exclusive mode?")
        during, _ = card.memory()
        holder.communicate()
    return before - during


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", action="store_true", help="what a context takes")
    parser.add_argument("--hold", action="store_true", help="has a context until standard input ends")
    parser.add_argument("--emulated", action="store_true", help="small sizes, for the emulator")
    args = parser.parse_args()
    try:
        card = Card(emulated=args.emulated)
    except NoCardError as error:
        print(error)
        return 1
    if args.hold:
        print("held", flush=True)
        sys.stdin.read()
    elif args.context:
        print(json.dumps({"context_bytes": context_bytes(card)}))
    else:
        limits = card.limits(EMULATED if args.emulated else ON_A_CARD)
        print(json.dumps(card.describe() | asdict(limits)))
    card.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
