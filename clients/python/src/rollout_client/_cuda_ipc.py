"""Pushes whose tensors stay in device memory, where a server on the same machine reads them: CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ._convert_weights import tensor_entry
from ._driver import DriverError, driver
from ._progress import Progress
from ._senders import StartCall, commit, request
from ._tensors import Layout, layout_of, local_tensor
from .errors import InvalidArgument

# Tensors that are declared in one message, which has at most 8 MiB.
_DECLARED = 8192


class IpcUnavailableError(InvalidArgument):
    """A tensor that this server cannot read where it lies."""


@dataclass(frozen=True)
class IpcTensor:
    """A tensor in device memory."""

    name: str
    layout: Layout
    tensor: Any
    """Kept until the reply, so that its memory is given to no other."""
    device: int
    allocation: _Allocation
    offset: int
    """Bytes from the start of the allocation."""

    def entry(self) -> Any:
        """Its declaration, without a digest: for that the bytes would have to come to this process."""
        entry = tensor_entry(self.name, self.layout.dtype, self.layout.shape, b"")
        entry.offset = self.offset
        entry.allocation.device_uuid, entry.allocation.handle = self.allocation.device_uuid, self.allocation.handle
        return entry


@dataclass(frozen=True)
class _Allocation:
    """An allocation."""

    device_uuid: str
    handle: bytes


def is_on_device(tensor: Any) -> bool:
    """Whether it is a tensor of torch on an NVIDIA GPU, or behaves like one."""
    return bool(getattr(tensor, "is_cuda", False)) and hasattr(tensor, "data_ptr")


class IpcExporter:
    """Finds the allocations of the tensors of one push."""

    def __init__(self, device_uuids: Iterable[str]) -> None:
        """For a server that computes on these devices."""
        self._known = sorted(set(device_uuids))
        self._allocations: dict[tuple[int, int], _Allocation] = {}

    def export(self, name: str, tensor: Any, old: Any = None) -> IpcTensor:
        """Where a tensor lies.

        Raises:
            InvalidArgument: as `layout_of`; a `IpcUnavailableError` if it lies in no device memory, on no device of the
                server's, or its memory has no handle.
        """
        if old is not None:
            raise InvalidArgument(f"{name}: only a delta has an old tensor")
        layout, tensor = layout_of(name, tensor), local_tensor(tensor)
        if not is_on_device(tensor):
            raise IpcUnavailableError(f"{name}: does not lie in the memory of a GPU; push through another transport")
        tensor = tensor.detach()
        if not tensor.is_contiguous():
            tensor = tensor.contiguous()
        address = tensor.data_ptr()
        try:
            device = driver().device_of(address)
            with driver().on(device):
                start, _ = driver().allocation_of(address)
                allocation = self._allocations.get((device, start)) or self._open(name, device, start)
        except DriverError as error:
            raise IpcUnavailableError(
                f"{name}: its memory has no handle for other processes ({error}); torch's has none with "
                "expandable_segments or the backend cudaMallocAsync; push through another transport"
            ) from None
        return IpcTensor(name, layout, tensor, device, allocation, address - start)

    def _open(self, name: str, device: int, start: int) -> _Allocation:
        device_uuid = driver().uuid_of(device)
        if device_uuid not in self._known:
            raise IpcUnavailableError(
                f"{name}: lies on device {device_uuid}, and the server computes on {self._known or 'none'}; push "
                "through another transport"
            )
        allocation = self._allocations[device, start] = _Allocation(device_uuid, driver().handle_of(start))
        return allocation


class CudaIpcSender:
    """Names tensors to the server, which reads them at the commit: until then they are kept, and must not change."""

    def __init__(self, start: StartCall, header: Any, progress: Progress) -> None:
        """Sends nothing yet.

        Args:
            start: starts the RPC.
            header: without tensors and source.
            progress: told of every byte.
        """
        self._start, self._header, self._progress = start, header, progress
        self._kept: list[IpcTensor] = []

    def write(self, tensor: IpcTensor) -> None:
        """As `Sender.write`, but for the tensor, which is not read before the commit."""
        self._kept.append(tensor)

    def commit(self) -> Any:
        """As `Sender.commit`."""
        # What writes to the tensors was started before, on whichever streams.
        for device in {tensor.device for tensor in self._kept}:
            try:
                with driver().on(device):
                    driver().synchronize()
            except DriverError as error:
                raise IpcUnavailableError(
                    f"device {device} has failed, and with it what was to be pushed: {error}"
                ) from None
        entries = [tensor.entry() for tensor in self._kept]
        header, total = self._header, sum(tensor.layout.size for tensor in self._kept)
        header.source.device_memory.SetInParent()
        header.total_bytes = total
        header.tensors.extend(entries[:_DECLARED])
        with self._start() as stream:
            stream.send(request(header=header))
            for first in range(_DECLARED, len(entries), _DECLARED):
                stream.send(request(manifest={"tensors": entries[first : first + _DECLARED]}))
            response = commit(stream)
        self._progress.add(total)
        return response

    def close(self) -> None:
        """As `Sender.close`."""
        self._kept = []
