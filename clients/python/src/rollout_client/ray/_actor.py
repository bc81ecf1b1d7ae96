"""The actor that runs one server on its node."""

from __future__ import annotations

import os
import shutil
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
from ..process import ServerProcess

_FAILURE = 1
"""An exit status that Ray takes for a failure: it starts the actor again."""
RESTART_SECONDS = 5.0
"""Before another attempt, when a server that was started again did not come up: its memory may not be free yet."""


@dataclass(frozen=True)
class Settings:
    """How each replica starts its server."""

    binary: str
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
    """Another one after each start."""
    node_id: str
    pid: int
    """Of the server's process, on its node."""


class ReplicaActor:
    """A rollout-server, from its start to its end: when the server ends, the actor does, and Ray starts both again."""

    def __init__(self, settings: Settings) -> None:
        """Starts the server and waits until it is ready.

        Raises:
            RolloutError: it does not start. After a restart by Ray the actor ends instead, for another attempt.
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
        """Where the server is."""
        context = ray.get_runtime_context()
        server = self._server
        return Started(server.address, server.http_address, self._instance, context.get_node_id(), server.process.pid)

    def stop(self) -> int:
        """Ends the server as SIGTERM does, and returns its exit status."""
        self._stopping = True
        status = self._server.stop()
        self._directory.cleanup()
        return status

    def _end_with_server(self) -> None:
        self._server.process.wait()
        if not self._stopping:
            self._end()

    def _end(self) -> NoReturn:
        """Ends the actor, so that Ray starts it again. No token stays behind."""
        self._directory.cleanup()
        os._exit(_FAILURE)

    def _start(self) -> ServerProcess:
        settings = self._settings
        binary = shutil.which(settings.binary)
        if binary is None:
            raise NotFound(f"binary: no program {settings.binary!r} on node {ray.util.get_node_ip_address()}")
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
    """Whether Ray has started this actor before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's property uses one that Ray has deprecated
        return ray.get_runtime_context().was_current_actor_reconstructed
