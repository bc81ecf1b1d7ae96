"""`rollout push-lora`: pushes a saved adapter."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, get_args

from .._adapter_directory import read_adapter
from ..options import PushLoraOptions
from ..types import RunningPolicy
from . import _format
from ._command import add_command, connected


def register(commands: Any) -> None:
    """Adds the subcommand."""
    parser = add_command(
        commands,
        "push-lora",
        _run,
        "pushes an adapter that PEFT has saved",
        "The files are read on this machine; the server needs no access to them.",
    )
    parser.add_argument(
        "directory", type=Path, metavar="DIR", help="directory with adapter_config.json and adapter_model.safetensors"
    )
    parser.add_argument("--name", help="keep the adapter resident under this name instead of merging it")
    parser.add_argument("--version", type=int, metavar="N", help="weight version of the new policy [one more than now]")
    parser.add_argument(
        "--force-version", action="store_true", help="accept a --version that is not above the current one"
    )
    parser.add_argument(
        "--running", choices=get_args(RunningPolicy), default="keep", help="how to treat running requests [keep]"
    )
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")


def _run(options: argparse.Namespace) -> None:
    tensors, config = read_adapter(options.directory)
    push: PushLoraOptions = {
        "version": options.version,
        "force_version": options.force_version,
        "running": options.running,
        "name": options.name,
    }
    with connected(options) as client:
        result = client.push_lora(tensors, config, **push)
    if options.json:
        print(_format.to_json(result))
        return
    where = f"version {result.weight_version}"
    if options.name is not None:
        where = f"adapter {options.name}, generation {result.adapter_generation}, beside {where}"
    waits = "; applied when the weights wake" if result.pending else f"; paused for {result.pause_ms:.1f} ms"
    print(f"{where}: {result.parameters} parameters from {_format.size(result.bytes)}{waits}; digest {result.digest}")
