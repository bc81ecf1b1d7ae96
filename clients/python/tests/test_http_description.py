"""Requests made after the server's own description of its routes, by schemathesis, and spoilt in all ways it knows."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rollout_client import ServerProcess
from serving import FIXTURES, SMALL_CACHE, assert_idle

SEED = 14
# Some thousand requests in a few seconds. Contexts are short, so that no answer takes long.
FLAGS = [*SMALL_CACHE, "--max-model-len", "48"]
# Every status that is not described fails, 500 among them: a route that needs what this server has not is described
# with 501, and one that waits for the model with 503. That a valid body is taken is not asked: no description says that
# a name is known or that two members go together.
EXCLUDED = "not_a_server_error,positive_data_acceptance"
# What makes the server refuse most of the others' requests comes in a pass of its own.
LIFECYCLE = "^/(sleep|pause)$"


def explore(server, directory, *options):
    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"http://{server.http_address}/openapi.json",
        "--seed", str(SEED), "--max-examples", "8", "--phases", "coverage,fuzzing", "--no-shrink",
        "--exclude-checks", EXCLUDED, "--request-timeout", "30",
        # It generates arbitrary strings for path parameters, and discards most of them as invalid in a path.
        "--suppress-health-check", "filter_too_much", *options,
    ]  # fmt: skip
    # It keeps what has failed in the directory that it runs in, and would try that first the next time.
    done = subprocess.run(command, cwd=directory, check=False, capture_output=True, text=True, timeout=300)
    print(done.stdout[-20_000:], done.stderr[-4_000:])
    assert done.returncode == 0, "the answers are not as described"
    assert f"Seed: {SEED}" in done.stdout


@pytest.mark.parametrize("selected", ["--exclude-path-regex", "--include-path-regex"])
def test_answers_are_as_described(binary, tmp_path, selected):
    with ServerProcess(binary, FIXTURES / "llama-tied", FLAGS) as server:
        explore(server, tmp_path, selected, LIFECYCLE)
        client = server.client
        # A sleep of level 2 gives the weights away, and a pause may follow a wake.
        if client.status().lifecycle.name == "ASLEEP":
            client.wake()
        if client.status().lifecycle.name == "WEIGHTS_MISSING":
            client.wake(reload=True)
        client.resume()
        assert_idle(client)
        assert client.generate([[1, 2, 3]], return_text=False)
        assert client.status().internal_errors == 0
