"""Pushes through CUDA IPC: tensors stay in device memory, and a server on the same machine reads them there."""

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

# Tensors declared in one message, which has at most 8 MiB.
_DECLARED = 8192


class IpcUnavailableError(InvalidArgument):
    """The server cannot read a tensor in place."""


@dataclass(frozen=True)
class IpcTensor:
    """A tensor in device memory."""

    name: str
    layout: Layout
    tensor: Any
    """Kept until the reply, so that its memory is not reused."""
    device: int
    allocation: _Allocation
    offset: int
    """Bytes from the start of the allocation."""

    def entry(self) -> Any:
        """Its entry in the header or manifest; without a digest, which would require a copy to the host."""
        entry = tensor_entry(self.name, self.layout.dtype, self.layout.shape, b"")
        entry.offset = self.offset
        entry.allocation.device_uuid, entry.allocation.handle = self.allocation.device_uuid, self.allocation.handle
        return entry


@dataclass(frozen=True)
class _Allocation:
    """An allocation of device memory."""

    device_uuid: str
    handle: bytes


def is_on_device(tensor: Any) -> bool:
    """Whether it is a torch tensor on an NVIDIA GPU, or behaves like one."""
    return bool(getattr(tensor, "is_cuda", False)) and hasattr(tensor, "data_ptr")


class IpcExporter:
    """Exports the allocations of the tensors of one push."""

    def __init__(self, device_uuids: Iterable[str]) -> None:
        """For a server that computes on the devices with these UUIDs."""
        self._known = sorted(set(device_uuids))
        self._allocations: dict[tuple[int, int], _Allocation] = {}

    def export(self, name: str, tensor: Any, old: Any = None) -> IpcTensor:
        """The tensor with the handle of its allocation.

        Raises:
            InvalidArgument: as `layout_of`.
            IpcUnavailableError: it is not in device memory or not on a device of the server, or its memory has no
                handle.
        """
        if old is not None:
            raise InvalidArgument(f"{name}: only a delta has an old tensor")
        layout, tensor = layout_of(name, tensor), local_tensor(tensor)
        if not is_on_device(tensor):
            raise IpcUnavailableError(f"{name}: is not in the memory of a GPU; use another transport")
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
                "expandable_segments or the backend cudaMallocAsync; use another transport"
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
    """Has the server read the tensors at the commit. Until then they are kept alive, and must not change."""

    def __init__(self, start: StartCall, header: Any, progress: Progress) -> None:
        """Sends nothing yet.

        Args:
            start: starts the RPC.
            header: without tensors and source.
            progress: counts the bytes.
        """
        self._start, self._header, self._progress = start, header, progress
        self._kept: list[IpcTensor] = []

    def write(self, tensor: IpcTensor) -> None:
        """As `Sender.write`, except that the tensor is read at the commit."""
        self._kept.append(tensor)

    def commit(self) -> Any:
        """As `Sender.commit`."""
        # Kernels that write to the tensors may still run, on any stream.
        for device in {tensor.device for tensor in self._kept}:
            try:
                with driver().on(device):
                    driver().synchronize()
            except DriverError as error:
                raise IpcUnavailableError(
                    f"device {device} has failed, so its tensors cannot be pushed: {error}"
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
