#!/usr/bin/env python3
"""Decode, prefill, sleep, wake and pushes on a card, as fractions of what it reaches at best; prints a Markdown table.

    .venv/bin/python benches/gpu.py --server target/cuda/release/rollout-server             # random 1.5B and 7B shapes
    .venv/bin/python benches/gpu.py --server SERVER --model tests/fixtures/qwen2 --emulated  # tries this program

LD_LIBRARY_PATH names NVIDIA's libraries, or the emulator's. Figures of an emulated card mean nothing. The random 7B
shape takes 15 GB in the temporary directory. `--peer-python` names a Python with transformers and a torch for the card,
which then does the same work beside the server.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from card import EMULATED, ON_A_CARD, Card, CardLimits, NoCardError, context_bytes
from checkpoints import QWEN_1_5B, QWEN_7B, write_qwen
from engines import PEER, Peer, PeerFailedError
from weight_sync import random_adapter, timed
from workloads import Limits, Shape, Workload, floor_seconds, run_once

from rollout_client import RolloutClient, ServerProcess

RANDOM = {"1.5B, random": QWEN_1_5B, "7B, random": QWEN_7B}
RUNS = 3
NO_CARD = 77
"""Exit status, as of scripts/gpu_check.py."""
Row = tuple[str, str, str]
"""What, the figure, and what issue 16 wants of it on an H200."""


def shape_of(client: RolloutClient, model: Path) -> Shape:
    """What a step reads and computes: without an embedding whose rows are only looked up."""
    sizes = {p.name: math.prod(p.shape) for p in client.parameters()}
    config = json.loads((model / "config.json").read_text())
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    embedding = sizes["model.embed_tokens.weight"]
    looked_up = embedding if "lm_head.weight" in sizes else 0
    kv = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head_dim
    return Shape(sum(sizes.values()) - looked_up, embedding, kv)


def workloads(*, emulated: bool) -> dict[str, tuple[Workload, str]]:
    """Workloads with their targets."""
    few, many, length = (4, 4, 8) if emulated else (128, 256, 1024)
    return {
        "decode, batch 1": (Workload(1, 1, 8, few, 0.0), "75 %"),
        f"group of {many}": (Workload(1, many, 8 if emulated else 256, few, 1.0), "60 %"),
        "prefill": (Workload(1 if emulated else 16, 1, length, 1, 0.0), "55 %"),
    }


def fastest(run: Callable[[Workload, list[list[int]]], float], vocab: int, *, emulated: bool) -> dict[str, float]:
    """The least seconds of each workload."""
    least = {}
    for name, (workload, _) in workloads(emulated=emulated).items():
        prompts = workload.make_prompts(vocab)
        # The first run is not counted.
        least[name] = min([run(workload, prompts) for _ in range(RUNS + 1)][1:])
    return least


def speeds(seconds: dict[str, float], shape: Shape, limits: CardLimits, *, emulated: bool) -> list[Row]:
    """Workloads beside the least time that the card's limits allow."""
    best = Limits(0, "card", 0.0, limits.bf16_tflops * 1e3, limits.copy_gb_per_s)
    rows = []
    for name, (workload, target) in workloads(emulated=emulated).items():
        share = floor_seconds(workload, shape, "bfloat16", best) / seconds[name]
        rate = workload.counted_tokens / seconds[name]
        rows.append((name, f"{rate:,.0f} tokens/s, {share:.0%} of the limits", target))
    return rows


def beside(ours: dict[str, float], python: str, model: Path, vocab: int, *, emulated: bool) -> list[Row]:
    """The same work by transformers' `generate`, which has the card for itself then."""
    command = [python, str(PEER), "transformers", str(model), "cpu" if emulated else "cuda"]
    # NVIDIA's libraries are torch's own there.
    environment = {"LD_LIBRARY_PATH": "", "HF_HUB_OFFLINE": "1"}
    try:
        with closing(Peer("transformers", command, environment)) as peer:
            theirs = fastest(peer.run, vocab, emulated=emulated)
    except PeerFailedError as error:
        return [("transformers", str(error), "")]
    rows = []
    for name, (workload, _) in workloads(emulated=emulated).items():
        rate = f"{workload.counted_tokens / theirs[name]:,.0f} tokens/s"
        ratio = f"the server is {theirs[name] / ours[name]:.2f} times as fast"
        rows.append((f"transformers {peer.version}, {name}", f"{rate}; {ratio}", ""))
    return rows


def pushes(client: RolloutClient, card: Card, limits: CardLimits) -> list[Row]:
    """An adapter from the host and from the device, and the whole model from the device."""
    parameters = client.parameters()
    adapter, config = random_adapter(parameters)

    def pause(tensors: Mapping[str, object], transport: str) -> str:
        def push() -> float:
            return client.push_lora(tensors, config, transport=transport, progress=False).pause_ms

        return f"{min([push() for _ in range(RUNS + 1)][1:]):.1f} ms"

    from_host = pause(adapter, "auto")
    lent = {name: card.tensor("float32", values.shape, values.tobytes()) for name, values in adapter.items()}
    from_device = pause(lent, "device_memory")
    model = {p.name: card.tensor("bfloat16", tuple(p.shape)) for p in parameters}
    push = partial(client.push_full, model, transport="device_memory", progress=False)
    taken, result = min((timed(push) for _ in range(RUNS)), key=lambda run: run[0])
    # A copy reads and writes each byte, and two digests read it once more each.
    share = sum(2 * math.prod(p.shape) for p in parameters) * 4 / 1e9 / limits.copy_gb_per_s / taken
    for tensor in [*lent.values(), *model.values()]:
        card.free(tensor)
    return [
        ("LoRA r=16 from the host, pause", from_host, "150 ms (7B)"),
        ("LoRA r=16 from the device, pause", from_device, "30 ms (7B)"),
        ("the whole model from the device", f"{taken * 1e3:.0f} ms, {share:.0%} of the copy rate", ""),
        ("the whole model from the device, pause", f"{result.pause_ms:.1f} ms", ""),
    ]


def sleeps(client: RolloutClient, card: Card, before: int, weights: int, limits: CardLimits) -> list[Row]:
    """Both levels of sleep: their times, and what the driver says the process holds."""

    def held() -> str:
        return f"{(before - card.memory()[0]) / 2**20:,.0f} MiB"

    awake, (slept, _), asleep = held(), timed(client.sleep), held()
    woken, _ = timed(client.wake)
    link = weights / 1e9 / limits.to_device_gb_per_s / woken
    client.sleep(2)
    context = f"the bare context, {context_bytes(card) / 2**20:,.0f} MiB"
    return [
        ("held awake", awake, "below --mem-util"),
        ("sleep level 1", f"{slept * 1e3:.0f} ms", ""),
        ("wake", f"{woken * 1e3:.0f} ms, {link:.0%} of the link", "80 %"),
        ("held asleep, level 1", asleep, context),
        ("held asleep, level 2", held(), context),
    ]


def measure(args: argparse.Namespace, card: Card, limits: CardLimits, name: str, model: Path) -> None:
    before, _ = card.memory()
    flags = ["--device", "cuda", "--dtype", "bfloat16", "--speculation", "off", "--mem-util", str(args.mem_util)]
    flags += ["--kv-cache-bytes", "64MiB" if args.emulated else "16GiB", *args.flags]
    with ServerProcess(args.server, model, flags) as server:
        client = server.client
        shape, vocab = shape_of(client, model), client.info().vocab_size
        seconds = fastest(partial(run_once, client), vocab, emulated=args.emulated)
        rows = speeds(seconds, shape, limits, emulated=args.emulated) + pushes(client, card, limits)
        rows += sleeps(client, card, before, int(2 * shape.parameters), limits)
    left = before - card.memory()[0]
    rows.append(("held after the end", f"{left / 2**20:,.0f} MiB", "0 MiB"))
    if args.peer_python:
        rows += beside(seconds, args.peer_python, model, vocab, emulated=args.emulated)
    lines = [f"## {name}", "", "| | measured | target on an H200 |", "|---|---|---|"]
    print("\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]), "\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", required=True, help="a binary of make cuda")
    parser.add_argument("--model", type=Path, help="a checkpoint, instead of the random shapes")
    parser.add_argument("--mem-util", type=float, default=0.8)
    parser.add_argument("--peer-python", help="a Python with transformers and torch, to run them beside the server")
    parser.add_argument("--emulated", action="store_true", help="few and short sequences, for the emulator")
    parser.add_argument("flags", nargs="*", help="further flags of the server, after --")
    args = parser.parse_args()
    try:
        card = Card(emulated=args.emulated)
    except NoCardError as error:
        print(f"skipped, as there is no card here: {error}")
        return NO_CARD
    limits = card.limits(EMULATED if args.emulated else ON_A_CARD)
    print(card.describe(), limits, "\n")
    if args.model:
        measure(args, card, limits, args.model.name, args.model)
        return 0
    for name, config in RANDOM.items():
        with tempfile.TemporaryDirectory(prefix="rollout-bench-") as directory:
            measure(args, card, limits, name, write_qwen(Path(directory) / "model", config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
