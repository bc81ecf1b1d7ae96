"""The stream of a push, in place of `rollout_client._http2.ClientStream`."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from rollout_client import _proto
from rollout_client.errors import Cancelled, DeadlineExceeded, RolloutError, Unavailable, from_rpc_error

from .network import Network, answered
from .scheduler import Condition
from .server import IDLE_SECONDS, RpcError, Session


class PushStream:
    """In place of `ClientStream`, for simulated threads."""

    network: Network
    of_push = False
    """Whether it is of a push of the fleet, and not of a replica that catches up."""

    def __init__(
        self, address: str, path: str, metadata: Iterable[tuple[str, str]], timeout: float | None, tls: object = None
    ) -> None:
        network, self._address = self.network, address
        self._changed = Condition()
        self._ended, self._error, self._response = False, None, b""
        self._inbox: deque[bytes] = deque()
        self._arrived: asyncio.Event | None = None
        self._is_final = self.is_committing = False
        self._stopped = False
        connecting = asyncio.run_coroutine_threadsafe(network.connect(address), network.world)
        try:
            self._machine, self._process, self._connection = connecting.result()
        except RpcError as error:
            raise from_rpc_error(error) from None
        except BaseException:
            connecting.cancel()
            raise
        network.streams.append(self)
        network.world.call_soon_threadsafe(self._start, timeout)

    def send(self, *parts: bytes | memoryview) -> None:
        self.check()
        message = b"".join(map(bytes, parts))
        while self._machine.stopped and not self._ended and len(self._inbox) > 1:  # its window is full
            self._changed.wait(1.0)
        self.check()
        if _proto.UPDATE.request.FromString(message).WhichOneof("kind") == "commit":
            self.is_committing = True
        self._put(message)

    def send_all(self, messages: Iterable[tuple[bytes | memoryview, ...]]) -> None:
        for parts in messages:
            self.send(*parts)

    def finish(self) -> bytes:
        self._changed.wait_for(lambda: self._ended)
        if self._error is not None:
            raise self._error
        return self._response

    def check(self) -> None:
        if self._ended:
            raise self._error or RolloutError("the server has ended the call before its last request")

    def cancel(self) -> None:
        self._end(Cancelled("the call was cancelled on this side"))

    def close(self) -> None:
        self.cancel()

    def __enter__(self) -> PushStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _put(self, message: bytes) -> None:
        self._inbox.append(message)
        self.network.world.call_soon_threadsafe(lambda: self._arrived is None or self._arrived.set())

    def _end(self, error: RolloutError | None) -> None:
        if self._ended:
            return
        self._ended, self._error, self.is_committing = True, error, False
        self.network.streams.remove(self)
        self._changed.notify_all()
        self.network.world.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._running.cancel()

    def _start(self, timeout: float | None) -> None:
        loop = self.network.world
        self._arrived = asyncio.Event()
        self._running = loop.create_task(self._run())
        if timeout is not None:
            loop.call_later(timeout, lambda: self._end(DeadlineExceeded("the deadline passed")))

    async def _run(self) -> None:
        """In the world's loop: carries the messages to the server."""
        machine, process, network, loop = self._machine, self._process, self.network, self.network.world
        session: Session | None = None

        def broken() -> None:
            self._end(Unavailable(f"{self._address}: the connection broke"))

        self._connection.on_break(broken)
        if self._connection.broken:
            broken()
        try:
            while not self._ended:
                message = await self._next_message(session)
                if network.happens("cut_push"):
                    broken()
                elif message.WhichOneof("kind") == "header":
                    session = process.begin(message.header)
                elif message.WhichOneof("kind") == "commit":
                    await self._commit(session, broken)
                else:
                    self._take(session, message)
        except RpcError as error:
            with contextlib.suppress(RpcError):
                await network.cross(machine, self._connection)
            self._end(from_rpc_error(error))
        finally:
            self._connection.forget(broken)
            if session is not None:
                loop.call_later(network.latency(machine), process.drop, session)

    async def _next_message(self, session: Session | None) -> Any:
        """The next message as it comes to the server.

        Raises:
            RpcError: none came in time, or the connection broke.
        """
        loop = self.network.world
        deadline = loop.time() + IDLE_SECONDS
        while not self._inbox:
            self._arrived.clear()
            if session is not None and self._process.session is not session:
                raise RpcError("ABORTED", "the update was ended")
            if session is not None and loop.time() >= deadline:
                raise RpcError("ABORTED", f"nothing came of the update for {IDLE_SECONDS:g} s")
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._arrived.wait(), 5.0)
        await self.network.cross(self._machine, self._connection)
        message = _proto.UPDATE.request.FromString(self._inbox.popleft())
        self._changed.notify_all()
        await self._machine.awake()
        return message

    def _take(self, session: Session, message: Any) -> None:
        """A message with tensors."""
        if message.WhichOneof("kind") == "manifest":
            self._process.declare(session, message.manifest.tensors)
            return
        if self.network.happens("corrupt"):
            message.chunk.data = bytes([message.chunk.data[0] ^ 1]) + message.chunk.data[1:]
        self._process.write(session, message.chunk)

    async def _commit(self, session: Session, broken: Callable[[], None]) -> None:
        machine, network = self._machine, self.network
        handled = network.serve(self._process, self._process.commit(session))
        response = await answered(network, machine, self._connection, handled)
        if network.happens("lost_commit_reply"):
            return broken()
        await network.cross(machine, self._connection)
        self._response = response.SerializeToString()
        self._end(None)
