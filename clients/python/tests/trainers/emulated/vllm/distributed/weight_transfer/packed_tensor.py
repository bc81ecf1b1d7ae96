"""The packing of vllm/distributed/weight_transfer/packed_tensor.py: a broadcast ends behind the tensor with which it
has more bytes than the buffer. Tensors are copied as they come. vLLM's own keeps views until a broadcast is whole, and
TRL has unmerged its adapter by the time of the last: as both are read, but not run, that one brings the bare base."""

from __future__ import annotations

import torch

BUFFER_BYTES = 1 << 30


def packed_nccl_broadcast_producer(*, iterator, group, src, post_iter_func):
    chunk: list[torch.Tensor] = []

    def send():
        group.group.broadcast(torch.cat(chunk).numpy().tobytes(), src)
        chunk.clear()

    for item in iterator:
        tensor = post_iter_func(item).detach().clone()
        chunk.append(tensor.view(torch.uint8).view(-1))
        if sum(part.numel() for part in chunk) > BUFFER_BYTES:
            send()
    if chunk:
        send()
