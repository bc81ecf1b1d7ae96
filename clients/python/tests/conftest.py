"""Fixtures: a fake server in this process, and the real one's path."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest

from fake_server import FakeServer
from fleets import fleet, pair, servers  # noqa: F401 fixtures
from models import checksums, read_model
from rollout_client import AsyncRolloutClient, RolloutClient, ServerProcess
from scripted import scripted, scripted_model  # noqa: F401 fixtures
from serving import FIXTURES, PUSH_MODEL, REPOSITORY, SMALL_CACHE, assert_idle, held, outputs, server

# Servers that tests start by themselves take any port for HTTP, because several may run at once.
os.environ.setdefault("ROLLOUT_HTTP_PORT", "0")
# A shell starts its background jobs with SIGINT ignored, which Python and all that the tests start would leave so.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption(
        "--server",
        default=os.environ.get("ROLLOUT_SERVER_BINARY", str(REPOSITORY / "target/release/rollout-server")),
        help="the rollout-server binary that test_server.py runs",
    )
    parser.addoption(
        "--record",
        action="store_true",
        help="write anew what a test compares with: tests/fixtures/recorded.json (test_recorded.py), or the tables of "
        "docs/http.md (compat/test_members.py)",
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
    path = Path(request.config.getoption("--server")).absolute()
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


@pytest.fixture
def rng():
    """Random numbers; the seed is in the output of a test that fails."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def push_target(binary):
    """A bfloat16 server that tests share, with its parameters as arrays; each test leaves it at the base."""
    with server(binary, PUSH_MODEL, "--weights-dir", FIXTURES) as client:
        yield client, read_model(PUSH_MODEL)


@pytest.fixture
def at_base(push_target):
    """The shared server and its base; afterwards no push is open, and the base, pushed again, serves as before."""
    client, base = push_target
    client.push_full(base)
    expected = outputs(client)
    yield client, base
    client.push_full(base)
    assert client.checksum() == checksums(base, "bfloat16")
    assert outputs(client) == expected
    status = client.status()
    assert not status.updating and "update_staging" not in held(status), status


@pytest.fixture
def pusher(fake, new_segments):
    """A client of the fake server, which leaves no shared memory behind."""
    with RolloutClient(fake.address, timeout=60) as client:
        yield client
    assert new_segments() == []


@pytest.fixture
def new_segments():
    """Names of the shared memory that this process has taken since the test began; other clients keep theirs."""

    def own_segments():
        return {path.name for path in Path("/dev/shm").glob(f"rollout-{os.getpid()}-*")}

    before = own_segments()
    return lambda: sorted(own_segments() - before)
