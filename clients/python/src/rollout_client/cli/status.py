"""`rollout status`: a server's state, live in a terminal, once in a pipe, or as JSON."""

from __future__ import annotations

import argparse
import importlib.util
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DeadlineExceeded, Unavailable
from . import _format
from ._command import CommandError, add_command, connected, explained, positive_seconds
from ._monitor import Monitor

if TYPE_CHECKING:
    from rich.console import Console

# A server whose status takes longer counts as not answering.
_LOOK_SECONDS = 5.0
_PUSHES = 20
# The status that shells report for a process that SIGTERM has ended.
_TERMINATED = 143


def register(commands: Any) -> None:
    """Adds the subcommand."""
    parser = add_command(
        commands,
        "status",
        _run,
        "shows what the server does, live",
        "In a pipe it prints the state once. Interrupt it with Ctrl-C.",
    )
    parser.add_argument("--once", action="store_true", help="print the view once")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the state once as JSON")
    form.add_argument("--svg", type=Path, metavar="FILE", help="write the view once as a picture")
    parser.add_argument(
        "--interval", type=positive_seconds, default=1.0, metavar="SECONDS", help="time between two polls [1]"
    )
    parser.add_argument(
        "--window",
        type=positive_seconds,
        default=60.0,
        metavar="SECONDS",
        help="time that the strip of phases covers [60]",
    )


def _run(options: argparse.Namespace) -> None:
    with connected(options, timeout=_LOOK_SECONDS) as client:
        monitor = Monitor(client)
        if options.json:
            monitor.look()
            print(_format.to_json(_facts(monitor, options)))
            return
        if importlib.util.find_spec("rich") is None:
            raise CommandError("status needs rich: pip install 'rollout-client[cli]', or use --json")
        from . import _status_view as shown  # noqa: PLC0415 it needs rich, which no other command does

        console, unicode = shown.console_of(sys.stdout)
        if options.svg is not None:
            monitor.look()
            _write(options.svg, shown.picture(monitor, options.address, options.window))
        elif options.once or not console.is_terminal or console.is_dumb_terminal:
            monitor.look()
            view = shown.StatusView(monitor, options.address, options.window, width=console.width, unicode=unicode)
            console.print(view.render())
        else:
            _watch(monitor, console, unicode, options)


def _watch(monitor: Monitor, console: Console, unicode: bool, options: argparse.Namespace) -> None:
    """Polls and draws until interrupted. Retries while the server does not answer."""
    from rich.live import Live  # noqa: PLC0415 only this view needs it

    from ._status_view import StatusView  # noqa: PLC0415

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))  # restores the terminal
    answered = time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            problem = None
            try:
                monitor.look()
                answered = time.monotonic()
            except (Unavailable, DeadlineExceeded) as error:
                silent = _format.seconds(time.monotonic() - answered)
                problem = f"no answer for {silent}, retrying: {explained(error, options.address)}"
            view = StatusView(monitor, options.address, options.window, width=console.width, unicode=unicode)
            live.update(view.render(problem), refresh=True)
            time.sleep(options.interval)


def _facts(monitor: Monitor, options: argparse.Namespace) -> dict[str, Any]:
    return {
        "address": options.address,
        "info": monitor.info,
        "status": monitor.status,
        "phases": monitor.phases(options.window),
        "pushes": [asdict(push) for push in monitor.pushes(_PUSHES)],
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"--svg {path}: {error.strerror}") from None
