"""A model of plain torch that two processes shard: what the second of them imports, without transformers."""

from __future__ import annotations

import contextlib
import os

import numpy as np
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from models import read_model
from serving import PUSH_MODEL


@contextlib.contextmanager
def ranks(directory, rank, count):
    """This process as one of so many."""
    distributed.init_process_group("gloo", init_method=f"file://{directory}/ranks", rank=rank, world_size=count)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def sharded_parameters():
    """Modules with twice the server's parameters, by their names, sharded over all ranks."""
    root = torch.nn.Module()
    for name, array in read_model(PUSH_MODEL, np.float32).items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, torch.nn.Parameter(torch.from_numpy(2 * array)))
    return fully_shard(root)


def gathered(model, push):
    """Calls `push` with all parameters as they are gathered, or only takes part where it is None."""
    tensors = ((name, parameter.full_tensor()) for name, parameter in model.named_parameters())
    try:
        if push is not None:
            push(tensors)
    finally:
        for _ in tensors:
            pass


def second_rank(directory, pushes):
    """Takes part in so many pushes."""
    torch.set_num_threads(1)
    with ranks(directory, 1, 2):
        model = sharded_parameters()
        for _ in range(pushes):
            gathered(model, None)
    # As torch ends a process, a thread of gloo's may still run, and the process aborts.
    os._exit(0)
