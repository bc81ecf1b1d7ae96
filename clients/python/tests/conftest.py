"""Fixtures: a fake server in this process, and the real one's path."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from fake_server import FakeServer
from rollout_client import AsyncRolloutClient, RolloutClient, ServerProcess, ServerStatus

REPOSITORY = Path(__file__).resolve().parents[3]
FIXTURES = REPOSITORY / "tests" / "fixtures"
# The fixtures need a few hundred bytes of cache per token: this holds some 100,000 tokens.
SMALL_CACHE = ["--kv-cache-bytes", str(64 << 20)]


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


@pytest.fixture(scope="session")
def binary(request):
    path = Path(request.config.getoption("--server"))
    if not path.is_file():
        pytest.fail(f"no server at {path}: build it (`make server`), or say --server PATH", pytrace=False)
    return path


@pytest.fixture(scope="session")
def running(binary):
    """A server of a tiny model that the tests share; each leaves it idle."""
    with ServerProcess(binary, FIXTURES / "llama-tied", SMALL_CACHE) as process:
        yield process


@pytest.fixture
def client(running):
    """A client of the shared server, which must be idle after the test as it was before."""
    with RolloutClient(running.address, timeout=120) as client:
        yield client
        assert_idle(client)


def wait_for(client: RolloutClient, condition, what: str, seconds: float = 60.0) -> ServerStatus:
    """The first status for which `condition` holds."""
    deadline = time.monotonic() + seconds
    while True:
        status = client.status()
        if condition(status):
            return status
        assert time.monotonic() < deadline, f"not {what} after {seconds:g} s: {status}"
        time.sleep(0.01)


def assert_idle(client: RolloutClient) -> None:
    """Soon nothing runs or waits, and no block is held."""
    wait_for(
        client,
        lambda s: s.running_requests == s.running_samples == s.waiting_samples == 0 and s.free_blocks == s.total_blocks,
        "idle with every block free",
    )
