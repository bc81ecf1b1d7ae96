"""A rollout-server as a child process."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ._tls import TlsInput
from .client import RolloutClient
from .errors import Misdirected, NotFound, RolloutError, Unavailable

SERVER = "rollout-server"
"""The server's command, which the wheel of this name installs."""

STOP_SECONDS = 40.0
"""Time limit of a stop: the server's own grace period for running requests (30 s) and some more."""

STANDARD_ERROR = 2
"""Its file descriptor, because `sys.stderr` may be replaced by an object without one."""

STOPPED_STARTING_POLL_SECONDS = 0.5
"""How often a start checks whether the process has exited."""

_DIE_WITH_PARENT = Path(__file__).with_name("_die_with_parent.py")


class ServerProcess:
    """Starts a rollout-server on free ports of this machine and stops it with SIGTERM. A context manager.

    ```python
    with ServerProcess(model="dir", flags=["--tp", "2"]) as server:
        server.client.generate(["Hello"])
    ```

    The binary is the installed `rollout-server`, or `ServerProcess("target/release/rollout-server", "dir")` names one.

    On Linux the server never outlives this process: if this process is killed, or ends without `stop`, the kernel kills
    the server. Start a server from a shell if it must keep running.
    """

    def __init__(
        self,
        binary: str | Path | None = None,
        model: str | Path | None = None,
        flags: list[str] | None = None,
        *,
        host: str = "127.0.0.1",
        output: IO[Any] | int | None = None,
        token: str | None = None,
        tls: TlsInput = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Starts the process; `wait_until_ready` waits until it serves.

        Args:
            binary: path of the server, or its name in `PATH`; None is the installed one, see `find_server`.
            model: the value of `--model`; required.
            flags: further command line flags, without ports, which are chosen here.
            host: address to listen on.
            token, tls: of `client`, for a server whose `flags` require them.
            prefix: a command to run the binary with, such as `("numactl", "--cpunodebind=0")`.
            output: for its log (a file, `subprocess.DEVNULL`); None is standard error.

        Raises:
            NotFound: the program does not exist.
            TypeError: there is no model.
        """
        if model is None:
            raise TypeError("ServerProcess needs a model; its first argument is the binary: ServerProcess(model=…)")
        for program in prefix[:1]:
            if shutil.which(program) is None:
                raise NotFound(f"no program {program!r} on this machine")
        binary = find_server(binary)
        port, http_port = free_port(host), free_port(host)
        self.address = f"{host}:{port}"
        self.http_address = f"{host}:{http_port}"
        """Where its HTTP routes are, unless `flags` say otherwise."""
        ports = ["--port", str(port), "--http-port", str(http_port)]
        command = [*prefix, binary, "--model", str(model), "--host", host, *ports, *(flags or [])]
        self._stopped = threading.Event()
        # Before the process starts: if this raised, nothing could stop the process.
        self.client = RolloutClient(self.address, token=token, tls=tls)
        """A client of this server; `stop` closes it."""
        try:
            self.process = _start(command, STANDARD_ERROR if output is None else output, self._stopped)
        except BaseException:
            self.client.close()
            raise

    def wait_until_ready(self, timeout: float = 120.0) -> None:
        """Waits until the server serves requests.

        Raises:
            RolloutError: the process has ended, or is not ready after `timeout` seconds.
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
        """Stops the server with SIGTERM, waits, and returns its exit status; kills it after `timeout` seconds."""
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
        """Returns the server when it is ready."""
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
    """Starts a command that the kernel kills when this process ends.

    For the kernel, the parent is the thread that has started the command. So a thread of its own starts it, and lives
    until `stopped` is set or this process ends.
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


def find_server(binary: str | Path | None = None) -> str:
    """The server's program: `binary`, or the one in this Python's environment, or the first in `PATH`.

    Raises:
        NotFound: it does not exist or is not executable.
    """
    if binary is not None:
        found = str(binary) if shutil.which(binary) else None
    else:
        found = shutil.which(SERVER, path=sysconfig.get_path("scripts")) or shutil.which(SERVER)
    if found is None:
        name = SERVER if binary is None else str(binary)
        raise NotFound(
            f"no program {name!r} on this machine; `pip install {SERVER}` installs it, `make server` builds it"
        )
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
