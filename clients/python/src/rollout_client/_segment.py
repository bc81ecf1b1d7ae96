"""Shared memory of this process and a server on the same host: a file in `/dev/shm`."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import xxhash

from .errors import InvalidArgument, ResourceExhausted

DIRECTORY = Path("/dev/shm")
ALIGNMENT = 64
OWNER_ONLY = 0o600
# Room between the tensors of a segment: the alignment of 16,384 tensors.
PADDING = ALIGNMENT * 16_384
_NAME = re.compile(r"rollout-(\d+)-[0-9a-f]{16}")
_PIECE = 256 << 10


class Segment:
    """A file of `size` bytes, owned by this process; removed by `close`, or when the interpreter ends."""

    def __init__(self, size: int, mode: int = OWNER_ONLY, taken: int | None = None) -> None:
        """Creates it, after removing the segments of crashed processes.

        Args:
            size: in bytes.
            taken: bytes at its start whose memory is allocated now, the rest when it is written; None is all.
            mode: who may read it, as for `chmod`; the umask does not apply.

        Raises:
            ResourceExhausted: `/dev/shm` is full or missing.
        """
        clean_stale_segments()
        self.size = size
        self.name = f"rollout-{os.getpid()}-{os.urandom(8).hex()}"
        path = DIRECTORY / self.name
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, OWNER_ONLY)
        except OSError as error:
            raise ResourceExhausted(f"no shared memory: {path}: {error.strerror}") from None
        # Held while this process lives: its id may differ in another namespace.
        fcntl.flock(file, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, path, file, os.getpid())
        try:
            os.fchmod(file, mode)
            os.ftruncate(file, size)
            self._file, self._taken = file, 0
            self.take(size if taken is None else taken)
            self._memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
            self._bytes = memoryview(self._memory)
            self._start = _address(self._bytes)
        except (OSError, ResourceExhausted) as error:
            self._remove()
            if isinstance(error, OSError):
                raise _no_room(size, error) from None
            raise

    def take(self, end: int) -> None:
        """Allocates the memory of the bytes before `end`: writing to a full file system would kill the process.

        Raises:
            ResourceExhausted: `/dev/shm` is full.
        """
        if end <= self._taken:
            return
        try:
            os.posix_fallocate(self._file, self._taken, end - self._taken)
        except OSError as error:
            raise _no_room(end, error) from None
        self._taken = end

    def write(self, offset: int, data: memoryview) -> bytes:
        """Copies `data` to `offset`; returns its XXH3-128.

        Each piece is copied and digested while it is in the core's cache. On two cores, one of which the server uses,
        that costs a fifth less than a thread for each of the two.

        Raises:
            ResourceExhausted: `/dev/shm` is full.
        """
        self.take(offset + len(data))
        if len(data) <= _PIECE:
            self._bytes[offset : offset + len(data)] = data
            return digest_of(data)
        source, target = np.frombuffer(data, np.uint8), self._memory[offset : offset + len(data)]
        digest = xxhash.xxh3_128()
        for start in range(0, len(data), _PIECE):
            piece = source[start : start + _PIECE]
            target[start : start + _PIECE] = piece
            digest.update(piece)
        return digest.digest()

    def read(self, offset: int, size: int) -> memoryview:
        """The bytes at `offset`."""
        return self._bytes[offset : offset + size]

    def offset_of(self, data: memoryview) -> int | None:
        """The offset of `data` in it; None if it is elsewhere in memory."""
        offset = _address(data) - self._start
        return offset if 0 <= offset <= len(self._memory) - len(data) else None

    def close(self) -> None:
        """Removes the file; the memory is freed when no process maps it any more."""
        self._remove()
        self._memory = np.empty(0, np.uint8)
        self._bytes = memoryview(self._memory)


class SharedBuffer:
    """Memory that a server on this host can read: tensors in it are pushed without a copy.

        with SharedBuffer(total_bytes) as buffer:
            for name, shard in shards:
                tensor = torch.frombuffer(buffer.take(size_of(name)), dtype=torch.bfloat16).view(shape_of(name))
                gather(shard, out=tensor)
                tensors[name] = tensor
            client.push_full(tensors, buffer=buffer)

    Keep it for all pushes: allocating new pages takes longer than writing them. Its tensors must not change while a
    push is open. `close`, or the end of the process, frees it once no tensor uses it any more.
    """

    def __init__(self, size: int, segment_mode: int = OWNER_ONLY) -> None:
        """Allocates `size` bytes for tensors, and room for their alignment.

        Args:
            size: in bytes.
            segment_mode: as for `RolloutClient`.

        Raises:
            ResourceExhausted: `/dev/shm` is full or missing.
        """
        self.segment = Segment(size + PADDING, segment_mode)
        self._taken = 0

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, writable, aligned for every dtype.

        Raises:
            InvalidArgument: `size` is negative.
            ResourceExhausted: fewer than `size` bytes are left.
        """
        if size < 0:
            raise InvalidArgument(f"size: expected a number of bytes, got {size}")
        start = self._taken
        if start + size > self.segment.size:
            left = self.segment.size - start
            raise ResourceExhausted(f"the shared buffer has {left} bytes left, {size} are needed; make it larger")
        self._taken = start + aligned(size)
        return self.segment.read(start, size)

    def close(self) -> None:
        """Removes the shared memory, once no tensor uses it."""
        self.segment.close()

    def __enter__(self) -> SharedBuffer:
        """Returns the buffer."""
        return self

    def __exit__(self, *_: object) -> None:
        """As `close`."""
        self.close()


def aligned(size: int) -> int:
    """Bytes from the start of a tensor of this size to the start of the next."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(data: memoryview) -> int:
    if data.readonly or not len(data):
        return np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return ctypes.addressof(ctypes.c_char.from_buffer(data))  # six times as fast


def digest_of(data: memoryview | bytes) -> bytes:
    """XXH3-128, big-endian, as in the protocol."""
    return xxhash.xxh3_128(data).digest()


def clean_stale_segments() -> list[str]:
    """Removes the segments of this user whose process has crashed; returns their names."""
    removed = []
    for path in _segments():
        pid = int(_NAME.fullmatch(path.name)[1])  # type: ignore[index]
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.getuid() and not _lives(pid) and _is_unlocked(path):
                path.unlink()
                removed.append(path.name)
    return removed


def _segments() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in DIRECTORY.iterdir() if _NAME.fullmatch(path.name))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user, or not a process id
        return True
    return True


def _is_unlocked(path: Path) -> bool:
    """Whether no process holds it: a process in another namespace looks dead from here."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def _remove(path: Path, file: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork: the segment belongs to the parent
        return
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(file)


def _no_room(size: int, error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"no shared memory of {size} bytes below {DIRECTORY}: {error.strerror}")


class SegmentPool:
    """Keeps a client's segment for its next push: allocating new pages takes longer than the copy."""

    def __init__(self, mode: int = OWNER_ONLY) -> None:
        """Allocates nothing before the first push."""
        self._mode = mode
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._closed = False

    def lease(self, size: int, limit: int) -> SegmentLease:
        """A segment for one push; another push at the same time gets a segment of its own.

        Args:
            size: bytes whose memory is allocated now.
            limit: the most bytes that will be written.

        Raises:
            ResourceExhausted: `/dev/shm` is full or missing.
        """
        with self._lock:
            kept, self._segment = self._segment, None
        if kept is not None and kept.size < limit:
            kept.close()
            kept = None
        if kept is None:
            kept = Segment(limit, self._mode, size)
        lease = SegmentLease(self, kept)
        try:
            kept.take(size)
        except ResourceExhausted:
            lease.close()
            raise
        return lease

    def give_back(self, segment: Segment) -> None:
        """Keeps a segment for the next push, unless the pool has one or is closed."""
        with self._lock:
            keep = self._segment is None and not self._closed
            if keep:
                self._segment = segment
        if not keep:
            segment.close()

    def close(self) -> None:
        """Removes the segment; a segment that a push uses is removed when the push ends."""
        with self._lock:
            kept, self._segment, self._closed = self._segment, None, True
        if kept is not None:
            kept.close()


class SegmentLease:
    """A segment in use by one push."""

    def __init__(self, pool: SegmentPool, segment: Segment) -> None:
        """Takes the segment, which the pool no longer has."""
        self._pool, self.segment = pool, segment
        self._ended = False

    def close(self) -> None:
        """Returns the segment to the pool."""
        if not self._ended:
            self._ended = True
            self._pool.give_back(self.segment)
