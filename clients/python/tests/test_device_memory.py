"""Pushes whose tensors stay in device memory: what the server is told of them, and when they go another way.

The driver is one of this file, over arrays of numpy. The last test asks the real one, where there is a GPU or the
emulator of one (LD_LIBRARY_PATH).
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import subprocess
import sys
import weakref
from contextlib import contextmanager

import ml_dtypes
import numpy as np
import pytest

from fake_weights import held, hold, in_bytes, random_state
from rollout_client import (
    AsyncRolloutClient,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RolloutClient,
    _cuda_ipc,
    _proto,
)
from rollout_client._driver import Driver, DriverError

UUIDS = ["0a0b0c0d-0000-4000-8000-000000000001", "0a0b0c0d-0000-4000-8000-000000000002"]
CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}


class Gpus:
    """Two devices. Allocations are arrays; an address is the number of its allocation times 2**32, plus the offset."""

    def __init__(self):
        self.allocations = {}
        self.device = {}
        self.used = []
        self.synchronized = []
        self.without_handle = set()

    def allocate(self, size, device=0):
        start = (len(self.allocations) + 1) << 32
        self.allocations[start], self.device[start] = np.zeros(size, np.uint8), device
        return start

    def device_of(self, address):
        return self.device[address >> 32 << 32]

    def uuid_of(self, device):
        return UUIDS[device]

    def allocation_of(self, address):
        assert self.used, "no context is in use"
        start = address >> 32 << 32
        return start, len(self.allocations[start])

    def handle_of(self, start):
        assert self.used == [self.device[start]]
        if start in self.without_handle:
            raise DriverError("cuIpcGetMemHandle: CUDA_ERROR_INVALID_VALUE (1)")
        return start.to_bytes(64, "big")

    def synchronize(self):
        self.synchronized.extend(self.used)

    @contextmanager
    def on(self, device):
        self.used.append(device)
        try:
            yield
        finally:
            self.used.pop()

    def opened(self):
        """What the fake server can open."""
        return {
            (UUIDS[self.device[start]], start.to_bytes(64, "big")): memory for start, memory in self.allocations.items()
        }


class GpuTensor:
    """What the client asks of a tensor of torch that lies on a GPU."""

    is_cuda = True

    def __init__(self, gpus, array, device=0, at=None, contiguous=True):
        self._gpus, self.dtype, self.shape, self._is_contiguous = gpus, array.dtype, array.shape, contiguous
        self._at = gpus.allocate(array.nbytes, device) if at is None else at
        start, offset = self._at >> 32 << 32, self._at & 0xFFFFFFFF
        gpus.allocations[start][offset : offset + array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)

    def detach(self):
        return self

    def is_contiguous(self):
        return self._is_contiguous

    def contiguous(self):
        return GpuTensor(self._gpus, np.asarray(self))

    def data_ptr(self):
        return self._at

    def __array__(self, dtype=None, copy=None):
        start, offset = self._at >> 32 << 32, self._at & 0xFFFFFFFF
        size = int(np.prod(self.shape)) * self.dtype.itemsize
        return self._gpus.allocations[start][offset : offset + size].view(self.dtype).reshape(self.shape)


@pytest.fixture
def gpus(fake, monkeypatch):
    gpus = Gpus()
    monkeypatch.setattr(_cuda_ipc, "driver", lambda: gpus)
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response(device_uuids=UUIDS)
    return gpus


@pytest.fixture
def state(fake, rng):
    state = random_state(rng)
    hold(fake, state)
    return state


def on_gpus(gpus, state, **options):
    return {name: GpuTensor(gpus, array, **options) for name, array in state.items()}


def packed(gpus, state, device=0):
    """All tensors in one allocation, as torch's allocator packs them."""
    start = gpus.allocate(sum(array.nbytes + 512 for array in state.values()), device)
    tensors, offset = {}, 512
    for name, array in state.items():
        tensors[name] = GpuTensor(gpus, array, at=start + offset)
        offset += -(-array.nbytes // 512) * 512
    return tensors


def new_of(rng, state):
    return {name: rng.standard_normal(array.shape).astype(array.dtype) for name, array in state.items()}


@pytest.mark.parametrize("transport", ["auto", "device_memory"])
def test_tensors_of_one_allocation_are_read_where_they_lie(call, fake, gpus, state, rng, transport):  # noqa: PLR0917
    new = new_of(rng, state)
    tensors = packed(gpus, new)
    fake.weights.device_memory = gpus.opened()
    result = call(lambda client: client.push_full(tensors, version=7, transport=transport))
    assert held(fake) == in_bytes(new)
    (commit,) = fake.weights.commits
    assert commit.header.source.HasField("device_memory") and commit.header.total_bytes == result.bytes
    entries = [entry for entry, _ in commit.tensors.values()]
    assert {entry.allocation.device_uuid for entry in entries} == {UUIDS[0]}
    assert len({entry.allocation.handle for entry in entries}) == 1 and not any(entry.digest for entry in entries)
    assert (result.weight_version, gpus.synchronized, gpus.used) == (7, [0], [])


def test_tensors_lie_on_several_devices_and_are_declared_in_several_messages(fake, gpus, state, rng, monkeypatch):
    monkeypatch.setattr(_cuda_ipc, "_DECLARED", 2)
    new = new_of(rng, state)
    tensors = {name: GpuTensor(gpus, array, device=i % 2) for i, (name, array) in enumerate(new.items())}
    fake.weights.device_memory = gpus.opened()
    with RolloutClient(fake.address) as client:
        client.push_full(tensors)
    assert held(fake) == in_bytes(new)
    assert len(fake.weights.commits[0].header.tensors) == 2
    assert sorted(gpus.synchronized) == [0, 1]


def test_what_has_gaps_is_copied_on_the_device(fake, gpus, state, rng):
    new = new_of(rng, state)
    tensors = on_gpus(gpus, new, contiguous=False)
    fake.weights.device_memory = LateMemory(gpus)
    with RolloutClient(fake.address) as client:
        client.push_full(tensors, transport="device_memory")
    assert held(fake) == in_bytes(new)


class LateMemory:
    """What can be opened at the time of the push."""

    def __init__(self, gpus):
        self._gpus = gpus

    def get(self, key):
        return self._gpus.opened().get(key)


@pytest.mark.parametrize("transport", ["auto", "device_memory"])
def test_an_adapter_is_read_where_it_lies(call, fake, gpus, rng, transport):
    adapter = {
        f"base_model.model.model.layers.{i}.self_attn.q_proj.lora_{part}.weight": rng.standard_normal(shape, np.float32)
        for i in range(3)
        for part, shape in (("A", (2, 8)), ("B", (8, 2)))
    }
    tensors = packed(gpus, adapter, device=1)
    fake.weights.device_memory = gpus.opened()
    call(lambda client: client.push_lora(tensors, CONFIG, transport=transport))
    (commit,) = fake.weights.commits
    assert {name: data for name, (_, data) in commit.tensors.items()} == in_bytes(adapter)
    assert commit.header.source.HasField("device_memory") and gpus.synchronized == [1]


def hidden_by_the_server(fake, gpus, tensors):
    fake.weights.device_memory = {}


def without_devices(fake, gpus, tensors):
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response()


def without_handles(fake, gpus, tensors):
    gpus.without_handle = set(gpus.allocations)


def on_another_device(fake, gpus, tensors):
    fake.answers["GetInfo"] = lambda request, context: _proto.GET_INFO.response(device_uuids=UUIDS[1:])


def partly_on_the_host(fake, gpus, tensors):
    name = next(iter(tensors))
    tensors[name] = np.asarray(tensors[name])


@pytest.mark.parametrize(
    ("hinder", "expected", "says"),
    [
        (hidden_by_the_server, NotFound, "no such allocation"),
        (without_devices, InvalidArgument, "the server computes on none"),
        (without_handles, InvalidArgument, r"model\.t0\.weight: its memory has no handle.*expandable_segments"),
        (on_another_device, InvalidArgument, f"lies on device {UUIDS[0]}"),
        (partly_on_the_host, InvalidArgument, r"model\.t0\.weight: is not in the memory of a GPU"),
    ],
)
def test_memory_that_cannot_be_shared_is_an_error(call, fake, gpus, state, rng, hinder, expected, says):  # noqa: PLR0917
    tensors = on_gpus(gpus, new := new_of(rng, state))
    fake.weights.device_memory = gpus.opened()
    hinder(fake, gpus, tensors)
    with pytest.raises(expected, match=says):
        call(lambda client: client.push_full(tensors, transport="device_memory"))
    assert held(fake) == in_bytes(state)
    call(lambda client: client.push_full(tensors, version=4))
    assert held(fake) == in_bytes(new) and fake.weights.version == 4
    assert not fake.weights.commits[-1].header.source.HasField("device_memory")


def test_a_server_that_cannot_open_memory_is_asked_once(fake, gpus, state, rng, caplog):
    tensors = on_gpus(gpus, new_of(rng, state))
    fake.weights.device_memory = {}
    caplog.set_level("INFO", "rollout_client")
    with RolloutClient(fake.address) as client:
        for version in (1, 2, 3):
            client.push_full(tensors, version=version)
    assert fake.weights.version == 3
    assert len(gpus.synchronized) == 1, "named to the server once"
    assert caplog.text.count("device memory cannot be shared with the server") == 1


def test_a_device_that_has_failed_is_an_error_of_the_push(fake, gpus, state, rng, monkeypatch):
    def broken():
        raise DriverError("cuCtxSynchronize: CUDA_ERROR_ECC_UNCORRECTABLE (214)")

    monkeypatch.setattr(gpus, "synchronize", broken)
    tensors = on_gpus(gpus, new_of(rng, state))
    with RolloutClient(fake.address) as client, pytest.raises(InvalidArgument, match=r"device 0 has failed.*ECC"):
        client.push_full(tensors, transport="device_memory")


def test_errors_of_the_server_are_raised_and_not_tried_otherwise(fake, gpus, state, rng):
    tensors = packed(gpus, new_of(rng, state))
    fake.weights.device_memory = gpus.opened()
    del tensors[next(iter(tensors))]
    with RolloutClient(fake.address) as client, pytest.raises(InvalidArgument, match="missing"):
        client.push_full(tensors)
    assert fake.weights.broken == 1


def test_what_an_iterator_gathers_is_kept_only_if_that_is_asked_for(fake, gpus, state, rng):
    new, alive = new_of(rng, state), []

    def gathered():
        for name, array in new.items():
            gc.collect()
            alive.append(sum(reference() is not None for reference in references))
            tensor = GpuTensor(gpus, array)
            references.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    fake.weights.device_memory = LateMemory(gpus)
    with RolloutClient(fake.address) as client:
        for transport, source, most in [("auto", False, 1), ("device_memory", True, len(new) - 1)]:
            references: list[weakref.ref[GpuTensor]] = []
            alive.clear()
            client.push_full(gathered(), transport=transport)
            assert held(fake) == in_bytes(new)
            assert fake.weights.commits[-1].header.source.HasField("device_memory") is source
            assert max(alive) <= most and (not source or alive[-1] == most)


def test_a_push_that_is_written_bit_by_bit_names_its_memory_at_the_commit(fake, gpus, state, rng):
    new = new_of(rng, state)
    fake.weights.device_memory = LateMemory(gpus)
    with RolloutClient(fake.address) as client:
        with client.begin_push(version=3, transport="device_memory") as push:
            for name, array in new.items():
                push.write(f"_orig_mod.{name}", GpuTensor(gpus, array))
            with pytest.raises(InvalidArgument, match="on the host: is not in the memory"):
                push.write("on the host", next(iter(new.values())))
            assert not fake.weights.messages
        assert held(fake) == in_bytes(new) and push.receipt.weight_version == 3
        with pytest.raises(KeyboardInterrupt), client.begin_push(transport="device_memory") as push:
            push.write("model.t0.weight", GpuTensor(gpus, np.zeros(4, ml_dtypes.bfloat16)))
            raise KeyboardInterrupt
        adapter = rng.standard_normal((2, 8), np.float32)
        with client.begin_push("lora", CONFIG, transport="device_memory") as push:
            push.write("base_model.model.x.q_proj.lora_A.weight", GpuTensor(gpus, adapter))
    assert [commit.header.kind for commit in fake.weights.commits] == [2, 1]


def test_a_delta_and_the_writes_of_the_asyncio_client_are_of_this_process(fake, gpus, state):
    with RolloutClient(fake.address) as client:
        with pytest.raises(InvalidArgument, match="a delta is made in this process"):
            client.push_delta(state, state, base_version=0, transport="device_memory")
        with pytest.raises(FailedPrecondition), client.begin_push("lora", CONFIG, transport="device_memory") as push:
            push.rollback()
            push.commit()

    async def main():
        async with AsyncRolloutClient(fake.address) as client:
            client.begin_push(transport="device_memory")

    with pytest.raises(InvalidArgument, match="device_memory"):
        asyncio.run(main())
    assert not fake.weights.messages


OTHER = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    assert code == 0, (name, code)
context, at = ctypes.c_void_p(), ctypes.c_uint64()
call("cuInit", 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
call("cuCtxSetCurrent", context)
class Handle(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 64)]
handle = Handle.from_buffer_copy(bytes.fromhex(sys.argv[1]))
call("cuIpcOpenMemHandle_v2", ctypes.byref(at), handle, 1)
out = ctypes.create_string_buffer(int(sys.argv[3]))
call("cuMemcpyDtoH_v2", out, ctypes.c_uint64(at.value + int(sys.argv[2])), len(out))
call("cuIpcCloseMemHandle", at)
sys.stdout.write(out.raw.hex())
"""


def test_the_driver_names_memory_that_another_process_reads(monkeypatch):
    try:
        driver = Driver()
    except DriverError as error:
        pytest.skip(f"no driver: {error}")
    cuda, at, data = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64(), bytes(range(200)) * 7
    with driver.on(0):
        assert cuda.cuMemAlloc_v2(ctypes.byref(at), 5000) == 0
        assert cuda.cuMemcpyHtoD_v2(ctypes.c_uint64(at.value + 1024), data, len(data)) == 0

    class Tensor(GpuTensor):
        def __init__(self):
            self.dtype, self.shape, self._at, self._is_contiguous = np.dtype(np.float32), (350,), at.value + 1024, True

    exported = _cuda_ipc.IpcExporter([driver.uuid_of(0)]).export("t", Tensor())
    assert (exported.device, exported.offset, exported.allocation.device_uuid) == (0, 1024, driver.uuid_of(0))
    command = [sys.executable, "-c", OTHER, exported.allocation.handle.hex(), str(exported.offset), str(len(data))]
    read = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert read.stdout == data.hex()
    with driver.on(0):
        driver.synchronize()
        assert cuda.cuMemFree_v2(at) == 0
    with pytest.raises(InvalidArgument, match="t: its memory has no handle"):
        _cuda_ipc.IpcExporter([driver.uuid_of(0)]).export("t", Tensor())
