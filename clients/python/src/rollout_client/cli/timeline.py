"""`rollout timeline`: the engine's time by phase, as a table, JSON, or a trace for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._timeline import Timeline, trace_events
from ..client import RolloutClient
from . import _format
from ._command import CommandError, add_command, connected, positive_seconds

_BILLION = 1_000_000_000


def register(commands: Any) -> None:
    """Adds the subcommand."""
    parser = add_command(commands, "timeline", _run, "shows where the engine's time went")
    parser.add_argument(
        "--last", type=positive_seconds, metavar="SECONDS", help="only the last SECONDS [all that the server keeps]"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for ui.perfetto.dev instead of a table")
    form.add_argument("--json", action="store_true", help="print the spans as JSON")


def _run(options: argparse.Namespace) -> None:
    with connected(options) as client:
        found = since(client, options.last)
    if options.json:
        print(_format.to_json(found))
    elif options.trace is not None:
        try:
            options.trace.write_text(_format.to_json(trace_events(found)), encoding="utf-8")
        except OSError as error:
            raise CommandError(f"--trace {options.trace}: {error.strerror}") from None
        print(f"{len(found.spans)} spans in {options.trace}: open it at https://ui.perfetto.dev")
    else:
        print("\n".join(_table(found)))


def since(client: RolloutClient, last: float | None) -> Timeline:
    """The timeline of the last seconds by the server's clock; None returns all that the server keeps."""
    if last is None:
        return client.timeline()
    now = client.timeline(max_spans=1).now
    return client.timeline(since=max(1, now - round(last * _BILLION)))


def _table(timeline: Timeline) -> list[str]:
    whole = (timeline.now - timeline.start) / _BILLION
    lines = [f"{'phase':16} {'time':>12} {'share':>7}"]
    for phase in sorted(timeline.phases, key=lambda phase: -phase.seconds):
        lines.append(f"{phase.phase:16} {_format.seconds(phase.seconds):>12} {phase.share:>7.1%}")
    return [*lines, f"{'all':16} {_format.seconds(whole):>12}"]
