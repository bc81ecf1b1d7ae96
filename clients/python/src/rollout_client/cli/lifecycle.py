"""`rollout sleep`, `wake`, `pause` and `resume`."""

from __future__ import annotations

import argparse
from typing import Any, get_args

from ..types import DrainMode, MemoryTag
from . import _format
from ._command import add_command, connected


def register(commands: Any) -> None:
    """Adds the four subcommands."""
    sleep = add_command(
        commands, "sleep", _sleep, "releases the server's memory, and returns once the operating system has it"
    )
    sleep.add_argument(
        "--level", type=int, choices=(1, 2), default=1, help="1 keeps the policy outside the device, 2 discards it [1]"
    )
    wake = add_command(commands, "wake", _wake, "takes the memory back")
    wake.add_argument("tags", nargs="*", metavar="TAG", help="part to wake: weights or kv_cache [both]")
    wake.add_argument("--reload", action="store_true", help="after level 2: read the checkpoint again")
    pause = add_command(commands, "pause", _pause, "stops generation; requests that arrive meanwhile wait")
    for parser in (sleep, pause):
        parser.add_argument(
            "--mode", choices=get_args(DrainMode), default="wait", help="how to treat running requests [wait]"
        )
    add_command(commands, "resume", _resume, "resumes generation after a pause")
    wake.set_defaults(usage_error=wake.error)


def _sleep(options: argparse.Namespace) -> None:
    with connected(options) as client:
        result = client.sleep(options.level, options.mode)
    released = ", ".join(f"{tag} {_format.size(count)}" for tag, count in result.released.items()) or "nothing"
    resident = _format.size(result.resident_bytes)
    print(f"asleep after {_format.seconds(result.seconds)}: released {released}; {resident} still resident")


def _wake(options: argparse.Namespace) -> None:
    for tag in options.tags:
        if tag not in get_args(MemoryTag):
            options.usage_error(f"argument TAG: {tag!r} is not one of {', '.join(get_args(MemoryTag))}")
    with connected(options) as client:
        result = client.wake(options.tags or None, reload=options.reload)
    print(f"{result.lifecycle} after {_format.seconds(result.seconds)}")


def _pause(options: argparse.Namespace) -> None:
    with connected(options) as client:
        client.pause(options.mode)
        print(client.status().lifecycle)


def _resume(options: argparse.Namespace) -> None:
    with connected(options) as client:
        client.resume()
        print(client.status().lifecycle)
