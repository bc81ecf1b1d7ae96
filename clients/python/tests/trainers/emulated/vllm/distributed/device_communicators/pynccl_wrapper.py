"""NCCL and the driver by ctypes, from the folder that EMULATOR names."""

from __future__ import annotations

import ctypes
import os

FOLDER = os.environ["EMULATOR"]
cuda = ctypes.CDLL(f"{FOLDER}/libcuda.so.1")
nccl = ctypes.CDLL(f"{FOLDER}/libnccl.so.2")

UINT8, FLOAT32, SUM = 1, 7, 0


# Its name is in the pickle that the server reads.
class ncclUniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Device:
    """The first device, current on this thread."""

    def __init__(self):
        context = ctypes.c_void_p()
        check(cuda.cuInit(0))
        check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.context = context
        self.make_current()

    def make_current(self):
        check(cuda.cuCtxSetCurrent(self.context))

    def with_copy(self, data: bytes, work):
        """Calls `work` with the address of a copy, and frees it when the device is done."""
        self.make_current()
        address = ctypes.c_uint64()
        check(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(len(data))))
        check(cuda.cuMemcpyHtoD_v2(address, data, ctypes.c_size_t(len(data))))
        work(address)
        check(cuda.cuCtxSynchronize())
        check(cuda.cuMemFree_v2(address))


def check(status: int):
    if status != 0:
        raise RuntimeError(f"the driver or NCCL says {status}")


def new_id() -> ncclUniqueId:
    unique = ncclUniqueId()
    check(nccl.ncclGetUniqueId(ctypes.byref(unique)))
    return unique
