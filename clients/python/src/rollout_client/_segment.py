"""Memory that this process and a server on the same host share: a file below `/dev/shm`."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from .errors import InvalidArgument, ResourceExhausted

DIRECTORY = Path("/dev/shm")
ALIGNMENT = 64
OWNER_ONLY = 0o600
# What may lie between the tensors in a segment: alignment of 16,384 tensors.
PADDING = ALIGNMENT * 16_384
_NAME = re.compile(r"rollout-(\d+)-[0-9a-f]{16}")
_PIECE = 256 << 10


class Segment:
    """A file of `size` bytes that belongs to this process; it goes with `close`, or when the interpreter ends."""

    def __init__(self, size: int, mode: int = OWNER_ONLY, taken: int | None = None) -> None:
        """Creates it, after the removal of what crashed processes have left.

        Args:
            size: in bytes.
            taken: bytes at its start whose memory is taken now; that of others is when they are written. None is all.
            mode: who may read it, as for `chmod`; whatever the process's umask is.

        Raises:
            ResourceExhausted: `/dev/shm` has no room for it, or is not there.
        """
        clean_stale_segments()
        self.size = size
        self.name = f"rollout-{os.getpid()}-{os.urandom(8).hex()}"
        path = DIRECTORY / self.name
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, OWNER_ONLY)
        except OSError as error:
            raise ResourceExhausted(f"no shared memory: {path}: {error.strerror}") from None
        # Held while this process lives, whatever its id is in another namespace.
        fcntl.flock(file, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, path, file, os.getpid())
        try:
            os.fchmod(file, mode)
            os.ftruncate(file, size)
            self._file, self._taken = file, 0
            self.take(size if taken is None else taken)
            self._memory = np.frombuffer(mmap.mmap(file, size), np.uint8)
        except (OSError, ResourceExhausted) as error:
            self._remove()
            if isinstance(error, OSError):
                raise _no_room(size, error) from None
            raise

    def take(self, end: int) -> None:
        """Takes the memory of the bytes before `end`: a write into a file system that is full would kill the process.

        Raises:
            ResourceExhausted: `/dev/shm` has no room for it.
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

        The two go over each piece while the core's cache has it: on two cores, one of which the server reads with, that
        costs a fifth less than a thread for each.

        Raises:
            ResourceExhausted: `/dev/shm` has no room for it.
        """
        self.take(offset + len(data))
        source, target = np.frombuffer(data, np.uint8), self._memory[offset : offset + len(data)]
        digest = xxhash.xxh3_128()
        for start in range(0, len(data), _PIECE):
            piece = source[start : start + _PIECE]
            target[start : start + _PIECE] = piece
            digest.update(piece)
        return digest.digest()

    def read(self, offset: int, size: int) -> memoryview:
        """What was written there."""
        return memoryview(self._memory[offset : offset + size])

    def offset_of(self, data: memoryview) -> int | None:
        """Where `data` lies in it; None if it lies elsewhere."""
        offset = _address(np.frombuffer(data, np.uint8)) - _address(self._memory)
        return offset if 0 <= offset <= len(self._memory) - len(data) else None

    def close(self) -> None:
        """Removes the file; its memory goes when nobody maps it any more."""
        self._remove()
        self._memory = np.empty(0, np.uint8)


class SharedBuffer:
    """Memory that a server on this host can read: tensors that are gathered into it are pushed without a copy.

        with SharedBuffer(total_bytes) as buffer:
            for name, shard in shards:
                tensor = torch.frombuffer(buffer.take(size_of(name)), dtype=torch.bfloat16).view(shape_of(name))
                gather(shard, out=tensor)
                tensors[name] = tensor
            client.push_full(tensors, buffer=buffer)

    Keep it for all pushes: fresh pages cost more than what is written to them. What lies in it must not change while a
    push is under way. `close`, or the end of the process, gives it back when no tensor lies in it any more.
    """

    def __init__(self, size: int, segment_mode: int = OWNER_ONLY) -> None:
        """Of `size` bytes for tensors, beside what aligning them takes.

        Args:
            size: in bytes.
            segment_mode: as for `RolloutClient`.

        Raises:
            ResourceExhausted: `/dev/shm` has no room for it, or is not there.
        """
        self.segment = Segment(size + PADDING, segment_mode)
        self._taken = 0

    def take(self, size: int) -> memoryview:
        """The next `size` bytes, aligned for every type, writable.

        Raises:
            InvalidArgument: `size` is negative.
            ResourceExhausted: so many are not left.
        """
        if size < 0:
            raise InvalidArgument(f"size: expected bytes, got {size}")
        start = self._taken
        if start + size > self.segment.size:
            left = self.segment.size - start
            raise ResourceExhausted(f"{size} bytes of a shared buffer that has {left} left; make it larger")
        self._taken = start + aligned(size)
        return self.segment.read(start, size)

    def close(self) -> None:
        """Ends it."""
        self.segment.close()

    def __enter__(self) -> SharedBuffer:
        """The buffer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """As `close`."""
        self.close()


def aligned(size: int) -> int:
    """Bytes from the start of a tensor of this size to that of the next."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _address(array: npt.NDArray[np.uint8]) -> int:
    # `array.ctypes` takes ten times as long.
    return array.__array_interface__["data"][0]


def digest_of(data: memoryview | bytes) -> bytes:
    """XXH3-128, big-endian, as the protocol has it."""
    return xxhash.xxh3_128(data).digest()


def clean_stale_segments() -> list[str]:
    """Removes segments of this user whose process has died without doing it; returns their names."""
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
    except (OSError, OverflowError):  # somebody else's, or no process id
        return True
    return True


def _is_unlocked(path: Path) -> bool:
    """Whether no process holds it: one in another namespace looks dead from here."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def _remove(path: Path, file: int, owner: int) -> None:
    if os.getpid() != owner:  # a fork: the segment is the parent's
        return
    with contextlib.suppress(OSError):
        path.unlink()
    os.close(file)


def _no_room(size: int, error: OSError) -> ResourceExhausted:
    return ResourceExhausted(f"no shared memory of {size} bytes below {DIRECTORY}: {error.strerror}")


class SegmentPool:
    """The one segment of a client, kept for its next push: fresh pages cost more than the copy."""

    def __init__(self, mode: int = OWNER_ONLY) -> None:
        """Nothing is made before the first push."""
        self._mode = mode
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._closed = False

    def lease(self, size: int, limit: int) -> SegmentLease:
        """A segment for one push; a further push that begins meanwhile gets one of its own.

        Args:
            size: bytes whose memory is taken now.
            limit: bytes that may be written.

        Raises:
            ResourceExhausted: `/dev/shm` has no room for it, or is not there.
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
        """Keeps a segment for the next push, unless there is one or the pool is closed."""
        with self._lock:
            keep = self._segment is None and not self._closed
            if keep:
                self._segment = segment
        if not keep:
            segment.close()

    def close(self) -> None:
        """Removes the segment; one that a push still uses goes when that ends."""
        with self._lock:
            kept, self._segment, self._closed = self._segment, None, True
        if kept is not None:
            kept.close()


class SegmentLease:
    """A segment while one push uses it."""

    def __init__(self, pool: SegmentPool, segment: Segment) -> None:
        """Of this segment, which the pool has no more."""
        self._pool, self.segment = pool, segment
        self._ended = False

    def close(self) -> None:
        """Gives the segment back to the pool."""
        if not self._ended:
            self._ended = True
            self._pool.give_back(self.segment)
