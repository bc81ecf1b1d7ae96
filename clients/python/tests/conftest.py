"""Fixtures: a fake server in this process, and the real one's path."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from fake_server import FakeServer
from rollout_client import AsyncRolloutClient, RolloutClient

REPOSITORY = Path(__file__).resolve().parents[3]


def pytest_addoption(parser):
    parser.addoption(
        "--server",
        default=os.environ.get("ROLLOUT_SERVER_BINARY", str(REPOSITORY / "target/release/rollout-server")),
        help="the rollout-server binary that test_server.py runs",
    )


@pytest.fixture
def fake():
    with FakeServer() as server:
        yield server


@pytest.fixture(params=["sync", "async"])
def call(request, fake):
    """Runs one call of a client: `call(lambda client: client.status())`, with both clients in turn."""

    def run(use, **options):
        if request.param == "sync":
            with RolloutClient(fake.address, **options) as client:
                return use(client)

        async def main():
            async with AsyncRolloutClient(fake.address, **options) as client:
                return await use(client)

        return asyncio.run(main())

    return run
