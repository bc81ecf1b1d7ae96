"""A fleet whose servers are actors of a real Ray: placed, killed in the middle of a generation, started again."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import tempfile
import threading
from pathlib import Path

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group

from models import perturbed, random_adapter, read_model
from rollout_client import InvalidArgument, ResourceExhausted, RolloutError, SamplingParams, ServerProcess, Unavailable
from rollout_client.ray import AsyncFleet, Fleet, ReplicaState
from serving import PUSH_MODEL, SMALL_CACHE, bits

CURRENT, LOST = ReplicaState.CURRENT, ReplicaState.LOST
FLAGS = [*SMALL_CACHE, "--mem-util", "0.1"]
PROMPTS = [[i % 7, i % 5, 3, 11] for i in range(8)]
LONG = SamplingParams(max_tokens=1200, seed=5, ignore_eos=True)
BASE = read_model(PUSH_MODEL)
TIMEOUT = 120.0
STARTS = 4


@pytest.fixture(scope="module")
def cluster():
    """A local Ray. It gives itself 30 s to start, in which a machine that is busy may not manage."""
    try:
        for left in reversed(range(STARTS)):
            with contextlib.suppress(*[Exception] * bool(left)):
                ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
                break
            ray.shutdown()
        yield
    finally:
        ray.shutdown()
        gc.collect()  # here, where warnings of others count for nothing: Ray leaves its processes to the collector


@pytest.fixture(scope="module")
def fleet(cluster, binary):
    with Fleet(binary, PUSH_MODEL, replicas=2, flags=FLAGS, num_cpus=0.5) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def alone(binary):
    """One server, without Ray."""
    with ServerProcess(binary, PUSH_MODEL, FLAGS) as server:
        yield server.client


def all_bits(groups):
    return [(*bits(s), s.seed, s.prompt_index, s.sample_index) for group in groups for s in group.samples]


def generating(fleet, prompts=PROMPTS, n=2):
    """A generation in a thread that has begun on both replicas; `join` gives its samples."""
    outputs = []
    thread = threading.Thread(target=lambda: outputs.append(fleet.generate(prompts, n, LONG, return_text=False)))
    thread.start()
    until(lambda: all(r.server is not None and r.server.running_samples for r in fleet.status().replicas))

    def join():
        thread.join(TIMEOUT)
        return all_bits(outputs[0])

    return join


def until(condition):
    waiting = threading.Event()
    for _ in range(int(TIMEOUT / 0.02)):
        if condition():
            return
        waiting.wait(0.02)
    raise AssertionError(f"not after {TIMEOUT:g} s")


def instances(fleet):
    return [started.instance for started in fleet.started()]


def test_a_fleet_of_two_gives_the_bits_of_one_server(fleet, alone):
    groups = fleet.generate(PROMPTS, 2, LONG, return_text=False)
    assert all_bits(groups) == all_bits(alone.generate(PROMPTS, 2, LONG, return_text=False))
    assert [r.state for r in fleet.status().replicas] == [CURRENT, CURRENT]
    assert all(r.server.generated_tokens > 0 for r in fleet.status().replicas)


@pytest.mark.parametrize("killed", ["server", "actor"])
def test_one_killed_in_the_middle_of_a_generation_loses_and_doubles_nothing(fleet, alone, killed, rng):
    adapter, config = random_adapter(rng, BASE)
    receipt = fleet.push_lora(adapter, config)
    assert alone.push_lora(adapter, config, version=receipt.weight_version).digest == receipt.digest
    before, pids = instances(fleet), [started.pid for started in fleet.started()]
    join = generating(fleet)
    if killed == "server":
        os.kill(pids[0], signal.SIGKILL)
    else:
        ray.kill(fleet.actors[0], no_restart=False)
    assert join() == all_bits(alone.generate(PROMPTS, 2, LONG, return_text=False))
    fleet.wait_until_ready(TIMEOUT)
    after = instances(fleet)
    assert after[0] != before[0] and after[1] == before[1]
    until(lambda: not Path(f"/proc/{pids[0]}").exists())
    sums = fleet.checksum()
    assert sums[0] == sums[1] == alone.checksum(), "it has the policy that it was started without"
    assert {r.server.weight_version for r in fleet.status().replicas} == {receipt.weight_version}


def test_a_push_that_one_misses_keeps_it_out_until_it_has_caught_up(fleet, rng):
    adapter, config = random_adapter(rng, BASE)
    os.kill(fleet.started()[1].pid, signal.SIGKILL)
    receipt = fleet.push_lora(adapter, config)
    assert receipt.missed == [1] and receipt.replicas[0].digest == receipt.digest, receipt
    groups = fleet.generate(PROMPTS, 2, SamplingParams(max_tokens=8), return_text=False)
    spans = [span for group in groups for sample in group.samples for span in sample.weight_versions]
    assert {span.weight_version for span in spans} == {receipt.weight_version}
    fleet.wait_until_ready(TIMEOUT)
    sums = fleet.checksum()
    assert sums[0] == sums[1]
    full = fleet.push_full(perturbed(rng, BASE).items())
    assert full.missed == [] and {replica.digest for replica in full.replicas} == {full.digest}
    assert fleet.push_full(BASE).missed == []


def test_a_replica_that_is_lost_while_all_sleep_comes_back_asleep(fleet):
    fleet.push_lora(None)
    fleet.sleep()
    before = instances(fleet)
    os.kill(fleet.started()[0].pid, signal.SIGKILL)
    until(lambda: fleet.status().replicas[0].state is LOST)
    until(lambda: (server := fleet.status().replicas[0].server) is not None and server.asleep is not None)
    assert instances(fleet)[0] != before[0]
    fleet.wake()
    version = fleet.push_lora(None).weight_version
    assert fleet.generate(PROMPTS, 1, LONG, return_text=False, if_weight_version=version)


def kept_tokens():
    """Directories with the token of a server."""
    return set(Path(tempfile.gettempdir()).glob("rollout-replica-*"))


def made_groups():
    return [group for group in placement_group_table().values() if group["state"] != "REMOVED"]


@pytest.fixture
def bundles(cluster):
    """A placement group of the caller: two bundles."""
    group = placement_group([{"CPU": 0.5}, {"CPU": 0.1}], strategy="PACK")
    yield group
    remove_placement_group(group)


def test_replicas_go_into_bundles_that_the_caller_has(bundles, binary, fleet):
    options = {"num_cpus": 0.1, "placement_group": bundles, "bundle_indices": [1], "flags": FLAGS}
    before = kept_tokens()
    with Fleet(binary, PUSH_MODEL, 1, **options) as other:
        assert other.generate(PROMPTS[:1], 1, SamplingParams(max_tokens=2), return_text=False)
        pid = other.started()[0].pid
        assert len(kept_tokens() - before) == 1
    assert not Path(f"/proc/{pid}").exists() and kept_tokens() == before
    assert placement_group_table(bundles)["state"] == "CREATED", "it is the caller's"
    other.close()


def test_a_fleet_that_cannot_be_made_leaves_nothing(cluster, binary, fleet):
    before = len(made_groups())
    with pytest.raises(InvalidArgument, match="quorum"):
        Fleet(binary, PUSH_MODEL, 1, num_cpus=0.1, quorum=2)
    until(lambda: len(made_groups()) == before)


def test_it_is_waited_for_as_long_as_a_server_may_take_to_start(bundles, binary):
    """Both replicas want the same bundle, which has room for one."""
    options = {"num_cpus": 0.1, "placement_group": bundles, "bundle_indices": [1, 1], "flags": FLAGS}
    fleet = Fleet(binary, PUSH_MODEL, 2, **options, quorum=2, start_seconds=5.0)
    with contextlib.closing(fleet), pytest.raises(Unavailable, match="of 2 replicas are ready after 5 s"):
        asyncio.run(AsyncFleet(fleet).wait_until_ready())


def test_what_cannot_start_says_why(cluster, binary, tmp_path):
    with pytest.raises(ResourceExhausted, match="no room for 2 bundles"):
        Fleet(binary, PUSH_MODEL, 2, num_cpus=64, start_seconds=0.5)
    with pytest.raises(InvalidArgument, match="bundle_indices"):
        Fleet(binary, PUSH_MODEL, 2, bundle_indices=[0, 1])
    for program, model, said in [
        ("no-such-program", PUSH_MODEL, "no program"),
        (binary, tmp_path / "none", "status 1"),
    ]:
        fleet = Fleet(program, model, 1, num_cpus=0.1)
        with pytest.raises(RolloutError, match=f"replica 0 does not start: .*{said}"):
            fleet.wait_until_ready(TIMEOUT)
        fleet.close()
        with pytest.raises(Unavailable):
            fleet.started()
