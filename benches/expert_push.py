#!/usr/bin/env python3
"""Pushes into a model with many experts beside those into a dense one; prints a Markdown section for RESULTS.md.

    make bench-expert-push           # builds, runs this
    .venv/bin/python benches/expert_push.py --runs 5 --json results.json -- --threads 4

Two random models with the same attention and almost the same bytes: a Qwen3-MoE whose experts are 18,432 tensors, and a
Qwen3 whose feed-forward blocks are as wide as all experts of a layer. Each gets LoRA adapters of rank 16 on attention,
then full pushes through the connection and through shared memory, all while nothing runs. The two servers take turns,
and the first push of each kind is not counted.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from checkpoints import QWEN3_MOE, quick_bfloat16, qwen_shapes, write_qwen
from weight_sync import RANK, Timing, copy_rate, gather, random_adapter, timed
from workloads import commit, machine

from rollout_client import RolloutClient, ServerProcess, SharedBuffer, UpdateResult, clean_stale_segments

EXPERTS, DENSE = "experts", "dense"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SMALL = QWEN3_MOE | {
    "hidden_size": 256,
    "num_hidden_layers": 48,
    "num_attention_heads": 8,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "num_experts": 128,
    "vocab_size": 4096,
}
WIDE = {name: value for name, value in SMALL.items() if "expert" not in name} | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "intermediate_size": SMALL["num_experts"] * SMALL["moe_intermediate_size"],
}
CONFIGS = {EXPERTS: SMALL, DENSE: WIDE}
State = dict[str, tuple[memoryview, str, tuple[int, ...]]]


@dataclass(frozen=True)
class Line:
    """A line of the table: what both models took, run by run, and the aim of their ratio."""

    title: str
    values: dict[str, list[float]]
    aim: str

    def row(self) -> str:
        """Both models' medians and ranges, and the ratio's."""
        pairs = zip(self.values[EXPERTS], self.values[DENSE], strict=True)
        ratio = Timing.of([experts / dense for experts, dense in pairs])
        cells = [self.title, *(Timing.of(self.values[name]) for name in CONFIGS), ratio, self.aim]
        return f"| {' | '.join(map(str, cells))} |"


def bytes_of(config: dict) -> int:
    return 2 * sum(int(np.prod(shape)) for shape in qwen_shapes(config).values())


def random_state(config: dict, values: bytes) -> State:
    """The tensors of a full push, as parts of `values`."""
    state, end = {}, 0
    for name, shape in qwen_shapes(config).items():
        start, end = end, end + 2 * int(np.prod(shape))
        state[name] = (memoryview(values)[start:end], "bfloat16", shape)
    return state


def in_turn(push: dict[str, Callable[[], UpdateResult]], runs: int) -> dict[str, list[tuple[float, UpdateResult]]]:
    """Seconds and results of the rounds, without the first, in which the servers take fresh pages."""
    rounds = [{name: timed(once) for name, once in push.items()} for _ in range(1 + runs)]
    return {name: [found[name] for found in rounds[1:]] for name in push}  # type: ignore[misc]


def measure_adapters(clients: dict[str, RolloutClient], runs: int) -> list[Line]:
    adapters = {name: random_adapter(client.parameters(), ATTENTION) for name, client in clients.items()}
    push = {name: partial(client.push_lora, *adapters[name], progress=False) for name, client in clients.items()}
    found = in_turn(push, runs)
    seconds = {name: [1e3 * seconds for seconds, _ in rounds] for name, rounds in found.items()}
    return [
        Line(f"LoRA r={RANK} on attention, end to end, ms", seconds, ""),
        Line("… pause, ms", pauses(found), "≤ 1"),
    ]


def measure_full(clients: dict[str, RolloutClient], runs: int) -> list[Line]:
    sizes = {name: bytes_of(config) for name, config in CONFIGS.items()}
    values = quick_bfloat16(np.random.default_rng(2), (max(sizes.values()) // 2,))[0]
    states = {name: random_state(config, values) for name, config in CONFIGS.items()}
    with ExitStack() as stack:
        buffers = {name: stack.enter_context(SharedBuffer(size)) for name, size in sizes.items()}
        gathered = {
            name: {tensor: (gather(buffers[name], part), *rest) for tensor, (part, *rest) in state.items()}
            for name, state in states.items()
        }
        ways: dict[str, Callable[[str], Callable[[], UpdateResult]]] = {
            "inline": lambda name: partial(clients[name].push_full, states[name], transport="inline"),
            "shared memory": lambda name: partial(clients[name].push_full, states[name], transport="shared_memory"),
            "gathered into shared memory": lambda name: partial(
                clients[name].push_full, gathered[name], buffer=buffers[name]
            ),
        }
        lines = []
        for title, way in ways.items():
            found = in_turn({name: partial(way(name), progress=False) for name in clients}, runs)
            rates = {name: [sizes[name] / 1e9 / seconds for seconds, _ in rounds] for name, rounds in found.items()}
            staging = {name: [result.staging_ms for _, result in rounds] for name, rounds in found.items()}
            lines += [
                Line(f"FULL {title}, end to end, GB/s", rates, "≥ 0.85"),
                Line("… receiving and verifying in the server, ms", staging, ""),
                Line("… pause, ms", pauses(found), ""),
            ]
    return lines


def pauses(found: dict[str, list[tuple[float, UpdateResult]]]) -> dict[str, list[float]]:
    return {name: [result.pause_ms for _, result in rounds] for name, rounds in found.items()}


def markdown(args: argparse.Namespace, tensors: dict[str, int], copy: Timing, lines: list[Line]) -> str:
    """The section for RESULTS.md."""
    sizes = {name: f"{bytes_of(config) / 1e6:,.0f} MB in {tensors[name]:,} tensors" for name, config in CONFIGS.items()}
    return "\n".join(
        [
            f"## {datetime.date.today().isoformat()}: pushes of experts",
            "",
            f"- machine: {machine()}; a copy of the same bytes by one thread {copy} GB/s",
            f"- commit: {commit()}",
            f"- command: `benches/expert_push.py {' '.join(sys.argv[1:])}`",
            f"- experts: {sizes[EXPERTS]} under the names of checkpoints; dense: {sizes[DENSE]}; bfloat16",
            f"- median (least–most) of {args.runs} runs in turn after one that is not counted; ratio: run by run",
            "",
            "| | experts | dense | ratio | aim |",
            "|---|---|---|---|---|",
            *(line.row() for line in lines),
        ]
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="target/release/rollout-server", help="the server's binary")
    parser.add_argument("--mem-util", type=float, default=0.4)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write every run there")
    parser.add_argument("flags", nargs="*", help="further flags of the servers, after --")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    clean_stale_segments()
    copy = copy_rate(bytes_of(WIDE), args.runs)
    flags = ["--dtype", "bfloat16", "--mem-util", str(args.mem_util), "--kv-cache-bytes", "1GiB", *args.flags]
    with ExitStack() as stack:
        clients = {}
        for name, config in CONFIGS.items():
            model = write_qwen(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rollout-bench-"))), config)
            clients[name] = stack.enter_context(ServerProcess(args.server, model, flags)).client
        tensors = {name: len(client.parameters()) for name, client in clients.items()}
        # The full pushes come last: an adapter pushed after one needs copies of the base's values.
        lines = [*measure_adapters(clients, args.runs), *measure_full(clients, args.runs)]
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    print(markdown(args, tensors, copy, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
