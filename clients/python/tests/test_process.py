"""ServerProcess with stand-ins for the server's binary."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import threading

import pytest

from rollout_client import NotFound, RolloutError, ServerProcess, Unavailable

# A trainer that has started a server, says which, and ends with its standard input.
TRAINER = """
import subprocess, sys
from rollout_client import ServerProcess
server = ServerProcess(sys.argv[1], "m", output=subprocess.DEVNULL)
print(server.process.pid, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def end_of(pid):
    """Gives a function that waits so many seconds for a process of somebody else, and says whether it has ended."""
    process = os.pidfd_open(pid)
    try:
        yield lambda seconds: bool(select.select([process], [], [], seconds)[0])
    finally:
        os.close(process)


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


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends a server with its parent")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL, None], ids=["terminated", "killed", "at its end"])
def test_a_server_ends_with_the_process_that_started_it(script, sent):
    path = script("trap '' TERM INT HUP; while :; do sleep 0.05; done")
    command = [sys.executable, "-c", TRAINER, str(path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer,
        end_of(int(trainer.stdout.readline())) as ended,
    ):
        assert not ended(0), "it serves as long as the trainer runs"
        if sent is None:
            trainer.stdin.close()
        else:
            trainer.send_signal(sent)
        assert ended(60)


def test_a_server_outlives_the_thread_that_started_it(script):
    others, started = set(threading.enumerate()), []
    path = script("trap 'exit 7' TERM; while :; do sleep 0.05; done")
    thread = threading.Thread(target=lambda: started.append(ServerProcess(path, "m")))
    thread.start()
    thread.join()
    (server,) = started
    with pytest.raises(Unavailable):
        server.wait_until_ready(0.3)
    assert server.stop() == 7
    for left in set(threading.enumerate()) - others:
        left.join(60)
        assert not left.is_alive(), "stopped, it leaves no thread"


@pytest.mark.parametrize("name", ["nowhere/rollout-server", "no-rollout-server", "not-executable"])
def test_a_binary_that_is_not_there_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "not-executable").touch()
    advice = "`pip install rollout-server` installs it, `make server` builds it"
    with pytest.raises(NotFound, match=f"no program {re.escape(repr(name))} on this machine; {advice}"):
        ServerProcess(name, "m")


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Two empty folders: the scripts of this Python's environment, and the only one in `PATH`."""
    scripts, in_path = tmp_path / "scripts", tmp_path / "path"
    for folder in (scripts, in_path):
        folder.mkdir()
    get_path = sysconfig.get_path
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(scripts) if name == "scripts" else get_path(name))
    monkeypatch.setenv("PATH", str(in_path))
    return scripts, in_path


def test_without_a_binary_the_one_of_the_environment_comes_first_then_the_path(script, places):
    with pytest.raises(NotFound, match="no program 'rollout-server' on this machine; `pip install rollout-server`"):
        ServerProcess(model="m")
    scripts, in_path = places
    for folder, status in ((in_path, 5), (scripts, 6)):
        script(f"exit {status}").rename(folder / "rollout-server")
        server = ServerProcess(model="m", output=subprocess.DEVNULL)
        assert server.process.wait(10) == status
        server.stop()


def test_a_server_needs_a_model():
    for arguments in ((), ("model",)):
        with pytest.raises(TypeError, match=r"needs a model; its first argument is the binary"):
            ServerProcess(*arguments)
