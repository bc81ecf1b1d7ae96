"""Code that the subcommands share: options, the connection to the server, and messages of one line."""

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
_MOST_SECONDS = 1e9  # more than clocks and gRPC support
_MOST_PORT = 65535
# Python arguments in the client's messages, with the options of the command that replace them.
_AS_OPTIONS = {
    "leave tls= out": "leave --tls out",
    "give cert= and key= of tls=": "give --tls-cert and --tls-key",
    "give both cert= and key=, or none": "give both --tls-cert and --tls-key, or none",
    "as ca= of tls=": "as --tls-ca",
    "as server_name= of tls=": "as --tls-server-name",
    "give tls=True, or the authority of its certificate as tls={'ca': path}": "give --tls or --tls-ca",
    "give images=": "give --images",
}

Run = Callable[[argparse.Namespace], "int | None"]


class CommandError(Exception):
    """An error whose text is the command's whole output, and says what to do."""


def add_command(commands: Any, name: str, run: Run, summary: str, details: str = "") -> argparse.ArgumentParser:
    """Adds a subcommand that connects to a server, with the options of the connection.

    Args:
        commands: the result of `add_subparsers`.
        name: name of the subcommand.
        run: called with the parsed options; returns the exit status, or None for 0.
        summary: text for the list of subcommands, without a full stop.
        details: sentences that follow the summary in the subcommand's own `--help`.
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
        help=f"address of the server's gRPC port [ROLLOUT_ADDRESS, else {DEFAULT_ADDRESS}]",
    )
    group.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        default=os.environ.get("ROLLOUT_TOKEN_FILE") or None,
        help="file with only the token, or the server's --auth-token-file [ROLLOUT_TOKEN_FILE]",
    )
    group.add_argument("--tls", action="store_true", help="use TLS with the system's certificate authorities")
    group.add_argument(
        "--tls-ca",
        metavar="FILE",
        default=os.environ.get("ROLLOUT_TLS_CA") or None,
        help="use TLS with the certificate authorities in this PEM file [ROLLOUT_TLS_CA]",
    )
    group.add_argument("--tls-cert", metavar="FILE", help="this client's certificate, if the server requires one")
    group.add_argument("--tls-key", metavar="FILE", help="private key of --tls-cert")
    group.add_argument("--tls-server-name", metavar="NAME", help="name in the server's certificate [the host]")
    group.add_argument(
        "--timeout", type=positive_seconds, metavar="SECONDS", help="maximum duration of a call [no limit]"
    )
    return parser


@contextmanager
def connected(options: argparse.Namespace, timeout: float | None = None) -> Iterator[RolloutClient]:
    """Connects to the server that the options name. Connection errors name the option that would help.

    Args:
        options: options parsed by a parser of `add_command`.
        timeout: seconds for each call, unless the options have a timeout.
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
    """Explains a connection error, with the option that would help."""
    text = one_line(error)
    if isinstance(error, Unauthenticated):
        return f"{address}: {text}; give a token with --token-file or ROLLOUT_TOKEN_FILE"
    if isinstance(error, PermissionDenied):
        return f"{address}: {text}; give a token with the role control with --token-file or ROLLOUT_TOKEN_FILE"
    if "failed to connect" in text.lower():
        return f"no gRPC server answers at {address}: start one, or give its address with --address or ROLLOUT_ADDRESS"
    return text if address in text else f"{address}: {text}"


def one_line(error: object) -> str:
    """The text of an error in one line, with the command's options instead of the client's arguments."""
    text = " ".join(str(error).split())
    for argument, option in _AS_OPTIONS.items():
        text = text.replace(argument, option)
    return text


def address(text: str) -> str:
    """Parses an option that is an address."""
    host_and_port(text)
    return text


def host_and_port(text: str) -> tuple[str, int]:
    """Splits an address into the host, without brackets, and the port."""
    found = ADDRESS.fullmatch(text)
    if found is None or int(found["port"]) > _MOST_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    return found["v6"] or found["host"], int(found["port"])


def positive_seconds(text: str) -> float:
    """Parses an option that is a duration."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds above 0 and at most {_MOST_SECONDS:g}")
    return seconds


def token_of(options: argparse.Namespace) -> str | None:
    """The token from the options, if any."""
    return None if options.token_file is None else read_token(options.token_file)


def tls_of(options: argparse.Namespace) -> Tls | None:
    """The TLS settings of the options; None without TLS."""
    given = (options.tls_ca, options.tls_cert, options.tls_key, options.tls_server_name)
    if not options.tls and not any(given):
        return None
    return Tls(*given)
