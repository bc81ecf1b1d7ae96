"""HTTP as bytes on a socket, for what no client library would send."""

from __future__ import annotations

import contextlib
import json
import socket
from typing import NamedTuple

PATIENCE = 60.0


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    def error(self):
        return json.loads(self.body)["error"]


class Wire:
    """A connection to the HTTP port."""

    def __init__(self, address, data=b""):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        self.unread = b""
        self.send(data)

    def send(self, data):
        # The server may close before it has read all.
        with contextlib.suppress(ConnectionResetError, BrokenPipeError):
            self.socket.sendall(data)

    def more(self):
        """Reads what comes next; false at the end."""
        with contextlib.suppress(ConnectionResetError):
            part = self.socket.recv(1 << 16)
            self.unread += part
            return bool(part)
        return False

    def _until(self, mark):
        while mark not in self.unread:
            if not self.more():
                return None
        part, _, self.unread = self.unread.partition(mark)
        return part

    def exactly(self, size):
        """So many bytes of a body."""
        while len(self.unread) < size:
            assert self.more(), f"the body broke off after {len(self.unread)} of {size} bytes"
        part, self.unread = self.unread[:size], self.unread[size:]
        return part

    def head(self):
        """Status and headers of the next answer; None if the connection ends before one."""
        head = self._until(b"\r\n\r\n")
        if head is None:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        fields = (line.partition(":") for line in lines)
        return int(first.split()[1]), {name.lower(): value.strip() for name, _, value in fields}

    def answer(self, to_head=False):
        """The next answer; None if the connection ends before one."""
        head = self.head()
        if head is None:
            return None
        status, headers = head
        if to_head or status in (204, 304) or status < 200:
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") == "chunked":
            return Answer(status, headers, b"".join(self.chunks()))
        return Answer(status, headers, self.exactly(int(headers.get("content-length", 0))))

    def chunks(self):
        """The parts of a body whose length is not announced, as they come."""
        while True:
            size = self._until(b"\r\n")
            assert size is not None, "the body broke off"
            part = self.exactly(int(size, 16) + 2)[:-2]
            if not part:
                return
            yield part

    def is_closed(self):
        """Whether the server closes the connection without another word."""
        return not self.unread and not self.more()

    def close(self):
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def request(method, path, *headers, body=b""):
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def post(path, body, *headers):
    """A POST with a JSON body, as bytes or as a value."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return request("POST", path, "Content-Type: application/json", f"Content-Length: {len(body)}", *headers, body=body)


def ask(address, data):
    """The answer to one request on a connection of its own."""
    with Wire(address, data) as wire:
        return wire.answer()
