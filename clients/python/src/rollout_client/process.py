"""A rollout-server of one's own, as a child process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ._tls import TlsInput
from .client import RolloutClient
from .errors import Misdirected, NotFound, RolloutError, Unavailable

STOP_SECONDS = 40.0
"""For a stop: the server's own grace period for running requests (30 s) and some more."""

STANDARD_ERROR = 2
"""By its number, because `sys.stderr` may be replaced by something that is no file."""

STOPPED_STARTING_POLL_SECONDS = 0.5
"""How often a start looks whether the process has already given up."""

_DIE_WITH_PARENT = Path(__file__).with_name("_die_with_parent.py")


class ServerProcess:
    """Starts a rollout-server on free ports of this machine and stops it with SIGTERM. A context manager.

    ```python
    with ServerProcess("target/release/rollout-server", model="dir", flags=["--tp", "2"]) as server:
        server.client.generate(["Hello"])
    ```

    On Linux the server never outlives this process: where that is killed, or ends without `stop`, the kernel kills the
    server. One that is to go on by itself is started from a shell.
    """

    def __init__(
        self,
        binary: str | Path,
        model: str | Path,
        flags: list[str] | None = None,
        *,
        host: str = "127.0.0.1",
        output: IO[Any] | int | None = None,
        token: str | None = None,
        tls: TlsInput = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Starts the process; `wait_until_ready` waits for it.

        Args:
            binary: path of the server, or its name in `PATH`.
            model: as `--model` takes it.
            flags: further command line flags; the ports are chosen here.
            host: address to listen on.
            token, tls: of `client`, for a server whose `flags` ask for them.
            prefix: a command that becomes another one, before the binary: `("numactl", "--cpunodebind=0")`.
            output: where its log goes (a file, `subprocess.DEVNULL`); None is this process's own standard error.

        Raises:
            NotFound: there is no such program.
        """
        for program in (*prefix[:1], str(binary)):
            if shutil.which(program) is None:
                raise NotFound(f"no program {program!r} on this machine; `make server` builds rollout-server")
        port, http_port = free_port(host), free_port(host)
        self.address = f"{host}:{port}"
        self.http_address = f"{host}:{http_port}"
        """Where its HTTP routes are, unless `flags` say otherwise."""
        ports = ["--port", str(port), "--http-port", str(http_port)]
        command = [*prefix, str(binary), "--model", str(model), "--host", host, *ports, *(flags or [])]
        self._stopped = threading.Event()
        # Before the process, which nobody could stop if this raised.
        self.client = RolloutClient(self.address, token=token, tls=tls)
        """A client of this server; closed by `stop`."""
        try:
            self.process = _start(command, STANDARD_ERROR if output is None else output, self._stopped)
        except BaseException:
            self.client.close()
            raise

    def wait_until_ready(self, timeout: float = 120.0) -> None:
        """Waits until the server runs.

        Raises:
            RolloutError: the process has ended, or is not ready within `timeout` seconds.
        """
        left = timeout
        while True:
            step = min(left, STOPPED_STARTING_POLL_SECONDS)
            try:
                self.client.wait_until_ready(step)
                return
            except Misdirected:
                raise
            except Unavailable as error:
                if self.process.poll() is not None:
                    raise RolloutError(f"the server ended with status {self.process.returncode}; see its log") from None
                left -= step
                if left <= 0:
                    raise Unavailable(f"{self.address} is not ready after {timeout:g} s: {error}") from None

    def stop(self, timeout: float = STOP_SECONDS) -> int:
        """Asks the server to end (SIGTERM), waits for it and returns its exit status; kills it after `timeout`."""
        self.client.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._stopped.set()

    def __enter__(self) -> ServerProcess:
        """The server, ready."""
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops the server."""
        self.stop()


def _start(command: list[str], output: IO[Any] | int, stopped: threading.Event) -> subprocess.Popen[bytes]:
    """The process of a command, which the kernel ends with this one.

    To the kernel its parent is the thread that has started it. So that is a thread of its own, which stays until
    `stopped`, or until this process ends.
    """
    if sys.platform == "linux":
        command = [sys.executable, "-I", str(_DIE_WITH_PARENT), str(os.getpid()), *command]
    started: Future[subprocess.Popen[bytes]] = Future()

    def keep() -> None:
        try:
            started.set_result(
                subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
            )
        except BaseException as error:
            started.set_exception(error)
        else:
            stopped.wait()

    threading.Thread(target=keep, name="rollout-server", daemon=True).start()
    return started.result()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
