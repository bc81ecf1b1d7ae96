"""A connection that a test can cut."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Passes every connection on to a server, until it is cut."""

    def __init__(self, target):
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._cut = False
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self):
        """Breaks all connections, and every one that comes until `mend`."""
        with self._lock:
            self._cut = True
            sockets, self._sockets = self._sockets, set()
        self._flows.set()
        for end in sockets:
            _close(end)

    def mend(self):
        """Lets connections through again."""
        self._cut = False
        self._flows.set()

    def stall(self):
        """Passes nothing on until `mend`, over connections that stay: a server that hangs."""
        self._flows.clear()

    def redirect(self, target):
        """Leads connections that come from now on to another server."""
        host, _, port = target.rpartition(":")
        self._target = host, int(port)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        _close(self._listener)
        self.cut()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    _close(near)
                    continue
                with self._lock:
                    cut = self._cut
                    if not cut:
                        self._sockets |= {near, far}
                if cut:
                    _close(near), _close(far)
                    continue
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pump, args=(*ends, self._flows), daemon=True).start()


def _pump(source, target, flows):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            flows.wait()
            target.sendall(data)
    _close(source), _close(target)


def _close(end):
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
