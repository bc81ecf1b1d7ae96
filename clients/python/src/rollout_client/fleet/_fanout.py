"""One push into several replicas, with the interface of one call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Protocol, TypeVar

from .. import _proto
from .._http2 import ClientStream
from ..errors import Cancelled, DeadlineExceeded, InvalidArgument, NotFound, RolloutError, Unavailable

COMMIT = _proto.UPDATE.request(commit={}).SerializeToString()
"""The last message of a push. It is held back until all replicas have confirmed that they are ready."""

STALLED_SECONDS = 60.0
"""A replica that accepts no bytes of a push for this long misses it. Servers end a push that idles as long."""

_T = TypeVar("_T")


class Barrier(Protocol):
    """The fleet's part in a commit."""

    def prepare(self, numbers: list[int]) -> dict[int, RolloutError]:
        """Lets no group start until the push ends. Returns the errors of the replicas that are not ready to commit."""


class FanOut:
    """The calls of one push, with the interface of a `ClientStream`.

    Each message is sent to all replicas at the same time, and `send` returns when all have taken it, so that a tensor
    is read once and need not be kept. A replica whose call fails misses the push. With fewer replicas than the quorum,
    the push fails, and none commits it. If a replica rejects the contents of the push, the push fails for all.
    """

    def __init__(self, starts: Mapping[int, Callable[[], ClientStream]], quorum: int, barrier: Barrier) -> None:
        """Starts the call of each replica.

        Args:
            starts: how to start the call, by the replica's number.
            quorum: how many replicas must be ready to commit.
            barrier: asked before the commit.
        """
        self._quorum, self._barrier, self._replicas = quorum, barrier, len(starts)
        self._lock = threading.Lock()
        self._cancelled = False
        self.errors: dict[int, RolloutError] = {}
        """Why replicas missed the push, by number."""
        self.responses: dict[int, bytes] = {}
        """The replicas' responses to the commit, by number."""
        self.committing: frozenset[int] = frozenset()
        """The replicas to which the commit was sent: it may or may not have arrived, and cannot be withdrawn."""
        self._streams: dict[int, ClientStream] = {}
        self._threads = ThreadPoolExecutor(max(len(starts), 1), thread_name_prefix="rollout-fan-out")
        try:
            for number, stream in self._each(dict(starts), lambda start: start(), None).items():
                self._streams[number] = stream
            self._check_quorum()
        except BaseException:
            self.close()
            raise

    def send(self, *parts: bytes | memoryview) -> None:
        """As `ClientStream.send`, to all replicas. The commit is held back for `finish`.

        Raises:
            RolloutError: too few replicas are left, or one refuses what the push contains.
        """
        if parts != (COMMIT,):
            self.send_all([parts])

    def send_all(self, messages: Sequence[tuple[bytes | memoryview, ...]]) -> None:
        """As `ClientStream.send_all`, to all replicas. The commit is not among the messages.

        Raises:
            RolloutError: as for `send`.
        """
        self._each(self._streams, lambda stream: stream.send_all(messages), STALLED_SECONDS)
        self._check_quorum()

    def check(self) -> None:
        """As `ClientStream.check`, for all replicas."""
        self._each(self._streams, lambda stream: stream.check(), None)
        self._check_quorum()

    def finish(self) -> bytes:
        """Commits the push, and returns the response of one replica; `responses` has all.

        Raises:
            RolloutError: the push is not committed anywhere, as far as can be known here.
        """
        self.check()
        for number, error in self._barrier.prepare(list(self._streams)).items():
            self._drop(number, error)
        self.check()
        self.committing = frozenset(self._streams)

        def commit(number: int) -> None:
            stream = self._streams[number]
            stream.send(COMMIT)
            self.responses[number] = stream.finish()  # also if no thread waits for it any more

        self._each({number: number for number in self._streams}, commit, None)
        if not self.responses:
            raise self._failure("the commit of a push failed on all replicas")
        return self.responses[min(self.responses)]

    def has_ended(self, number: int) -> bool:
        """Whether a replica has ended its call, or was left out; for any thread."""
        with self._lock:
            stream = self._streams.get(number)
        try:
            if stream is not None:
                stream.check()
        except RolloutError:
            return True
        return stream is None

    def drop(self, number: int, error: RolloutError) -> None:
        """Leaves out a replica, and ends its call; for any thread."""
        with self._lock:
            stream = self._streams.get(number)
            if stream is not None:
                self.errors.setdefault(number, error)
        if stream is not None:
            stream.cancel()

    def cancel(self) -> None:
        """As `ClientStream.cancel`, for all replicas; for any thread."""
        self._cancelled = True
        with self._lock:
            streams = list(self._streams.values())
        for stream in streams:
            stream.cancel()

    def close(self) -> None:
        """As `ClientStream.close`, for all replicas."""
        self.cancel()
        self._threads.shutdown(wait=True)
        for stream in self._streams.values():
            stream.close()
        self._streams = {}

    def __enter__(self) -> FanOut:
        """Returns the call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `close`."""
        self.close()

    def _each(self, targets: Mapping[int, _S], use: Callable[[_S], _T], timeout: float | None) -> dict[int, _T]:
        """Calls `use` for all at the same time; drops those that fail, or stall for longer than `timeout` seconds."""
        targets = dict(targets)
        if len(targets) == 1 and timeout is None:
            ((number, target),) = targets.items()
            pending: dict[Future[_T], int] = {_done(use, target): number}
        else:
            pending = {self._threads.submit(use, target): number for number, target in targets.items()}
        results: dict[int, _T] = {}
        while pending:
            done, _ = wait(pending, timeout, FIRST_COMPLETED)
            if not done:
                for number in pending.values():
                    self.drop(number, DeadlineExceeded(f"accepted no bytes of the push for {timeout:g} s"))
                timeout = None
            for future in done:
                number = pending.pop(future)
                try:
                    results[number] = future.result()
                except RolloutError as error:
                    # The traceback refers to the sender, which could not be collected while the error is kept.
                    self._drop(number, error.with_traceback(None))
        return results

    def _drop(self, number: int, error: RolloutError) -> None:
        """Leaves out a replica, which misses the push; keeps its first error."""
        with self._lock:
            stream = self._streams.pop(number, None)
            self.errors.setdefault(number, error)
        if stream is not None:
            stream.close()

    def _check_quorum(self) -> None:
        if self._cancelled:
            raise Cancelled("the push was cancelled by this client")
        for error in self.errors.values():
            if isinstance(error, (InvalidArgument, NotFound)):  # an error of the push itself is the same for all
                raise error
        if len(self._streams) < self._quorum:
            raise self._failure(
                f"a push needs {self._quorum} of {self._replicas} replicas, and has {len(self._streams)}"
            )

    def _failure(self, what: str) -> RolloutError:
        """The error of the push: of the class that all replicas' errors have, else `Unavailable`."""
        kinds = {type(error) for error in self.errors.values()}
        kind = kinds.pop() if len(kinds) == 1 else Unavailable
        reasons = "; ".join(f"replica {number}: {error}" for number, error in sorted(self.errors.items()))
        return kind(f"{what}; the policy is as it was ({reasons})" if reasons else f"{what}; the policy is as it was")


_S = TypeVar("_S")


def _done(use: Callable[[_S], _T], target: _S) -> Future[_T]:
    """As a submission to a thread, but executed in this one."""
    future: Future[_T] = Future()
    try:
        future.set_result(use(target))
    except RolloutError as error:
        future.set_exception(error)
    return future
