"""Two servers behind connections that can be cut, a fleet of them, and what can be seen of it."""

from __future__ import annotations

import threading

import pytest

from models import read_model
from proxies import Proxy
from rollout_client import Lifecycle, SamplingParams, ServerProcess
from rollout_client.fleet import Fleet, ReplicaState
from serving import PUSH_MODEL, SMALL_CACHE, bits

CURRENT, BEHIND, LOST = ReplicaState.CURRENT, ReplicaState.BEHIND, ReplicaState.LOST
FLAGS = [*SMALL_CACHE, "--mem-util", "0.1", "--max-adapters", "2"]
PROMPTS = [[i % 7, i % 5, 3, 11] for i in range(10)]
SAMPLING = SamplingParams(max_tokens=24, seed=5, ignore_eos=True)
LONG = SamplingParams(max_tokens=1500, seed=5, ignore_eos=True)
BASE = read_model(PUSH_MODEL)


@pytest.fixture(scope="module")
def pair(binary):
    """Two servers, each behind a connection that can be cut."""
    with (
        ServerProcess(binary, PUSH_MODEL, FLAGS) as first,
        ServerProcess(binary, PUSH_MODEL, FLAGS) as second,
        Proxy(first.address) as near,
        Proxy(second.address) as far,
    ):
        yield (first, second), (near, far)


@pytest.fixture
def servers(pair):
    """The two servers, at the checkpoint again and with whole connections."""
    for server, proxy in zip(*pair, strict=True):
        proxy.mend()
        if server.client.status().lifecycle is Lifecycle.ASLEEP:
            server.client.wake()
        server.client.resume()
        for adapter in server.client.adapters():
            server.client.remove_adapter(adapter.name)
        server.client.push_full(BASE, version=server.client.status().weight_version + 1)
    versions = [server.client.status().weight_version for server in pair[0]]
    for server in pair[0]:
        server.client.push_lora(None, version=max(versions) + 1)
    return pair


@pytest.fixture
def fleet(servers):
    _, proxies = servers
    with Fleet([proxy.address for proxy in proxies]) as fleet:
        yield fleet


def all_bits(groups):
    return [(*bits(s), s.seed, s.prompt_index, s.sample_index) for group in groups for s in group.samples]


def ask(client, prompts=PROMPTS, n=3, **options):
    return client.generate(prompts, n, SAMPLING, return_text=False, **options)


def states(fleet):
    return [replica.state for replica in fleet.status().replicas]


def versions(groups):
    return {span.weight_version for group in groups for s in group.samples for span in s.weight_versions}


def wait_until(fleet, expected, stuck=None, seconds=60):
    wait_until_true(
        lambda: states(fleet) == expected and (stuck is None or fleet._core.replica_set.replicas[stuck].stuck), seconds
    )


def wait_until_true(condition, seconds=60.0):
    done = threading.Event()
    for _ in range(int(seconds / 0.02)):
        if condition():
            return
        done.wait(0.02)
    raise AssertionError(f"not after {seconds:g} s")
