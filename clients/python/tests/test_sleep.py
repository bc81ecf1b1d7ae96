"""Sleep, wake and pause of real servers: memory really given back, and the same outputs afterwards."""

from __future__ import annotations

import re
import sys
import threading
import types

import numpy as np
import pytest

from models import checksums, perturbed, random_adapter, read_model, write_large_model
from rollout_client import (
    Aborted,
    FailedPrecondition,
    FinishReason,
    InvalidArgument,
    Lifecycle,
    ResourceExhausted,
    SamplingParams,
    ServerProcess,
    SharedBuffer,
    _senders,
)
from serving import (
    FIXTURES,
    LONG,
    PROMPTS,
    PUSH_MODEL,
    REPOSITORY,
    SMALL_CACHE,
    assert_idle,
    bits,
    fill_cache,
    mapped_segments,
    no_room,
    outputs,
    resident_bytes,
    seen,
    server,
    start_group,
    wait_for,
)

CYCLES = 100
# Much against what an idle process varies by, little against what is given back.
CACHE_BYTES = 64 << 20
NOISE_BYTES = 4 << 20


@pytest.fixture
def process(binary):
    flags = ["--kv-cache-bytes", str(CACHE_BYTES), "--mem-util", "0.2"]
    with ServerProcess(binary, PUSH_MODEL, flags) as process:
        yield process
        assert_idle(process.client)


def test_sleep_and_wake_a_hundred_times(process):
    client = process.client
    fill_cache(client)
    client.reset_prefix_cache()
    expected, full = outputs(client), resident_bytes(process.process.pid)
    asleep, awake = [], []
    for _ in range(CYCLES):
        result = client.sleep()
        asleep.append(resident_bytes(process.process.pid))
        assert abs(result.resident_bytes - asleep[-1]) < NOISE_BYTES
        status = client.status()
        assert status.lifecycle is Lifecycle.ASLEEP and status.asleep.level == 1 and status.asleep.resident == []
        assert status.memory.entries.get("kv_cache", 0) == 0
        assert client.wake().lifecycle is Lifecycle.RUNNING
        assert outputs(client) == expected
        awake.append(resident_bytes(process.process.pid))
    print(f"awake {full}, asleep {asleep[0]} … {asleep[-1]}")
    # The cache goes at least, and each sleep goes down to the same floor.
    assert asleep[0] < full - 0.8 * CACHE_BYTES
    assert_one_floor(asleep)


def assert_one_floor(asleep):
    """Asserts that resident bytes went down to the same number in each of `CYCLES` sleeps."""
    assert np.percentile(asleep, 95) - min(asleep) < NOISE_BYTES / 2
    assert max(asleep) - min(asleep) < NOISE_BYTES
    slope = np.polyfit(np.arange(CYCLES), asleep, 1)[0]
    assert slope * CYCLES < NOISE_BYTES / 2, slope


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "internvl3"])
def test_sleep_and_wake_a_hundred_times_with_images(binary, rng, name, level):
    side = 56
    picture = lambda: rng.integers(0, 256, (1, side, side, 3), np.uint8)  # noqa: E731
    first, sampling = picture(), SamplingParams(max_tokens=4, seed=6)
    with ServerProcess(binary, FIXTURES / name, SMALL_CACHE) as process:
        client = process.client
        pad, pid = client.info().images.placeholder, process.process.pid
        sample = lambda image: client.generate([[5, pad, 6]], images=[[image]], sampling=sampling, return_text=False)[0]  # noqa: E731
        expected, asleep = bits(sample(first).samples[0]), []
        for _ in range(CYCLES):
            sample(picture())
            client.sleep(level)
            asleep.append(resident_bytes(pid))
            status = client.status()
            assert (status.held_images, status.named_images) == (0, 0)
            used = status.memory.entries
            assert (used.get("tower_workspace", 0), used.get("embeddings", 0)) == (0, 0)
            client.wake(reload=level == 2)
            assert bits(sample(first).samples[0]) == expected
        assert_one_floor(asleep)
        assert_idle(client)


def test_what_is_released_is_measured(process):
    client = process.client
    fill_cache(client)
    before = resident_bytes(process.process.pid)
    result = client.sleep()
    after = resident_bytes(process.process.pid)
    assert result.released.keys() == {"weights", "kv_cache"}
    assert result.released["kv_cache"] > 0.8 * CACHE_BYTES
    assert abs(sum(result.released.values()) - (before - after)) < NOISE_BYTES
    client.wake()


@pytest.mark.parametrize("level", [1, 2])
def test_the_trainers_segment_is_not_held_asleep(binary, rng, tmp_path, level):
    """Nor counted as given back: it is the trainer's."""
    state = write_large_model(tmp_path / "model", PUSH_MODEL, rng)
    size = sum(array.nbytes for array in state.values())
    assert size > 2 * NOISE_BYTES
    with ServerProcess(binary, tmp_path / "model", SMALL_CACHE) as process, SharedBuffer(size) as buffer:
        client, pid = process.client, process.process.pid
        gathered = {}
        for name, array in state.items():
            gathered[name] = np.frombuffer(buffer.take(array.nbytes), array.dtype).reshape(array.shape)
            gathered[name][...] = array
        for _ in range(2):
            client.push_full(gathered, buffer=buffer)
            assert mapped_segments(pid) == {buffer.segment.name}
            awake, result, asleep = resident_bytes(pid), client.sleep(level), resident_bytes(pid)
            assert not mapped_segments(pid)
            assert abs(awake - size - sum(result.released.values()) - asleep) < NOISE_BYTES
            assert abs(result.resident_bytes - asleep) < NOISE_BYTES
            client.wake(reload=level == 2)
        client.push_full(gathered, buffer=buffer)
        assert client.checksum() == checksums(state, "bfloat16")


@pytest.mark.parametrize("level", [1, 2])
def test_the_segment_of_a_push_asleep_is_let_go_with_it(process, rng, level):
    client, adapter = process.client, random_adapter(rng, read_model(PUSH_MODEL))
    client.sleep(level)
    assert client.push_lora(*adapter, transport="shared_memory").pending
    assert not mapped_segments(process.process.pid)
    client.wake()
    client.push_lora(*adapter, transport="shared_memory")
    assert mapped_segments(process.process.pid)


def test_asleep_only_what_is_allowed_is_done(process):
    client = process.client
    client.sleep()
    for refused in (
        lambda: client.generate([[1]]),
        lambda: client.score([[1, 2]]),
        client.checksum,
        client.pause,
        client.resume,
        lambda: client.push_full(read_model(PUSH_MODEL)),
    ):
        with pytest.raises(FailedPrecondition):
            refused()
    assert len(client.parameters()) == len(read_model(PUSH_MODEL))
    client.sleep()
    assert client.wake(["weights"]).lifecycle is Lifecycle.ASLEEP
    assert client.status().asleep.resident == ["weights"]
    assert client.checksum() == checksums(read_model(PUSH_MODEL), "bfloat16")
    with pytest.raises(FailedPrecondition):
        client.generate([[1]])
    assert client.wake(["kv_cache"]).lifecycle is Lifecycle.RUNNING
    assert client.wake().lifecycle is Lifecycle.RUNNING
    assert client.generate([[1]])


@pytest.mark.parametrize("when", ["asleep", "weights awake"])
def test_adapters_pushed_in_a_sleep_serve_after_it(binary, rng, when):
    with server(binary, PUSH_MODEL) as client:
        base = read_model(PUSH_MODEL)
        adapter, config = random_adapter(rng, base)
        client.push_lora(adapter, config)
        expected, version = seen(client), client.status().weight_version
        client.push_lora(None)
        client.sleep()
        if when == "weights awake":
            client.wake(["weights"])
        result = client.push_lora(adapter, config, version=version + 9)
        assert result.pending is (when == "asleep") and result.weight_version == version + 9
        assert client.status().asleep.pending_update is (when == "asleep")
        client.wake()
        assert seen(client) == expected and client.status().weight_version == version + 9


def test_a_full_push_comes_between_weights_and_cache(binary, rng):
    base = read_model(PUSH_MODEL)
    with server(binary, PUSH_MODEL) as client:
        full = perturbed(rng, base)
        client.push_full(full)
        expected = seen(client)
        client.push_full(base)
        for transport in ("inline", "shared_memory"):
            client.sleep()
            with client.awake(["weights"]):
                client.push_full(full, transport=transport)
                client.wake(["kv_cache"])
                assert seen(client) == expected
            # What differs from the checkpoint is kept.
            client.wake()
            assert seen(client) == expected
            client.push_full(base)


def test_level_2_needs_a_push_or_a_reload(binary, rng):
    base = read_model(PUSH_MODEL)
    with server(binary, PUSH_MODEL) as client:
        at_start = seen(client)
        full = perturbed(rng, base)
        client.push_full(full)
        expected = seen(client)
        for push in (
            lambda: client.push_full(full),
            lambda: client.push_full(iter(full.items()), transport="shared_memory"),
        ):
            client.sleep(2)
            assert client.status().asleep.level == 2
            assert client.wake().lifecycle is Lifecycle.WEIGHTS_MISSING
            for refused in (lambda: client.generate([[1]]), client.checksum):
                with pytest.raises(FailedPrecondition):
                    refused()
            with pytest.raises((FailedPrecondition, Aborted)):
                client.push_delta(base, full, base_version=client.status().weight_version)
            push()
            assert client.status().lifecycle is Lifecycle.RUNNING and seen(client) == expected
        client.sleep(2)
        assert client.wake(reload=True).lifecycle is Lifecycle.RUNNING
        assert seen(client) == at_start
        # An adapter alone is a complete push too: on the checkpoint.
        adapter, config = random_adapter(rng, base)
        client.push_lora(adapter, config)
        with_adapter = seen(client)
        client.sleep(2)
        client.push_lora(adapter, config)
        assert client.wake().lifecycle is Lifecycle.RUNNING and seen(client) == with_adapter


def test_level_2_gives_the_weights_back(binary, rng):
    """Of weights that are not the checkpoint's, level 1 must keep what level 2 need not."""
    with ServerProcess(binary, FIXTURES / "llama-tied", ["--dtype", "float32", "--kv-cache-bytes", "8MiB"]) as process:
        client = process.client
        client.push_full(perturbed(rng, read_model(FIXTURES / "llama-tied")))
        client.sleep(1)
        kept = client.status().memory.entries["weights"]
        client.sleep(2)
        assert client.status().memory.entries.get("weights", 0) < kept
        client.wake(reload=True)


@pytest.mark.parametrize("rest", ["pause", "sleep"])
def test_running_requests_stand_still_and_go_on(binary, rest):
    with server(binary, PUSH_MODEL) as client:
        expected = [(s.token_ids, s.logprobs.tobytes()) for s in start_group(client)()]
        join = start_group(client)
        (client.pause if rest == "pause" else lambda mode: client.sleep(1, mode))("keep")
        made = client.status().generated_tokens
        if rest == "pause":
            late = threading.Thread(target=lambda: client.generate([[1]]))
            late.start()
            wait_for(client, lambda status: status.held_requests == 1, "held")
            assert client.status().lifecycle is Lifecycle.PAUSED and client.status().generated_tokens == made
            client.resume()
            late.join(60)
        else:
            client.wake()
        assert [(s.token_ids, s.logprobs.tobytes()) for s in join()] == expected


@pytest.mark.parametrize("rest", ["pause", "sleep"])
@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_running_requests_finish_or_end(binary, rest, mode):
    with server(binary, PUSH_MODEL) as client:
        join = start_group(client)
        (client.pause if rest == "pause" else lambda mode: client.sleep(1, mode))(mode)
        samples = join()
        if mode == "wait":
            assert {len(sample.token_ids) for sample in samples} == {LONG.max_tokens}
        else:
            assert {sample.finish_reason for sample in samples} == {FinishReason.ABORTED}
        client.resume() if rest == "pause" else client.wake()
        assert client.generate([[1]])


def test_an_exception_in_a_colocated_loop_leaves_the_server_asleep(binary):
    with server(binary, PUSH_MODEL) as client:
        client.sleep()
        with pytest.raises(InvalidArgument), client.awake():
            client.generate([[]])
        assert client.status().lifecycle is Lifecycle.ASLEEP
        with client.awake():
            assert client.generate([[1]])
        assert client.status().lifecycle is Lifecycle.ASLEEP
        client.wake()


def test_the_loop_of_the_readme_runs(binary, rng, monkeypatch):
    [loop] = [code for code in python_of_the_readme() if ".awake(" in code]
    assert len(loop.splitlines()) <= 30
    base = read_model(PUSH_MODEL)
    peft = types.SimpleNamespace(get_peft_model_state_dict=lambda model, **_: model.tensors)
    monkeypatch.setitem(sys.modules, "peft", peft)
    model = types.SimpleNamespace(active_adapter="default", state_dict=dict)
    trained = []

    def change(model):
        model.tensors, config = random_adapter(rng, base)
        model.peft_config = {"default": config}

    def train(model, groups, rewards):
        samples = [sample for group in groups for sample in group.samples]
        assert rewards == [[len(sample.text) for sample in group.samples] for group in groups]
        assert all(len(sample.logprobs) == len(sample.token_ids) > 0 for sample in samples)
        trained.append([(len(group.samples), step_of(group.samples)) for group in groups])
        change(model)

    def step_of(samples):
        [step] = {span.weight_version for sample in samples for span in sample.weight_versions}
        return step

    change(model)
    batches = [PROMPTS, PROMPTS, PROMPTS[:1]]
    names = {"batches": batches, "peft_model": model, "reward": len, "train": train}
    with server(binary, PUSH_MODEL) as client:
        exec(loop.replace("127.0.0.1:50051", client.address), names)
        names["client"].close()
        assert client.status().lifecycle is Lifecycle.ASLEEP
        assert client.status().weight_version == len(batches)
        client.wake()
    assert trained == [[(8, step)] * len(prompts) for step, prompts in enumerate(batches, start=1)]


def python_of_the_readme():
    return re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), re.DOTALL)


def test_in_place_pushes_need_no_room_beside_the_weights(binary, rng, monkeypatch):
    monkeypatch.setattr(_senders, "CHUNK_BYTES", 1 << 10)  # small tensors are sent together: here some at a time
    base = read_model(PUSH_MODEL)
    with server(binary, PUSH_MODEL, *no_room(binary)) as client:
        before, full = seen(client), perturbed(rng, base)
        with pytest.raises(ResourceExhausted):  # not while it serves
            client.push_full(full, in_place=True, transport="inline")
        assert seen(client) == before
        client.pause("abort")
        with pytest.raises(ResourceExhausted):
            client.push_full(full, transport="inline")
        client.push_full(full, in_place=True, transport="inline")
        assert client.status().lifecycle is Lifecycle.PAUSED
        client.resume()
        assert client.checksum() == checksums(full, "bfloat16")
        # A push that breaks in the middle leaves no policy; the next one makes it whole.
        client.pause("abort")

        def broken():
            yield from list(full.items())[:10]
            # Until the server has written something, a push that breaks never happened.
            wait_for(client, lambda status: status.lifecycle is Lifecycle.WEIGHTS_MISSING, "written in part")
            raise KeyError("broken")

        with pytest.raises(KeyError):
            client.push_full(broken(), in_place=True, transport="inline")
        wait_for(client, lambda status: not status.updating, "without a push")
        assert client.status().lifecycle is Lifecycle.WEIGHTS_MISSING
        with pytest.raises(FailedPrecondition):
            client.generate([[1]])
        client.push_full(base, in_place=True, transport="inline")
        client.resume()
        assert seen(client) == before
