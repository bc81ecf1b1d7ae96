"""Hooks of conftest files whose tests import trainers, which warn of things that are not ours to mend."""

from __future__ import annotations

import warnings

import pytest


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
