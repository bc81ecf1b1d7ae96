"""For tests with real trainers, which need torch: `make test-trainers`. Servers are fixtures of ../conftest.py."""

from __future__ import annotations

import os
import warnings

import pytest

# No test may look for a model elsewhere, and each has one of two cores: several processes train and serve at once.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1", OMP_NUM_THREADS="1")

import torch

torch.set_num_threads(1)


def foreign_warnings_ignored():
    """Ignores the warnings of trainers and what they use; those of our own code stay errors."""
    warnings.filterwarnings("ignore")
    warnings.filterwarnings("error", module=r"rollout_client(\.|$)")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    foreign_warnings_ignored()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    foreign_warnings_ignored()
    return (yield)
