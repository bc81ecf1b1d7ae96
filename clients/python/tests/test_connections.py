"""Connections of a real server at its limits: descriptors, places, tokens."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import threading
import time
from pathlib import Path

import pytest

from rollout_client import NotFound, RolloutClient, RolloutError, SamplingParams, ServerProcess
from serving import FIXTURES, SMALL_CACHE, assert_idle

MODEL = FIXTURES / "llama-tied"
# HTTP/2's preface and empty SETTINGS.
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
ONE_TOKEN = SamplingParams(max_tokens=1)


def connect(address):
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=60)
    with contextlib.suppress(OSError):
        connection.sendall(GREETING)
    return connection


def cpu_seconds(pid):
    """What the process has computed, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def wait_until_served(address):
    deadline = time.monotonic() + 60
    while True:
        try:
            with RolloutClient(address, timeout=5) as client:
                assert client.generate([[1, 2]], sampling=ONE_TOKEN, return_text=False)
                return
        except RolloutError:
            assert time.monotonic() < deadline, "nobody new is served"


def test_without_descriptors_old_clients_are_served_and_no_core_is_burnt(binary, tmp_path):
    path = tmp_path / "log"
    with path.open("w") as log, ServerProcess(binary, MODEL, SMALL_CACHE, output=log) as server:
        pid, client = server.process.pid, server.client
        idle = client.status().memory.resident_bytes
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # The highest number that is in use and a few more.
        numbers = [int(entry.name) for entry in Path(f"/proc/{pid}/fd").iterdir()]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (max(numbers) + 9, hard))
        connections = [connect(server.address) for _ in range(60)]
        deadline = time.monotonic() + 60
        while "cannot accept connections" not in path.read_text():
            assert time.monotonic() < deadline, "descriptors did not run out"
            time.sleep(0.05)

        computed, start = cpu_seconds(pid), time.monotonic()
        while time.monotonic() - start < 5:
            assert client.generate([[1, 2]], sampling=ONE_TOKEN, return_text=False)
            assert client.status().memory.resident_bytes > idle / 2
            time.sleep(0.25)
        # A loop that spins takes all of the time; what is asked of the server takes some milliseconds.
        assert cpu_seconds(pid) - computed < (time.monotonic() - start) / 4

        for connection in connections:
            connection.close()
        wait_until_served(server.address)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (hard, hard))
        assert_idle(client)


def test_connections_beyond_the_limit_are_closed_and_the_others_served(binary, tmp_path):
    path = tmp_path / "log"
    flags = [*SMALL_CACHE, "--max-connections", "4"]
    with path.open("w") as log, ServerProcess(binary, MODEL, flags, output=log) as server:
        server.client.status()
        # Three take the places that are left; they answer no ping, and so are closed after 20 s.
        connections = [connect(server.address) for _ in range(12)]
        refused = 0
        for connection in connections:
            with contextlib.suppress(ConnectionResetError):
                refused += not connection.recv(9)
                continue
            refused += 1
        assert refused == 9
        assert server.client.generate([[1, 2]], sampling=ONE_TOKEN, return_text=False)
        for connection in connections:
            connection.close()
        wait_until_served(server.address)
    said = re.findall(r"connections closed: --max-connections are open times=(\d+) limit=4", path.read_text())
    assert said and len(said) < 5, said


def test_few_descriptors_are_few_connections(binary, tmp_path):
    path = tmp_path / "log"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        # The child has the limit of its parent at its start.
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
        log = path.open("w")
        server = ServerProcess(binary, MODEL, SMALL_CACHE, output=log)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with log, server:
        assert server.client.status()
    assert "--max-connections 1024 is lowered to 68: the process may open 200 files" in path.read_text()


def test_a_token_that_nobody_checks_is_warned_of_once(binary, tmp_path):
    path = tmp_path / "log"
    with path.open("w") as log:
        server = ServerProcess(binary, MODEL, [*SMALL_CACHE, "--insecure"], host="0.0.0.0", output=log)
        with server, RolloutClient(server.address, token="secret") as client:
            client.status()
            client.status()
    said = path.read_text()
    assert said.count("a client sends a token") == 1 and "secret" not in said
    assert said.count("--insecure with --host 0.0.0.0: every client that reaches it") == 1
    with path.open("w") as log, ServerProcess(binary, MODEL, SMALL_CACHE, output=log) as server:
        server.client.status()
    assert "sends a token" not in path.read_text() and "--host" not in path.read_text()


def test_a_server_that_is_slow_to_answer_a_connection_is_waited_for(running):
    """As over a long way, with the round trips of TCP and TLS before the first answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def forward():
            near, _ = listener.accept()
            time.sleep(0.5)
            host, _, port = running.address.rpartition(":")
            with near, socket.create_connection((host, int(port))) as far:
                back = threading.Thread(target=copy, args=(far, near))
                back.start()
                copy(near, far)
                back.join()

        def copy(source, target):
            with contextlib.suppress(OSError):
                while data := source.recv(1 << 16):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=forward)
        thread.start()
        with RolloutClient(f"127.0.0.1:{listener.getsockname()[1]}", timeout=60) as client:
            assert client.status()
        thread.join()


def test_names_of_any_length_leave_short_statuses_and_lines(binary, tmp_path):
    path = tmp_path / "log"
    with (
        path.open("w") as log,
        ServerProcess(binary, MODEL, [*SMALL_CACHE, "--log", "debug"], output=log) as server,
    ):
        client = server.client
        for length in (200, 1 << 20):
            name = "n\n" * (length // 2)
            calls = [
                lambda name=name: client.generate([[1]], sampling=ONE_TOKEN, adapter=name, return_text=False),
                lambda name=name: client.score([[1, 2]], adapter=name),
                lambda name=name: client.checksum([name] * 3),
                lambda name=name: client.remove_adapter(name),
            ]
            for call in calls:
                with pytest.raises(RolloutError) as refused:
                    call()
                assert len(str(refused.value)) < 2500 and "\n" not in str(refused.value)
                assert length > 200 or isinstance(refused.value, NotFound) or "not parameters" in str(refused.value)
        assert_idle(client)
    assert max(len(line) for line in path.read_text().splitlines()) < 5000
