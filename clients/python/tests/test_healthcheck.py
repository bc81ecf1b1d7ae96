"""docker/healthcheck, the image's health check, which has nothing but bash."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading

from certificates import Authority
from rollout_client import ServerProcess
from serving import PUSH_MODEL, REPOSITORY, SMALL_CACHE

FLAGS = [*SMALL_CACHE, "--mem-util", "0.2"]


def healthy(**variables):
    command = ["bash", str(REPOSITORY / "docker" / "healthcheck")]
    environment = {"PATH": "/usr/bin:/bin", **variables}
    return subprocess.run(command, env=environment, timeout=30, capture_output=True, check=False).returncode == 0


def port(address):
    return address.rpartition(":")[2]


@contextlib.contextmanager
def listener(answer):
    """The port of a server that gives its first client `answer` and then nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            connection, _ = listening.accept()
            # The check hangs up without having read all.
            with connection, contextlib.suppress(ConnectionResetError):
                connection.sendall(answer)
                while connection.recv(4096):
                    pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield str(listening.getsockname()[1])
        thread.join()


def test_a_server_is_healthy_until_it_ends(binary):
    with ServerProcess(binary, PUSH_MODEL, FLAGS) as server:
        http = {"ROLLOUT_HTTP_PORT": port(server.http_address)}
        without_http = {"ROLLOUT_HTTP_PORT": "off", "ROLLOUT_PORT": port(server.address)}
        assert healthy(**http)
        assert healthy(**without_http)
    assert not healthy(**http)
    assert not healthy(**without_http)


def test_with_tls_it_is_enough_that_the_port_answers(binary, tmp_path):
    authority = Authority(tmp_path)
    certificate, key, _ = authority.issue("server")
    flags = [*FLAGS, "--tls-cert", str(certificate), "--tls-key", str(key)]
    with ServerProcess(binary, PUSH_MODEL, flags, tls={"ca": authority.path}) as server:
        variables = {"ROLLOUT_HTTP_PORT": port(server.http_address), "ROLLOUT_TLS_CERT": str(certificate)}
        assert healthy(**variables)
    assert not healthy(**variables)


def test_an_answer_that_is_not_ok_is_none():
    for answer in (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"HTTP/1.1 \r\n", b"\0\0\r\n", b""):
        with listener(answer) as http_port:
            assert not healthy(ROLLOUT_HTTP_PORT=http_port), answer
