"""The transports of a push. Each is a stream of a header, tensors in chunks or in shared memory, and a commit."""

from __future__ import annotations

import contextlib
import os
import queue
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol

from . import _proto
from ._http2 import ClientStream
from ._progress import Progress
from ._segment import DIRECTORY, SegmentLease, SharedBuffer, aligned, digest_of
from ._tensors import Layout
from ._wire import Message, chunk_request, encoded_entry, header_request, manifest_request, request
from .errors import InvalidArgument, NotFound, ResourceExhausted

CHUNK_BYTES = 1 << 20
"""The most bytes of a tensor in one message: those of one HTTP/2 frame."""

SHARED_MEMORY_FROM = 16 << 20
"""Smaller pushes are sent inline: creating a segment would cost more than it saves."""

# Smaller chunks are sent together, after a copy if their memory may change; above, a copy costs more than it saves.
_SMALL_BYTES = 256 << 10
# Smaller chunks are always copied: that costs less than to keep account of their memory.
_TINY_BYTES = 4 << 10
_LOCAL = ("localhost:", "127.", "[::1]:")
# Bytes of a segment that one message declares: the server reads them while the next are written.
_DECLARED_BYTES = 16 << 20
# The longest that written tensors wait to be sent together with more: far below the server's --update-idle-seconds.
_LATE_SECONDS = 5.0
# Most bytes that a message takes beside its tensor's entry or data.
_MESSAGE_BYTES = 32
# More threads would wait for memory, and the trainer needs the cores.
_DIGEST_THREADS = min(4, os.cpu_count() or 1)
# Digests of smaller tensors are computed by one thread: xxhash holds the interpreter's lock meanwhile.
_THREADED_BYTES = 128 << 10


class OutgoingTensor(NamedTuple):
    """A tensor to send."""

    name: str
    layout: Layout
    """Of the whole tensor."""
    data: memoryview
    changed: int = 0
    """For a delta: the number of elements in `data`, which is then the compressed payload."""

    def entry(self, digest: bytes, offset: int = 0) -> bytes:
        """Its entry in the header or manifest, encoded."""
        payload = len(self.data) if self.changed else 0
        return encoded_entry(self.name, self.layout, digest, offset=offset, changed=self.changed, payload_bytes=payload)


StartCall = Callable[[], ClientStream]
"""Starts the RPC."""


def choose_shared_memory(transport: str, address: str, total: int) -> bool:
    """Whether a push goes through shared memory.

    Raises:
        InvalidArgument: `transport` is unknown.
    """
    if transport == "device_memory":
        raise InvalidArgument("transport: 'device_memory' is for whole tensors; a delta is made in this process")
    if transport not in ("auto", "inline", "shared_memory"):
        known = "'auto', 'inline', 'shared_memory' or 'device_memory'"
        raise InvalidArgument(f"transport: expected {known}, got {transport!r}")
    local = address.startswith(_LOCAL) and DIRECTORY.is_dir()
    return transport == "shared_memory" or (transport == "auto" and local and total >= SHARED_MEMORY_FROM)


class Sender(Protocol):
    """Sends one push: `write` each tensor, then `commit`; `close` without a commit cancels the push."""

    def write(self, tensor: OutgoingTensor) -> None:
        """Sends the next tensor. Its memory is not read after the return, unless `InlineSender` keeps it.

        Raises:
            RolloutError: the server has ended the push with this error, now or since the previous tensor.
        """

    def commit(self) -> Any:
        """Ends the push and returns the `UpdateResponse`."""

    def close(self) -> None:
        """Frees everything; cancels the push if it is not committed."""


def _begin_or_close(sender: InlineSender | SharedMemorySender) -> None:
    """Sends the header; closes the sender if that fails, because the caller does not have it yet."""
    try:
        sender.begin()
    except BaseException:
        sender.close()
        raise


class InlineSender:
    """Sends all bytes through the stream."""

    def __init__(
        self,
        start: StartCall,
        header: Any,
        limit: int,
        progress: Progress,
        *,
        upfront: bool,
        unchanged: bool = False,
    ) -> None:
        """Sends the header, unless the header must declare all tensors.

        Args:
            start: starts the RPC.
            header: without tensors and source.
            limit: the most bytes of all tensors.
            progress: counts the bytes.
            upfront: declare all tensors in the header; they are kept, uncopied, until the commit.
            unchanged: the tensors' memory does not change before the commit, so that it need not be copied.
        """
        self._start, self._header, self._progress, self._upfront = start, header, progress, upfront
        self._unchanged = unchanged or upfront
        self._kept: list[OutgoingTensor] = []
        self._stream: ClientStream | None = None
        self._index = 0
        if not upfront:
            header.total_bytes = limit
            _begin_or_close(self)

    def write(self, tensor: OutgoingTensor) -> None:
        """As `Sender.write`."""
        if self._upfront:
            self._kept.append(tensor)
            return
        self._stream.check()
        self._batch.declare(tensor.entry(digest_of(tensor.data)))
        self._send(tensor)

    def commit(self) -> Any:
        """As `Sender.commit`."""
        if self._upfront:
            self.begin([tensor.entry(digest_of(tensor.data)) for tensor in self._kept])
            for tensor in self._kept:
                self._send(tensor)
        self._batch.send()
        return commit(self._stream)

    def close(self) -> None:
        """As `Sender.close`."""
        self._kept = []
        if self._stream is not None:
            self._stream.close()

    def begin(self, entries: Iterable[bytes] = ()) -> None:
        """Sends the header, which declares these tensors."""
        self._stream = self._start()
        self._stream.send(header_request(self._header, entries))
        self._batch = _Batch(self._stream, unchanged=self._unchanged)

    def _send(self, tensor: OutgoingTensor) -> None:
        size = len(tensor.data)
        for offset in range(0, size, CHUNK_BYTES):
            data = tensor.data if size <= CHUNK_BYTES else tensor.data[offset : offset + CHUNK_BYTES]
            self._batch.add(self._index, offset, data)
            self._progress.add(len(data))
        self._index += 1


class _Batch:
    """Collects small chunks up to the bytes of a frame, and sends them together, behind a manifest of their tensors."""

    def __init__(self, stream: ClientStream, *, unchanged: bool) -> None:
        """`unchanged`: the chunks' memory does not change before the commit."""
        self._stream, self._unchanged = stream, unchanged
        self._begin()

    def declare(self, entry: bytes) -> None:
        self._declared.append(entry)
        self._size += len(entry) + _MESSAGE_BYTES

    def add(self, tensor: int, offset: int, data: memoryview) -> None:
        """Takes a chunk of a declared tensor. Unless its memory is unchanged, it is not read after the return."""
        size, parts = len(data), chunk_request(tensor, offset, data)
        if self._chunks and self._size + size > CHUNK_BYTES:
            self.send()
        is_sent_now = size >= _SMALL_BYTES
        if not is_sent_now and (size < _TINY_BYTES or not self._unchanged):
            parts = (b"".join(parts),)
        self._chunks.append(parts)
        self._size += size + _MESSAGE_BYTES
        if is_sent_now or self._size >= CHUNK_BYTES or time.monotonic() - self._sent >= _LATE_SECONDS:
            self.send()

    def send(self) -> None:
        """Sends the collected chunks."""
        if self._declared:
            self._chunks.insert(0, (manifest_request(self._declared),))
        if self._chunks:
            self._stream.send_all(self._chunks)
        self._begin()

    def _begin(self) -> None:
        self._declared: list[bytes] = []
        self._chunks: list[Message] = []
        self._size, self._sent = 0, time.monotonic()


class SharedMemorySender:
    """Copies all tensors into shared memory, from which the server reads them."""

    def __init__(
        self,
        start: StartCall,
        header: Any,
        limit: int,
        progress: Progress,
        *,
        upfront: bool,
        lease: SegmentLease,
        fall_back: bool,
    ) -> None:
        """Sends the header, unless the header must declare all tensors.

        Args:
            start, header, limit, progress: as for `InlineSender`.
            upfront: declare all tensors in the header.
            lease: of a segment with room for them.
            fall_back: send everything inline if the server has another `/dev/shm`, or if it becomes full.
        """
        self._start, self._header, self._limit, self._progress = start, header, limit, progress
        self._lease, self._fall_back, self._inline = lease, fall_back, None
        self._inline_upfront = upfront
        # In place, the server reserves less memory for tensors that the header declares.
        self._upfront = upfront or header.in_place
        self._written: list[tuple[str, Layout, int, int, int]] = []
        self._entries: list[bytes] = []
        self._end = self._declared = 0
        self._sent = time.monotonic()
        self._stream: ClientStream | None = None
        header.source.shared_memory.name = lease.segment.name
        if not self._upfront:
            header.total_bytes = limit
            _begin_or_close(self)

    def write(self, tensor: OutgoingTensor) -> None:
        """As `Sender.write`."""
        if self._inline is not None:
            self._inline.write(tensor)
            return
        size, segment = len(tensor.data), self._lease.segment
        if self._end + size > segment.size:
            raise InvalidArgument(f"{tensor.name}: exceeds total_bytes, which is {self._limit}")
        try:
            digest = segment.write(self._end, tensor.data)
        except ResourceExhausted:  # the tensors are larger than the estimate
            if not self._fall_back:
                raise
            self._repeat_inline()
            self._inline.write(tensor)
            return
        self._entries.append(tensor.entry(digest, self._end))
        self._written.append((tensor.name, tensor.layout, self._end, size, tensor.changed))
        self._progress.add(size)
        self._end += aligned(size)
        if self._upfront:
            return
        try:
            self._stream.check()
            if self._end - self._declared >= _DECLARED_BYTES or time.monotonic() - self._sent >= _LATE_SECONDS:
                self._declare()
        except NotFound:
            if not self._fall_back:
                raise
            self._repeat_inline()

    def commit(self) -> Any:
        """As `Sender.commit`."""
        if self._inline is not None:
            return self._inline.commit()
        try:
            if self._upfront:
                self.begin(self._entries)
            else:
                self._declare()
            return commit(self._stream)
        except NotFound:
            if not self._fall_back:
                raise
        self._repeat_inline()
        return self._inline.commit()

    def close(self) -> None:
        """As `Sender.close`."""
        for part in (self._stream, self._inline, self._lease):
            if part is not None:
                part.close()

    def begin(self, entries: Iterable[bytes] = ()) -> None:
        """Sends the header, which declares these tensors."""
        self._stream = self._start()
        self._stream.send(header_request(self._header, entries))

    def _declare(self) -> None:
        if self._entries:
            self._stream.send(manifest_request(self._entries))
            self._entries, self._declared, self._sent = [], self._end, time.monotonic()

    def _repeat_inline(self) -> None:
        """Starts again inline, with the tensors that were written."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._header.ClearField("source")
        self._progress.repeat(sum(size for _, _, _, size, _ in self._written))
        self._inline = InlineSender(
            self._start, self._header, self._limit, self._progress, upfront=self._inline_upfront
        )
        for name, layout, offset, size, changed in self._written:
            self._inline.write(OutgoingTensor(name, layout, self._lease.segment.read(offset, size), changed))


def push_buffer(
    start: StartCall,
    header: Any,
    tensors: list[OutgoingTensor],
    buffer: SharedBuffer,
    progress: Progress,
    *,
    fall_back: bool,
) -> Any:
    """Has the server read a segment that already contains all tensors; returns the `UpdateResponse`.

    Args:
        start, header, progress: as for `InlineSender`.
        tensors: all of them.
        buffer: the shared memory that contains them.
        fall_back: send them inline if the server has another `/dev/shm`.
    """
    offsets = [buffer.segment.offset_of(tensor.data) for tensor in tensors]
    for tensor, offset in zip(tensors, offsets, strict=True):
        if offset is None:
            where = "is not in the shared buffer; gather it into the memory that `take` returns"
            raise InvalidArgument(f"{tensor.name}: {where}")
    header.source.shared_memory.name = buffer.segment.name
    total = sum(len(tensor.data) for tensor in tensors)
    try:
        # In place, the server reserves less memory for tensors that the header declares.
        if total < _THREADED_BYTES * len(tensors) and not header.in_place:
            response = _declare_in_turn(start, header, tensors, offsets)
        else:
            # Client and server each process all tensors with all threads.
            digests = _digests([tensor.data for tensor in tensors])
            found = zip(tensors, digests, offsets, strict=True)
            response = push_header(start, header, [tensor.entry(*where) for tensor, *where in found])
    except NotFound:
        if not fall_back:
            raise
        header.ClearField("source")
        return send_all(InlineSender(start, header, total, progress, upfront=False, unchanged=True), tensors)
    progress.add(total)
    return response


def _declare_in_turn(start: StartCall, header: Any, tensors: list[OutgoingTensor], offsets: list[int]) -> Any:
    """Declares tensors in a segment some at a time, which the server reads while this thread digests the next ones."""
    header.total_bytes = sum(len(tensor.data) for tensor in tensors)
    with start() as stream:
        stream.send(header_request(header, ()))
        entries, size = [], 0
        for tensor, offset in zip(tensors, offsets, strict=True):
            entries.append(tensor.entry(digest_of(tensor.data), offset))
            size += len(tensor.data)
            if size >= _DECLARED_BYTES:
                stream.send(manifest_request(entries))
                entries, size = [], 0
        if entries:
            stream.send(manifest_request(entries))
        return commit(stream)


class BufferedSender:
    """Keeps copies of all tensors until the commit, for pushes whose header declares all tensors."""

    def __init__(self, begin: Callable[[int], Sender]) -> None:
        """`begin` returns the sender for this many bytes."""
        self._begin = begin
        self._kept: list[OutgoingTensor] = []
        self._sender: Sender | None = None

    def write(self, tensor: OutgoingTensor) -> None:
        """As `Sender.write`."""
        self._kept.append(tensor._replace(data=memoryview(bytes(tensor.data))))

    def commit(self) -> Any:
        """As `Sender.commit`."""
        self._sender = self._begin(sum(len(tensor.data) for tensor in self._kept))
        for tensor in self._kept:
            self._sender.write(tensor)
        return self._sender.commit()

    def close(self) -> None:
        """As `Sender.close`."""
        self._kept = []
        if self._sender is not None:
            self._sender.close()


def send_all(sender: Sender, tensors: Iterable[OutgoingTensor]) -> Any:
    """Sends the tensors, each before the next is taken, and commits; returns the `UpdateResponse`."""
    with contextlib.closing(sender):
        for tensor in tensors:
            sender.write(tensor)
            del tensor  # before the next one is gathered, so that two are never alive at once
        return sender.commit()


def _digests(parts: list[memoryview]) -> list[bytes]:
    """The digest of each, computed by several threads."""
    digests = [b""] * len(parts)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    # The largest first, so that the threads end together.
    large = [index for index, part in enumerate(parts) if len(part) >= _THREADED_BYTES]
    for index in sorted(large, key=lambda index: -len(parts[index])):
        todo.put(index)

    def make() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                index = todo.get_nowait()
                digests[index] = digest_of(parts[index])

    # One task per thread, not per part: submitting a small part takes longer than its digest.
    with ThreadPoolExecutor(_DIGEST_THREADS, thread_name_prefix="rollout-digest") as threads:
        making = [threads.submit(make) for _ in range(_DIGEST_THREADS)]
        for index, part in enumerate(parts):
            if len(part) < _THREADED_BYTES:
                digests[index] = digest_of(part)
        for made in making:
            made.result()
    return digests


def push_header(start: StartCall, header: Any, entries: Iterable[bytes] = ()) -> Any:
    """Sends a push whose tensors, if any are declared, the server reads itself; returns the `UpdateResponse`."""
    with start() as stream:
        stream.send(header_request(header, entries))
        return commit(stream)


def commit(stream: ClientStream) -> Any:
    """Commits the push of a stream; returns the `UpdateResponse`."""
    stream.send(request(commit={}))
    return _proto.UPDATE.response.FromString(stream.finish())
