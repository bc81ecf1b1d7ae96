"""Open pushes, to which the trainer writes tensors one by one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, TypeVar

from . import _convert_weights
from ._progress import Progress
from ._senders import OutgoingTensor, Sender
from ._tensors import bytes_of
from .errors import FailedPrecondition, RolloutError
from .types import UpdateResult

NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
"""Arrays or tensors by name: numpy arrays (float32, float16, and bfloat16 of ml_dtypes), torch tensors, or `(bytes,
dtype, shape)`. A tensor is copied only if it is not contiguous in this machine's memory."""

_T = TypeVar("_T")


class Push:
    """An open push; `RolloutClient.begin_push` returns it. A context manager, for one thread at a time.

        with client.begin_push(version=step) as push:
            for name, tensor in gathered():
                push.write(name, tensor)
        print(push.receipt.digest)

    The end of the `with` block commits. An exception inside it rolls back, and the old policy keeps serving. If the
    server rejects a tensor, the next `write` or the commit raises the error.
    """

    def __init__(
        self, sender: Sender, outgoing: Callable[[str, Any, Any], OutgoingTensor | None], progress: Progress
    ) -> None:
        """For `begin_push`.

        Args:
            sender: sends the tensors.
            outgoing: converts the arguments of `write` to the tensor that is sent, or to None if nothing is.
            progress: of the push.
        """
        self._sender, self._outgoing, self._progress = sender, outgoing, progress
        self._ended: str | None = None
        self._error: BaseException | None = None
        self._receipt: UpdateResult | None = None

    @property
    def receipt(self) -> UpdateResult:
        """The server's answer to the commit.

        Raises:
            FailedPrecondition: the push is not committed.
        """
        if self._receipt is None:
            raise FailedPrecondition("receipt: the push is not committed")
        return self._receipt

    @property
    def is_open(self) -> bool:
        """Whether the push was neither committed nor rolled back, and has not failed."""
        return self._ended is None

    def write(self, name: str, tensor: Any, old: Any = None) -> None:
        """Sends one tensor, which may change or be freed after the return. With `transport="device_memory"` it is kept
        alive, and must not change, until the commit.

        Args:
            name: as `push_full`, `push_lora` or `push_delta` takes it.
            tensor: an array, a tensor, or `(bytes, dtype, shape)`; read in this thread. For an adapter or a delta, a
                copy is kept until the commit.
            old: for a delta: the tensor as the server has it now.

        Raises:
            InvalidArgument: this tensor cannot be pushed; the push stays open without it.
            FailedPrecondition: the push has ended.
            RolloutError: the server has ended the push with this error, now or since the previous tensor.
        """
        self._check_open()
        outgoing = self._outgoing(name, tensor, old)
        if outgoing is not None:
            self._end_on_error(lambda: self._sender.write(outgoing))

    def write_all(self, named_tensors: NamedTensors) -> None:
        """Writes the tensors of a state dict, or of an iterator of pairs; each is sent before the next is taken."""
        for name, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
            self.write(name, tensor)
            del tensor  # before the next one is gathered, so that two are never alive at once

    def commit(self) -> UpdateResult:
        """Applies the push, and returns the receipt.

        Raises:
            FailedPrecondition: the push has ended.
            RolloutError: as for the methods that push in one call.
        """
        self._check_open()
        response = self._end_on_error(self._sender.commit)
        self._receipt = _convert_weights.update_result(response)
        self._end("is committed")
        self._progress.finish()
        return self._receipt

    def rollback(self) -> None:
        """Cancels the push: the policy stays as it was. Has no effect if it has failed or was rolled back.

        Waits up to a second for the server to end the push, so that the next push is not rejected because of it.

        Raises:
            FailedPrecondition: the push is committed.
        """
        if self._receipt is not None:
            self._check_open()
        if self.is_open:
            self._end("was rolled back")

    def __enter__(self) -> Push:
        """Returns the push."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commits, unless the push has ended; after an exception, rolls back. Raises the error of a failed push."""
        if kind is not None:
            if self.is_open:
                self.rollback()
        elif self.is_open or self._error is not None:
            self.commit()

    def _check_open(self) -> None:
        if isinstance(self._error, RolloutError):
            raise self._error
        if self._ended is not None:
            raise FailedPrecondition(f"the push {self._ended}; begin another")

    def _end_on_error(self, use: Callable[[], _T]) -> _T:
        try:
            return use()
        except BaseException as error:
            # A message that was interrupted, by whatever error, cannot be continued.
            self._error = error
            self._end(f"has failed ({type(error).__name__})")
            raise

    def _end(self, how: str) -> None:
        self._ended = how
        self._sender.close()


class AsyncPush:
    """As `Push`, awaited; `AsyncRolloutClient.begin_push` makes it.

        async with client.begin_push(version=step) as push:
            await push.write(name, tensor)

    Tensors are read, and iterators run, in the event loop's thread; another thread sends the bytes and waits for the
    server. Cancelling a task that waits for a call of this push cancels the push.
    """

    def __init__(self, begin: Callable[[], Push], cancel: Callable[[], None]) -> None:
        """For `begin_push`.

        Args:
            begin: opens the push; called in a thread, by the first call or at the start of the `async with` block.
            cancel: ends the calls of this push; for any thread.
        """
        self._begin, self._cancel = begin, cancel
        self._push: Push | None = None
        self._dropped = False
        self._lock = asyncio.Lock()

    @property
    def receipt(self) -> UpdateResult:
        """As `Push.receipt`."""
        if self._push is None:
            raise FailedPrecondition("receipt: the push is not committed")
        return self._push.receipt

    @property
    def is_open(self) -> bool:
        """As `Push.is_open`; also True before the first call has opened it."""
        return not self._dropped if self._push is None else self._push.is_open

    async def write(self, name: str, tensor: Any, old: Any = None) -> None:
        """As `Push.write`."""
        tensors = [_as_bytes(name, tensor), None if old is None else _as_bytes(name, old)]
        del tensor, old

        def write(push: Push) -> None:
            given, before = tensors
            tensors.clear()  # the thread may keep this function for a moment after its return
            push.write(name, given, before)

        await self._use(write)

    async def write_all(self, named_tensors: NamedTensors | AsyncIterable[tuple[str, Any]]) -> None:
        """As `Push.write_all`; also takes asynchronous iterators."""
        if isinstance(named_tensors, AsyncIterable):
            async for name, tensor in named_tensors:
                await self.write(name, tensor)
                del tensor
            return
        for name, tensor in named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors:
            await self.write(name, tensor)
            del tensor

    async def commit(self) -> UpdateResult:
        """As `Push.commit`."""
        return await self._use(lambda push: push.commit())

    async def rollback(self) -> None:
        """As `Push.rollback`."""
        async with self._lock:  # another task may be opening it
            self._dropped = self._push is None
        if not self._dropped:
            await self._use(lambda push: push.rollback())

    async def __aenter__(self) -> AsyncPush:
        """Opens the push, and returns it."""
        await self._use(lambda push: None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `Push.__exit__`."""
        await self._use(lambda push: push.__exit__(kind, error, trace))

    async def _use(self, use: Callable[[Push], _T]) -> _T:
        def begun() -> _T:
            if self._dropped:
                raise FailedPrecondition("the push was rolled back; begin another")
            if self._push is None:
                self._push = self._begin()
            return use(self._push)

        async with self._lock:
            working = asyncio.ensure_future(asyncio.to_thread(begun))
            try:
                return await asyncio.shield(working)
            except asyncio.CancelledError:
                self._cancel()
                # The thread may read the tensor until then.
                await asyncio.wait({working})
                with contextlib.suppress(Exception):
                    working.result()
                if self._push is not None and self._push.is_open:
                    self._push.rollback()
                raise
            finally:
                if not self.is_open:
                    self._cancel()


def _as_bytes(name: str, tensor: Any) -> tuple[memoryview, str, tuple[int, ...]]:
    given = bytes_of(name, tensor)
    return given.data, given.layout.dtype, given.layout.shape
