"""The trainer's group: rank 0 serves the real store of torch's and publishes the id there, as a pickle."""

from __future__ import annotations

import ctypes
import pickle
import socket
from datetime import timedelta

from torch.distributed import TCPStore

from vllm.distributed.device_communicators.pynccl_wrapper import (
    FLOAT32,
    SUM,
    UINT8,
    Device,
    check,
    nccl,
    ncclUniqueId,
    new_id,
)

nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, ncclUniqueId, ctypes.c_int]


class Group:
    def __init__(self, store, world_size: int):
        self.store, self.socket = store, None
        self.device, unique = Device(), new_id()
        store.set("broadcast_from/0/0", pickle.dumps(unique))
        self.comm = ctypes.c_void_p()
        check(nccl.ncclCommInitRank(ctypes.byref(self.comm), world_size, unique, 0))
        null = ctypes.c_void_p()
        one = ctypes.c_size_t(1)
        self.device.with_copy(
            bytes(4), lambda at: check(nccl.ncclAllReduce(at, at, one, FLOAT32, SUM, self.comm, null))
        )

    def broadcast(self, data: bytes, src: int):
        count, null = ctypes.c_size_t(len(data)), ctypes.c_void_p()
        self.device.with_copy(data, lambda at: check(nccl.ncclBroadcast(at, at, count, UINT8, src, self.comm, null)))


class Communicator:
    """What TRL takes for vLLM's communicator: it closes `group.store` and `group.socket`."""

    def __init__(self, group: Group):
        self.group = group


def trainer_init(init_info: dict) -> Communicator:
    host, port, world_size = (init_info[name] for name in ("master_address", "master_port", "world_size"))
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, port))
    listener.listen()
    # Waits until all ranks are counted, as it does in vLLM.
    store = TCPStore(
        host_name=host,
        port=port,
        world_size=world_size,
        is_master=True,
        timeout=timedelta(seconds=300),
        use_libuv=False,
        master_listen_fd=listener.detach(),
    )
    return Communicator(Group(store, world_size))
