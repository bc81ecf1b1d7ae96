"""One push: a stream of a header, tensors in chunks or in shared memory, and a commit."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from . import _proto
from ._convert_weights import tensor_entry
from ._http2 import ClientStream
from ._progress import Progress
from ._segment import ALIGNMENT, DIRECTORY, MANY_TENSORS, Segment, SegmentPool, SharedBuffer, aligned, digest_of
from ._tensors import Layout
from .errors import InvalidArgument, NotFound, ResourceExhausted

CHUNK_BYTES = 1 << 20
"""Most bytes of a tensor in one message: as many as a frame may have."""

SHARED_MEMORY_FROM = 16 << 20
"""Below this many bytes a segment is not worth its making."""

# Smaller chunks are copied, to be declared together. From here to 4 KiB it makes no difference, above copies cost more.
_SMALL_BYTES = 64 << 10
_LOCAL = ("localhost:", "127.", "[::1]:")
# Bytes in a segment that are declared in one message: the server reads them while the next are written.
_DECLARED_BYTES = 16 << 20
# Memory does not feed more, and the trainer has other work for them.
_DIGEST_THREADS = min(4, os.cpu_count() or 1)


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


StartCall = Callable[[], ClientStream]
"""Starts the RPC."""


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
    with start() as stream:
        stream.send(_request(header=plan.header))
        batch = _Batch(stream)
        index = 0  # counted by hand: `enumerate` keeps the last tensor while the next is gathered
        for tensor in tensors:
            if not plan.upfront:
                batch.declare(tensor.entry(digest_of(tensor.data)))
            for offset in range(0, len(tensor.data), CHUNK_BYTES):
                data = tensor.data[offset : offset + CHUNK_BYTES]
                batch.add(index, offset, data)
                progress.add(len(data))
                del data
            index += 1  # noqa: SIM113
            del tensor  # before the next is gathered, so that never two are held
        batch.send()
        return _commit(stream)


class _Batch:
    """Chunks of small tensors that wait to be declared in one message; a large one is sent from where it lies."""

    def __init__(self, stream: ClientStream) -> None:
        self._stream = stream
        self._declared: list[Any] = []
        self._chunks: list[bytes] = []
        self._size = 0

    def declare(self, entry: Any) -> None:
        self._declared.append(entry)

    def add(self, tensor: int, offset: int, data: memoryview) -> None:
        """Takes a chunk of a tensor that was declared; nothing reads `data` any more when this returns."""
        request = chunk_request(tensor, offset, data)
        if len(data) >= _SMALL_BYTES:
            self.send()
            self._stream.send(*request)
            return
        self._chunks.append(b"".join(request))
        self._size += len(data)
        if self._size >= CHUNK_BYTES:
            self.send()

    def send(self) -> None:
        """Hands over what waits."""
        if self._declared:
            self._stream.send(_request(manifest={"tensors": self._declared}))
        for chunk in self._chunks:
            self._stream.send(chunk)
        self._declared, self._chunks, self._size = [], [], 0


def push_shared(start: StartCall, plan: Plan, pool: SegmentPool, progress: Progress, *, fall_back: bool) -> Any:
    """Lays everything into a segment and names it to the server; returns the `UpdateResponse`.

    Args:
        fall_back: where there is no room for a segment, or the server has another `/dev/shm`, send it inline.
    """
    with ExitStack() as held:
        try:
            segment = held.enter_context(pool.segment(plan.total + ALIGNMENT * MANY_TENSORS))
        except ResourceExhausted:
            if not fall_back:
                raise
        else:
            return _push_segment(start, plan, segment, progress, fall_back)
    return push_inline(start, plan, progress)


def _push_segment(start: StartCall, plan: Plan, segment: Segment, progress: Progress, fall_back: bool) -> Any:
    written: list[tuple[str, Layout, int, int, int]] = []
    end = 0
    tensors = iter(plan.tensors)
    # In place, the server sets less aside for tensors that it knows at once.
    upfront = plan.upfront or plan.header.in_place
    plan.header.source.shared_memory.name = segment.name
    try:
        with start() as stream:
            if not upfront:
                plan.header.total_bytes = plan.total
                stream.send(_request(header=plan.header))
            entries, declared = [], 0
            for tensor in tensors:
                size = len(tensor.data)
                if end + size > segment.size:
                    raise InvalidArgument(f"{tensor.name}: goes past the {plan.total} bytes of total_bytes")
                entries.append(tensor.entry(segment.write(end, tensor.data), end))
                written.append((tensor.name, tensor.layout, end, size, tensor.changed))
                progress.add(size)
                end += aligned(size)
                del tensor  # before the next is gathered, so that never two are held
                if not upfront and end - declared >= _DECLARED_BYTES:
                    stream.send(_request(manifest={"tensors": entries}))
                    entries, declared = [], end
            if upfront:
                plan.header.tensors.extend(entries)
                stream.send(_request(header=plan.header))
            elif entries:
                stream.send(_request(manifest={"tensors": entries}))
            return _commit(stream)
    except NotFound:
        if not fall_back:
            raise
    plan.header.ClearField("source")
    plan.header.ClearField("tensors")
    again = (
        Outgoing(name, layout, segment.read(offset, size), changed) for name, layout, offset, size, changed in written
    )
    progress.repeat(sum(size for _, _, _, size, _ in written))
    return push_inline(start, replace(plan, tensors=itertools.chain(again, tensors)), progress)


def push_buffer(start: StartCall, plan: Plan, buffer: SharedBuffer, progress: Progress, *, fall_back: bool) -> Any:
    """Names a segment to the server in which all tensors lie already; returns the `UpdateResponse`.

    Args:
        fall_back: where the server has another `/dev/shm`, send it inline.
    """
    tensors = list(plan.tensors)
    offsets = [buffer.segment.offset_of(tensor.data) for tensor in tensors]
    for tensor, offset in zip(tensors, offsets, strict=True):
        if offset is None:
            where = "does not lie in the shared buffer; gather it into what `take` gives"
            raise InvalidArgument(f"{tensor.name}: {where}")
    # There is nothing to copy that the server could overlap with: both sides take all tensors with all threads.
    digests = _digests([tensor.data for tensor in tensors])
    for tensor, digest, offset in zip(tensors, digests, offsets, strict=True):
        plan.header.tensors.append(tensor.entry(digest, offset))
    plan.header.source.shared_memory.name = buffer.segment.name
    try:
        response = push_header(start, plan.header)
    except NotFound:
        if not fall_back:
            raise
        plan.header.ClearField("source")
        plan.header.ClearField("tensors")
        return push_inline(start, replace(plan, tensors=tensors), progress)
    progress.add(plan.total)
    return response


def _digests(parts: list[memoryview]) -> list[bytes]:
    """The digest of each, made by several threads."""
    digests = [b""] * len(parts)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    # The largest first, so that the threads end together.
    for index in sorted(range(len(parts)), key=lambda index: -len(parts[index])):
        todo.put(index)

    def make() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                index = todo.get_nowait()
                digests[index] = digest_of(parts[index])

    # A task for each thread, not for each part: handing over a small one takes longer than its digest.
    with ThreadPoolExecutor(_DIGEST_THREADS, thread_name_prefix="rollout-digest") as threads:
        for made in [threads.submit(make) for _ in range(_DIGEST_THREADS)]:
            made.result()
    return digests


def push_header(start: StartCall, header: Any) -> Any:
    """A push whose tensors the server finds by itself; returns the `UpdateResponse`."""
    with start() as stream:
        stream.send(_request(header=header))
        return _commit(stream)


def chunk_request(tensor: int, offset: int, data: memoryview | bytes) -> tuple[bytes, memoryview | bytes]:
    """The two parts of an `UpdateRequest` with a `Chunk`, by hand: the library would copy the data three times."""
    fields = b"\x08" + _varint(tensor) + b"\x10" + _varint(offset) + b"\x1a" + _varint(len(data))
    return b"\x1a" + _varint(len(fields) + len(data)) + fields, data


def _commit(stream: ClientStream) -> Any:
    stream.send(_request(commit={}))
    return _proto.UPDATE.response.FromString(stream.finish())


def _request(**kind: Any) -> bytes:
    return _proto.UPDATE.request(**kind).SerializeToString()


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:  # noqa: PLR2004 seven bits a byte
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
