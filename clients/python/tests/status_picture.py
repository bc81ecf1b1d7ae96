#!/usr/bin/env python3
"""The picture of `rollout status` for the docs: rounds of a trainer on a real model. `make status-picture` runs it."""

from __future__ import annotations

import argparse
import threading
import time
from pathlib import Path

from page_picture import generate, rounds
from rollout_client import ServerProcess
from rollout_client.cli._monitor import Monitor
from rollout_client.cli._status_view import picture

ADDRESS = "127.0.0.1:50051"
LOOK_SECONDS, LAST_SECONDS, WINDOW = 0.5, 3.0, 30.0


def train(client):
    rounds(client, lambda milliseconds: time.sleep(milliseconds / 1000))
    generate(client)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="the rollout-server binary")
    parser.add_argument("--model", required=True, help="the model to serve")
    parser.add_argument("output", help="the picture to write")
    args = parser.parse_args()
    flags = ["--mem-util", "0.1", "--kv-cache-bytes", "256MiB"]
    with ServerProcess(args.server, args.model, flags) as server:
        monitor = Monitor(server.client)
        trainer = threading.Thread(target=train, args=(server.client,))
        trainer.start()
        until = None
        while until is None or time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
            monitor.look()
            if until is None and monitor.status.weight_version == 3 and monitor.status.running_samples:
                until = time.monotonic() + LAST_SECONDS
        Path(args.output).write_text(picture(monitor, ADDRESS, WINDOW), encoding="utf-8")
        trainer.join()


if __name__ == "__main__":
    main()
