"""A TLS connection that one thread writes while another reads, with the methods of a socket that this takes."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

_T = TypeVar("_T")


class TlsSocket:
    """A connection after its handshake.

    OpenSSL lets no two threads use a connection at once. So each holds a lock while OpenSSL works, which never waits
    for the network here, and waits for the network without the lock.
    """

    def __init__(self, wrapped: ssl.SSLSocket, timeout: float | None) -> None:
        """Takes over `wrapped`; `timeout` is as for `settimeout`."""
        wrapped.setblocking(False)
        self._wrapped = wrapped
        self._timeout = timeout
        self._lock = threading.Lock()

    def settimeout(self, timeout: float | None) -> None:
        """Seconds that each later `sendmsg` and `recv` may wait; None is no limit."""
        self._timeout = timeout

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Sends bytes of the first part and returns how many."""
        part = next(iter(parts))
        return self._when_ready(lambda: self._wrapped.send(part))

    def recv(self, size: int) -> bytes:
        """Receives up to so many bytes; none is the end."""
        try:
            return self._when_ready(lambda: self._wrapped.recv(size))
        except ssl.SSLEOFError:  # the server has closed without a farewell
            return b""

    def shutdown(self, how: int) -> None:
        """Ends the connection below TLS, which wakes those that wait."""
        # Not the method of `SSLSocket`, which would take TLS away below a thread that uses it.
        socket.socket.shutdown(self._wrapped, how)

    def close(self) -> None:
        """Gives the descriptor back."""
        self._wrapped.close()

    def _when_ready(self, use: Callable[[], _T]) -> _T:
        """What `use` returns, once it need not wait for the network."""
        timeout = self._timeout
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            try:
                with self._lock:
                    return use()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            waiter = select.poll()
            waiter.register(self._wrapped.fileno(), event)
            left = None if deadline is None else max(deadline - time.monotonic(), 0) * 1000
            if not waiter.poll(left):
                raise TimeoutError("timed out")
