"""`rollout sidecar`: serves the server's HTTP routes on the trainer's machine, with adapters from its directories."""

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
        "forwards HTTP requests to the server, and pushes adapters from directories of this machine",
        "Use it with trainers that send adapters as directories, such as TRL's AsyncGRPOTrainer. It forwards every "
        "request to the server's HTTP port, except /v1/load_lora_adapter, whose files it reads on this machine and "
        "pushes over gRPC. It adds the token to requests without one, so every program that can connect to it has the "
        "token's rights. It rejects web pages of other origins.",
    )
    parser.add_argument(
        "--http-address",
        type=address,
        metavar="HOST:PORT",
        default=os.environ.get("ROLLOUT_HTTP_ADDRESS") or None,
        help=f"address of the server's HTTP port [ROLLOUT_HTTP_ADDRESS, else port {HTTP_PORT} of the --address]",
    )
    parser.add_argument(
        "--listen",
        type=address,
        metavar="HOST:PORT",
        default=DEFAULT_LISTEN,
        help=f"address to listen on, to which the trainer connects; port 0 picks a free one [{DEFAULT_LISTEN}]",
    )
    parser.add_argument(
        "--allow-host",
        type=host_name,
        action="append",
        default=[],
        metavar="NAME",
        help="host name by which the trainer connects, unless it is an IP address, localhost or the host of --listen; "
        "repeatable",
    )


def _run(options: argparse.Namespace) -> None:
    if importlib.util.find_spec("aiohttp") is None:
        raise CommandError("sidecar needs aiohttp: pip install 'rollout-client[cli]'")
    from ._sidecar import Sidecar, serve  # noqa: PLC0415 it needs aiohttp, which no other command does

    with connected(options) as client:
        capacity = client.info().max_adapters
        if capacity == 0:
            raise CommandError(
                f"{options.address}: the server keeps no resident adapters; start it with --max-adapters of at least "
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
