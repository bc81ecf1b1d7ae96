"""verl in `make test-integrations`: Ray, and replicas of a tiny model that tests share. Servers: ../../conftest.py."""

from __future__ import annotations

import asyncio
import os

import pytest

# No test may look for a model elsewhere, and each has one of two cores: several processes train and serve at once.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", RAY_worker_niceness="0")

import torch

from foreign_warnings import pytest_collection, pytest_runtest_protocol  # noqa: F401 hooks

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cluster():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def rollouts(cluster, binary):
    """A replica that serves adapters, awake, to one rank of a trainer; tests share it."""
    yield from _started(binary, 0, lora_rank=4)


@pytest.fixture(scope="session")
def full_rollouts(cluster, binary):
    """A replica that serves what is pushed in full."""
    yield from _started(binary, 1)


def _started(binary, rank, **model):
    from replicas import Rollouts, model_config, rollout_config

    rollouts = Rollouts(rollout_config(binary), model_config(**model), rank=rank)
    asyncio.run(rollouts.start())
    yield rollouts
    rollouts.close()
