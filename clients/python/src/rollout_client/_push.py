"""One push: a stream of a header, tensors in chunks or in shared memory, and a commit."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import grpc

from . import _proto
from ._convert_weights import tensor_entry
from ._progress import Progress
from ._segment import ALIGNMENT, DIRECTORY, Segment, SegmentPool, digest_of
from ._tensors import Layout
from .errors import Cancelled, InvalidArgument, NotFound, ResourceExhausted, RolloutError, translated

CHUNK_BYTES = 4 << 20
"""Most bytes of a tensor in one message."""

SHARED_MEMORY_FROM = 16 << 20
"""Below this many bytes a segment is not worth its making."""

_LOCAL = ("localhost:", "127.", "[::1]:", "unix:", "unix-abstract:")
# What may lie between the tensors in a segment: alignment of this many tensors.
_MANY_TENSORS = 16_384
# Messages that wait for the connection: one is sent while the next is made.
_QUEUED_MESSAGES = 2
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Outgoing:
    """A tensor as it is sent."""

    name: str
    layout: Layout
    """Of the whole tensor."""
    data: memoryview
    changed: int = 0
    """DELTA: elements in `data`, which is then the compressed payload."""

    def entry(self, digest: bytes, offset: int = 0) -> Any:
        """Its declaration."""
        payload = len(self.data) if self.changed else 0
        entry = tensor_entry(
            self.name, self.layout.dtype, self.layout.shape, digest, changed=self.changed, payload_bytes=payload
        )
        entry.offset = offset
        return entry


@dataclass(frozen=True)
class Plan:
    """All of a push but the way it is sent."""

    header: Any
    tensors: Iterable[Outgoing]
    """Taken one by one, in the caller's thread, each sent before the next is taken."""
    total: int
    """Bytes of all of them."""
    upfront: bool
    """Declare all tensors in the header, which needs them all at once."""


StartCall = Callable[[Iterator[bytes]], Any]
"""Starts the RPC with its requests, serialised; returns the future of its response."""


def choose_shared_memory(transport: str, address: str, total: int) -> bool:
    """Whether a push goes through shared memory.

    Raises:
        InvalidArgument: `transport` is unknown.
    """
    if transport not in ("auto", "inline", "shared_memory"):
        raise InvalidArgument(f"transport: expected 'auto', 'inline' or 'shared_memory', got {transport!r}")
    local = address.startswith(_LOCAL) and DIRECTORY.is_dir()
    return transport == "shared_memory" or (transport == "auto" and local and total >= SHARED_MEMORY_FROM)


def push_inline(start: StartCall, plan: Plan, progress: Progress) -> Any:
    """Sends everything through the stream; returns the `UpdateResponse`."""
    tensors = plan.tensors
    if plan.upfront:
        tensors = list(tensors)
        plan.header.tensors.extend(tensor.entry(digest_of(tensor.data)) for tensor in tensors)
    else:
        plan.header.total_bytes = plan.total
    with UpdateStream(start) as stream:
        stream.send(_request(header=plan.header))
        index = 0  # counted by hand: `enumerate` keeps the last tensor while the next is gathered
        for tensor in tensors:
            if not plan.upfront:
                stream.send(_request(manifest={"tensors": [tensor.entry(digest_of(tensor.data))]}))
            for offset in range(0, len(tensor.data), CHUNK_BYTES):
                data = tensor.data[offset : offset + CHUNK_BYTES]
                stream.send(chunk_request(index, offset, data))
                progress.add(len(data))
                del data
            index += 1  # noqa: SIM113
            del tensor  # before the next is gathered, so that never two are held
        return stream.commit()


def push_shared(start: StartCall, plan: Plan, pool: SegmentPool, progress: Progress, *, fall_back: bool) -> Any:
    """Lays everything into a segment and names it to the server; returns the `UpdateResponse`.

    Args:
        fall_back: where there is no room for a segment, or the server has another `/dev/shm`, send it inline.
    """
    with ExitStack() as held:
        try:
            segment = held.enter_context(pool.segment(plan.total + ALIGNMENT * _MANY_TENSORS))
        except ResourceExhausted:
            if not fall_back:
                raise
        else:
            return _push_segment(start, plan, segment, progress, fall_back)
    return push_inline(start, plan, progress)


def _push_segment(start: StartCall, plan: Plan, segment: Segment, progress: Progress, fall_back: bool) -> Any:
    staged: list[tuple[str, Layout, int, int, int]] = []
    end = 0
    for tensor in plan.tensors:
        size = len(tensor.data)
        if end + size > segment.size:
            raise InvalidArgument(f"{tensor.name}: goes past the {plan.total} bytes of total_bytes")
        plan.header.tensors.append(tensor.entry(segment.write(end, tensor.data), end))
        staged.append((tensor.name, tensor.layout, end, size, tensor.changed))
        progress.add(size)
        end += -(-size // ALIGNMENT) * ALIGNMENT
        del tensor  # before the next is gathered, so that never two are held
    plan.header.source.shared_memory.name = segment.name
    try:
        return push_header(start, plan.header)
    except NotFound:
        if not fall_back:
            raise
    plan.header.ClearField("source")
    plan.header.ClearField("tensors")
    again = (
        Outgoing(name, layout, segment.read(offset, size), changed) for name, layout, offset, size, changed in staged
    )
    return push_inline(start, replace(plan, tensors=again), Progress("", 0, False))


def push_header(start: StartCall, header: Any) -> Any:
    """A push whose tensors the server finds by itself; returns the `UpdateResponse`."""
    with UpdateStream(start) as stream:
        stream.send(_request(header=header))
        return stream.commit()


def chunk_request(tensor: int, offset: int, data: memoryview | bytes) -> bytes:
    """An `UpdateRequest` with a `Chunk`, serialised by hand: one copy of the data, where the library makes three."""
    fields = b"\x08" + _varint(tensor) + b"\x10" + _varint(offset) + b"\x1a" + _varint(len(data))
    return b"".join((b"\x1a", _varint(len(fields) + len(data)), fields, data))


def _request(**kind: Any) -> bytes:
    return _proto.UPDATE.request(**kind).SerializeToString()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004 seven bits a byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


class UpdateStream:
    """The requests of an update on their way. A context manager: leaving it before `commit` drops the update.

    Messages are made in the caller's thread, as tensors often can be read there only, and sent by gRPC's.
    """

    def __init__(self, start: StartCall) -> None:
        """Starts the call."""
        self._queue: queue.Queue[bytes | None] = queue.Queue(_QUEUED_MESSAGES)
        with translated():
            self._call = start(iter(self._queue.get, None))

    def send(self, message: bytes | None) -> None:
        """Hands a message over, waiting for room; raises the server's error if it has ended the call."""
        while not self._call.done():
            try:
                self._queue.put(message, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue
        self._response()
        raise RolloutError("the server has ended the update before its commit")

    def commit(self) -> Any:
        """Commits and waits for the response."""
        self.send(_request(commit={}))
        self.send(None)
        return self._response()

    def _response(self) -> Any:
        with translated():
            try:
                return self._call.result()
            except grpc.FutureCancelledError:
                raise Cancelled("the update was cancelled on this side") from None

    def __enter__(self) -> UpdateStream:
        """The stream itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancels what has not been committed."""
        self._call.cancel()
        with suppress(queue.Empty):
            while True:
                self._queue.get_nowait()
        self._queue.put(None)  # for gRPC's thread, which may wait for a message
