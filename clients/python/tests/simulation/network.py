"""The network between the fleet's clients and the simulated servers, with all that can go wrong there.

`Channel` stands in place of gRPC's channels.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import re
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any

from rollout_client import _proto

from .scheduler import Scheduler, VirtualLoop
from .server import Process, RpcError

KEEPALIVE_SECONDS = 50.0
"""After which gRPC gives a connection up whose server does not answer pings."""


@dataclass
class Weather:
    """How often single messages go wrong, as probabilities."""

    lost_request: float = 0.0
    lost_reply: float = 0.0
    twice: float = 0.0
    cut_push: float = 0.0
    lost_commit_reply: float = 0.0
    corrupt: float = 0.0
    slow: float = 0.0


class Connection:
    """Of all calls to one process, until it breaks."""

    def __init__(self) -> None:
        self.broken = False
        self._on_break: dict[Callable[[], None], None] = {}

    def on_break(self, use: Callable[[], None]) -> None:
        self._on_break[use] = None

    def forget(self, use: Callable[[], None]) -> None:
        self._on_break.pop(use, None)

    def end(self) -> None:
        self.broken = True
        for use in list(self._on_break):
            use()


@dataclass(eq=False)
class Machine:
    """Where a server runs, with the way to it."""

    number: int
    address: str
    network: Network
    process: Process | None = None
    cut: bool = False
    stopped: bool = False
    slow: float = 1.0
    connection: Connection = field(default_factory=Connection)
    poisoned: bool = False

    def start(self) -> Process:
        network = self.network
        self.process = process = Process(network.world, self.awake)
        process.step_seconds *= self.slow
        process.order_seconds = network.rng.choice([0.0, 0.0, 0.3, 5.0])
        process.on_apply = lambda process, kind: network.on_apply(self, process, kind)
        return process

    def kill(self) -> None:
        """As SIGKILL: the connections break, and all that the process held is gone."""
        process, self.process = self.process, None
        if process is not None:
            process.session = None
            for task in [task for task, owner in self.network.serving.items() if owner is process]:
                task.cancel()
        self.stopped = False
        self.break_connections()
        self.network.changed()

    def break_connections(self) -> None:
        connection, self.connection = self.connection, Connection()
        connection.end()

    def set_stopped(self, stopped: bool) -> None:
        self.stopped = stopped
        self.network.changed()

    async def awake(self) -> None:
        """Waits while it is stopped; for tasks of the world's loop."""
        while self.stopped:
            await self.network.change()


class Network:
    """The machines, their addresses, and what happens on the way to them."""

    def __init__(self, scheduler: Scheduler, world: VirtualLoop, rng: Random, oracle: Any) -> None:
        self.scheduler, self.world, self.rng, self.oracle = scheduler, world, rng, oracle
        self.weather = Weather()
        self.machines: list[Machine] = []
        self.serving: dict[asyncio.Task, Process] = {}
        self.streams: list[Any] = []
        self.faults: Counter[str] = Counter()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future]] = []

    def at(self, address: str) -> Machine | None:
        return next((machine for machine in self.machines if machine.address == address), None)

    def happens(self, fault: str) -> bool:
        """Whether this message meets a fault."""
        happens = self.rng.random() < getattr(self.weather, fault)
        self.faults[fault] += happens
        return happens

    def latency(self, machine: Machine | None) -> float:
        seconds = self.rng.expovariate(1 / 0.004) * (machine.slow if machine is not None else 1.0)
        return seconds + (self.rng.uniform(0.5, 15.0) if self.happens("slow") else 0.0)

    async def change(self) -> None:
        """Waits until a machine is stopped, continued or killed; for tasks of any loop."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append((loop, future))
        await future

    def changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for loop, future in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(lambda future=future: future.done() or future.set_result(None))

    def on_apply(self, machine: Machine, process: Process, kind: int) -> None:
        self.oracle.applied(machine.number, process.version, process.policy)

    def serve(self, process: Process, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Runs a handler of a process in the world's loop."""

        async def serving() -> Any:
            task = asyncio.current_task()
            self.serving[task] = process
            try:
                return await work
            finally:
                self.serving.pop(task, None)

        return asyncio.run_coroutine_threadsafe(serving(), self.world)

    async def connect(self, address: str) -> tuple[Machine, Process, Connection]:
        """Whatever answers at an address."""
        machine = self.at(address)
        await asyncio.sleep(self.latency(machine))
        if machine is None or machine.cut or machine.process is None:
            raise RpcError("UNAVAILABLE", f"{address}: connection refused")
        return machine, machine.process, machine.connection

    async def cross(self, machine: Machine, connection: Connection) -> None:
        """A message on its way."""
        await asyncio.sleep(self.latency(machine))
        if machine.stopped and not connection.broken:
            deadline = asyncio.get_running_loop().time() + KEEPALIVE_SECONDS
            while machine.stopped and not connection.broken:
                try:
                    await asyncio.wait_for(self.change(), deadline - asyncio.get_running_loop().time())
                except asyncio.TimeoutError:
                    raise RpcError("UNAVAILABLE", "keepalive watchdog timeout") from None
        if connection.broken:
            raise RpcError("UNAVAILABLE", "the connection broke")


async def answered(
    network: Network, machine: Machine, connection: Connection, served: concurrent.futures.Future[Any]
) -> Any:
    """The result of a handler, unless the connection breaks or its process is stopped for too long."""
    loop = asyncio.get_running_loop()
    serving, broken = loop.create_future(), loop.create_future()

    def end() -> None:
        loop.call_soon_threadsafe(lambda: broken.done() or broken.set_result(None))

    def ended(future: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(lambda: serving.done() or serving.set_result(None))

    connection.on_break(end)
    if connection.broken:
        end()
    served.add_done_callback(ended)
    try:
        stopped_since: float | None = None
        while not serving.done() and not broken.done():
            await asyncio.wait({serving, broken}, timeout=5.0, return_when=asyncio.FIRST_COMPLETED)
            stopped_since = (stopped_since or loop.time()) if machine.stopped else None
            if stopped_since is not None and loop.time() - stopped_since >= KEEPALIVE_SECONDS:
                raise RpcError("UNAVAILABLE", "keepalive watchdog timeout")
        if broken.done() or served.cancelled():
            raise RpcError("UNAVAILABLE", "the connection broke")
        return served.result()
    finally:
        connection.forget(end)
        if not served.done():  # the server learns of it a little later
            world = network.world
            world.call_soon_threadsafe(world.call_later, network.latency(machine), served.cancel)


class Channel:
    """In place of `grpc.Channel` and `grpc.aio.Channel`."""

    def __init__(self, network: Network, address: str, *, blocks: bool) -> None:
        self._network, self._address, self._blocks = network, address, blocks
        self._calls: dict[asyncio.Task, None] = {}
        self._closed = False

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any) -> Callable[..., Any]:
        name = _snake(path)

        async def call(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            data = request_serializer(request)
            return response_deserializer(await self._within(timeout, self._unary(name, data)))

        def blocking_call(request: Any, timeout: float | None = None, metadata: Any = None) -> Any:
            future = asyncio.run_coroutine_threadsafe(call(request, timeout), self._network.world)
            try:
                return future.result()
            except BaseException:
                future.cancel()
                raise

        return blocking_call if self._blocks else call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any) -> Callable[..., Any]:
        def call(request: Any, timeout: float | None = None, metadata: Any = None) -> StreamCall:
            self._check_open()
            data = request_serializer(request)
            return StreamCall(self, _snake(path), data, timeout, response_deserializer)

        return call

    def close(self) -> Any:
        self._closed = True
        for task in list(self._calls):
            task.get_loop().call_soon_threadsafe(task.cancel)

        async def closed() -> None:
            pass

        return None if self._blocks else closed()

    def _check_open(self) -> None:
        if self._closed:
            raise AssertionError(f"a call on the closed channel of {self._address}")

    async def _within(self, timeout: float | None, work: Coroutine[Any, Any, Any]) -> Any:
        """A call until its deadline; cancelled if the channel is closed."""
        if self._closed:
            work.close()
            self._check_open()
        task = asyncio.ensure_future(work)
        self._calls[task] = None
        try:
            done, _ = await asyncio.wait({task}, timeout=timeout)
            if not done:
                raise RpcError("DEADLINE_EXCEEDED", "Deadline Exceeded")
            return task.result()
        finally:
            task.cancel()
            self._calls.pop(task, None)

    async def _unary(self, name: str, data: bytes) -> bytes:
        network, begun = self._network, self._network.scheduler.now
        request = getattr(_proto, name.upper()).request.FromString(data)
        if name == "sleep" and request.level == 2:
            network.oracle.told_to_drop(self._address)
        machine, process, connection = await network.connect(self._address)
        await network.cross(machine, connection)
        if network.happens("lost_request"):
            raise RpcError("UNAVAILABLE", "the connection broke before the request")
        handler = getattr(process, name)

        async def handled() -> Any:
            await machine.awake()
            return await handler(request)

        if network.happens("twice"):
            with contextlib.suppress(RpcError):
                await answered(network, machine, connection, network.serve(process, handled()))
        response = await answered(network, machine, connection, network.serve(process, handled()))
        if network.happens("lost_reply"):
            raise RpcError("UNAVAILABLE", "the connection broke before the answer")
        await network.cross(machine, connection)
        if name == "get_status":
            network.oracle.heard(self._address, begun)
        return response.SerializeToString()


class StreamCall:
    """A call that is answered by many messages."""

    def __init__(
        self, channel: Channel, name: str, data: bytes, timeout: float | None, deserialize: Callable[[bytes], Any]
    ) -> None:
        self._channel, self._name, self._data, self._deserialize = channel, name, data, deserialize
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._task = asyncio.ensure_future(channel._within(timeout, self._run()))
        self._task.add_done_callback(lambda task: self._messages.put_nowait(None))

    def __aiter__(self) -> StreamCall:
        return self

    async def __anext__(self) -> Any:
        message = await self._messages.get()
        if message is not None:
            return self._deserialize(message)
        self._messages.put_nowait(None)
        self._task.result()
        raise StopAsyncIteration

    def cancel(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        network, name = self._channel._network, self._name
        request = getattr(_proto, name.upper()).request.FromString(self._data)
        sent = network.oracle.sent(self._channel._address, name, request)
        machine, process, connection = await network.connect(self._channel._address)
        await network.cross(machine, connection)
        loop, wire = asyncio.get_running_loop(), deque()
        came = asyncio.Event()

        def arrive(message: bytes) -> None:
            wire.append(message)
            loop.call_soon_threadsafe(came.set)

        async def handled() -> None:
            await machine.awake()
            network.oracle.begins(machine, request)
            async for message in getattr(process, name)(request):
                arrive(message.SerializeToString())

        serving = asyncio.ensure_future(answered(network, machine, connection, network.serve(process, handled())))
        try:
            while not serving.done() or wire:
                if not wire:
                    waiting = asyncio.ensure_future(came.wait())
                    try:
                        await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        waiting.cancel()
                    came.clear()
                    continue
                await network.cross(machine, connection)
                while wire:
                    self._messages.put_nowait(wire.popleft())
            serving.result()
            if network.happens("lost_reply"):
                raise RpcError("UNAVAILABLE", "the connection broke before the end")
            network.oracle.answered(sent)
        finally:
            serving.cancel()


def _snake(path: str) -> str:
    """`/rollout.v1.Control/GetStatus` as `get_status`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", path.rpartition("/")[2]).lower()
