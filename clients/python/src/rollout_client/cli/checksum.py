"""`rollout checksum`: checksums of the serving parameters."""

from __future__ import annotations

import argparse
from typing import Any

from . import _format
from ._command import add_command, connected


def register(commands: Any) -> None:
    """Adds the subcommand."""
    parser = add_command(
        commands,
        "checksum",
        _run,
        "prints the SHA-256 of parameters as they serve now",
        "Each line has the format of sha256sum: digest, two spaces, name.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="names of parameters [all]")
    parser.add_argument("--json", action="store_true", help="print an object of digests by name")


def _run(options: argparse.Namespace) -> None:
    with connected(options) as client:
        digests = client.checksum(options.names or None)
    if options.json:
        print(_format.to_json(digests))
    else:
        for name, digest in digests.items():
            print(f"{digest}  {name}")
