"""Pushes that go wrong at a real server: wherever one breaks, the policy is as it was, bit for bit."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from models import checksums, perturbed, random_adapter, read_model, write_large_model
from rollout_client import (
    Aborted,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RolloutClient,
    RolloutError,
    ServerProcess,
    _proto,
)
from rollout_client._convert_weights import update_header
from rollout_client._http2 import _data_header
from rollout_client._segment import Segment, aligned, digest_of
from rollout_client._senders import OutgoingTensor, chunk_request
from rollout_client._tensors import bytes_of
from serving import (
    PUSH_MODEL,
    SMALL_CACHE,
    held,
    mapped_segments,
    no_room,
    resident_bytes,
    seen,
    server,
    start_group,
    wait_for,
)


@pytest.fixture
def unchanged(at_base):
    """The shared server; afterwards policy, version and count of updates are as before."""
    client, base = at_base
    before, status = seen(client), client.status()
    yield client, base
    after = wait_for(client, lambda now: not now.updating, "without a push")
    assert (after.weight_version, after.updates) == (status.weight_version, status.updates)
    # A push that begins takes the spare weights, whatever becomes of it; one that fails leaves none.
    assert held(after) in (held(status), held(status) - {"spare_weights"})
    assert seen(client) == before


def messages(kind, tensors, *, config="", directory=None, **options):
    """The requests of a push, serialised, with its tensors declared one by one."""
    outgoing = [OutgoingTensor(name, given.layout, given.data) for name, given in tensors]
    message = update_header(kind, options, adapter_config=config, directory=directory)
    message.total_bytes = sum(len(each.data) for each in outgoing)
    made = [_proto.UPDATE.request(header=message).SerializeToString()]
    for index, each in enumerate(outgoing):
        entry = each.entry(digest_of(each.data))
        made.append(_proto.UPDATE.request(manifest={"tensors": [_proto.Tensor.FromString(entry)]}).SerializeToString())
        half = len(each.data) // 2
        made += [
            b"".join(chunk_request(index, at, each.data[at:to]))
            for at, to in ((half, len(each.data)), (0, half))
            if to > at
        ]
    return [*made, _proto.UPDATE.request(commit={}).SerializeToString()]


def full_messages(state, **options):
    return messages("full", [(name, bytes_of(name, array)) for name, array in state.items()], **options)


def send(client, requests, *, then="commit"):
    """Sends requests as they are; then waits for the answer, breaks off, or ends the stream without a commit."""
    with client._pusher.start(60) as stream:
        for request in requests:
            stream.send(request)
        if then == "break":
            wait_for(client, lambda status: status.updating, "updating")
            return None
        return _proto.UPDATE.response.FromString(stream.finish())


def test_hand_made_pushes_are_taken(at_base, rng):
    """Chunks in any order, tensors in any order: what the other tests change is then all that is wrong."""
    client, base = at_base
    full = dict(reversed(perturbed(rng, base).items()))
    version = client.status().weight_version
    assert send(client, full_messages(full)).weight_version == version + 1
    assert client.checksum() == checksums(full, "bfloat16")


def tear(client, requests, count):
    """Sends so many requests and half of the next one in one frame, and ends the stream."""
    framed = b"".join(struct.pack(">BI", 0, len(each)) + each for each in requests[: count + 1])
    with client._pusher.start(60) as stream:
        stream._wait_for_room()
        torn = framed[: len(framed) - (len(requests[count]) + 1) // 2]
        stream._write(_data_header(len(torn)), torn)
        stream.finish()


@pytest.mark.parametrize("then", ["break", "end", "tear"])
def test_a_stream_cut_after_every_message_never_happened(unchanged, rng, then):
    client, base = unchanged
    before = client.checksum()
    requests = full_messages(perturbed(rng, base))
    for count in range(1, len(requests)):
        if then == "break":
            send(client, requests[:count], then="break")
        elif then == "tear":
            with pytest.raises(InvalidArgument, match="in the middle"):
                tear(client, requests, count)
        else:
            with pytest.raises(RolloutError):
                send(client, requests[:count])
        wait_for(client, lambda status: not status.updating, "without a push")
        assert client.checksum() == before, count


def test_a_push_broken_while_requests_run_changes_none_of_them(unchanged, rng):
    client, base = unchanged
    alone = start_group(client)()
    requests = full_messages(perturbed(rng, base))
    join = start_group(client)
    for count in (1, 5, len(requests) - 1):
        send(client, requests[:count], then="break")
        wait_for(client, lambda status: not status.updating, "without a push")
    for sample, expected in zip(join(), alone, strict=True):
        assert (sample.token_ids, sample.logprobs.tobytes()) == (expected.token_ids, expected.logprobs.tobytes())


def changed_tensor(entry_change, data_change=lambda data: data):
    """A push whose fourth tensor is declared or sent otherwise than it should be."""

    def make(state):
        requests, index = [], 0
        for request in full_messages(state):
            message = _proto.UPDATE.request.FromString(request)
            kind = message.WhichOneof("kind")
            index += kind == "manifest"
            if index == 4 and kind == "manifest":
                entry_change(message.manifest.tensors[0])
            if index == 4 and kind == "chunk":
                message.chunk.data = data_change(message.chunk.data)
            requests.append(message.SerializeToString())
        return requests

    return make


def put(field, value):
    return lambda entry: setattr(entry, field, value)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (changed_tensor(put("digest", bytes(16))), DataLoss),
        (changed_tensor(put("digest", b"")), InvalidArgument),
        (changed_tensor(lambda _: None, lambda data: bytes([data[0] ^ 1]) + data[1:]), DataLoss),
        (changed_tensor(lambda _: None, lambda data: data + b"\0"), InvalidArgument),
        (changed_tensor(put("name", "model.nonsense")), InvalidArgument),
        (changed_tensor(put("name", "")), InvalidArgument),
        (changed_tensor(put("dtype", 0)), InvalidArgument),
        (changed_tensor(put("dtype", 9)), InvalidArgument),
        (changed_tensor(lambda entry: entry.shape.append(2)), InvalidArgument),
        (changed_tensor(lambda entry: entry.shape.append(2**63)), InvalidArgument),
        (changed_tensor(lambda entry: entry.ClearField("shape")), InvalidArgument),
        (lambda state: full_messages(dict(list(state.items())[1:])), InvalidArgument),
        (lambda state: [*full_messages(state)[:3], *full_messages(state)[2:]], InvalidArgument),
        (lambda state: full_messages(state)[1:], InvalidArgument),
        (lambda state: full_messages(state)[:1] * 2, InvalidArgument),
        (lambda state: [full_messages(state)[0], full_messages(state)[2], full_messages(state)[-1]], InvalidArgument),
        (lambda state: [full_messages(state)[0], b"".join(chunk_request(0, 2**64 - 1, b"a"))], InvalidArgument),
        (lambda state: [*full_messages(state)[:2], b"".join(chunk_request(0, 2**64 - 1, b"ab"))], InvalidArgument),
        (lambda state: [*full_messages(state)[:2], b"".join(chunk_request(2**32 - 1, 0, b"ab"))], InvalidArgument),
        (lambda state: [b""], InvalidArgument),
        (lambda state: [_proto.UPDATE.request(header={}).SerializeToString()], InvalidArgument),
        (lambda state: [], InvalidArgument),
        (lambda state: full_messages({n: a + np.nan for n, a in state.items()}), InvalidArgument),
        (lambda state: full_messages({n: a * np.inf for n, a in state.items()}), InvalidArgument),
        (lambda state: full_messages(state, directory="../.."), InvalidArgument),
        (lambda state: full_messages(state, directory="/etc"), InvalidArgument),
        (lambda state: full_messages(state, directory="nothing"), (NotFound, InvalidArgument)),
        (lambda state: full_messages(state, name="resident"), InvalidArgument),
        (lambda state: full_messages(state, config="{}"), InvalidArgument),
    ],
)
def test_what_is_wrong_is_refused_and_named(unchanged, rng, make, error):
    client, base = unchanged
    requests = make(perturbed(rng, base))
    with pytest.raises(error) as raised:
        send(client, requests)
    assert len(str(raised.value)) > 10


@pytest.mark.parametrize("total", [1, 2**62, 2**64 - 1])
def test_a_wrong_total_is_refused(unchanged, total):
    client, base = unchanged
    with pytest.raises((InvalidArgument, ResourceExhausted)):
        client.push_full(iter(base.items()), total_bytes=total, transport="inline")


def first_of(tensors, suffix):
    return next(name for name in tensors if name.endswith(suffix))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t, c: t.pop(first_of(t, "lora_A.weight")), "lora_"),
        (
            lambda t, c: t.update({"base_model.model.nonsense.lora_A.weight": t[first_of(t, "lora_A.weight")]}),
            "nonsense",
        ),
        (lambda t, c: t.update({first_of(t, "lora_A.weight"): np.zeros((3, 3), np.float32)}), "lora_A"),
        (lambda t, c: t.update({first_of(t, "lora_B.weight"): t[first_of(t, "lora_B.weight")] * np.nan}), "lora_B"),
        (lambda t, c: c.update(r=3), "lora_A"),
        (lambda t, c: c.update(peft_type="LOHA"), "LOHA"),
        (lambda t, c: c.pop("r"), "r"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_by_name(unchanged, rng, change, says):
    client, base = unchanged
    tensors, config = random_adapter(rng, base)
    change(tensors, config)
    for transport in ("inline", "shared_memory"):
        with pytest.raises(InvalidArgument, match=says):
            client.push_lora(tensors, config, transport=transport)


def test_configurations_that_are_no_json_are_refused(unchanged, rng):
    client, base = unchanged
    tensors, _ = random_adapter(rng, base)
    for config in ("", "[]", "{", "null", '{"r": 1e400}', "[" * 100_000):
        with pytest.raises(InvalidArgument):
            client.push_lora(tensors, config)


SLOW_CHILD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from models import read_model
from rollout_client import RolloutClient
def slowly():
    for i, pair in enumerate(read_model(Path(sys.argv[2])).items()):
        if i == 5:
            print("under way", flush=True)
            time.sleep(60)
        yield pair
RolloutClient(sys.argv[1]).push_full(slowly(), transport=sys.argv[4])
"""


@pytest.mark.parametrize("transport", ["inline", "shared_memory"])
def test_a_killed_trainer_never_pushed(unchanged, transport):
    client, _ = unchanged
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", SLOW_CHILD, client.address, str(PUSH_MODEL), here, transport]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "under way\n"
        wait_for(client, lambda status: status.updating, "updating")
        left = f"rollout-{child.pid}-*"
        assert len(list(Path("/dev/shm").glob(left))) == (transport == "shared_memory")
        child.kill()
    wait_for(client, lambda status: not status.updating, "without a push")
    wait_for(client, lambda _: not list(Path("/dev/shm").glob(left)), "without the segment of the dead trainer")


@pytest.mark.parametrize("left", [0.0, 0.3, 0.9])
def test_a_segment_cut_short_during_a_push_is_lost_and_the_server_lives(unchanged, rng, left):
    """The server maps it: what is gone must not end the process that reads it."""
    client, base = unchanged
    full = perturbed(rng, base)
    segment = Segment(sum(aligned(array.nbytes) for array in full.values()))
    requests, end = full_messages(full), 0
    header = _proto.UPDATE.request.FromString(requests[0])
    header.header.source.shared_memory.name = segment.name
    manifest = _proto.UPDATE.request()
    for name, array in full.items():
        given = bytes_of(name, array)
        entry = OutgoingTensor(name, given.layout, given.data).entry(segment.write(end, given.data), end)
        manifest.manifest.tensors.append(_proto.Tensor.FromString(entry))
        end += aligned(array.nbytes)
    with client._pusher.start(60) as stream:
        stream.send(header.SerializeToString())
        wait_for(client, lambda status: status.updating, "updating")
        os.truncate(f"/dev/shm/{segment.name}", int(left * end))
        stream.send(manifest.SerializeToString())
        stream.send(requests[-1])
        with pytest.raises(DataLoss, match=r"cut short|XXH3"):
            stream.finish()
    segment.close()


def test_the_segment_of_a_trainer_that_is_gone_is_let_go(binary, rng):
    """It stays mapped from one push to the next; its memory comes back when its owner removes it."""
    base = read_model(PUSH_MODEL)
    with ServerProcess(binary, PUSH_MODEL, [*SMALL_CACHE, "--mem-util", "0.2"]) as process:
        here, seen_mapped = RolloutClient(process.address), set()
        for _ in range(3):
            here.push_full(perturbed(rng, base), transport="shared_memory")
            seen_mapped |= mapped_segments(process.process.pid)
        assert len(seen_mapped) == 1
        here.close()
        wait_for(process.client, lambda _: not mapped_segments(process.process.pid), "without a segment", 10)
        process.client.push_full(base, transport="shared_memory")
        assert process.client.checksum() == checksums(base, "bfloat16")


def test_a_deadline_drops_the_push(unchanged):
    client, base = unchanged

    def slowly():
        for pair in base.items():
            yield pair
            time.sleep(0.1)

    with pytest.raises(DeadlineExceeded):
        client.push_full(slowly(), timeout=0.5)


def test_a_second_trainer_is_told_and_the_first_goes_on(at_base, rng):
    client, base = at_base
    full = perturbed(rng, base)
    meanwhile = []

    def interrupted():
        for i, pair in enumerate(full.items()):
            if i == 3:
                # Each push has a connection of its own, so that what was sent first need not arrive first.
                wait_for(client, lambda status: status.updating, "updating")
                for second in (
                    lambda: client.push_full(base),
                    lambda: client.push_lora(None),
                    lambda: client.push_delta(base, base, base_version=client.status().weight_version),
                ):
                    with pytest.raises(Aborted) as raised:
                        second()
                    meanwhile.append(str(raised.value))
                with pytest.raises(FailedPrecondition):
                    client.sleep()
            yield pair

    version = client.status().weight_version
    assert client.push_full(interrupted(), transport="inline").weight_version == version + 1
    assert len(meanwhile) == 3 and client.checksum() == checksums(full, "bfloat16")


def test_many_trainers_at_once_leave_one_whole_policy(at_base, rng):
    client, base = at_base
    states = [perturbed(rng, base) for _ in range(4)]
    done = []

    def push(i):
        for _ in range(5):
            try:
                done.append((client.push_full(states[i], transport=["inline", "auto"][i % 2]).weight_version, i))
            except Aborted:
                time.sleep(0.005)

    threads = [threading.Thread(target=push, args=(i,)) for i in range(len(states))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = states[max(done)[1]]
    assert len({version for version, _ in done}) == len(done)
    assert client.checksum() == checksums(last, "bfloat16")


def test_pushes_that_do_not_fit_are_refused_before_anything_is_touched(binary, rng):
    with server(binary, PUSH_MODEL, *no_room(binary)) as client:
        before = seen(client)
        with pytest.raises(ResourceExhausted, match="update_staging"):
            client.push_full(perturbed(rng, read_model(PUSH_MODEL)))
        assert seen(client) == before and "update_staging" not in held(client.status())


def test_failed_pushes_leave_no_memory(binary, rng, tmp_path):
    """Of a model large enough that what one of them kept would show."""
    name, directory = "model.embed_tokens.weight", tmp_path / "model"
    state = write_large_model(directory, PUSH_MODEL, rng)
    requests = full_messages(perturbed(rng, state))
    wrong = changed_tensor(put("digest", bytes(16)))(state)
    with ServerProcess(binary, directory, [*SMALL_CACHE, "--mem-util", "0.3"]) as process:
        client, after = process.client, []
        for _ in range(16):
            for count in (2, len(requests) // 2, len(requests) - 1):
                send(client, requests[:count], then="break")
                wait_for(client, lambda status: not status.updating, "without a push")
            with pytest.raises(DataLoss):
                send(client, wrong)
            with pytest.raises(InvalidArgument):
                client.push_full({**state, name: state[name] * np.nan}, transport="shared_memory")
            after.append(resident_bytes(process.process.pid))
        print("resident MiB after each round:", [round(size / 2**20, 1) for size in after])
        assert "spare_weights" not in held(client.status())
        # Buffers of connections and threads come and go; each round that kept one of its embeddings would add 8 MiB.
        assert max(after[8:]) < max(after[:8]) + state[name].nbytes
