"""Pushes through shared memory: when it is used, what is used instead, and that none is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fake_weights import held, hold, in_bytes
from rollout_client import (
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    SharedBuffer,
    _segment,
    _senders,
    clean_stale_segments,
)

SHM = Path("/dev/shm")


def test_the_segment_is_kept_for_the_next_push_and_grows(pusher, fake, rng, new_segments):
    small = {"a": rng.standard_normal(1000, dtype=np.float32)}
    large = {"a": rng.standard_normal(1 << 20, dtype=np.float32)}
    for state in (small, large):
        hold(fake, state)
    names = []
    for state in (small, small, large, small):
        hold(fake, state)
        pusher.push_full(state, transport="shared_memory")
        assert held(fake) == in_bytes(state)
        names.append(new_segments())
    assert all(len(n) == 1 for n in names)
    assert names[0] == names[1] != names[2] == names[3]


def test_auto_uses_shared_memory_for_large_pushes_to_this_host(pusher, fake, rng):
    for elements, shared in [(_senders.SHARED_MEMORY_FROM // 4 - 1, False), (_senders.SHARED_MEMORY_FROM // 4, True)]:
        state = {"a": rng.standard_normal(elements, dtype=np.float32)}
        hold(fake, state)
        pusher.push_full(state)
        assert fake.weights.commits[-1].header.source.HasField("shared_memory") is shared


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("10.0.0.1:1", False),
        ("localhost.example:1", False),
        ("server:50051", False),
    ],
)
def test_only_a_local_server_is_offered_shared_memory(address, local):
    assert _senders.choose_shared_memory("auto", address, 1 << 30) is local
    assert _senders.choose_shared_memory("shared_memory", address, 1)
    assert not _senders.choose_shared_memory("inline", address, 1 << 30)


@pytest.mark.parametrize("as_iterator", [False, True])
def test_a_server_with_another_shm_gets_it_inline(pusher, fake, rng, as_iterator):
    state = {f"t{i}": rng.standard_normal((1000, 1500), dtype=np.float32) for i in range(4)}
    hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
    fake.weights.hide_shared_memory = True
    pusher.push_full(iter(state.items()) if as_iterator else state)
    assert held(fake) == in_bytes(state)
    with pytest.raises(NotFound):
        pusher.push_full(state, transport="shared_memory")


def gathered(buffer, state):
    """The tensors of `state`, in the buffer, the last name first."""
    views = {
        name: np.frombuffer(buffer.take(array.nbytes), array.dtype).reshape(array.shape)
        for name, array in state.items()
    }
    for name, view in views.items():
        view[...] = state[name]
    return dict(reversed(views.items()))


def some_tensors(rng):
    return {f"t{i}": rng.standard_normal((1000, 1501 + i), dtype=np.float32) for i in range(4)}


def test_what_lies_in_a_shared_buffer_is_pushed_without_a_copy(pusher, fake, rng, monkeypatch, new_segments):
    def copied(*_):
        raise AssertionError("a tensor was copied")

    monkeypatch.setattr(_segment.Segment, "write", copied)
    state = some_tensors(rng)
    with SharedBuffer(sum(array.nbytes for array in state.values())) as buffer:
        tensors = gathered(buffer, state)
        for factor in (1, 2):
            for name in state:
                tensors[name][...] = factor * state[name]
            hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
            told = []
            pusher.push_full(tensors, buffer=buffer, progress=lambda done, total, told=told: told.append((done, total)))
            assert held(fake) == in_bytes({name: factor * array for name, array in state.items()})
            total = sum(array.nbytes for array in state.values())
            assert told[-1] == (total, total)
            assert fake.weights.commits[-1].header.source.shared_memory.name == buffer.segment.name
        assert new_segments() == [buffer.segment.name]
    assert new_segments() == []


def test_small_tensors_in_a_shared_buffer_are_declared_while_others_are_digested(pusher, fake, rng):
    state = {f"t{i}": rng.standard_normal((100 + i % 7, 128), dtype=np.float32) for i in range(700)}
    requests = []
    fake.weights.on_message = lambda number, request: requests.append(request.WhichOneof("kind"))
    with SharedBuffer(sum(array.nbytes for array in state.values())) as buffer:
        tensors = gathered(buffer, state)
        hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
        pusher.push_full(tensors, buffer=buffer)
        assert held(fake) == in_bytes(state)
        assert requests == ["header", "manifest", "manifest", "manifest", "commit"]
        requests.clear()
        pusher.push_full(tensors, buffer=buffer, in_place=True)
        assert requests == ["header", "commit"]
        fake.weights.hide_shared_memory = True
        hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
        pusher.push_full(tensors, buffer=buffer)
        assert held(fake) == in_bytes(state)


def test_what_lies_elsewhere_is_refused_by_name_and_another_shm_gets_it_inline(pusher, fake, rng):
    state = some_tensors(rng)
    with SharedBuffer(sum(array.nbytes for array in state.values())) as buffer:
        tensors = gathered(buffer, state)
        hold(fake, {name: np.zeros_like(array) for name, array in state.items()})
        with pytest.raises(InvalidArgument, match=r"t2.*shared buffer"):
            pusher.push_full({**tensors, "t2": state["t2"]}, buffer=buffer)
        with SharedBuffer(state["t2"].nbytes) as second:  # one lies above the other, whichever it is
            other = gathered(second, {"t2": state["t2"]})
            for wrong, of in (({**tensors, **other}, buffer), (tensors, second)):
                with pytest.raises(InvalidArgument, match="shared buffer"):
                    pusher.push_full(wrong, buffer=of)
        fake.weights.hide_shared_memory = True
        pusher.push_full(tensors, buffer=buffer)
        assert held(fake) == in_bytes(state)


@pytest.mark.parametrize("options", [{}, {"segment_mode": 0o644}])
def test_others_may_read_a_segment_only_if_the_trainer_says_so(call, fake, rng, options):
    state = {"t": rng.standard_normal(1000, dtype=np.float32)}
    hold(fake, state)
    fake.weights.segment_mode = options.get("segment_mode", 0o600)
    before = os.umask(0o077)  # which is for files that are made without a thought
    try:
        call(lambda client: client.push_full(state, transport="shared_memory", timeout=60), **options)
        with SharedBuffer(1000, **options) as buffer:
            assert (SHM / buffer.segment.name).stat().st_mode & 0o7777 == fake.weights.segment_mode
    finally:
        os.umask(before)
    assert held(fake) == in_bytes(state)


def test_a_shared_buffer_gives_aligned_parts_until_it_is_full():
    with SharedBuffer(1000) as buffer:
        parts = [buffer.take(size) for size in (1, 63, 65, 128)]
        places = [buffer.segment.offset_of(part) for part in parts]
        assert places == [0, 64, 128, 256]
        for size in (-1, 1 << 40):
            with pytest.raises((InvalidArgument, ResourceExhausted), match=str(size)):
                buffer.take(size)


def test_no_room_for_a_segment_is_inline_or_an_error(pusher, fake, rng, monkeypatch, new_segments):
    state = {f"t{i}": rng.standard_normal((1000, 1500), dtype=np.float32) for i in range(4)}
    hold(fake, {name: np.zeros_like(array) for name, array in state.items()})

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_segment.os, "posix_fallocate", full)
    with pytest.raises(ResourceExhausted, match="No space left"):
        pusher.push_full(state, transport="shared_memory")
    pusher.push_full(state)
    assert held(fake) == in_bytes(state) and new_segments() == []


def test_shared_memory_that_becomes_full_on_the_way_is_left_for_the_stream(pusher, fake, rng, monkeypatch):
    """Tensors in float32 take twice what a model that serves in bfloat16 lets expect."""
    state = {f"t{i}": rng.standard_normal((1000, 1500), dtype=np.float32) for i in range(10)}
    hold(fake, {name: np.zeros_like(array, ml_dtypes.bfloat16) for name, array in state.items()})
    expected, real = sum(array.nbytes for array in state.values()) // 2, _segment.os.posix_fallocate

    def limited(file, offset, size):
        if offset + size > expected + _segment.PADDING:
            raise OSError(28, "No space left on device")
        real(file, offset, size)

    monkeypatch.setattr(_segment.os, "posix_fallocate", limited)
    for in_place in (False, True):
        with (
            pytest.raises(ResourceExhausted, match="No space left"),
            pusher.begin_push(transport="shared_memory", in_place=in_place) as push,
        ):
            push.write_all(state)
        told = []
        with pusher.begin_push(in_place=in_place, progress=lambda done, total, told=told: told.append(done)) as push:
            push.write_all(state)
        assert held(fake) == in_bytes(state)
        assert told == sorted(told) and told[-1] == 2 * expected
        assert not fake.weights.commits[-1].header.HasField("source")
        hold(fake, {name: np.zeros_like(array, ml_dtypes.bfloat16) for name, array in state.items()})


def test_an_iterator_that_goes_past_its_total_is_refused_by_name(pusher, fake, rng):
    state = {f"t{i}": rng.standard_normal((1000, 1000), dtype=np.float32) for i in range(4)}
    hold(fake, state)
    for transport in ("inline", "shared_memory"):
        with pytest.raises(InvalidArgument, match="total_bytes"):
            pusher.push_full(iter(state.items()), total_bytes=5_000_000, transport=transport)
    assert fake.weights.commits == []


SEGMENT_CHILD = """
import sys, time
from rollout_client._segment import Segment
segment = Segment(1 << 20)
print(segment.name, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
"""
FORKING_CHILD = """
import os, sys
from rollout_client._segment import DIRECTORY, Segment
segment = Segment(1 << 20)
if os.fork() == 0:
    sys.exit()
os.wait()
print(segment.name, (DIRECTORY / segment.name).exists())
"""


def test_a_killed_clients_segment_goes_when_the_next_one_comes():
    child = subprocess.Popen([sys.executable, "-c", SEGMENT_CHILD, "wait"], stdout=subprocess.PIPE, text=True)
    try:
        name = child.stdout.readline().strip()
        assert name.startswith(f"rollout-{child.pid}-")
        assert name not in clean_stale_segments() and (SHM / name).exists()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    assert (SHM / name).exists()
    segment = _segment.Segment(1)
    try:
        assert not (SHM / name).exists()
        assert (SHM / segment.name).exists()
    finally:
        segment.close()
    assert not (SHM / segment.name).exists()


def test_segments_of_others_and_other_files_are_left_alone(monkeypatch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, other = SHM / f"rollout-{dead.pid}-{'0' * 16}", SHM / f"rollout-{dead.pid}-file"
    young = SHM / f"rollout-{os.getpid()}-{'0' * 16}"  # made a moment ago, not yet locked
    for path in (stale, other, young):
        path.touch()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(_segment.os, "getuid", lambda: os.geteuid() + 1)
            assert stale.name not in clean_stale_segments()
        with stale.open() as file:
            _segment.fcntl.flock(file, _segment.fcntl.LOCK_EX)
            assert stale.name not in clean_stale_segments()  # alive, in another namespace of processes
        assert stale.name in clean_stale_segments()
        assert other.exists() and young.exists()
    finally:
        for path in (stale, other, young):
            path.unlink(missing_ok=True)


def test_a_segment_goes_with_the_interpreter_but_not_with_its_forks():
    ended = subprocess.run(
        [sys.executable, "-c", SEGMENT_CHILD, "end"], capture_output=True, text=True, check=True, timeout=60
    )
    assert not (SHM / ended.stdout.strip()).exists()
    command = [sys.executable, "-W", "ignore", "-c", FORKING_CHILD]
    name, existed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    assert existed == "True" and not (SHM / name).exists()
