"""The command `rollout`, which watches and controls a server from a shell.

Each subcommand is a module with `register`, which adds its parser; its function takes the parsed options and returns an
exit status, or None for 0. Statuses: 0 success, 1 an error of the server or a file, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

from ..errors import RolloutError
from . import checksum, completion, generate, lifecycle, push_lora, replay, sidecar, status, timeline
from ._command import CommandError, one_line

_COMMANDS = (status, generate, push_lora, lifecycle, checksum, timeline, replay, sidecar)
_FAILED = 1
# The statuses that shells report for a process that SIGINT or SIGPIPE has ended.
_INTERRUPTED = 130
_READER_LEFT = 141


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command, with every subcommand registered."""
    parser = argparse.ArgumentParser(prog="rollout", description="Watches and controls a rollout-server.")
    parser.add_argument("--version", action="version", version=f"rollout-client {_version()}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.register(commands)
    completion.register(commands, parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status. Prints expected errors as one line on standard error.

    Args:
        arguments: the command line without the program's name; None takes this process's own.

    Raises:
        SystemExit: with status 2 for wrong usage, and 0 after `--help` or `--version`.
    """
    with suppress(AttributeError):  # a replacement of standard output may have no encoding
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        options = build_parser().parse_args(arguments)
        status = options.run(options) or 0
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _READER_LEFT
    except (CommandError, RolloutError) as error:
        print(f"rollout: {one_line(error)}", file=sys.stderr)
        return _FAILED
    return status


def _version() -> str:
    try:
        return version("rollout-client")
    except PackageNotFoundError:
        return "(not installed; found through PYTHONPATH)"
