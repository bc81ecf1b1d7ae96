"""An event loop of the fleet's own, in a thread, for callers of any kind."""

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
        """Starts the thread, which does not keep the interpreter alive."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout-fleet", daemon=True)
        self._thread.start()
        self._closed = False

    def submit(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        """Starts a coroutine. Cancelling the future cancels it.

        Raises:
            FailedPrecondition: the loop is closed.
        """
        if self._closed:
            coroutine.close()
            raise FailedPrecondition("the fleet is closed")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Waits for a coroutine; what interrupts the wait cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except CancelledError:
            raise Cancelled("the fleet was closed") from None
        except BaseException:
            future.cancel()
            raise

    def make(self, make: Callable[[], _T]) -> _T:
        """Calls a function in the loop's thread."""

        async def call() -> _T:
            return make()

        return self.run(call())

    def close(self) -> None:
        """Ends the thread; what still runs is cancelled."""
        if self._closed:
            return
        self.run(_cancel_others())
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def _cancel_others() -> None:
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
