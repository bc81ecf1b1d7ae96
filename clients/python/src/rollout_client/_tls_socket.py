"""A TLS connection that one thread writes while another reads, with the methods of a socket that this takes."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress

# Encrypted at once and handed to the kernel at once. OpenSSL by itself makes a system call of each record of 16 KiB and
# wakes the server as often; more than this would be memory fresh from the system each time.
_PIECE_BYTES = 64 << 10
_READ_BYTES = 64 << 10


class TlsSocket:
    """A connection inside TLS.

    OpenSSL lets no two threads use a connection at once. So it works in memory here, under a lock, and the network is
    waited for without the lock. What it has to say while it reads goes out with the next bytes that are sent.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        """Begins TLS; each wait is limited by the timeout of `connected`, which this takes over.

        Raises:
            OSError: it cannot be begun; the connection is left open.
        """
        self._socket = connected
        self._received, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._received, self._to_send, server_hostname=server_name)
        self._lock = threading.Lock()
        while True:
            try:
                self._tls.do_handshake()
                self._socket.sendall(self._to_send.read())
                break
            except ssl.SSLWantReadError:
                self._socket.sendall(self._to_send.read())
                self._receive()
            except ssl.SSLError:
                with suppress(OSError):  # the server hears why, if it still listens
                    self._socket.sendall(self._to_send.read())
                raise

    def settimeout(self, timeout: float | None) -> None:
        """Seconds that each later wait may take; None is no limit."""
        self._socket.settimeout(timeout)

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Sends bytes of the first part and returns how many. For one thread at a time."""
        with self._lock:
            sent = self._tls.write(next(iter(parts))[:_PIECE_BYTES])
            encrypted = self._to_send.read()
        self._socket.sendall(encrypted)
        return sent

    def recv(self, size: int) -> bytes:
        """Receives up to so many bytes; none is the end. For one thread at a time."""
        while True:
            try:
                with self._lock:
                    return self._tls.read(size)
            except ssl.SSLWantReadError:
                self._receive()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):  # with or without a farewell
                return b""

    def shutdown(self, how: int) -> None:
        """Ends the connection below TLS, which wakes those that wait."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Gives the descriptor back."""
        self._socket.close()

    def _receive(self) -> None:
        data = self._socket.recv(_READ_BYTES)
        with self._lock:
            if data:
                self._received.write(data)
            else:
                self._received.write_eof()
