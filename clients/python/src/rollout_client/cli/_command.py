"""What the subcommands share: their options, the way to the server, and messages of one line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._tls import ADDRESS, Tls
from .._token import read_token
from ..client import RolloutClient
from ..errors import DeadlineExceeded, PermissionDenied, Unauthenticated, Unavailable

DEFAULT_ADDRESS = "127.0.0.1:50051"
_MOST_SECONDS = 1e9  # more than clocks and gRPC count with
_MOST_PORT = 65535
# What the client's messages say to whoever writes Python, as options of the command.
_AS_OPTIONS = {
    "leave tls= out": "leave --tls out",
    "give cert= and key= of tls=": "give --tls-cert and --tls-key",
    "give both cert= and key=, or none": "give both --tls-cert and --tls-key, or none",
    "as ca= of tls=": "as --tls-ca",
    "as server_name= of tls=": "as --tls-server-name",
    "give tls=True, or the authority of its certificate as tls={'ca': path}": "give --tls or --tls-ca",
}

Run = Callable[[argparse.Namespace], "int | None"]


class CommandError(Exception):
    """Something that the command cannot do; its text is all that the user sees, and says what to do."""


def add_command(commands: Any, name: str, run: Run, summary: str, details: str = "") -> argparse.ArgumentParser:
    """Adds a subcommand which talks to a server, with the options of the connection.

    Args:
        commands: what `add_subparsers` has returned.
        name: of the subcommand.
        run: called with the parsed options; returns the exit status, or None for 0.
        summary: for the list of subcommands, without a full stop.
        details: sentences for its own `--help`, after the summary.
    """
    description = f"{summary[0].upper()}{summary[1:]}. {details}".strip()
    parser: argparse.ArgumentParser = commands.add_parser(name, help=summary, description=description)
    parser.set_defaults(run=run)
    group = parser.add_argument_group("connection")
    group.add_argument(
        "--address",
        type=address,
        metavar="HOST:PORT",
        default=os.environ.get("ROLLOUT_ADDRESS") or DEFAULT_ADDRESS,
        help=f"of the server's gRPC port [ROLLOUT_ADDRESS, else {DEFAULT_ADDRESS}]",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        default=os.environ.get("ROLLOUT_TOKEN_FILE") or None,
        help="file with the token, alone or as in the server's --auth-token-file [ROLLOUT_TOKEN_FILE]",
    )
    group.add_argument("--tls", action="store_true", help="use TLS, and trust the system's authorities")
    group.add_argument(
        "--tls-ca",
        metavar="FILE",
        default=os.environ.get("ROLLOUT_TLS_CA") or None,
        help="use TLS, and trust the authorities in this PEM file [ROLLOUT_TLS_CA]",
    )
    group.add_argument("--tls-cert", metavar="FILE", help="this client's certificate, for a server that asks for one")
    group.add_argument("--tls-key", metavar="FILE", help="its private key")
    group.add_argument("--tls-server-name", metavar="NAME", help="the name in the server's certificate [the host]")
    group.add_argument("--timeout", type=positive_seconds, metavar="SECONDS", help="most seconds of a call [no limit]")
    return parser


@contextmanager
def connected(options: argparse.Namespace, timeout: float | None = None) -> Iterator[RolloutClient]:
    """A client of the server that the options name. Errors of the connection say which option would help.

    Args:
        options: parsed by a parser of `add_command`.
        timeout: seconds for each call, unless the options have their own.
    """
    seconds = timeout if options.timeout is None else options.timeout
    try:
        with RolloutClient(options.address, timeout=seconds, token=token_of(options), tls=tls_of(options)) as client:
            yield client
    except DeadlineExceeded as error:
        if seconds is None:  # the server's own limit has passed
            raise
        raise CommandError(f"{options.address}: no answer within {seconds:g} s (--timeout)") from error
    except (Unavailable, Unauthenticated, PermissionDenied) as error:
        raise CommandError(explained(error, options.address)) from error


def explained(error: Exception, address: str) -> str:
    """What an error of the connection means, and the option that would help."""
    text = one_line(error)
    if isinstance(error, Unauthenticated):
        return f"{address}: {text}; name the file of a token with --token-file or ROLLOUT_TOKEN_FILE"
    if isinstance(error, PermissionDenied):
        return f"{address}: {text}; name a token of the role control with --token-file or ROLLOUT_TOKEN_FILE"
    if "failed to connect" in text.lower():
        return f"no gRPC server answers at {address}: start one, or name another with --address or ROLLOUT_ADDRESS"
    return text if address in text else f"{address}: {text}"


def one_line(error: object) -> str:
    """The text of an error in one line, with the options of the command for the arguments of the client."""
    text = " ".join(str(error).split())
    for argument, option in _AS_OPTIONS.items():
        text = text.replace(argument, option)
    return text


def address(text: str) -> str:
    """The value of an option that is an address."""
    host_and_port(text)
    return text


def host_and_port(text: str) -> tuple[str, int]:
    """The host, without brackets, and the port of an option that is an address."""
    found = ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > _MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return found["v6"] or found["host"], int(found["port"])


def positive_seconds(text: str) -> float:
    """The value of an option that is a duration."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0 and up to {_MOST_SECONDS:g}")
    return seconds


def token_of(options: argparse.Namespace) -> str | None:
    """The token that the options name, if they do."""
    return None if options.token_file is None else read_token(options.token_file)


def tls_of(options: argparse.Namespace) -> Tls | None:
    """How the options want TLS; None for none."""
    given = (options.tls_ca, options.tls_cert, options.tls_key, options.tls_server_name)
    if not options.tls and not any(given):
        return None
    return Tls(*given)
