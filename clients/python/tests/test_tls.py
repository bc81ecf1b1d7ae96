"""TLS of a real server: what is refused, files that change, pushes, clients that stall in the handshake."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import re
import signal
import socket
import ssl
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from certificates import DAY, Authority, replace
from models import checksums, random_adapter, read_model
from rollout_client import (
    AsyncRolloutClient,
    InvalidArgument,
    Misdirected,
    ResourceExhausted,
    RolloutClient,
    SamplingParams,
    ServerProcess,
    Tls,
    Unavailable,
)
from serving import FIXTURES, LONG, PUSH_MODEL, SMALL_CACHE, assert_idle, outputs, server

MODEL = FIXTURES / "llama-tied"
TOKEN = "token-of-a-trainer-0123456789"
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
FRAME_BYTES = 1 << 20
CEILING = 1 << 30


class Files:
    """An authority and another one, and what they have signed."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.authority, self.other = Authority(directory), Authority(directory, "other")
        self.cert, self.key, self.serial = self.authority.issue("server")
        self.expired = self.authority.issue("expired", until=-DAY)[:2]
        self.client = self.authority.issue("client")[:2]
        self.stranger = self.other.issue("stranger")[:2]

    def flags(self, cert=None, key=None):
        return [*SMALL_CACHE, "--tls-cert", str(cert or self.cert), "--tls-key", str(key or self.key)]

    def tls(self, pair=(None, None), ca=None):
        return Tls(ca=ca or self.authority.path, cert=pair[0], key=pair[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return Files(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def servers(binary, files):
    """A server without TLS, one with, one that asks for certificates of clients, one whose certificate has expired."""
    ca = ["--tls-client-ca", str(files.authority.path)]
    flags = {
        "plain": SMALL_CACHE,
        "tls": files.flags(),
        "mutual": [*files.flags(), *ca],
        "expired": files.flags(*files.expired),
    }
    started = {}
    try:
        # One after the other: a port that is only chosen may be chosen again.
        for name, each_flags in flags.items():
            each = started[name] = ServerProcess(binary, MODEL, list(each_flags))
            wait_until_listening(each.address)
            if name != "expired":
                with RolloutClient(each.address, tls=None if name == "plain" else files.tls(files.client)) as client:
                    client.wait_until_ready(60)
        yield {name: each.address for name, each in started.items()}
    finally:
        for each in started.values():
            each.stop()


def wait_until_listening(address):
    deadline = time.monotonic() + 60
    while True:
        try:
            connect(address).close()
            return
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def connect(address):
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=60)


def wrapped(files, address, protocol="h2"):
    context = ssl.create_default_context(cafile=files.authority.path)
    context.set_alpn_protocols([protocol])
    return context.wrap_socket(connect(address), server_hostname="localhost")


def serial(files, address, protocol="h2"):
    """The serial number of the certificate that a new connection gets."""
    with wrapped(files, address, protocol) as connection:
        return int(connection.getpeercert()["serialNumber"], 16)


def calls(address, tls):
    """One call of each kind of connection; their results, or errors."""

    def status():
        with RolloutClient(address, tls=tls, timeout=60) as client:
            return client.status()

    def push():
        with RolloutClient(address, tls=tls, timeout=60) as client:
            return client.push_lora(None)

    def stream():
        with RolloutClient(address, tls=tls, timeout=60) as client:
            return client.generate([[1, 2]], return_text=False)

    async def asynchronous():
        async with AsyncRolloutClient(address, tls=tls, timeout=60) as client:
            await client.push_lora(None)
            return await client.status()

    for call in (status, push, stream, lambda: asyncio.run(asynchronous())):
        try:
            yield call()
        except Unavailable as error:
            yield error


SPEAKS = "the server speaks TLS; give tls=True"
SILENT = "the server does not speak TLS on this port; leave tls= out"
UNKNOWN = "certificate is refused: .*issuer.*; give the authority that signed it as ca="
ASKS = "the server asks for a certificate of the client; give cert= and key="


@pytest.mark.parametrize(
    ("name", "tls", "said"),
    [
        ("plain", lambda files: None, None),
        ("tls", lambda files: files.tls(), None),
        ("tls", lambda files: {"ca": str(files.authority.path), "server_name": "localhost"}, None),
        ("mutual", lambda files: files.tls(files.client), None),
        ("tls", lambda files: None, SPEAKS),
        ("plain", lambda files: files.tls(), SILENT),
        ("tls", lambda files: files.tls(ca=files.other.path), UNKNOWN),
        ("tls", lambda files: True, UNKNOWN),
        (
            "tls",
            lambda files: Tls(ca=files.authority.path, server_name="elsewhere"),
            "valid for 'elsewhere'; reach it by",
        ),
        ("expired", lambda files: files.tls(), "certificate is refused: certificate has expired"),
        ("mutual", lambda files: files.tls(), ASKS),
        ("mutual", lambda files: files.tls(files.stranger), "--tls-client-ca has not signed it"),
        ("mutual", lambda files: files.tls(files.expired), "this client's certificate: it has expired"),
    ],
)
def test_what_is_refused_says_why(servers, files, name, tls, said):
    for found in calls(servers[name], tls(files)):
        if said is None:
            assert not isinstance(found, Exception), found
        else:
            assert isinstance(found, Misdirected) and re.search(said, str(found)), found


def test_a_connection_that_is_closed_before_tls_may_be_of_a_server_that_starts(files):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        threading.Thread(target=close_all, args=(listener,), daemon=True).start()
        for found in calls(address, files.tls()):
            assert type(found) is Unavailable, found
        listener.shutdown(socket.SHUT_RDWR)


def close_all(listener):
    """Accepts and closes, as a proxy whose server is not there yet."""
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_files_that_are_wrong_are_named_by_the_client(files, tmp_path):
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    for tls, said in [
        (Tls(ca="/missing"), r"tls\.ca: .*No such file"),
        (Tls(ca=nonsense), r"tls\.ca: .*no certificate"),
        (Tls(cert=files.cert), "needs its key"),
        (Tls(cert=files.cert, key=files.client[1]), r"tls\.cert, tls\.key: .* are not a certificate and its key"),
        ({"cafile": "x"}, "unknown 'cafile'; there are ca, cert, key, server_name"),
        ("ca.pem", "expected True"),
    ]:
        for client in (RolloutClient, AsyncRolloutClient):
            with pytest.raises(InvalidArgument, match=said):
                client("127.0.0.1:1", tls=tls)


def test_http_speaks_tls_too(binary, files):
    with ServerProcess(binary, MODEL, files.flags(), tls=files.tls()) as process:
        host, _, port = process.http_address.rpartition(":")
        context = ssl.create_default_context(cafile=files.authority.path)
        connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=context)
        for path in ("/health", "/v1/models"):
            connection.request("GET", path)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()
        connection.close()
        # The ports differ in their protocol, and say so in the handshake.
        with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
            wrapped(files, process.http_address, "h2").recv(1)


def test_certificates_are_replaced_while_a_stream_runs(binary, files, tmp_path):
    cert, key, first = files.authority.issue("rotated")
    log = tmp_path / "log"

    def until(condition, what):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.05)

    with (
        log.open("w") as output,
        ServerProcess(binary, MODEL, files.flags(cert, key), output=output, tls=files.tls()) as process,
        process.client.generate_stream([[1, 2, 3]], sampling=LONG, stream_tokens=True, return_text=False) as stream,
    ):
        next(stream)
        for protocol, address in (("h2", process.address), ("http/1.1", process.http_address)):
            assert serial(files, address, protocol) == first
        _, _, second = files.authority.issue("rotated")
        until(lambda: serial(files, process.address) == second, "the new certificate is served")
        assert serial(files, process.http_address, "http/1.1") == second
        events = list(stream)
        assert len(events) > 1, "the stream goes on over its old connection"
        assert process.client.status(), "and so does its client"

        # A certificate without its key, as when a rotation stops half way.
        before = cert.read_bytes()
        other_cert, other_key, third = files.authority.issue("half")
        replace(cert, other_cert.read_bytes())
        until(lambda: "does not belong to the certificate" in log.read_text(), "the mistake is logged")
        time.sleep(1.5)
        assert serial(files, process.address) == second
        assert log.read_text().count("does not belong to the certificate") == 1
        replace(cert, before)
        replace(key, other_key.read_bytes())
        replace(cert, other_cert.read_bytes())
        process.process.send_signal(signal.SIGHUP)
        until(lambda: serial(files, process.address) == third, "the rest of the rotation is taken")
        assert_idle(process.client)


def seen(client, state, adapter, config):
    """What pushes of each kind, by each way, leave behind."""
    found = []
    for transport in ("inline", "shared_memory"):
        client.push_full(state, transport=transport)
        found += [client.checksum(), outputs(client)]
        client.push_lora(adapter, config, transport=transport)
        found += [client.checksum(), outputs(client)]
    changed = {name: np.array(value) for name, value in state.items()}
    first = next(iter(changed))
    changed[first].reshape(-1)[:7] = 0
    with client.begin_push() as push:
        push.write(*next(iter(changed.items())))
        push.rollback()
    client.push_full(state)
    client.push_delta(state, changed, base_version=client.status().weight_version)
    return [*found, client.checksum(), outputs(client)]


def test_pushes_through_tls_are_those_without(binary, files):
    state = read_model(PUSH_MODEL)
    adapter, config = random_adapter(np.random.default_rng(5), state)
    tokens = files.directory / "tokens"
    replace(tokens, f"control {TOKEN}\n".encode())
    with server(binary, PUSH_MODEL) as client:
        expected = seen(client, state, adapter, config)
        assert client.checksum() != checksums(state, "bfloat16")
    flags = [*files.flags(), "--tls-client-ca", str(files.authority.path), "--auth-token-file", str(tokens)]
    flags += ["--mem-util", "0.2"]
    with ServerProcess(binary, PUSH_MODEL, flags, token=TOKEN, tls=files.tls(files.client)) as process:
        assert seen(process.client, state, adapter, config) == expected

        async def push():
            options = {"token": TOKEN, "tls": files.tls(files.client)}
            async with AsyncRolloutClient(process.address, **options) as client:
                await client.push_full(state, transport="inline")
                return await client.checksum()

        assert asyncio.run(push()) == expected[0]


@pytest.fixture(scope="module")
def bounded(binary, files):
    """A server with a low ceiling, after it has touched what it touches once, and its resident memory then."""
    with server(binary, MODEL) as client:
        machine = client.status().memory.total_bytes
    flags = [*files.flags(), "--mem-util", f"{CEILING / machine:.6f}"]
    with ServerProcess(binary, MODEL, flags, tls=files.tls()) as process:
        prompts = [[i % 500, i % 7] for i in range(300)]
        process.client.generate(prompts, n=4, sampling=SamplingParams(max_tokens=16), return_text=False)
        Path(f"/proc/{process.process.pid}/clear_refs").write_text("5")
        yield process, memory(process.process.pid, "VmRSS")
        assert_idle(process.client)
        peak = memory(process.process.pid, "VmHWM")
        assert peak <= CEILING, f"{peak >> 20} MiB were resident"


def test_clients_that_stall_in_the_handshake_leave_others_served(bounded, files):
    process, _ = bounded
    ports = [process.address, process.http_address]
    stalled = [connect(ports[i % 2]) for i in range(600)]
    for i, connection in enumerate(stalled):
        # Nothing, the type of a record, or the beginning of a long one.
        connection.sendall([b"", b"\x16", b"\x16\x03\x01\x40\x00" + bytes(5000)][i % 3])
    for protocol, port in (("h2", ports[0]), ("http/1.1", ports[1])):
        start = time.monotonic()
        assert serial(files, port, protocol) == files.serial
        assert time.monotonic() - start < 8, "before the stalled handshakes are given up for their age"
    with RolloutClient(process.address, tls=files.tls(), timeout=60) as other:
        assert other.generate([[1, 2, 3]], return_text=False)
    for connection in stalled:
        connection.close()


def test_what_clients_send_inside_tls_is_bounded_as_without(bounded, files):
    process, idle = bounded
    # Frames of messages that never become whole: all connections together hold 32 MiB of them.
    frame = FRAME_BYTES.to_bytes(3, "big") + bytes([0, 0, 0, 0, 0, 1]) + bytes(FRAME_BYTES - 1)
    holding = []
    for _ in range(96):
        connection = wrapped(files, process.address)
        connection.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            connection.sendall(GREETING + frame)
        holding.append(connection)
    assert process.client.status()
    peak = memory(process.process.pid, "VmHWM")
    assert peak < idle + (32 << 20) + 96 * (192 << 10) + (24 << 20), f"{idle >> 20} MiB, then {peak >> 20} MiB"
    for connection in holding:
        connection.close()

    # Texts that are received whole and find no room to be encoded.
    def send(_):
        with (
            RolloutClient(process.address, tls=files.tls(), timeout=60) as client,
            pytest.raises((ResourceExhausted, InvalidArgument)),
        ):
            client.generate(["lorem ipsum " * (4 << 20)])

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(send, range(6)))


def memory(pid, name):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status).group(1)) << 10
