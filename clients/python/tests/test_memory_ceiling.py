"""A client that sends too much, never ends what it sends, or never reads: the process stays below its ceiling.

Resident memory is the system's own high-water mark, and another client is served all the while.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import struct
import threading
import time
from pathlib import Path

import grpc
import h2.config
import h2.connection
import h2.events
import pytest

from rollout_client import RolloutClient, SamplingParams, ServerProcess, _proto
from serving import FIXTURES

CEILING = 1 << 30
MODEL = FIXTURES / "llama-tied"
CONTEXT = 1024
# Small, so that what the cache touches as it fills is no part of what is looked at.
CACHE = ["--kv-cache-bytes", str(16 << 20)]
BACK_WITHIN = 64 << 20
# The server needs 5 s of its own; a loaded machine gives it fewer.
PATIENCE = 60.0
WARM = SamplingParams(max_tokens=64, ignore_eos=True)


def memory(pid, name):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(rf"{name}:\s+(\d+) kB", status).group(1)) << 10


@contextlib.contextmanager
def everybody_else(address):
    """Small requests of another client, one after the other; all are served, and some while the block lasts."""
    served, failed, stop = [], [], threading.Event()

    def ask():
        with RolloutClient(address, timeout=120) as client:
            while not stop.is_set() or not served:
                try:
                    served.append(client.generate([[1, 2, 3]], sampling=SamplingParams(max_tokens=2)))
                except Exception as error:
                    failed.append(error)
                    return
                stop.wait(0.02)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield served
        before = len(served)
        deadline = time.monotonic() + PATIENCE
        while len(served) < before + 2 and not failed and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(served) >= before + 2 or failed, "nobody else is served"
    finally:
        stop.set()
        thread.join()
    assert not failed, failed


@contextlib.contextmanager
def limited(binary, ceiling, *flags, model=MODEL):
    """A server with this ceiling."""
    with ServerProcess(binary, model, [*CACHE, "--mem-util", "0.2"]) as process:
        machine = process.client.status().memory.total_bytes
    with ServerProcess(binary, model, [*CACHE, "--mem-util", f"{ceiling / machine:.6f}", *flags]) as process:
        # Until all that a server touches once is touched: the cache, each thread's stack.
        process.client.generate([[i % 500, i % 7] for i in range(300)], n=4, sampling=WARM)
        process.client.score([[i % 500 for i in range(1000)]] * 4, top_logprobs=10)
        yield process


@pytest.fixture(scope="module")
def server(binary):
    with limited(binary, CEILING) as process:
        yield process


@pytest.fixture
def bounded(server):
    """Watches one case: the most that was resident, and what stays."""
    pid = server.process.pid
    deadline = time.monotonic() + PATIENCE
    while server.client.status().running_requests and time.monotonic() < deadline:
        time.sleep(0.05)
    idle = settled(pid)
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    with everybody_else(server.address):
        yield server
    assert server.process.poll() is None, "the server has died"
    peak = memory(pid, "VmHWM")
    assert peak <= server.client.status().memory.ceiling_bytes, f"{peak >> 20} MiB were resident"
    deadline = time.monotonic() + PATIENCE
    while memory(pid, "VmRSS") > idle + BACK_WITHIN and time.monotonic() < deadline:
        time.sleep(0.1)
    left = memory(pid, "VmRSS")
    print(f"idle {idle >> 20} MiB, at most {peak >> 20} MiB, then {left >> 20} MiB")
    assert left <= idle + BACK_WITHIN, f"{left >> 20} MiB stay of {peak >> 20}; idle were {idle >> 20}"
    ledger = server.client.status().memory
    assert ledger.traffic_bytes < 1 << 20, f"{ledger.traffic_bytes} bytes are still counted"


def settled(pid):
    """Resident memory when it has stopped to fall."""
    last = memory(pid, "VmRSS")
    while True:
        time.sleep(1.2)
        now = memory(pid, "VmRSS")
        if now >= last - (1 << 20):
            return now
        last = now


def tag(number, payload):
    """A field of bytes on the wire."""
    length, encoded = len(payload), b""
    while length > 127:
        encoded, length = encoded + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + encoded + bytes([length]) + payload


def refusal(address, path, message):
    """The status of a call with these bytes."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            list(channel.unary_stream(path)(message, timeout=PATIENCE))
        return refused.value.code()


TOO_MUCH = {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.INVALID_ARGUMENT}


def test_a_text_of_60_mib(bounded):
    text = tag(2, tag(2, b"lorem ipsum " * (5 << 20)))
    assert refusal(bounded.address, _proto.GENERATE.path, text) in TOO_MUCH


def test_a_text_that_decodes_but_cannot_be_encoded(bounded):
    text = tag(2, tag(2, b"ab c" * (5 << 20)))
    assert refusal(bounded.address, _proto.GENERATE.path, text) in TOO_MUCH


def test_a_chat_of_eight_million_messages(bounded):
    chat = tag(2, tag(3, tag(1, tag(1, b"u")) * 8_000_000))
    assert refusal(bounded.address, _proto.GENERATE.path, chat) in TOO_MUCH


class Flood:
    """Calls on some connections whose messages never end: each sends what the server takes of it."""

    PIECE = b"\x12" * (1 << 16)

    def __init__(self, address, path, calls, connections, message_bytes):
        host, _, port = address.rpartition(":")
        self.refused, self.sent, self._links = 0, 0, []
        start = struct.pack(">BI", 0, message_bytes)
        for i in range(connections):
            link = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
            link.initiate_connection()
            sock = socket.create_connection((host, int(port)))
            sock.sendall(link.data_to_send())
            headers = [
                (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", address),
                ("te", "trailers"), ("content-type", "application/grpc"),
            ]  # fmt: skip
            left = {}
            for stream in range(1, 2 * (calls // connections + (i < calls % connections)), 2):
                link.send_headers(stream, headers)
                link.send_data(stream, start)
                left[stream] = message_bytes - 1
            sock.setblocking(False)
            self._links.append((sock, link, left, bytearray(link.data_to_send())))

    def say(self, message):
        """Sends the one message of each call and ends it; no window is opened afterwards."""
        for sock, link, left, out in self._links:
            for stream in left:
                link.send_data(stream, message, end_stream=True)
            sock.setblocking(True)
            sock.sendall(bytes(out) + link.data_to_send())

    def answer_pings(self):
        """Keeps the connections, which the server closes if its pings are not answered."""
        for sock, link, _, _ in self._links:
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while data := sock.recv(1 << 16):
                    link.receive_data(data)
            sock.setblocking(True)
            sock.sendall(link.data_to_send())

    def run(self, seconds):
        """Sends for so long, or until nothing more is taken."""
        selector = selectors.DefaultSelector()
        for link in self._links:
            selector.register(link[0], selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            moved = False
            for key, mask in selector.select(timeout=0.2):
                moved |= self._turn(*key.data, mask)
            if not moved:
                time.sleep(0.01)
        selector.close()

    def _turn(self, sock, link, left, out, mask):
        moved = False
        with contextlib.suppress(BlockingIOError):
            if mask & selectors.EVENT_READ and (data := sock.recv(1 << 16)):
                moved = True
                for event in link.receive_data(data):
                    match event:
                        case h2.events.StreamReset() | h2.events.StreamEnded():
                            self.refused += left.pop(event.stream_id, None) is not None
                        case h2.events.DataReceived():
                            link.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        for stream in list(left) if len(out) < 1 << 20 else ():
            size = min(left[stream], link.local_flow_control_window(stream), link.max_outbound_frame_size, 1 << 16)
            if size > 0:
                link.send_data(stream, self.PIECE[:size])
                left[stream] -= size
                self.sent += size
        out += link.data_to_send()
        with contextlib.suppress(BlockingIOError):
            if out and (sent := sock.send(out)):
                del out[:sent]
                moved = True
        return moved

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for sock, *_ in self._links:
            sock.close()


@pytest.mark.parametrize("connections", [1, 64])
def test_64_requests_that_never_end(bounded, connections):
    with Flood(bounded.address, _proto.GENERATE.path, 64, connections, 60 << 20) as flood:
        flood.run(4)
        print(f"{flood.sent >> 20} MiB were taken, {flood.refused} calls refused")
        assert flood.refused > 0


@pytest.mark.parametrize("connections", [2, 50])
def test_500_pushes_that_never_end(bounded, connections):
    with Flood(bounded.address, _proto.UPDATE.path, 500, connections, 8 << 20) as flood:
        flood.run(4)
        print(f"{flood.sent >> 20} MiB were taken, {flood.refused} calls refused")
        assert flood.refused >= 400


def frame(kind, stream, payload):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, 0, stream) + payload


def headers_that_never_end(size):
    """A header whose name is announced with 64 MiB, in as many frames as the transport joins."""
    name = b"\x00\x7f\x81\xff\xff\x1f"
    return [frame(1, 1, name + b"a" * (size - len(name))), *[frame(9, 1, b"a" * size) for _ in range(5)]]


LONG_FRAME = 1 << 20
UNFINISHED = {
    "a message": [frame(0, 1, bytes(LONG_FRAME))[:-1]],
    "headers": headers_that_never_end(16 << 10),
    "headers in long frames": headers_that_never_end(LONG_FRAME),
}


@pytest.mark.parametrize("what", UNFINISHED)
def test_300_frames_that_never_end(bounded, what):
    """What the transport holds before it has a whole frame; no call has been made yet that could be refused."""
    host, port = bounded.address.rsplit(":", 1)
    before = memory(bounded.process.pid, "VmHWM")
    with contextlib.ExitStack() as open_sockets:
        closed = 0
        for _ in range(300):
            sock = open_sockets.enter_context(socket.create_connection((host, int(port))))
            link = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
            link.initiate_connection()
            if what == "a message":
                headers = [(":method", "POST"), (":scheme", "http"), (":path", _proto.GENERATE.path)]
                link.send_headers(1, [*headers, (":authority", bounded.address), ("te", "trailers")])
            sock.sendall(link.data_to_send())
            # As much as is taken: a connection that waits for room fills the sockets' buffers and no more.
            sock.setblocking(False)
            try:
                for part in UNFINISHED[what]:
                    if sock.send(part) < len(part):
                        break
            except BlockingIOError:
                pass
            except OSError:
                closed += 1
        time.sleep(1)
    grown = memory(bounded.process.pid, "VmHWM") - before
    print(f"{grown >> 20} MiB were taken, {closed} connections closed")
    assert grown < 128 << 20, f"{grown >> 20} MiB were taken"


WHOLE_VOCABULARY = 512
"""Most likely tokens of a position, as many as the model has."""


@pytest.mark.parametrize("returns", [False, True], ids=["most likely tokens", "all that returns has"])
def test_a_careless_score(bounded, returns):
    """1,000 x 1,000 tokens with 100 most likely ones each, 860 MB of reply, come as they are computed.

    Or with all tokens, supports, entropies and the divergences from a reference: 8 GB of reply. The test leaves when it
    has 100 MiB of it: on two cores the rest takes minutes.
    """
    request = _proto.SCORE.request(top_logprobs=0 if returns else 100)
    if returns:
        wanted = request.returns
        wanted.top, wanted.entropy, wanted.support, wanted.divergences = WHOLE_VOCABULARY, True, True, True
        wanted.references.append("")
    for i in range(1000):
        request.sequences.add(ids=[(i + j * j) % 500 for j in range(1000)])
    before = memory(bounded.process.pid, "VmHWM")
    with grpc.insecure_channel(bounded.address, [("grpc.max_receive_message_length", -1)]) as channel:
        score = channel.unary_stream(
            _proto.SCORE.path,
            request_serializer=_proto.SCORE.request.SerializeToString,
        )
        got, parts = 0, score(request, timeout=600)
        for part in parts:
            got += len(part)
            if got > 100 << 20:
                break
        grown = memory(bounded.process.pid, "VmHWM") - before
        parts.cancel()
    assert got > 100 << 20 and grown < 64 << 20, f"{got >> 20} MiB were sent, and {grown >> 20} MiB grown"


def test_tokens_that_nobody_reads(bounded):
    """A client that opens no window after the first 64 KiB: what is made beyond waits in the server, up to a point.

    Its samples would make a million tokens if nothing stopped them.
    """
    request = _proto.GENERATE.request(n=1024, stream_tokens=True)
    request.prompts.add().tokens.ids.append(5)
    request.sampling.max_tokens, request.sampling.ignore_eos = 1000, True
    message = request.SerializeToString()
    limit = bounded.client.status().memory.entries["requests"]
    with Flood(bounded.address, _proto.GENERATE.path, 1, 1, len(message)) as flood:
        flood.say(message)
        most, held = 0, 0
        deadline = time.monotonic() + 2 * PATIENCE
        while time.monotonic() < deadline and held < 10:
            flood.answer_pings()
            status = bounded.client.status()
            if status.memory.traffic_bytes > most:  # on a busy machine it takes long to make so many tokens
                most, deadline = status.memory.traffic_bytes, time.monotonic() + 2 * PATIENCE
            # Held back: none of its samples runs, only everybody else's.
            held = held + 1 if status.running_samples <= 1 and status.memory.traffic_bytes > 4 << 20 else 0
            time.sleep(0.1)
        print(f"{most >> 20} MiB of {limit >> 20} wait")
        assert held == 10, "the request goes on though nobody reads"
        assert most < limit / 2
