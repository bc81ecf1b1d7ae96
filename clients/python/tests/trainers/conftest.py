"""For tests with real trainers, which need torch: `make test-trainers`. Servers are fixtures of ../conftest.py."""

from __future__ import annotations

import os

import pytest

# No test may look for a model elsewhere, and each has one of two cores: several processes train and serve at once.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1", OMP_NUM_THREADS="1")

import torch
from tiny import make_model

from foreign_warnings import pytest_collection, pytest_runtest_protocol  # noqa: F401 hooks
from rollout_client import ServerProcess
from serving import SMALL_CACHE, assert_idle

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Path of the tiny model."""
    return str(make_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def float32_server(binary, model):
    """A server of the tiny model in float32, as the trainers compute, with room for resident adapters."""
    flags = [*SMALL_CACHE, "--mem-util", "0.2", "--dtype", "float32", "--max-adapters", "2"]
    with ServerProcess(binary, model, flags) as server:
        yield server


@pytest.fixture
def server(float32_server):
    """The server that trainers share, at its checkpoint and version 0; each leaves it idle."""
    client = float32_server.client
    client.sleep(2)
    client.wake(reload=True)
    yield float32_server
    client.wake()
    assert_idle(client)
