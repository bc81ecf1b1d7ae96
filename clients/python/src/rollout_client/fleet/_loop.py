"""The fleet's event loop, in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from ..errors import Cancelled, FailedPrecondition

_T = TypeVar("_T")


class Loop:
    """Runs coroutines for other threads."""

    def __init__(self) -> None:
        """Starts the thread, a daemon that does not keep the interpreter alive."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-fleet", daemon=True)
        self._thread.start()
        # Orders submissions and the close: close() cancels earlier submissions and rejects later ones. Reentrant,
        # because the garbage collector may submit the end of a push while this thread holds the lock.
        self._lock = threading.RLock()
        self._closed = False

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Starts a coroutine; cancelling the future cancels it.

        Raises:
            FailedPrecondition: the loop is closed.
        """
        with self._lock:
            if not self._closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise FailedPrecondition("the fleet is closed")

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Waits for a coroutine; an interrupted wait cancels it."""
        future = self._submit_to_wait(coroutine)
        try:
            return _result(future)
        except BaseException:
            future.cancel()
            raise

    def complete(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """As `run`, but an interrupted wait does not cancel the coroutine."""
        return _result(self._submit_to_wait(coroutine))

    def make(self, make: Callable[[], _T]) -> _T:
        """Calls a function in the loop's thread."""

        async def call() -> _T:
            return make()

        return self.run(call())

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancels all coroutines, runs `last`, and ends the thread."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        asyncio.run_coroutine_threadsafe(_end(last), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _submit_to_wait(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise FailedPrecondition(
                "called in the fleet's own thread (by a `progress` function?), which would wait for itself; call it in "
                "another thread"
            )
        return self.submit(coroutine)


def _result(future: Future[_T]) -> _T:
    try:
        return future.result()
    except CancelledError:
        raise closed() from None


def closed() -> Cancelled:
    """The error of a call that was running when the fleet was closed."""
    return Cancelled("the fleet was closed")


async def _end(last: Callable[[], Coroutine[Any, Any, None]]) -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await last()
    await asyncio.get_running_loop().shutdown_default_executor()
