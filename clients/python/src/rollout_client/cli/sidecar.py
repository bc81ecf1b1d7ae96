"""`rollout sidecar`: the server's HTTP routes on the trainer's machine, where adapters are directories."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
from typing import Any

from ._command import CommandError, add_command, address, connected, host_and_port, tls_of, token_of
from ._origins import AllowedHosts, host_name

DEFAULT_LISTEN = "127.0.0.1:8001"
HTTP_PORT = 8000


def register(commands: Any) -> None:
    """Adds the subcommand."""
    parser = add_command(
        commands,
        "sidecar",
        _run,
        "serves the server's HTTP routes here, and takes adapters from directories of this machine",
        "For trainers that hand over adapters as directories, such as TRL's AsyncGRPOTrainer: every request goes on to "
        "the server's HTTP port, except /v1/load_lora_adapter, whose files are read here and pushed over gRPC. The "
        "token is added to requests that bring none, so every program that can connect has its rights. Web pages of "
        "other origins are refused.",
    )
    parser.add_argument(
        "--http-address",
        type=address,
        metavar="HOST:PORT",
        default=os.environ.get("ROLLOUT_HTTP_ADDRESS") or None,
        help=f"of the server's HTTP port [ROLLOUT_HTTP_ADDRESS, else {HTTP_PORT} of the host of --address]",
    )
    parser.add_argument(
        "--listen",
        type=address,
        metavar="HOST:PORT",
        default=DEFAULT_LISTEN,
        help=f"where the trainer connects, port 0 is any [{DEFAULT_LISTEN}]",
    )
    parser.add_argument(
        "--allow-host",
        type=host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="host name by which the trainer connects, if that is neither an IP address, localhost nor the host of "
        "--listen; may be given several times",
    )


def _run(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise CommandError("sidecar needs aiohttp: pip install 'rollout-client[cli]'")
    from ._sidecar import Sidecar, serve  # noqa: PLC0415 it needs aiohttp, which no other command does

    with connected(options) as client:
        capacity = client.info().max_adapters
        if capacity == 0:
            raise CommandError(
                f"{options.address}: the server keeps no adapters; start it with --max-adapters of at least "
                "max_staleness + 2, which is 6 with the defaults of TRL's AsyncGRPOTrainer"
            )
        upstream = options.http_address or f"{options.address.rpartition(':')[0]}:{HTTP_PORT}"
        host, port = host_and_port(options.listen)
        hosts = AllowedHosts([host, *options.allow_host])
        sidecar = Sidecar(client, upstream, token_of(options), tls_of(options), hosts)

        def ready(listening: str) -> None:
            print(
                f"http://{listening} is {sidecar.upstream}; adapters go to {options.address}, which keeps {capacity} "
                "(its --max-adapters)",
                file=sys.stderr,
                flush=True,
            )

        try:
            asyncio.run(serve(sidecar, host, port, ready))
        except OSError as error:
            raise CommandError(f"--listen {options.listen}: {error.strerror or error}") from None
