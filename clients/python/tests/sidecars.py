"""Running `rollout sidecar`."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys


def start(*options):
    command = [sys.executable, "-m", "rollout_client.cli", "sidecar", "--listen", "127.0.0.1:0", *map(str, options)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def sidecar(*options):
    """A running one; gives its address and the line that it has printed."""
    process = start(*options)
    try:
        line = process.stderr.readline()
        found = re.match(r"http://(127\.0\.0\.1:\d+) is ", line)
        assert found, line + process.stderr.read()
        yield found[1], line
    finally:
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
