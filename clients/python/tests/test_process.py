"""ServerProcess with stand-ins for the server's binary."""

from __future__ import annotations

import subprocess

import pytest

from rollout_client import RolloutError, ServerProcess, Unavailable


@pytest.fixture
def script(tmp_path):
    def make(body):
        path = tmp_path / "server"
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    return make


def test_a_server_that_ends_while_starting_is_an_error(script):
    with (
        pytest.raises(RolloutError, match="ended with status 3"),
        ServerProcess(script("exit 3"), "m", output=subprocess.DEVNULL),
    ):
        pass


def test_arguments_reach_the_server(script, tmp_path):
    server = ServerProcess(script(f'echo "$@" > {tmp_path}/arguments'), "some model", ["--tp", "2"])
    server.process.wait(10)
    server.stop()
    port, http_port = (address.rpartition(":")[2] for address in (server.address, server.http_address))
    given = f"--model some model --host 127.0.0.1 --port {port} --http-port {http_port} --tp 2\n"
    assert (tmp_path / "arguments").read_text() == given


def test_a_server_that_never_answers_is_given_up_and_stopped(script):
    server = ServerProcess(script("trap 'exit 7' TERM; while :; do sleep 0.05; done"), "m")
    with pytest.raises(Unavailable, match=r"not ready after 0\.3 s"):
        server.wait_until_ready(0.3)
    assert server.stop() == 7


def test_a_server_that_ignores_sigterm_is_killed(script):
    server = ServerProcess(script("trap '' TERM; while :; do sleep 0.05; done"), "m")
    with pytest.raises(Unavailable):
        server.wait_until_ready(0.3)
    assert server.stop(timeout=0.3) == -9
