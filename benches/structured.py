"""Tokens per second with structured output and without, on one server, in turn: what the masks cost.

    .venv/bin/python benches/structured.py path/to/model

Both kinds of samples go on at the end-of-sequence token, so that they have the same number of tokens. The schema is of
strings, numbers and nested arrays without an end in sight; the automaton learns its states in the warm-up of each
request, as in use.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from rollout_client import RolloutClient, SamplingParams, ServerProcess, StructuredOutputs

SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
            "note": {"type": "string"},
        },
        "required": ["name", "age", "tags", "note"],
        "additionalProperties": False,
    },
    "x-guidance": {"whitespace_flexible": False},
}
PROMPT = "A JSON array of people with name, age, tags and a note: "


def tokens_per_second(client: RolloutClient, n: int, tokens: int, structure: StructuredOutputs | None) -> float:
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=1, structured_outputs=structure)
    started = time.monotonic()
    (output,) = client.generate([PROMPT], n=n, sampling=sampling)
    return sum(len(sample.token_ids) for sample in output.samples) / (time.monotonic() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--server", type=Path, default=Path("target/release/rollout-server"))
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    kinds = {"any text": None, "JSON schema": {"json": SCHEMA}, "regex": {"regex": "[A-Za-z ,.]+"}}
    flags = ["--speculation", "off", "--mem-util", "0.4"]
    print(f"| samples | {' | '.join(kinds)} |\n|---{'|---' * len(kinds)}|")
    with ServerProcess(args.server, args.model, flags) as process:
        for n in (1, 64):
            found = {kind: [] for kind in kinds}
            for run in range(args.runs + 1):
                for kind, structure in kinds.items():
                    rate = tokens_per_second(process.client, n, args.tokens, structure)
                    if run > 0:  # the first run builds what is built once
                        found[kind].append(rate)
            cells = [f"{statistics.median(v):,.0f} ({min(v):,.0f} to {max(v):,.0f})" for v in found.values()]
            print(f"| {n} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
