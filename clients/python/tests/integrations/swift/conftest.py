"""ms-swift in `make test-integrations`: what it imports of vLLM, which is not installed. Servers: ../../conftest.py."""

from __future__ import annotations

import os

# No test may look for a model elsewhere.
os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from foreign_warnings import pytest_collection, pytest_runtest_protocol  # noqa: F401 hooks
from rollout_client.swift._vllm_stub import install_stub

install_stub()
