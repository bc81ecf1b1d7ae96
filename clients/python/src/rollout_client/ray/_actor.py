"""The actor that runs one server on its node."""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import ray
import ray.util

from .._tls import TlsInput
from ..errors import NotFound, RolloutError
from ..process import ServerProcess, find_server

_FAILURE = 1
"""An exit status that Ray treats as a failure, so that it restarts the actor."""
RESTART_SECONDS = 5.0
"""Delay after a failed restart: the old server's memory may not be free yet."""


@dataclass(frozen=True)
class Settings:
    """Arguments with which each replica starts its server."""

    binary: str | None
    model: str
    flags: tuple[str, ...]
    token: str
    tls: TlsInput
    start_seconds: float


@dataclass(frozen=True)
class Started:
    """A server that an actor runs."""

    address: str
    http_address: str
    instance: str
    """Unique for each start."""
    node_id: str
    pid: int
    """Process id of the server on its node."""


class ReplicaActor:
    """Runs one server. When the server exits, the actor exits too, and Ray restarts both."""

    def __init__(self, settings: Settings) -> None:
        """Starts the server and waits until it is ready.

        Raises:
            RolloutError: the server does not start. After a restart by Ray the actor exits instead, so that Ray tries
                again.
        """
        self._settings = settings
        self._directory = tempfile.TemporaryDirectory(prefix="rollout-replica-")
        self._instance = uuid.uuid4().hex
        self._stopping = False
        try:
            self._server = self._start()
            self._server.wait_until_ready(settings.start_seconds)
        except RolloutError:
            if _was_started_again():
                time.sleep(RESTART_SECONDS)
                self._end()
            raise
        threading.Thread(target=self._end_with_server, name="rollout-replica", daemon=True).start()

    def started(self) -> Started:
        """The server's addresses, node and process."""
        context = ray.get_runtime_context()
        server = self._server
        return Started(server.address, server.http_address, self._instance, context.get_node_id(), server.process.pid)

    def stop(self) -> int:
        """Stops the server with SIGTERM, and returns its exit status."""
        self._stopping = True
        status = self._server.stop()
        self._directory.cleanup()
        return status

    def _end_with_server(self) -> None:
        self._server.process.wait()
        if not self._stopping:
            self._end()

    def _end(self) -> NoReturn:
        """Exits the actor, so that Ray restarts it, and removes the token file."""
        self._directory.cleanup()
        os._exit(_FAILURE)

    def _start(self) -> ServerProcess:
        settings = self._settings
        try:
            binary = find_server(settings.binary)
        except NotFound as error:
            raise NotFound(f"binary: node {ray.util.get_node_ip_address()}: {error}") from None
        token_file = Path(self._directory.name) / "tokens"
        token_file.touch(mode=0o600)
        token_file.write_text(f"control {settings.token}\n")
        return ServerProcess(
            binary,
            settings.model,
            ["--auth-token-file", str(token_file), *settings.flags],
            host=ray.util.get_node_ip_address(),
            token=settings.token,
            tls=settings.tls,
        )


def _was_started_again() -> bool:
    """Whether this actor is a restart by Ray."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's property uses another one that Ray has deprecated
        return ray.get_runtime_context().was_current_actor_reconstructed
