"""The Weights service of a fake server: takes pushes, checks them as the protocol says, keeps what they bring."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import ml_dtypes
import numpy as np
import xxhash
import zstandard

from rollout_client import _proto

ITEM_SIZES = {1: 4, 2: 2, 3: 2}
MAX_CHUNK = 4 << 20


class Refused(Exception):
    """Ends a push with a status."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


@dataclass
class Commit:
    """One push that came to its end."""

    header: object
    tensors: dict = field(default_factory=dict)
    """Name to (declaration, bytes as transported)."""


class FakeWeights:
    """Holds parameters and applies pushes to them; LORA pushes are only recorded."""

    def __init__(self):
        self.parameters = {}
        """Name to (TensorDtype, shape, bytes)."""
        self.version = 0
        self.commits = []
        self.broken = 0
        """Streams that ended without a commit."""
        self.messages = 0
        self.hide_shared_memory = False
        self.segment_mode = 0o600
        self.device_memory = {}
        """UUID and handle of each allocation that can be opened to its bytes."""
        self.largest_message = 0
        self.on_message = lambda number, request: None

    def answers(self):
        """For `FakeServer.answers`."""
        return {
            "Update": self.update,
            "ListParameters": self.list_parameters,
            "Checksum": self.checksum,
        }

    def update(self, requests, context):
        push = None
        try:
            for number, request in enumerate(requests):
                self.messages += 1
                self.largest_message = max(self.largest_message, len(request.chunk.data))
                self.on_message(number, request)
                kind = request.WhichOneof("kind")
                if (kind == "header") != (push is None):
                    raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"message {number}: a {kind}")
                if kind == "header":
                    push = Incoming(request.header, self)
                elif kind == "manifest":
                    push.declare(request.manifest.tensors)
                elif kind == "chunk":
                    push.write(request.chunk)
                else:
                    return self.commit(push)
        except Refused as error:
            self.broken += 1
            context.abort(error.code, str(error))
        except Exception:
            self.broken += 1
            raise
        self.broken += 1
        context.abort(grpc.StatusCode.CANCELLED, "no commit")

    def commit(self, push):
        header = push.header
        if header.HasField("expected_version") and header.expected_version != self.version:
            raise Refused(grpc.StatusCode.ABORTED, f"expected_version: the policy has version {self.version}")
        tensors = push.finish()
        if header.kind == 2:
            missing = self.parameters.keys() - tensors.keys()
            if missing:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{min(missing)}: missing")
            self.parameters = {name: (e.dtype, tuple(e.shape), data) for name, (e, data) in tensors.items()}
        elif header.kind == 3:
            for name, (entry, payload) in tensors.items():
                self.parameters[name] = changed(self.parameters[name], entry, payload)
        self.commits.append(Commit(header, tensors))
        resident = bool(header.adapter)
        if not resident:
            self.version = header.new_version if header.HasField("new_version") else self.version + 1
        digests = b"".join(tensors[name][0].digest for name in sorted(tensors))
        return _proto.UPDATE.response(
            weight_version=self.version,
            digest=xxhash.xxh3_128(digests).digest(),
            parameters=len(tensors),
            bytes=sum(len(data) for _, data in tensors.values()),
            pause_milliseconds=1.5,
            staging_milliseconds=2.5,
            adapter_generation=len(self.commits) if resident else None,
        )

    def list_parameters(self, request, context):
        parameters = [{"name": n, "shape": s, "dtype": d} for n, (d, s, _) in self.parameters.items()]
        return _proto.LIST_PARAMETERS.response(parameters=parameters)

    def checksum(self, request, context):
        names = request.names or self.parameters
        sums = [{"name": name, "sha256": hashlib.sha256(self.parameters[name][2]).digest()} for name in names]
        return _proto.CHECKSUM.response(weight_version=self.version, parameters=sums)


class Incoming:
    """One push on its way."""

    def __init__(self, header, weights):
        self.header = header
        self.segment = None
        if header.source.HasField("shared_memory"):
            path = Path("/dev/shm") / header.source.shared_memory.name
            if weights.hide_shared_memory or not path.exists():
                raise Refused(grpc.StatusCode.NOT_FOUND, f"{path.name}: no such segment")
            mode = path.stat().st_mode & 0o777
            assert mode == weights.segment_mode, oct(mode)
            self.segment = path
        self.device_memory = weights.device_memory if header.source.HasField("device_memory") else None
        self.entries, self.buffers, self.spans = [], [], []
        self.declare(header.tensors)

    def declare(self, entries):
        for entry in entries:
            if entry.dtype not in ITEM_SIZES:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{entry.name}: dtype {entry.dtype}")
            self.entries.append(entry)
            self.buffers.append(bytearray(size_of(self.header, entry)))
            if self.segment is not None:  # read at once, as a server may
                assert entry.offset % 64 == 0
                with self.segment.open("rb") as file:
                    file.seek(entry.offset)
                    self.buffers[-1][:] = file.read(len(self.buffers[-1]))
            if self.device_memory is not None:
                allocation = self.device_memory.get((entry.allocation.device_uuid, entry.allocation.handle))
                if allocation is None:
                    raise Refused(grpc.StatusCode.NOT_FOUND, f"{entry.name}: no such allocation")
                assert entry.offset + len(self.buffers[-1]) <= len(allocation)
                self.buffers[-1][:] = bytes(allocation[entry.offset : entry.offset + len(self.buffers[-1])])
            self.spans.append([])
        if self.header.HasField("total_bytes"):
            declared = sum(map(len, self.buffers))
            if declared > self.header.total_bytes:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"total_bytes: {declared} are declared")

    def write(self, chunk):
        buffer = self.buffers[chunk.tensor]
        end = chunk.offset + len(chunk.data)
        if len(chunk.data) > MAX_CHUNK or end > len(buffer):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"chunk at {chunk.offset} of {len(chunk.data)} bytes")
        if any(chunk.offset < e and s < end for s, e in self.spans[chunk.tensor]):
            raise Refused(grpc.StatusCode.INVALID_ARGUMENT, "bytes came twice")
        self.spans[chunk.tensor].append((chunk.offset, end))
        buffer[chunk.offset : end] = chunk.data

    def finish(self):
        tensors = {}
        for entry, buffer, spans in zip(self.entries, self.buffers, self.spans, strict=True):
            data = bytes(buffer)
            if (
                self.segment is None
                and self.device_memory is None
                and sum(end - start for start, end in spans) != len(buffer)
            ):
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{entry.name}: incomplete")
            has_digest = entry.digest or self.device_memory is None
            if has_digest and xxhash.xxh3_128_hexdigest(data) != entry.digest.hex():
                raise Refused(grpc.StatusCode.DATA_LOSS, f"{entry.name}: another digest")
            if entry.name in tensors:
                raise Refused(grpc.StatusCode.INVALID_ARGUMENT, f"{entry.name}: twice")
            tensors[entry.name] = (entry, data)
        return tensors


def size_of(header, entry):
    """Bytes of a tensor as transported."""
    elements = 1
    for size in entry.shape:
        elements *= size
    return entry.payload_bytes if header.kind == 3 else elements * ITEM_SIZES[entry.dtype]


def changed(parameter, entry, payload):
    """A parameter after a DELTA, by the text of the protocol alone."""
    dtype, shape, data = parameter
    assert dtype == entry.dtype and shape == tuple(entry.shape)
    width = np.dtype(f"u{ITEM_SIZES[dtype]}")
    plain = zstandard.ZstdDecompressor().decompress(payload)
    assert len(plain) == entry.changed * (4 + width.itemsize)
    indices = np.cumsum(np.frombuffer(plain, "<u4", entry.changed).astype(np.int64))
    assert (np.diff(indices) > 0).all()
    values = np.frombuffer(data, width).copy()
    values[indices] = np.frombuffer(plain, width, offset=4 * entry.changed)
    return dtype, shape, values.tobytes()


DTYPE_NUMBERS = {np.dtype(np.float32): 1, np.dtype(ml_dtypes.bfloat16): 2, np.dtype(np.float16): 3}


def random_state(rng, count=6, dtype=ml_dtypes.bfloat16, largest=300):
    return {
        f"model.t{i}.weight": rng.standard_normal(rng.integers(1, largest, rng.integers(1, 3))).astype(dtype)
        for i in range(count)
    }


def hold(fake, state):
    """Makes `state` the fake server's parameters."""
    fake.weights.parameters = {
        name: (DTYPE_NUMBERS[array.dtype], array.shape, array.tobytes()) for name, array in state.items()
    }


def held(fake):
    return {name: data for name, (_, _, data) in fake.weights.parameters.items()}


def in_bytes(state):
    return {name: array.tobytes() for name, array in state.items()}
