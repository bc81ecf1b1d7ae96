"""One gRPC call with many requests, on a connection of its own, sent straight from the caller's memory.

grpcio copies each request twice and passes it through three threads. Here the kernel copies it out of the tensor, which
makes an inline push 1.4 to 1.7 times as fast and halves the client's CPU time (`benches/RESULTS.md`, 2026-11-25). A
thread reads the server's frames meanwhile, because the server pings and a trainer may gather for minutes between two
requests.
"""

from __future__ import annotations

import contextlib
import itertools
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from urllib.parse import unquote

import hpack
from hyperframe import frame as frames

from ._tls import ADDRESS, TlsFiles, explained, failure
from ._tls_socket import TlsSocket
from .errors import Cancelled, DeadlineExceeded, Internal, InvalidArgument, RolloutError, Unavailable, from_status

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CONNECTION, _STREAM = 0, 1
_WINDOW, _FRAME = frames.SettingsFrame.INITIAL_WINDOW_SIZE, frames.SettingsFrame.MAX_FRAME_SIZE
# The values before the server's settings arrive.
_WINDOW_BYTES = (1 << 16) - 1
_DEFAULTS = {_WINDOW: _WINDOW_BYTES, _FRAME: 1 << 14}
_FRAME_HEADER = struct.Struct(">BHBBI")
# Before each message: whether it is compressed, and its length.
_MESSAGE_PREFIX = struct.Struct(">BI")
_READ_BYTES = 1 << 16
# The most parts that a system call takes.
_MOST_PARTS = 1024
_CONNECT_SECONDS = 20.0
_CANCEL_SECONDS = 1.0
# Detect a server whose machine has vanished in under a minute, as the other calls do.
_KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 50_000}


class ClientStream:
    """The call. A context manager: leaving it before `finish` cancels the call.

    One thread may use `send` and `finish`; any thread may use `cancel`.
    """

    def __init__(
        self,
        address: str,
        path: str,
        metadata: Iterable[tuple[str, str]],
        timeout: float | None,
        tls: TlsFiles | None = None,
    ) -> None:
        """Connects and starts the call.

        Args:
            address: `host:port`.
            path: `/<service>/<method>`.
            metadata: of the call.
            timeout: seconds for the whole call; None means no limit.
            tls: for a server with TLS.

        Raises:
            InvalidArgument: the address is invalid.
            Unavailable: the connection or the TLS handshake failed.
            DeadlineExceeded: the timeout passed.
        """
        self._address = address
        self._deadline = None if timeout is None else time.monotonic() + timeout
        # Guards the fields below; notified when there is room to send, and at the end.
        self._changed = threading.Condition()
        # The server's first frame has its settings, which open the stream's window.
        self._settings: dict[int, int] = {}
        self._windows = {_CONNECTION: _WINDOW_BYTES, _STREAM: 0}
        self._ended = False
        self._error: RolloutError | None = None
        self._last_request_sent = False
        # Used by the reader thread only, until the end.
        self._received = bytearray()
        self._headers: dict[str, str] = {}
        self._header_block = b""
        self._last_frame_came = False
        self._decoder = hpack.Decoder()
        self._response = b""
        # Held for each frame; acquired before the other lock.
        self._writing = threading.RLock()
        found = ADDRESS.fullmatch(address)
        if found is None:
            raise InvalidArgument(f"address: expected host:port, got {address!r}")
        self._tls = tls
        self._socket = self._connect(found["v6"] or found["host"], int(found["port"]))
        headers = [
            (":method", "POST"),
            (":scheme", "http" if tls is None else "https"),
            (":path", path),
            (":authority", found["authority"]),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *([] if timeout is None else [("grpc-timeout", _timeout_header(timeout))]),
            *metadata,
        ]
        start = frames.HeadersFrame(_STREAM, hpack.Encoder().encode(headers), flags=["END_HEADERS"])
        settings = frames.SettingsFrame(settings={frames.SettingsFrame.ENABLE_PUSH: 0})
        # Before the reader starts, whose answers must not be sent first.
        self._write(_PREFACE, settings.serialize(), start.serialize())
        self._reader = threading.Thread(target=self._read, name="rollout-push-reader", daemon=True)
        self._reader.start()

    def send(self, *parts: bytes | memoryview) -> None:
        """Sends one message, made of these parts, which are not read after the return. Waits for flow control.

        Raises:
            RolloutError: the server has ended the call with this error.
        """
        self.send_all([parts])

    def send_all(self, messages: Iterable[tuple[bytes | memoryview, ...]]) -> None:
        """As `send`, of several messages, which share frames."""
        size, rest = 0, deque[memoryview]()
        for parts in messages:
            length = sum(map(len, parts))
            rest.extend(memoryview(part) for part in (_MESSAGE_PREFIX.pack(0, length), *parts) if part)
            size += _MESSAGE_PREFIX.size + length
        while size:
            self._wait_for_room()
            with self._writing:
                room = self._take_room(size)
                self._write(_data_header(room), *_taken(rest, room))
            size -= room

    def finish(self) -> bytes:
        """Ends the requests, waits for the response and returns it.

        Raises:
            RolloutError: the server has ended the call with this error.
        """
        self._end_requests()
        with self._changed:
            self._changed.wait_for(lambda: self._ended)
        if self._error is not None:
            raise self._error
        return self._response

    def check(self) -> None:
        """Returns if the server has not ended the call.

        Raises:
            RolloutError: the server has ended the call with this error.
        """
        with self._changed:
            if self._ended:
                raise self._error or RolloutError("the server has ended the call before its last request")

    def cancel(self) -> None:
        """Ends the call as a client that disconnects; has no effect after the end."""
        self._end(Cancelled("the call was cancelled by this client"))

    def close(self) -> None:
        """Cancels the call if it has not ended, and closes the connection.

        Waits up to a second until the server has ended the call: by then it can begin another one in its place. A
        server that only sees the connection close may see the next call first.
        """
        if not (self._ended or self._last_request_sent) and self._can_write():
            self._end_requests()
            with self._changed:
                self._changed.wait_for(lambda: self._ended, _CANCEL_SECONDS)
        self.cancel()
        self._reader.join()
        self._socket.close()

    def __enter__(self) -> ClientStream:
        """Returns the call."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """As `close`."""
        self.close()

    def _connect(self, host: str, port: int) -> socket.socket | TlsSocket:
        left = self._left()
        patience = _CONNECT_SECONDS if left is None else min(left, _CONNECT_SECONDS)
        try:
            connected = socket.create_connection((host, port), patience)
        except (OSError, OverflowError) as error:
            raise self._broken(error) from None
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if self._tls is not None:
            try:
                wrapped = TlsSocket(connected, self._tls.context, self._tls.server_name or host)
                wrapped.settimeout(left)
                return wrapped
            except OSError as error:
                connected.close()
                raise self._broken(error) from None
        connected.settimeout(left)
        return connected

    def _left(self) -> float | None:
        """Seconds to the deadline; above 0, which would mean not to wait at all."""
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 1e-3)

    def _broken(self, error: Exception) -> RolloutError:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return DeadlineExceeded(f"{self._address} did not answer before the timeout")
        of_tls = failure(error, self._address) if self._tls is not None and isinstance(error, OSError) else None
        if of_tls is not None:
            return of_tls
        found = Unavailable(f"{self._address}: {error}")
        # A server that has sent its settings speaks HTTP/2, so there is nothing to explain.
        return found if self._settings else explained(found, self._address, self._tls)

    def _wait_for_room(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or min(self._windows.values()) > 0)
            self.check()

    def _take_room(self, most: int) -> int:
        """Takes up to `most` bytes of the flow-control windows for one frame; new settings may have left none."""
        with self._changed:
            room = max(min(most, self._settings[_FRAME], *self._windows.values()), 0)
            for stream in self._windows:
                self._windows[stream] -= room
            return room

    def _end_requests(self) -> None:
        self._last_request_sent = True
        self._write(_data_header(0, end=True))

    def _can_write(self) -> bool:
        """Whether the connection takes a short frame at once."""
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(self._socket, selectors.EVENT_WRITE)
                return bool(ready.select(0))
        except (OSError, ValueError):  # it is closed
            return False

    def _write(self, *parts: bytes | memoryview) -> None:
        """Writes whole frames. The reader reports a broken connection, after it has read the server's last frames."""
        rest = deque(map(memoryview, parts))
        with self._writing, contextlib.suppress(OSError):
            while rest:
                _taken(rest, self._socket.sendmsg(list(itertools.islice(rest, _MOST_PARTS))))

    def _read(self) -> None:
        """In the reader thread: handles frames until the end."""
        try:
            while not self._ended:
                self._take(self._next_frame())
        except Exception as error:  # whatever it is, no thread may wait for this one any longer
            self._end(self._broken(error))

    def _next_frame(self) -> frames.Frame:
        frame, size = frames.Frame.parse_frame_header(memoryview(self._next_bytes(_FRAME_HEADER.size)))
        if size > _DEFAULTS[_FRAME]:
            raise ValueError(f"a frame of {size} bytes, which HTTP/2 does not allow")
        frame.parse_body(memoryview(self._next_bytes(size)))
        return frame

    def _next_bytes(self, size: int) -> bytes:
        while len(self._received) < size:
            self._socket.settimeout(self._left())
            data = self._socket.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the server has closed the connection")
            self._received += data
        taken = bytes(self._received[:size])
        del self._received[:size]
        return taken

    def _take(self, frame: frames.Frame) -> None:
        match frame:
            case frames.SettingsFrame() if "ACK" not in frame.flags:
                with self._writing:  # frames after this acknowledgement follow the new settings
                    self._set(frame.settings)
                    self._write(frames.SettingsFrame(flags=["ACK"]).serialize())
            case frames.WindowUpdateFrame() if frame.stream_id in self._windows:
                with self._changed:
                    self._windows[frame.stream_id] += frame.window_increment
                    self._changed.notify_all()
            case frames.PingFrame() if "ACK" not in frame.flags:
                self._write(frames.PingFrame(opaque_data=frame.opaque_data, flags=["ACK"]).serialize())
            case frames.DataFrame():
                self._response += frame.data
            case frames.HeadersFrame() | frames.ContinuationFrame():
                self._header_block += frame.data
                if "END_HEADERS" in frame.flags:
                    self._headers |= dict(self._decoder.decode(self._header_block))
                    self._header_block = b""
            case frames.RstStreamFrame():
                self._end(Internal(f"the server has reset the call, HTTP/2 error {frame.error_code}"))
            case frames.GoAwayFrame() if frame.error_code or frame.last_stream_id < _STREAM:
                reason = frame.additional_data.decode(errors="replace")
                self._end(
                    Unavailable(f"the server has ended the connection, HTTP/2 error {frame.error_code}: {reason}")
                )
        self._last_frame_came |= "END_STREAM" in frame.flags
        if self._last_frame_came and not self._header_block:
            self._end(self._status())

    def _set(self, settings: dict[int, int]) -> None:
        """Applies the server's settings."""
        with self._changed:
            before = self._settings.get(_WINDOW, 0)
            self._settings = _DEFAULTS | self._settings | settings
            self._windows[_STREAM] += self._settings[_WINDOW] - before
            self._changed.notify_all()

    def _status(self) -> RolloutError | None:
        """The status in the headers and trailers of a call that the server has ended; sets the response."""
        code = self._headers.get("grpc-status")
        if code is None:
            return Unavailable(f"{self._address}: not a gRPC server, HTTP status {self._headers.get(':status')}")
        if code != "0":
            return from_status(int(code), unquote(self._headers.get("grpc-message", "")))
        if len(self._response) < _MESSAGE_PREFIX.size:
            return Internal(f"{self._address}: a status without a response")
        self._response = self._response[_MESSAGE_PREFIX.size :]
        return None

    def _end(self, error: RolloutError | None) -> None:
        """Records how the call ended, once, and wakes all waiting threads."""
        with self._changed:
            if self._ended:
                return
            self._ended, self._error = True, error
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _data_header(size: int, *, end: bool = False) -> bytes:
    """The header of a DATA frame."""
    return _FRAME_HEADER.pack(size >> 16, size & 0xFFFF, frames.DataFrame.type, end, _STREAM)


def _taken(parts: deque[memoryview], size: int) -> list[memoryview]:
    """Removes `size` bytes from the front, and returns them."""
    taken = []
    while size:
        part = parts.popleft()
        if len(part) > size:
            parts.appendleft(part[size:])
            part = part[:size]
        taken.append(part)
        size -= len(part)
    return taken


def _timeout_header(seconds: float) -> str:
    """The value of `grpc-timeout`: at most eight digits and a unit."""
    milliseconds = max(int(seconds * 1000), 1)
    return f"{milliseconds}m" if milliseconds < 10**8 else f"{min(milliseconds // 1000, 10**8 - 1)}S"
