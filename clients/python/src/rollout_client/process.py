"""A rollout-server of one's own, as a child process."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ._tls import TlsInput
from .client import RolloutClient
from .errors import RolloutError, Unavailable

STOP_SECONDS = 40.0
"""For a stop: the server's own grace period for running requests (30 s) and some more."""

STANDARD_ERROR = 2
"""By its number, because `sys.stderr` may be replaced by something that is no file."""

STOPPED_STARTING_POLL_SECONDS = 0.5
"""How often a start looks whether the process has already given up."""


class ServerProcess:
    """Starts a rollout-server on free ports of this machine and stops it with SIGTERM. A context manager.

    ```python
    with ServerProcess("target/release/rollout-server", model="dir", flags=["--tp", "2"]) as server:
        server.client.generate(["Hello"])
    ```
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
            binary: path of the server.
            model: as `--model` takes it.
            flags: further command line flags; the ports are chosen here.
            host: address to listen on.
            token, tls: of `client`, for a server whose `flags` ask for them.
            prefix: a command that starts another one, before the binary: `("numactl", "--cpunodebind=0")`.
            output: where its log goes (a file, `subprocess.DEVNULL`); None is this process's own standard error.
        """
        port, http_port = free_port(host), free_port(host)
        self.address = f"{host}:{port}"
        self.http_address = f"{host}:{http_port}"
        """Where its HTTP routes are, unless `flags` say otherwise."""
        ports = ["--port", str(port), "--http-port", str(http_port)]
        command = [*prefix, str(binary), "--model", str(model), "--host", host, *ports, *(flags or [])]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=STANDARD_ERROR if output is None else output,
            stderr=subprocess.STDOUT,
        )
        self.client = RolloutClient(self.address, token=token, tls=tls)
        """A client of this server; closed by `stop`."""

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


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
