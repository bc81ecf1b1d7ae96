#!/usr/bin/env python3
"""The picture of the page for the README: rounds of a trainer on a real model. `make page-picture` runs it."""

from __future__ import annotations

import argparse
import threading

from browsers import chromium
from rollout_client import RolloutError, SamplingParams, ServerProcess
from rollout_client.demo import random_adapter

PROMPTS = [f"Tell me a story about a lighthouse and {what}." for what in ("a storm", "a whale", "a letter", "a cat")]
SAMPLING = SamplingParams(max_tokens=120, seed=7, ignore_eos=True)
WIDTH, HEIGHT = 1120, 1184


def generate(client, **options):
    client.generate(PROMPTS, n=4, sampling=SAMPLING, **options)


def rounds(client, pause):
    """Three rounds of generating, sleeping while the trainer computes, waking and taking its newest policy."""
    tensors, config = random_adapter(client)
    for step in (1, 2, 3):
        generate(client, request_id=f"step-{step}")
        client.sleep()
        pause(4_000)
        client.wake(["weights"])
        client.push_lora(tensors, config, version=step)
        client.wake(["kv_cache"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="the rollout-server binary")
    parser.add_argument("--model", required=True, help="the model to serve")
    parser.add_argument("--scheme", default="light", choices=["light", "dark"])
    parser.add_argument("output", help="the picture to write")
    args = parser.parse_args()
    flags = ["--mem-util", "0.1", "--kv-cache-bytes", "256MiB"]
    with ServerProcess(args.server, args.model, flags) as server, chromium() as browser:
        page = browser.new_page(color_scheme=args.scheme, viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(f"http://{server.http_address}/")
        rounds(server.client, page.wait_for_timeout)
        try:
            server.client.generate(PROMPTS, sampling=SAMPLING, if_weight_version=1)
        except RolloutError as error:
            print(f"as it should be: {error}")
        last = threading.Thread(target=generate, args=(server.client,), kwargs={"request_id": "step-4"})
        last.start()
        page.wait_for_timeout(3_000)
        page.screenshot(path=args.output)
        last.join()


if __name__ == "__main__":
    main()
