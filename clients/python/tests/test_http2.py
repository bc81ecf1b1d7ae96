"""The call that carries pushes, against a peer of the library h2, which takes nothing that HTTP/2 forbids."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import hpack
import pytest
from h2.connection import ConnectionState
from h2.settings import SettingCodes, Settings
from hyperframe import frame as frames

from rollout_client import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    RolloutError,
    Unavailable,
)
from rollout_client._http2 import ClientStream

OK = [("grpc-status", "0")]
HEADER = 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Peer:
    """A server of one call. `on_data(peer)` is called for each piece of the requests, `on_end` after the last."""

    def __init__(self, settings=None, on_data=None, on_end=None):
        self.headers, self.body, self.acknowledged, self.error = {}, b"", [], None
        self.takes = True
        self._settings, self._on_data, self._on_end = settings or {}, on_data, on_end or Peer.answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def answer(self, data=b"\0\0\0\0\2hi", status=OK, headers=((":status", "200"),)):
        self.connection.send_headers(1, headers)
        if data:
            self.connection.send_data(1, data)
        self.connection.send_headers(1, status, end_stream=True)

    def flush(self):
        self.socket.sendall(self.connection.data_to_send())

    def _serve(self):
        self.socket, _ = self._listener.accept()
        with self.socket:
            # Of a stream that begins before these are acknowledged h2 would hold its client to them all the same.
            self.connection.local_settings = Settings(client=False, initial_values=self._settings)
            self.connection.initiate_connection()
            self.flush()
            try:
                for data in frames_from(self.socket):
                    if self.connection.state_machine.state is ConnectionState.CLOSED:
                        continue  # h2 would take what was on its way for an error
                    for event in self.connection.receive_data(data):
                        self._take(event)
                    self.flush()
            except ConnectionError:
                pass
            except h2.exceptions.ProtocolError as error:
                self.error = error

    def _take(self, event):
        match event:
            case h2.events.RequestReceived():
                self.headers = {name.decode(): value.decode() for name, value in event.headers}
            case h2.events.DataReceived():
                self.body += event.data
                if self.takes:
                    self.connection.acknowledge_received_data(event.flow_controlled_length, 1)
                if self._on_data:
                    self._on_data(self)
            case h2.events.PingAckReceived():
                self.acknowledged.append(event.ping_data)
            case h2.events.StreamEnded():
                self._on_end(self)

    def close(self):
        self._listener.close()
        self._thread.join(10)
        assert not self._thread.is_alive() and self.error is None, self.error


def frames_from(connection):
    """The preface, then frame by frame: h2 holds what it is given at once to the settings that it had before."""
    received, size = b"", len(PREFACE)
    while data := connection.recv(1 << 16):
        received += data
        while len(received) >= size:
            if size > HEADER or not int.from_bytes(received[:3], "big"):
                yield received[:size]
                received, size = received[size:], HEADER
            else:
                size += int.from_bytes(received[:3], "big")


@contextmanager
def peer(**options):
    server = Peer(**options)
    try:
        yield server
    finally:
        server.close()


def call(server, timeout=10.0, metadata=()):
    return ClientStream(server.address, "/service/Method", metadata, timeout)


def messages_of(body):
    """The messages in the data of a call."""
    found = []
    while body:
        compressed, size = struct.unpack(">BI", body[:5])
        assert compressed == 0 and len(body) >= 5 + size
        found.append(body[5 : 5 + size])
        body = body[5 + size :]
    return found


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("window", [1, 1_000, 1 << 16, 1 << 20])
def test_messages_arrive_whole_whatever_windows_and_frames_the_server_has(rng, window, together):
    """Windows and frames get larger in the middle of the call, and pings come between."""
    largest = window

    def change(server):
        nonlocal largest
        if rng.random() < 0.05:
            largest += int(rng.integers(largest + 1))
            sizes = {
                SettingCodes.INITIAL_WINDOW_SIZE: largest,
                SettingCodes.MAX_FRAME_SIZE: (1 << 14) + largest % 10**6,
            }
            server.connection.update_settings(sizes)
            server.connection.ping(b"12345678")

    most = min(300 * window, 300_000)
    sent = [[rng.bytes(rng.integers(0, most)) for _ in range(rng.integers(0, 4))] for _ in range(8)]
    settings = {SettingCodes.INITIAL_WINDOW_SIZE: window}
    with peer(settings=settings, on_data=change) as server, call(server, timeout=60) as stream:
        if together:
            stream.send_all([tuple(map(memoryview, parts)) for parts in sent])
        else:
            for parts in sent:
                stream.send(*map(memoryview, parts))
        assert stream.finish() == b"hi"
    assert messages_of(server.body) == [b"".join(parts) for parts in sent]
    assert set(server.acknowledged) <= {b"12345678"}


def test_messages_that_are_sent_together_share_a_frame():
    """Also if they have more parts than a system call takes."""
    sent, pieces = [(b"a", b"", b"bc"), (), (memoryview(b"d" * 1000),), *[(b"%d" % i,) for i in range(1200)]], []
    with peer(on_data=lambda server: pieces.append(len(server.body))) as server, call(server) as stream:
        stream.send_all(sent)
        stream.finish()
    assert messages_of(server.body) == [b"".join(parts) for parts in sent]
    assert set(pieces) == {len(server.body)}  # the last has no data and is the end


def test_a_window_may_shrink_below_nothing():
    """By hand, as h2 does not keep such an account: of 100 bytes that are sent, 10 would have been allowed."""

    def settings(value, key=frames.SettingsFrame.INITIAL_WINDOW_SIZE):
        return frames.SettingsFrame(settings={key: value}).serialize()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        message = bytes(range(256))
        client = threading.Thread(target=push, args=(f"127.0.0.1:{listener.getsockname()[1]}", message))
        client.start()
        server, _ = listener.accept()
        received = b""

        def data(more):
            """What has come of the message once nothing more comes."""
            nonlocal received
            server.sendall(more)
            server.settimeout(0.3)
            with suppress(TimeoutError):
                while piece := server.recv(1 << 16):
                    received += piece
            rest, found = received[len(PREFACE) :], b""
            while rest:
                frame, size = frames.Frame.parse_frame_header(memoryview(rest[:9]))
                found += rest[9 : 9 + size] if isinstance(frame, frames.DataFrame) else b""
                rest = rest[9 + size :]
            return found[5:]

        assert data(b"") == b""
        assert data(settings(105)) == message[:100]
        assert data(settings(15)) == message[:100]
        assert data(frames.WindowUpdateFrame(1, window_increment=90).serialize()) == message[:100]
        assert data(frames.WindowUpdateFrame(1, window_increment=7).serialize()) == message[:107]
        assert data(settings(18)) == message[:110]
        assert data(settings(1 << 15, frames.SettingsFrame.MAX_FRAME_SIZE)) == message[:110]
        server.close()
        client.join(10)
        assert not client.is_alive()


def push(address, message):
    with ClientStream(address, "/service/Method", (), 10) as stream, suppress(Unavailable):
        stream.send(message)
        stream.finish()


def test_the_call_is_one_of_grpc():
    with peer() as server, call(server, 2.5, [("authorization", "Bearer key")]) as stream:
        stream.send(b"a")
        stream.finish()
    assert server.headers == {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/service/Method",
        ":authority": server.address,
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-timeout": "2500m",
        "authorization": "Bearer key",
    }


@pytest.mark.parametrize(("timeout", "header"), [(None, None), (60, "60000m"), (1e5, "100000S"), (1e8, "99999999S")])
def test_timeouts_are_said_in_eight_digits(timeout, header):
    with peer() as server, call(server, timeout) as stream:
        stream.finish()
    assert server.headers.get("grpc-timeout") == header


def test_pings_are_answered_while_the_caller_is_busy():
    with peer(on_data=lambda server: server.connection.ping(b"tictacto")) as server, call(server) as stream:
        stream.send(b"a")
        wait_until(lambda: server.acknowledged)
        assert server.acknowledged == [b"tictacto"]


def answers(*args, **kwargs):
    return lambda server: server.answer(*args, **kwargs)


def raw(data):
    return lambda server: server.socket.sendall(server.connection.data_to_send() + data)


def split_headers():
    block = hpack.Encoder().encode([(":status", "200"), ("grpc-status", "5"), ("grpc-message", "in two frames")])
    first = frames.HeadersFrame(1, block[:5], flags=["END_STREAM"])
    return first.serialize() + frames.ContinuationFrame(1, block[5:], flags=["END_HEADERS"]).serialize()


def once(hook):
    """More data may have been on its way when the peer has ended the call."""
    calls = itertools.count()
    return lambda server: hook(server) if next(calls) == 0 else None


def ends_connection(server):
    server.connection.close_connection(11, b"calm down")


@pytest.mark.parametrize(
    ("on_end", "expected", "says"),
    [
        (answers(b"", [("grpc-status", "5"), ("grpc-message", "no %22f%C3%BCnf%22")]), NotFound, 'no "fünf"'),
        (raw(split_headers()), NotFound, "in two frames"),
        (answers(b"", [("grpc-status", "77")]), RolloutError, "UNKNOWN"),
        (answers(b"", [("grpc-status", "none")]), Unavailable, "none"),
        (answers(b"", OK), Internal, "without a response"),
        (answers(b"", [("x", "y")], [(":status", "503")]), Unavailable, "503"),
        (lambda server: server.connection.reset_stream(1, 8), Internal, "error 8"),
        (ends_connection, Unavailable, "calm down"),
        (lambda server: server.socket.shutdown(socket.SHUT_RDWR), Unavailable, "closed"),
        (raw(b"\xff" * 40), Unavailable, "127.0.0.1"),
        (raw(b"\0\0\1\1\4\0\0\0\1\xff"), Unavailable, "127.0.0.1"),
    ],
)
@pytest.mark.parametrize("early", [False, True])
def test_whatever_ends_the_call_is_raised(on_end, expected, says, early):
    options = {"on_data" if early else "on_end": once(on_end)}
    with peer(**options) as server, call(server) as stream, pytest.raises(expected, match=says) as raised:
        if not early:
            stream.finish()
        while True:
            stream.send(b"a")
            time.sleep(0.01)
    assert isinstance(raised.value, RolloutError)


def test_an_answer_before_the_last_request_is_no_success():
    with peer(on_data=once(Peer.answer)) as server, call(server) as stream, pytest.raises(RolloutError, match="before"):
        while True:
            stream.send(b"a")
            time.sleep(0.01)


def stuck(server):
    """A server that reads nothing on: its windows stay as they are."""
    server.takes = False


@pytest.mark.parametrize("sends", [True, False])
def test_the_deadline_ends_waiting(sends):
    with peer(settings={SettingCodes.INITIAL_WINDOW_SIZE: 10}, on_data=stuck, on_end=lambda _: None) as server:
        start = time.monotonic()
        with call(server, 0.3) as stream, pytest.raises(DeadlineExceeded):
            stream.send(b"a" * (100_000 if sends else 1))
            stream.finish()
        assert 0.2 < time.monotonic() - start < 5


@pytest.mark.parametrize("sends", [True, False])
def test_cancelling_from_another_thread_ends_waiting(sends):
    options = {"settings": {SettingCodes.INITIAL_WINDOW_SIZE: 10}, "on_data": stuck, "on_end": lambda _: None}
    with peer(**options) as server, call(server, None) as stream, pytest.raises(Cancelled):
        threading.Timer(0.1, stream.cancel).start()
        stream.send(b"a" * (100_000 if sends else 1))
        stream.finish()


def test_leaving_the_call_ends_its_thread_and_its_connection():
    def reads():
        return [thread.name for thread in threading.enumerate() if thread.name == "rollout-push-reader"]

    with peer() as server:
        with call(server) as stream:
            stream.send(b"a")
            wait_until(lambda: server.body)
            assert reads()
        assert not reads()
        wait_until(lambda: not server._thread.is_alive())


@pytest.mark.parametrize("address", ["", "localhost", ":1", "host:", "host:x", "unix:/tmp/a", "::1:50051", "a/b:1"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(InvalidArgument, match="address"):
        ClientStream(address, "/service/Method", (), 1)


@pytest.mark.parametrize("form", ["{}", "dns:{}", "dns:///{}", "ipv4:{}"])
def test_addresses_may_be_those_of_grpc(form):
    with peer() as server, ClientStream(form.format(server.address), "/service/Method", (), 10) as stream:
        assert stream.finish() == b"hi"
        assert server.headers[":authority"] == server.address


@pytest.mark.parametrize("address", ["127.0.0.1:1", "no-such-host.invalid:1", "127.0.0.1:99999", "[::1]:1"])
def test_where_nobody_listens_is_unavailable(address):
    with pytest.raises(Unavailable):
        ClientStream(address, "/service/Method", (), 10)


def wait_until(done):
    deadline = time.monotonic() + 10
    while not done() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert done()


def test_close_waits_until_the_server_has_ended_the_call(monkeypatch):
    monkeypatch.setattr("rollout_client._http2._CANCEL_SECONDS", 60)
    ended = []

    def end(server):
        time.sleep(0.1)
        ended.append(server.body)
        server.answer(data=b"", status=[("grpc-status", "10")])

    with peer(on_end=end) as server:
        stream = call(server)
        stream.send(b"one")
        stream.close()
        assert [messages_of(body) for body in ended] == [[b"one"]]
        stream.close()
        assert len(ended) == 1


def test_close_returns_though_the_server_never_ends_the_call(monkeypatch):
    monkeypatch.setattr("rollout_client._http2._CANCEL_SECONDS", 0.05)
    with peer(on_end=lambda server: None) as server:
        stream = call(server)
        stream.send(b"one")
        stream.close()
        with pytest.raises(Cancelled):
            stream.check()
