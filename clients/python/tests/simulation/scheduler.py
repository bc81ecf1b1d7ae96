"""A virtual clock, and threads that take turns in one thread of the operating system.

Each simulated thread is a greenlet that runs until it blocks: in a `Condition`, in the `select` of its event loop, or
in `join`. The clock jumps to the next timer when no thread can run, so that a timeout of 600 s takes no time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import heapq
import itertools
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

from greenlet import getcurrent, greenlet

from rollout_client import RolloutError

MAX_SECONDS = 20_000.0
"""Of virtual time in one run: twenty times what the longest timeouts of a run add up to."""
MAX_TURNS = 2_000_000
"""Turns of all threads in one run, ten times what a long run takes: more are a loop without progress."""


class Stuck(AssertionError):
    """No thread can run, or none makes progress."""


TURN_SECONDS = 1e-8
"""Virtual time of a turn of the fleet's loop."""


class Scheduler:
    """Runs simulated threads, one at a time. Created in the greenlet that calls `run`."""

    def __init__(self, rng: Random) -> None:
        self.now = 0.0
        self.rng = rng
        self.hub = getcurrent()
        self.threads: list[Thread] = []
        self.turns = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def call_at(self, when: float, use: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(when, self.now), next(self._order), use))

    def run(self, main: Callable[[], Any]) -> Any:
        """Runs `main` as a thread until it ends."""
        thread = Thread(self, main, "main")
        thread.start()
        while not thread.future.done():
            if not self._queue:
                raise Stuck(f"no thread can run: {', '.join(t.name for t in self.threads)}")
            when, _, use = heapq.heappop(self._queue)
            self.now = max(self.now, when)
            self.turns += 1
            if self.now > MAX_SECONDS or self.turns > MAX_TURNS:
                raise Stuck(f"no end after {self.now:g} virtual seconds and {self.turns} turns")
            use()
        return thread.future.result()

    def block(self, register: Callable[[Callable[[], None]], None], timeout: float | None = None) -> None:
        """Blocks the running thread until the function that `register` gets is called, or for `timeout` seconds."""
        me = getcurrent()
        assert me is not self.hub, "the scheduler itself cannot wait"
        token = me.token = object()

        def wake() -> None:
            self.call_at(self.now, lambda: self._resume(me, token))

        register(wake)
        if timeout is not None:
            self.call_at(self.now + timeout, lambda: self._resume(me, token))
        loop = asyncio._get_running_loop()
        asyncio._set_running_loop(None)
        try:
            self.hub.switch()
        finally:
            me.token = None
            asyncio._set_running_loop(loop)

    def interrupt(self, thread: Thread) -> None:
        """As Control-C in a thread that waits."""
        token = thread.token
        if token is not None:
            self.call_at(self.now, lambda: self._resume(thread, token, KeyboardInterrupt))

    def _resume(self, thread: greenlet, token: object, error: type[BaseException] | None = None) -> None:
        if thread.token is token:
            thread.throw(error) if error is not None else thread.switch()

    def close(self) -> None:
        """Ends the threads that a failed run has left."""
        for thread in list(self.threads):
            if thread:
                thread.token = None
                thread.throw()


class Thread(greenlet):
    """In place of `threading.Thread`."""

    token: object | None = None

    def __init__(self, scheduler: Scheduler, target: Callable[[], Any], name: str) -> None:
        super().__init__(self._run, scheduler.hub)
        self.scheduler, self.target, self.name = scheduler, target, name
        self.future = SimulatedFuture()

    def start(self) -> None:
        self.scheduler.threads.append(self)
        self.scheduler.call_at(self.scheduler.now, self.switch)

    def join(self) -> None:
        concurrent.futures.wait([self.future])

    def _run(self) -> None:
        if not self.future.set_running_or_notify_cancel():  # its caller was cancelled before it began
            return self._end()
        try:
            result = self.target()
        except BaseException as error:
            self._end()
            self.future.set_exception(error)
        else:
            self._end()
            self.future.set_result(result)

    def _end(self) -> None:
        asyncio._set_running_loop(None)
        self.scheduler.threads.remove(self)


class Condition:
    """In place of `threading.Condition`. Threads change only where they wait, so the lock itself has no effect."""

    scheduler: Scheduler

    def __init__(self, lock: object = None) -> None:
        self._waiting: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass

    def acquire(self) -> None:
        pass

    def release(self) -> None:
        pass

    def wait(self, timeout: float | None = None) -> None:
        self.scheduler.block(self._waiting.append, timeout)

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            self.wait()

    def notify_all(self) -> None:
        waiting, self._waiting = self._waiting, []
        for wake in waiting:
            wake()


class Event(Condition):
    """In place of `threading.Event`."""

    _is_set = False

    def set(self) -> None:
        self._is_set = True
        self.notify_all()

    def wait(self, timeout: float | None = None) -> bool:
        if not self._is_set:
            super().wait(timeout)
        return self._is_set


_serials = itertools.count()


def by_serial(cls: type) -> type:
    """Gives objects a hash that does not depend on their address, so that sets have the same order in each run."""

    def __hash__(self: Any) -> int:
        if getattr(self, "_serial", None) is None:
            self._serial = next(_serials)
        return self._serial

    cls.__hash__ = __hash__
    return cls


@by_serial
class SimulatedFuture(concurrent.futures.Future):
    """Of an executor."""


@by_serial
class _Task(asyncio.Task):
    """Of an event loop."""


@by_serial
class _Future(asyncio.Future):
    """Of an event loop."""


class Executor:
    """In place of `ThreadPoolExecutor`."""

    scheduler: Scheduler

    def __init__(self, max_workers: int | None = None, thread_name_prefix: str = "executor") -> None:
        self._name = thread_name_prefix
        self._futures: list[SimulatedFuture] = []

    def submit(self, use: Callable[..., Any], *arguments: Any) -> SimulatedFuture:
        thread = Thread(self.scheduler, lambda: use(*arguments), self._name)
        self._futures = [*(future for future in self._futures if not future.done()), thread.future]
        thread.start()
        return thread.future

    def shutdown(self, wait: bool = True) -> None:
        if wait:
            concurrent.futures.wait(self._futures)


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop of one simulated thread."""

    def __init__(self, scheduler: Scheduler, report: Callable[[str], None]) -> None:
        super().__init__()
        self._scheduler, self._selector, self._clock_resolution = scheduler, self, 1e-9
        self._wake: Callable[[], None] | None = None
        self._executor = Executor()
        self.set_task_factory(lambda loop, coroutine, **options: _Task(coroutine, loop=loop, **options))
        self._report = report
        self.set_exception_handler(self._note)

    def time(self) -> float:
        return self._scheduler.now

    def create_future(self) -> asyncio.Future:
        return _Future(loop=self)

    def select(self, timeout: float | None) -> tuple[()]:
        """As a selector: waits for timers and other threads. Sometimes others have a turn though this one has work.

        Each turn takes time, so that what waits for less than the clock can tell apart does not wait without end.
        """
        self._scheduler.now += TURN_SECONDS
        if timeout != 0 or self._scheduler.rng.random() < 0.2:
            self._scheduler.block(self._register, timeout)
            self._wake = None
        return ()

    def run_forever(self) -> None:
        """As the loops of the standard library, without hooks that are one for the whole thread."""
        self._check_closed()
        self._check_running()
        self._thread_id = 1
        asyncio._set_running_loop(self)
        try:
            while not self._stopping:
                self._run_once()
        finally:
            self._stopping, self._thread_id = False, None
            asyncio._set_running_loop(None)

    def run_in_executor(self, executor: None, use: Callable[..., Any], *arguments: Any) -> asyncio.Future:
        return asyncio.wrap_future(self._executor.submit(use, *arguments), loop=self)

    async def shutdown_default_executor(self) -> None:
        running = [asyncio.wrap_future(future, loop=self) for future in self._executor._futures]
        await asyncio.gather(*running, return_exceptions=True)

    def _note(self, loop: object, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, RolloutError):  # whose caller was interrupted
            self._report(f"{context['message']}: {error!r} {context.get('task')}")

    def _register(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def _write_to_self(self) -> None:
        if self._wake is not None:
            self._wake()

    def _process_events(self, events: tuple[()]) -> None:
        pass


def threading_of(scheduler: Scheduler) -> SimpleNamespace:
    """The part of `threading` that the fleet's loop uses."""
    import threading

    def thread(target: Callable[[], Any], name: str, daemon: bool) -> Thread:
        return Thread(scheduler, target, name)

    return SimpleNamespace(Thread=thread, RLock=threading.RLock, current_thread=getcurrent)
