"""The log of a real server: it never waits for its reader, and loses nothing while it is read."""

from __future__ import annotations

import re
import subprocess
import threading

from rollout_client import SamplingParams, ServerProcess
from serving import FIXTURES, SMALL_CACHE

REQUESTS = 2000
ONE_TOKEN = SamplingParams(max_tokens=1)
FINISHED = re.compile(rb'request finished request_id="([^"]+)"')


def ask(server):
    """Many short requests, each of which leaves lines in the log."""
    outputs = [server.client.generate([[1, 2]], sampling=ONE_TOKEN, return_text=False) for _ in range(REQUESTS)]
    assert all(len(output[0].samples[0].token_ids) == 1 for output in outputs)


def test_a_log_that_nobody_reads_stops_neither_requests_nor_the_end(binary):
    """A pipe holds 64 KiB; at level debug a few requests fill it."""
    with ServerProcess(
        binary, FIXTURES / "llama-tied", [*SMALL_CACHE, "--log", "debug"], output=subprocess.PIPE
    ) as server:
        ask(server)
        assert server.client.status().finished_requests == REQUESTS
        server.process.terminate()
        # The grace period is 30 s, and nothing is there to wait for.
        assert server.process.wait(25) == 0
        assert len(server.process.stdout.read()) >= 60_000, "the pipe was not full"
        server.process.stdout.close()


def test_no_line_of_a_log_that_is_read_is_lost(binary):
    lines = []
    with ServerProcess(binary, FIXTURES / "llama-tied", SMALL_CACHE, output=subprocess.PIPE) as server:
        reader = threading.Thread(target=lambda: lines.extend(server.process.stdout))
        reader.start()
        ask(server)
        assert server.stop() == 0
        reader.join()
        server.process.stdout.close()
    assert len({request for line in lines for request in FINISHED.findall(line)}) == REQUESTS
    assert lines[-1].rstrip().endswith(b"ended=Drained") and not any(b"dropped" in line for line in lines)


def test_a_late_reader_is_told_how_many_lines_are_missing(binary):
    """Once the queue behind the pipe is full too."""
    with ServerProcess(
        binary, FIXTURES / "llama-tied", [*SMALL_CACHE, "--log", "trace"], output=subprocess.PIPE
    ) as server:
        # At level trace a request leaves 20 KB, so these are five times what the queue holds.
        ask(server)
        told = threading.Event()
        count = []

        def read():
            for line in server.process.stdout:
                count.extend(map(int, re.findall(rb"(\d+) log lines were dropped", line)))
                if count:
                    told.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert told.wait(60), "no line says that lines are missing"
        assert server.stop() == 0
        reader.join()
        server.process.stdout.close()
    assert count[0] > 100
