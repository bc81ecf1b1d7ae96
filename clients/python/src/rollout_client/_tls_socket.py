"""A TLS connection that one thread writes while another reads, with the methods of a socket that this needs."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from contextlib import suppress

# Encrypted together, and sent by one system call. OpenSSL would make a system call for each record of 16 KiB, and wake
# the server as often; larger pieces would need newly allocated memory each time.
_PIECE_BYTES = 64 << 10
_READ_BYTES = 64 << 10


class TlsSocket:
    """A connection inside TLS.

    OpenSSL does not let two threads use a connection at once. Here it works in memory, under a lock, and the threads
    wait for the network without the lock. Bytes that it produces while reading are sent with the next write.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, server_name: str) -> None:
        """Begins TLS; the timeout of `connected`, which this takes over, limits each wait.

        Raises:
            OSError: the handshake failed; the connection is left open.
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
                with suppress(OSError):  # the alert tells the server why
                    self._socket.sendall(self._to_send.read())
                raise

    def fileno(self) -> int:
        """The file descriptor, for selectors."""
        return self._socket.fileno()

    def settimeout(self, timeout: float | None) -> None:
        """Sets the seconds that each later wait may take; None means no limit."""
        self._socket.settimeout(timeout)

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        """Sends the first bytes, and returns their number. For one thread at a time."""
        piece: memoryview | bytearray = parts[0][:_PIECE_BYTES]
        if len(piece) < _PIECE_BYTES:  # small parts are joined, each would take a system call
            piece = bytearray()
            for part in parts:
                piece += part[: _PIECE_BYTES - len(piece)]
                if len(piece) == _PIECE_BYTES:
                    break
        with self._lock:
            sent = self._tls.write(piece)
            encrypted = self._to_send.read()
        self._socket.sendall(encrypted)
        return sent

    def recv(self, size: int) -> bytes:
        """Receives up to `size` bytes; none at the end. For one thread at a time."""
        while True:
            try:
                with self._lock:
                    return self._tls.read(size)
            except ssl.SSLWantReadError:
                self._receive()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):  # with or without a close_notify
                return b""

    def shutdown(self, how: int) -> None:
        """Ends the connection below TLS, which wakes waiting threads."""
        self._socket.shutdown(how)

    def close(self) -> None:
        """Closes the file descriptor."""
        self._socket.close()

    def _receive(self) -> None:
        data = self._socket.recv(_READ_BYTES)
        with self._lock:
            if data:
                self._received.write(data)
            else:
                self._received.write_eof()
