"""Tensors as bytes, rounding, checksums and deltas, without a server."""

from __future__ import annotations

import hashlib
import struct
import sys
import types

import ml_dtypes
import numpy as np
import pytest
import zstandard

from rollout_client import InvalidArgument, _proto, checksum_of, make_delta
from rollout_client._delta import DeltaTensor
from rollout_client._lora import adapter_parts
from rollout_client._segment import digest_of
from rollout_client._senders import CHUNK_BYTES
from rollout_client._tensors import Layout, bits_of, bytes_of, layout_of
from rollout_client._wire import chunk_request, encoded_entry, header_request, manifest_request

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def random_bits(rng, size):
    """Float32 of every kind: subnormal, infinite, NaN, and halfway between two bfloat16."""
    bits = rng.integers(0, 2**32, size, dtype=np.uint32)
    halfway = rng.random(size) < 0.2
    bits[halfway] = bits[halfway] & 0xFFFF0000 | 0x8000
    return bits.view(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_go_as_their_little_endian_bytes(rng, dtype):
    array = rng.standard_normal((5, 7)).astype(DTYPES[dtype])
    given = bytes_of("a", array)
    assert (given.layout.dtype, given.layout.shape, given.layout.size) == (dtype, (5, 7), array.nbytes)
    assert given.data == array.tobytes()
    assert np.shares_memory(np.frombuffer(given.data, np.uint8), array.view(np.uint8))
    assert bytes_of("a", array.T).data == array.T.copy().tobytes()
    assert bytes_of("a", array[0, 0].reshape(())).layout.shape == ()


def test_big_endian_arrays_are_turned(rng):
    array = rng.standard_normal(9, dtype=np.float32)
    assert bytes_of("a", array.astype(">f4")).data == array.astype("<f4").tobytes()


def test_raw_bytes_must_be_as_many_as_they_say():
    given = bytes_of("a", (bytearray(range(12)), "bfloat16", [2, 3]))
    assert (given.layout.shape, bytes(given.data)) == ((2, 3), bytes(range(12)))
    with pytest.raises(InvalidArgument, match=r"^a: bfloat16 of shape \[2, 3\] takes 12 bytes, got 11"):
        bytes_of("a", (bytes(11), "bfloat16", [2, 3]))


@pytest.mark.parametrize("tensor", [np.zeros(3), np.zeros(3, int), [1.0], 3, None, "text", (b"", "int8", [0])])
def test_what_cannot_be_pushed_is_refused_by_name(tensor):
    with pytest.raises(InvalidArgument, match=r"^the name: "):
        bytes_of("the name", tensor)


class StandInTensor:
    """As much of a torch tensor as is used."""

    def __init__(self, array, dtype, log):
        self.array, self.dtype, self.log, self.shape = array, dtype, log, array.shape

    def detach(self):
        return self

    cpu = contiguous = detach

    def view(self, dtype):
        self.log.append(dtype)
        return StandInTensor(self.array.view(np.int16), dtype, self.log)

    def numpy(self):
        assert self.dtype != "torch.bfloat16", "numpy has no bfloat16"
        return self.array


def test_torch_tensors_lend_their_bits(monkeypatch, rng):
    torch = types.SimpleNamespace(Tensor=StandInTensor, bfloat16="torch.bfloat16", int16="torch.int16")
    monkeypatch.setitem(sys.modules, "torch", torch)
    values, log = rng.standard_normal((3, 4)).astype(ml_dtypes.bfloat16), []
    given = bytes_of("a", StandInTensor(values, "torch.bfloat16", log))
    assert (given.layout.dtype, given.data, log) == ("bfloat16", values.tobytes(), ["torch.int16"])
    wide = rng.standard_normal((3, 4), dtype=np.float32)
    assert bytes_of("a", StandInTensor(wide, "torch.float32", log)).data == wide.tobytes()


def test_the_package_imports_neither_torch_nor_peft():
    import subprocess

    code = "import sys, rollout_client; print([m for m in ('torch', 'peft', 'ml_dtypes') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize("target", DTYPES)
def test_rounding_is_that_of_ml_dtypes(rng, source, target):
    array = random_bits(rng, 100_000)
    with np.errstate(all="ignore"):
        array = array.astype(DTYPES[source])
        expected = array.astype(np.float32).astype(DTYPES[target])
    bits = bits_of("a", array, target)
    is_nan = np.isnan(expected.astype(np.float32))
    assert is_nan.any() and not is_nan.all()
    found = bits.view(DTYPES[target])
    assert (np.isnan(found.astype(np.float32)) == is_nan).all()
    assert (bits[~is_nan] == expected.view(bits.dtype)[~is_nan]).all()


def test_checksum_is_of_the_rounded_bytes(rng):
    array = rng.standard_normal((6, 8), dtype=np.float32)
    rounded = array.astype(ml_dtypes.bfloat16)
    assert checksum_of(array, "bfloat16") == hashlib.sha256(rounded.tobytes()).hexdigest()
    assert checksum_of(rounded, "bfloat16") == checksum_of(array, "bfloat16") != checksum_of(array, "float32")
    assert checksum_of(rounded, "float32") == hashlib.sha256(rounded.astype(np.float32).tobytes()).hexdigest()
    with pytest.raises(InvalidArgument, match="int8"):
        checksum_of(array, "int8")


def test_digest_is_the_canonical_one():
    """Of the empty input, as the specification of XXH3 has it."""
    assert digest_of(b"").hex() == "99aa06d3014798d86001c324468d497f"


@pytest.mark.parametrize("size", [0, 1, 127, 128, 16_384, CHUNK_BYTES])
@pytest.mark.parametrize(("tensor", "offset"), [(0, 0), (127, 128), (70_000, 2**40 + 1), (2**32 - 1, 2**64 - 1)])
def test_chunks_by_hand_are_the_librarys(rng, size, tensor, offset):
    data = rng.bytes(size)
    request = _proto.UPDATE.request.FromString(b"".join(chunk_request(tensor, offset, memoryview(data))))
    assert request == _proto.UPDATE.request(chunk={"tensor": tensor, "offset": offset, "data": data})


@pytest.mark.parametrize("shape", [(), (1,), (128, 300), (1, 2**20, 7)])
@pytest.mark.parametrize(("offset", "changed", "payload"), [(0, 0, 0), (127, 0, 0), (2**40, 5, 2**33 + 1)])
def test_declarations_by_hand_are_the_librarys(shape, offset, changed, payload):
    entries, expected = [], []
    for number, (dtype, digest) in enumerate([("float32", b""), ("bfloat16", bytes(16)), ("float16", b"x" * 16)]):
        name = "model.é" + "n" * (200 * number)
        more = {"offset": offset, "changed": changed, "payload_bytes": payload}
        entries.append(encoded_entry(name, Layout(dtype, shape), digest, **more))
        expected.append(_proto.Tensor(name=name, dtype=number + 1, shape=shape, digest=digest, **more))
        assert _proto.Tensor.FromString(entries[-1]) == expected[-1]
    header = _proto.UpdateHeader(kind=2, new_version=7, total_bytes=2**40)
    request = _proto.UPDATE.request
    assert request.FromString(manifest_request(entries)) == request(manifest={"tensors": expected})
    assert request.FromString(header_request(header, [])) == request(header=header)
    header.tensors.extend(expected[:1])
    whole = request.FromString(header_request(header, entries[1:]))
    assert list(whole.header.tensors) == expected and whole.header.total_bytes == 2**40


def apply_delta(delta: DeltaTensor, old):
    """As the text of `DeltaTensor.payload` says, one element at a time."""
    plain = zstandard.ZstdDecompressor().decompress(delta.payload)
    flat, index = old.reshape(-1).copy(), 0
    values = np.frombuffer(plain, old.dtype, offset=4 * delta.changed)
    assert len(values) == delta.changed
    for i, gap in enumerate(struct.unpack_from(f"<{delta.changed}I", plain)):
        assert i == 0 or gap > 0
        index += gap
        flat[index] = values[i]
    return flat.reshape(old.shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deltas_turn_old_into_new_bit_for_bit(rng, dtype):
    old, new = {}, {}
    for i in range(12):
        shape = tuple(rng.integers(1, 40, rng.integers(1, 4)))
        old[f"t{i}"] = random_bits(rng, int(np.prod(shape))).reshape(shape)
        changes = rng.random(shape) < [0.0, 0.01, 1.0][i % 3]
        new[f"t{i}"] = np.where(changes, random_bits(rng, int(np.prod(shape))).reshape(shape), old[f"t{i}"])
    served = {name: bits_of(name, tensor, dtype).reshape(tensor.shape) for name, tensor in old.items()}
    wanted = {name: bits_of(name, tensor, dtype).reshape(tensor.shape) for name, tensor in new.items()}
    deltas = list(make_delta(old, new, dtype))
    for delta in deltas:
        assert delta.changed == (served[delta.name] != wanted[delta.name]).sum() > 0
        assert (delta.dtype, delta.shape) == (dtype, old[delta.name].shape)
        served[delta.name] = apply_delta(delta, served[delta.name])
    assert all((served[name] == wanted[name]).all() for name in old)
    unchanged = old.keys() - {delta.name for delta in deltas}
    assert unchanged == {
        name for name in old if (bits_of(name, old[name], dtype) == bits_of(name, new[name], dtype)).all()
    }


def test_changes_below_the_served_precision_cost_nothing():
    old = {"a": np.full((4, 4), 1.0, np.float32)}
    new = {"a": np.full((4, 4), 1.0 + 2**-12, np.float32)}
    assert list(make_delta(old, new, "bfloat16")) == []
    assert [delta.changed for delta in make_delta(old, new, "float32")] == [16]
    # Zeros of both signs are equal as numbers, but not as weights bit for bit.
    assert [d.changed for d in make_delta({"a": np.zeros(3, np.float32)}, {"a": -np.zeros(3, np.float32)})] == [3]


def test_deltas_need_the_same_names_and_shapes():
    a = np.zeros((2, 3), np.float32)
    with pytest.raises(InvalidArgument, match=r"^b: is in new only"):
        list(make_delta({"a": a}, {"a": a, "b": a}))
    with pytest.raises(InvalidArgument, match=r"^a: has shape \[2, 3\] in old and \[3, 2\] in new"):
        list(make_delta({"a": a}, {"a": a.T}))


class Config:
    """A `LoraConfig` is turned into JSON by its `to_dict`."""

    def to_dict(self):
        return {"r": 4, "target_modules": {"v_proj", "q_proj"}, "lora_alpha": 8}


def test_configurations_become_json():
    import json

    expected = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_alpha": 8}
    tensors = {"a": np.zeros(1)}
    for config in (Config(), Config().to_dict(), json.dumps(expected)):
        assert json.loads(adapter_parts(tensors, config)[1]) == expected
    assert adapter_parts(None, None) == adapter_parts({}, None) == ({}, "")


@pytest.mark.parametrize(
    ("adapter", "config", "says"),
    [
        ({"a": np.zeros(1)}, None, "config: needed"),
        (3, {}, "adapter: "),
        ({}, 3, "config: "),
        ({}, {"a": object()}, "config: "),
    ],
)
def test_what_is_no_adapter_is_refused(adapter, config, says):
    with pytest.raises(InvalidArgument, match=f"^{says}"):
        adapter_parts(adapter, config)


class PeftModel:
    """As much of a PEFT model as is used."""

    active_adapter = "second"
    peft_config = types.MappingProxyType({"first": None, "second": Config()})

    def state_dict(self):
        return {}


def test_a_peft_model_brings_its_active_adapter_and_its_config(monkeypatch):
    asked = []

    def get_peft_model_state_dict(model, **options):
        asked.append(options)
        return {"base_model.model.q_proj.lora_A.weight": np.ones((4, 2), np.float32)}

    peft = types.SimpleNamespace(get_peft_model_state_dict=get_peft_model_state_dict)
    monkeypatch.setitem(sys.modules, "peft", peft)
    tensors, config = adapter_parts(PeftModel(), None)
    assert list(tensors) == ["base_model.model.q_proj.lora_A.weight"] and '"r": 4' in config
    assert asked == [{"adapter_name": "second", "save_embedding_layers": False}]
    with pytest.raises(InvalidArgument, match=r"^config: "):
        adapter_parts(PeftModel(), {})
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InvalidArgument, match="PEFT cannot be imported"):
        adapter_parts(PeftModel(), None)


def test_layout_is_told_without_the_values():
    class Elsewhere:
        dtype, shape = "torch.bfloat16", (3, 4)

    assert (layout_of("a", Elsewhere()).size, layout_of("a", Elsewhere()).dtype) == (24, "bfloat16")
