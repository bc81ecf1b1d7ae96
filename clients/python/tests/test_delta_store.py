"""Delta stores: versions in files, served by naming one, whatever the server has; and a fleet that catches up there."""

from __future__ import annotations

import contextlib
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
import xxhash
import zstandard

from fleets import CURRENT, FLAGS, LOST, wait_until, wait_until_true
from models import (
    checksums,
    partly,
    perturbed,
    random_adapter,
    read_model,
    read_safetensors,
    write_safetensors,
)
from proxies import Proxy
from rollout_client import (
    Aborted,
    DataLoss,
    DeltaStore,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ServerProcess,
)
from rollout_client.fleet import Fleet
from serving import FIXTURES, PUSH_MODEL, outputs, seen, server
from vllm_answers import ask as ask_http

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@pytest.fixture(params=[("qwen2", 1, "bfloat16"), ("qwen2", 2, "bfloat16"), ("llama-tied", 2, "float32")], ids=str)
def pair(request, binary, tmp_path):
    """A server, and its checkpoint as arrays; its files are below `tmp_path`."""
    model, tp, dtype = request.param
    base = read_model(FIXTURES / model, DTYPES[dtype])
    with server(binary, FIXTURES / model, "--tp", tp, "--dtype", dtype, "--weights-dir", tmp_path) as client:
        yield client, base, dtype


def trajectory(rng, base, steps):
    """The states of a training run, of which each changes a few elements."""
    states = [base]
    for _ in range(steps):
        states.append(partly(rng, states[-1], perturbed(rng, states[-1]), 0.03))
    return states


def saved(directory, states, dtype, **options):
    """A store of these states, from version 1 on."""
    store = DeltaStore(directory, dtype=dtype, **options)
    for version, state in enumerate(states, 1):
        store.save(state, version)
    return store


def test_versions_are_streamed_deltas_and_full_pushes(pair, rng, tmp_path):
    client, base, dtype = pair
    states = trajectory(rng, base, 4)
    saved(tmp_path / "run", states, dtype)
    expected = []
    for version, state in enumerate(states, 1):
        client.push_full(state, version=version, force_version=True)
        expected.append(seen(client))
    client.push_full(states[0], version=1, force_version=True)
    for version in range(2, 6):
        client.push_delta(states[version - 2], states[version - 1], base_version=version - 1, version=version)
        assert seen(client) == expected[version - 1]
    # One after the other, as a trainer pushes them: the first is whole, and the others take only their changes.
    results = [client.push_directory("run", "delta", version=v, force_version=v == 1) for v in range(1, 6)]
    assert [result.weight_version for result in results] == [1, 2, 3, 4, 5]
    assert seen(client) == expected[4]
    whole, deltas = results[0].bytes, [result.bytes for result in results[1:]]
    assert max(deltas) < whole / 4
    # From any version that serves to any other: the same bits, and the same digest.
    for first, last in [(1, 5), (2, 4), (4, 2), (3, 3)]:
        client.push_directory("run", "delta", version=first, force_version=True)
        assert seen(client) == expected[first - 1]
        result = client.push_directory(tmp_path / "run", "delta", version=last, force_version=True)
        assert seen(client) == expected[last - 1]
        assert (result.digest, result.weight_version) == (results[last - 1].digest, last)
        between = sum(deltas[first - 1 : last - 1])
        assert result.bytes == (between if first <= last else whole + sum(deltas[: last - 1]))
    # Other pushes make the policy another one than the store's, so that the next version begins with the whole one.
    client.push_full(base, version=10)
    assert client.push_directory("run", "delta", version=5, force_version=True).bytes == whole + sum(deltas)
    assert seen(client) == expected[4]


def test_a_merged_adapter_is_no_part_of_a_version(binary, rng, tmp_path):
    base = read_model(PUSH_MODEL)
    states = trajectory(rng, base, 2)
    saved(tmp_path / "run", states, "bfloat16")
    with server(binary, PUSH_MODEL, "--weights-dir", tmp_path) as client:
        whole = client.push_directory("run", "delta", version=1).bytes
        client.push_lora(*random_adapter(rng, base))
        assert client.push_directory("run", "delta", version=3, force_version=True).bytes > whole
        assert client.checksum() == checksums(states[2], "bfloat16")
        # The base below an adapter is still the version, once the adapter is taken out.
        client.push_directory("run", "delta", version=2, force_version=True)
        client.push_lora(*random_adapter(rng, base))
        client.push_lora(None)
        assert client.push_directory("run", "delta", version=3, force_version=True).bytes < whole
        assert client.checksum() == checksums(states[2], "bfloat16")
        # After a sleep that has dropped the policy, the store brings it back.
        client.sleep(2)
        client.wake(["weights"])
        assert client.push_directory("run", "delta", version=3).bytes > whole
        client.wake()
        assert client.checksum() == checksums(states[2], "bfloat16")


def test_what_is_wrong_is_refused_and_changes_nothing(binary, rng, tmp_path):
    base = read_model(PUSH_MODEL)
    states = trajectory(rng, base, 3)
    saved(tmp_path / "run", states, "bfloat16")
    with server(binary, PUSH_MODEL, "--weights-dir", tmp_path) as client:
        client.push_directory("run", "delta", version=2)
        before = seen(client)

        def refused(error, match, **options):
            with pytest.raises(error, match=match):
                client.push_directory(options.pop("path", "run"), "delta", **options)
            assert seen(client) == before

        refused(InvalidArgument, "version: missing")
        refused(NotFound, "version 9 does not exist in run", version=9)
        refused(NotFound, "nowhere", path="nowhere", version=3)
        refused(InvalidArgument, "leads out of --weights-dir", path="../run", version=3)
        refused(InvalidArgument, "outside --weights-dir", path="/etc", version=3)
        refused(FailedPrecondition, "not above 2", version=1)
        refused(Aborted, "expected_version: 1", version=4, expected_version=1)
        shard = tmp_path / "run" / "weight_v000004" / "model-00000-of-00001.safetensors"
        good = shard.read_bytes()
        shard.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        refused(DataLoss, r"run/weight_v000004/model-00000-of-00001.safetensors: tensor .* XXH3-128", version=4)
        shard.write_bytes(good[:-1])
        refused(InvalidArgument, "weight_v000004/model-00000-of-00001.safetensors: not a whole", version=4)
        shard.unlink()
        refused(NotFound, "run/weight_v000004/model-00000-of-00001.safetensors does not exist", version=4)
        shard.write_bytes(good)
        shutil.rmtree(tmp_path / "run" / "weight_v000003")
        refused(NotFound, "version 3 does not exist in run", version=4)
        # The one that is there is not touched by the others.
        client.push_directory("run", "delta", version=2, force_version=True)
        assert seen(client) == before
        assert client.status().memory.entries.get("update_staging", 0) == 0
    with server(binary, PUSH_MODEL) as client, pytest.raises(InvalidArgument, match="start it with --weights-dir"):
        client.push_directory("run", "delta", version=1)


def test_deltas_of_the_servers_own_checkpoint(binary, rng, tmp_path):
    base = read_model(PUSH_MODEL)
    states = trajectory(rng, base, 2)
    store = DeltaStore(tmp_path / "run")
    for version, state in enumerate(states):
        store.save(state, version)
    shutil.rmtree(tmp_path / "run" / "weight_v000000")
    with server(binary, PUSH_MODEL, "--weights-dir", tmp_path) as client:
        client.push_directory("run", "delta", version=2)
        assert client.checksum() == checksums(states[2], "bfloat16")
        client.push_full(base)
        with pytest.raises(FailedPrecondition, match="no version 0"):
            client.push_directory("run", "delta", version=2, force_version=True)
        client.sleep(2)
        client.wake(reload=True)
        client.push_directory("run", "delta", version=1)
        assert client.checksum() == checksums(states[1], "bfloat16")


def test_files_of_trl(binary, rng, tmp_path):
    """The layout of `delta_engine.py` of TRL's branch delta-weight-sync-v3 (July 2026): anchors, and sparse patches."""
    base = read_model(PUSH_MODEL)
    states = trajectory(rng, base, 3)
    (tmp_path / "run" / "anchors").mkdir(parents=True)
    (tmp_path / "run" / "deltas").mkdir()
    write_safetensors(tmp_path / "run" / "anchors" / "step_000001.safetensors", states[0])
    for version in (2, 3, 4):
        encoding = "raw" if version == 3 else "gap_delta"
        path = tmp_path / "run" / "deltas" / f"step_{version:06d}.safetensors"
        write_patch(path, states[version - 2], states[version - 1], version, encoding)
    with server(binary, PUSH_MODEL, "--weights-dir", tmp_path) as client:
        for version in (2, 4, 1):
            client.push_directory("run", "delta", version=version, force_version=True)
            assert client.checksum() == checksums(states[version - 1], "bfloat16")


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("tp", [1, 2])
def test_files_of_slime(binary, rng, tmp_path, encoding, tp):
    """The layout of `update_weight_from_disk_delta.py` of slime (commit 624b824a, August 2026): changed bytes of each
    tensor, with a digest of its new ones. Version 0 is the checkpoint that the engines are started with."""
    states = trajectory(rng, read_model(PUSH_MODEL), 4)
    for version in range(1, 5):
        write_slime(tmp_path / "run", states[version - 1], states[version], version, encoding)
    with server(binary, PUSH_MODEL, "--weights-dir", tmp_path, "--tp", tp) as client:
        for version in (1, 2, 4):
            client.push_directory("run", "delta", version=version)
            assert client.checksum() == checksums(states[version], "bfloat16")
        before = seen(client)
        client.push_full(states[0], version=5)
        with pytest.raises(FailedPrecondition, match="no version 0"):
            client.push_directory("run", "delta", version=4, force_version=True)
        # A version that is published whole makes the chain independent of what serves.
        shutil.rmtree(tmp_path / "run" / "weight_v000003")
        (tmp_path / "run" / "weight_v000003").mkdir()
        write_safetensors(tmp_path / "run" / "weight_v000003" / "model-00000-of-00001.safetensors", states[3])
        result = client.push_directory("run", "delta", version=4, force_version=True)
        assert seen(client) == before
        # A damaged file is noticed before anything changes.
        shard = tmp_path / "run" / "weight_v000004" / "model-00000-of-00001.safetensors"
        data = shard.read_bytes()
        shard.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        client.push_directory("run", "delta", version=3, force_version=True)
        with pytest.raises((DataLoss, InvalidArgument), match=r"weight_v000004/model-00000-of-00001\.safetensors"):
            client.push_directory("run", "delta", version=4)
        assert client.checksum() == checksums(states[3], "bfloat16")
        shard.write_bytes(data)
        assert client.push_directory("run", "delta", version=4).digest == result.digest
        assert seen(client) == before


def write_slime(root, old, new, version, encoding):
    """What `_encode_delta` and `_write_delta_files` write."""
    path = root / f"weight_v{version:06d}"
    path.mkdir(parents=True)
    tensors, sums = {}, {}
    for name in old:
        before, after = (np.frombuffer(state[name].tobytes(), np.uint8) for state in (old, new))
        changed = before != after
        if not changed.any():
            continue
        if encoding == "xor":
            raw = before ^ after
        else:
            positions = np.flatnonzero(changed).astype("<u4")
            count = np.array([positions.size], "<u4")
            raw = np.concatenate([count.view(np.uint8), positions.view(np.uint8), after[changed]])
        tensors[name] = np.frombuffer(zstandard.ZstdCompressor(level=1).compress(raw), np.uint8)
        sums[name] = xxhash.xxh3_128(after).hexdigest()
    file = "model-00000-of-00001.safetensors"
    metadata = {
        "version": f"{version:06d}",
        "base_version": f"{version - 1:06d}",
        "delta_encoding": encoding,
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }
    write_file(path / file, tensors, sums, dict.fromkeys(tensors, "U8"))
    index = {"metadata": metadata, "weight_map": dict.fromkeys(tensors, file)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_file(path, tensors, metadata, dtypes):
    header, end = {"__metadata__": metadata}, 0
    for name, array in tensors.items():
        header[name] = {"dtype": dtypes[name], "shape": array.shape, "data_offsets": [end, end := end + array.nbytes]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))


def write_patch(path, old, new, version, encoding):
    """What `encode_patch` writes: for each parameter its changed indices (`.idx`) and their values (`.val`)."""
    tensors = {}
    for name in old:
        before, after = old[name].reshape(-1).view(np.uint16), new[name].reshape(-1).view(np.uint16)
        indices = np.flatnonzero(before != after)
        gaps = np.diff(indices, prepend=-1) - 1
        small = encoding == "gap_delta" and gaps.max(initial=0) < 1 << 16
        encoded = indices.astype(np.int32) if encoding == "raw" else gaps.astype(np.uint16 if small else np.uint32)
        tensors |= {f"{name}.val": after[indices], f"{name}.idx": encoded}
    names = {"uint16": "U16", "uint32": "U32", "int32": "I32"}
    dtypes = {name: "BF16" if name.endswith(".val") else names[array.dtype.name] for name, array in tensors.items()}
    metadata = {"sparse": "True", "model_version": str(version), "encoding": encoding}
    write_file(path, tensors, metadata, dtypes)


def test_a_store_is_a_directory_that_others_can_read(rng, tmp_path):
    base = read_model(PUSH_MODEL)
    states = trajectory(rng, base, 4)
    store = saved(tmp_path / "run", states, "bfloat16", whole_every=3)
    assert store.versions() == [1, 2, 3, 4, 5]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"weight_v{v:06d}" for v in range(1, 6)]
    for version in (1, 5):
        path = tmp_path / "run" / f"weight_v{version:06d}" / "model-00000-of-00001.safetensors"
        found = read_safetensors(path)
        assert found.keys() == base.keys()
        assert all(np.array_equal(found[name], states[version - 1][name]) for name in base)
    directory = tmp_path / "run" / "weight_v000003"
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "version": "000003",
        "base_version": "000002",
        "delta_encoding": "elements",
        "compression_format": "zstd",
        "checksum_format": "xxh3-128",
        "dtype": "bfloat16",
    }
    shard = (directory / "model-00000-of-00001.safetensors").read_bytes()
    sums = json.loads(shard[8 : 8 + int.from_bytes(shard[:8], "little")])["__metadata__"]
    payloads = read_safetensors(directory / "model-00000-of-00001.safetensors")
    assert sums == {name: xxhash.xxh3_128(payload.tobytes()).hexdigest() for name, payload in payloads.items()}
    assert index["weight_map"].keys() == payloads.keys()


def test_a_store_refuses_what_it_cannot_save(rng, tmp_path):
    base = read_model(PUSH_MODEL)
    name = next(iter(base))
    store = DeltaStore(tmp_path)
    with pytest.raises(InvalidArgument, match="empty"):
        store.save({}, 1)
    store.save(base, 1)
    for version in (1, 0, -1, None, "2"):
        with pytest.raises(InvalidArgument, match="version: expected above 1"):
            store.save(base, version)
    with pytest.raises(InvalidArgument, match=rf"{name}: expected shape"):
        store.save({name: base[name][1:]}, 2)
    with pytest.raises(InvalidArgument, match="w: not in the versions before"):
        store.save({"w": base[name]}, 2)
    changed = perturbed(rng, base)

    def breaks():
        yield name, changed[name]
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        store.save(breaks(), 2)
    assert store.versions() == [1] and len(list(tmp_path.iterdir())) == 1
    # A failed save leaves no version behind, so the same version can be saved again.
    path = store.save(iter(changed.items()), 2)
    assert read_safetensors(path / "model-00000-of-00001.safetensors").keys() == base.keys()
    # A restarted trainer continues after the last version and saves a whole one first.
    again = DeltaStore(tmp_path)
    with pytest.raises(InvalidArgument, match="above 2"):
        again.save(base, 2)
    assert read_safetensors(again.save(base, 3) / "model-00000-of-00001.safetensors").keys() == base.keys()
    for wrong in ({"dtype": "int8"}, {"whole_every": 0}):
        with pytest.raises(InvalidArgument, match=next(iter(wrong))):
            DeltaStore(tmp_path, **wrong)


def test_update_weights_takes_a_store_or_a_version(binary, rng, tmp_path):
    states = trajectory(rng, read_model(PUSH_MODEL), 3)
    saved(tmp_path / "run", states, "bfloat16")
    flags = [*FLAGS, "--weights-dir", tmp_path]
    with ServerProcess(binary, PUSH_MODEL, [str(flag) for flag in flags]) as process:

        def update(path):
            return ask_http(process.http_address, "POST", "/update_weights", {"weight_dir": str(path)})

        for path, version in [("run/weight_v000002", 2), (tmp_path / "run" / "weight_v000003", 3), ("run", 4)]:
            answer = update(path)
            assert (answer.status, answer.body["status"]) == (200, "ok"), answer
            assert process.client.status().weight_version == version
            assert process.client.checksum() == checksums(states[version - 1], "bfloat16")
        assert update("run").status == 409, "it serves this version already"
        assert update("run/weight_v000009").status == 404
        assert update("elsewhere").status == 404
        assert update("../run").status == 400


def test_replicas_of_a_fleet_catch_up_from_the_store(binary, rng, tmp_path):
    states = trajectory(rng, read_model(PUSH_MODEL), 5)
    store = DeltaStore(tmp_path / "run")
    flags = [str(flag) for flag in [*FLAGS, "--weights-dir", tmp_path]]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(ServerProcess(binary, PUSH_MODEL, flags))
        second = stack.enter_context(ServerProcess(binary, PUSH_MODEL, flags))
        proxy = stack.enter_context(Proxy(second.address))
        fleet = stack.enter_context(Fleet([first.address, proxy.address]))
        fleet.wait_until_ready(60)
        receipts = []
        for version, state in enumerate(states[1:], 1):
            if version == 3:
                proxy.cut()
                wait_until(fleet, [CURRENT, LOST])
            store.save(state, version)
            receipts.append(fleet.push_directory("run", "delta", version=version))
        # The second one has missed three of five pushes.
        assert [receipt.missed for receipt in receipts] == [[], [], [1], [1], [1]]
        updates = second.client.status().updates
        proxy.mend()
        fleet.wait_until_ready(60)
        assert second.client.status().updates == updates + 1, "one push takes it to the last version"
        for client in (first.client, second.client):
            assert client.status().weight_version == 5
            assert client.checksum() == checksums(states[5], "bfloat16")
        assert outputs(first.client) == outputs(second.client)
        # One that starts again has the checkpoint, and gets the whole version and all deltas.
        second.process.kill()
        third = stack.enter_context(ServerProcess(binary, PUSH_MODEL, flags))
        proxy.redirect(third.address)
        wait_until_true(lambda: third.client.status().weight_version == 5)
        fleet.wait_until_ready(60)
        assert third.client.checksum() == checksums(states[5], "bfloat16")
        # Both take the next delta.
        store.save(states[0], 6)
        receipt = fleet.push_directory("run", "delta", version=6)
        assert receipt.missed == [] and third.client.checksum() == checksums(states[0], "bfloat16")
