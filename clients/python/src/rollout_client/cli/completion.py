"""`rollout completion`: the script with which a shell completes the command."""

from __future__ import annotations

import argparse
import importlib.util
from typing import Any

from ._command import CommandError

_SHELLS = ("bash", "zsh", "fish")


def register(commands: Any, command: argparse.ArgumentParser) -> None:
    """Adds the subcommand, which completes the options of `command`."""
    parser = commands.add_parser(
        "completion",
        help="prints the script with which a shell completes this command",
        description="Prints the script with which a shell completes this command: "
        'eval "$(rollout completion bash)", or rollout completion fish | source',
    )
    parser.add_argument("shell", choices=_SHELLS)
    parser.set_defaults(run=lambda options: _run(options, command))


def _run(options: argparse.Namespace, command: argparse.ArgumentParser) -> None:
    if importlib.util.find_spec("shtab") is None:
        raise CommandError("completion needs shtab: pip install 'rollout-client[cli]'")
    import shtab  # noqa: PLC0415 no other command needs it

    print(shtab.complete(command, shell=options.shell))
