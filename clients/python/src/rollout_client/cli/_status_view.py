"""The view of `rollout status`, drawn with rich. It is readable without colours and without Unicode."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..status import MemoryLedger, ServerStatus, Stall
from ..types import Lifecycle
from . import _format
from ._monitor import BILLION, Monitor, Push

_LABEL = 10
_MOST_BAR, _LEAST_BAR, _MOST_COLUMNS = 48, 8, 120
# Columns for the text beside a bar.
_BESIDE_BAR = 44
_MOST_PUSHES = 5
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEVELS = "▁▂▃▄▅▆▇█"
_PICTURE_COLUMNS = 100

_LIFECYCLE_STYLES = {
    Lifecycle.RUNNING: "bold green",
    Lifecycle.PAUSED: "bold yellow",
    Lifecycle.ASLEEP: "bold magenta",
    Lifecycle.WEIGHTS_MISSING: "bold red",
    Lifecycle.SHUTTING_DOWN: "bold red",
}


@dataclass(frozen=True)
class _Mark:
    """The sign of a phase in the strip."""

    sign: str
    plain: str
    style: str
    stands_out: bool = False
    """A rare and short phase, which is shown wherever it has any time."""


_MARKS = {
    "decode": _Mark("█", "D", "green"),
    "mixed": _Mark("▓", "M", "green"),
    "prefill": _Mark("▒", "P", "cyan"),
    "brief": _Mark("░", "B", "green"),
    "idle": _Mark("·", ".", "dim"),
    "wait_version": _Mark("w", "w", "yellow"),
    "wait_adapter": _Mark("a", "a", "yellow"),
    "wait_readers": _Mark("r", "r", "yellow"),
    "paused": _Mark("=", "=", "yellow"),
    "asleep": _Mark("z", "z", "magenta"),
    "weights_missing": _Mark("!", "!", "bold red"),
    "push_reserve": _Mark("u", "u", "bold blue", True),
    "push_apply": _Mark("U", "U", "bold blue", True),
    "sleep": _Mark("s", "s", "bold magenta", True),
    "wake": _Mark("k", "k", "bold magenta", True),
    "reload": _Mark("R", "R", "bold magenta", True),
    "checksum": _Mark("c", "c", "blue"),
    "load": _Mark("l", "l", "blue"),
}
_UNKNOWN = _Mark("?", "?", "dim")


class StatusView:
    """Draws the data of a `Monitor` for a console width and character set."""

    def __init__(self, monitor: Monitor, address: str, window: float, *, width: int, unicode: bool = True) -> None:
        """`window` is the seconds of the strip, `width` the columns; `unicode` allows block characters."""
        self._monitor, self._address, self._window, self._width = monitor, address, window, width
        self._unicode = unicode
        self._bar_width = max(_LEAST_BAR, min(_MOST_BAR, width - _LABEL - _BESIDE_BAR))

    def render(self, problem: str | None = None) -> RenderableType:
        """The view; `problem` says why the server does not answer now."""
        parts: list[RenderableType] = [self._head()]
        if problem is not None:
            parts.append(Text(problem, "bold red"))
        if self._monitor.status is not None:
            parts.append(self._body(self._monitor.status))
        return Group(*parts)

    def _head(self) -> RenderableType:
        info = self._monitor.info
        if info is None:
            return Text(self._address, "bold")
        parts = [f"rollout-server {info.server_version}", self._address]
        facts = [info.model, info.architecture, info.dtype, f"{info.device} {info.kernel}"]
        dot = " · " if self._unicode else ", "
        return Group(
            Text(dot.join(parts), "bold"),
            Text(dot.join([*facts, f"tp {info.tensor_parallel_size}"]), "dim", overflow="crop", no_wrap=True),
            "",
        )

    def _body(self, status: ServerStatus) -> RenderableType:
        rows = Table.grid(padding=(0, 1), expand=False)
        rows.add_column(width=_LABEL, no_wrap=True, style="bold")
        rows.add_column(overflow="fold")
        rows.add_row("state", self._state(status))
        rows.add_row("requests", self._requests(status))
        rows.add_row("tokens/s", self._rates(status))
        rows.add_row("KV cache", self._blocks(status))
        if self._monitor.info is not None and self._monitor.info.images is not None:
            rows.add_row("images", self._images(status))
        if status.stall is not None:
            rows.add_row("watchdog", self._stall(status.stall))
        if any(status.tenants):
            rows.add_row("tenants", self._tenants(status))
        if status.tool_calls:
            rows.add_row("tool calls", self._tool_calls(status))
        rows.add_row(f"last {self._window:.0f} s", self._strip())
        rows.add_row("pushes", self._pushes())
        # Last, because a low terminal cuts off the last lines.
        if status.host_memory is None:
            rows.add_row("memory", self._memory(status.memory, status.memory.resident_bytes))
        else:
            rows.add_row("device", self._memory(status.memory, None))
            rows.add_row("host", self._memory(status.host_memory, status.host_memory.resident_bytes))
        return rows

    def _state(self, status: ServerStatus) -> Text:
        text = Text().append(str(status.lifecycle), _LIFECYCLE_STYLES[status.lifecycle])
        if status.asleep is not None:
            awake = f", {' and '.join(status.asleep.resident)} awake" if status.asleep.resident else ""
            pending = ", a push waits for the weights" if status.asleep.pending_update else ""
            text.append(f" (level {status.asleep.level}{awake}{pending})")
        text.append(f"   version {status.weight_version}", "bold")
        text.append(f"   up {_format.seconds(status.uptime_seconds)}")
        if status.internal_errors:
            text.append(f"   {status.internal_errors} internal errors: see the log", "bold red")
        return text

    def _requests(self, status: ServerStatus) -> str:
        return (
            f"{status.running_requests} accepted: {status.running_samples} samples run, {status.waiting_samples} wait; "
            f"{status.held_requests} held; {status.finished_requests} finished, {status.aborted_requests} aborted"
        )

    def _rates(self, status: ServerStatus) -> Text:
        rates = self._monitor.rates
        if not rates:
            return Text(f"{status.tokens_per_second:,.0f} generated while it steps")
        beside = 0.0 if self._monitor.prompt_rate is None else self._monitor.prompt_rate
        text = Text(f"{rates[-1]:,.0f} generated, {beside:,.0f} of prompts")
        if self._unicode:
            most, last = max(rates), list(rates)[-self._bar_width :]
            text.append("  ")
            text.append("".join(_LEVELS[round(rate / most * 7) if most else 0] for rate in last), "green")
        return text

    def _blocks(self, status: ServerStatus) -> Text:
        used = status.total_blocks - status.free_blocks
        return self._bar(used, status.total_blocks, "cyan").append(
            f" {used:,} of {status.total_blocks:,} blocks, {status.cached_blocks:,} cached"
        )

    def _images(self, status: ServerStatus) -> Text:
        return self._bar(status.reused_images, status.queried_images, "cyan").append(
            f" {status.reused_images:,} of {status.queried_images:,} found encoded, "
            f"{status.encoded_images:,} encoded, {status.held_images:,} held"
        )

    def _stall(self, stall: Stall) -> Text:
        what = stall.phase if stall.push is None else f"push {stall.push} ({stall.phase})"
        made = "made" if stall.over else "makes"
        seconds = _format.seconds(stall.seconds)
        return Text(f"{what} {made} no progress, for {seconds}: see the log", "" if stall.over else "bold red")

    def _tenants(self, status: ServerStatus) -> Text:
        parts = [
            f"{name or '(no name)'}: {tenant.running_samples:,} run, {tenant.waiting_samples:,} wait, "
            f"{tenant.generated_tokens:,} tokens"
            for name, tenant in status.tenants.items()
        ]
        return Text("; ".join(parts))

    def _tool_calls(self, status: ServerStatus) -> Text:
        parts = [
            f"{name}: {calls.parsed:,} parsed, {calls.malformed:,} malformed"
            for name, calls in status.tool_calls.items()
        ]
        return Text("; ".join(parts))

    def _memory(self, ledger: MemoryLedger, resident: int | None) -> RenderableType:
        reserved, ceiling = sum(ledger.entries.values()), _format.size(ledger.ceiling_bytes)
        held = "" if resident is None else f"; {_format.size(resident)} resident"
        taken = f" {_format.size(reserved)} of {ceiling}{held}"
        whole = self._bar(reserved, ledger.ceiling_bytes, "blue").append(taken)
        entries = sorted(ledger.entries.items(), key=lambda entry: -entry[1])
        return Group(
            whole,
            *(
                self._bar(size, ledger.ceiling_bytes, "dim blue").append(f" {_format.size(size):>9} {name}")
                for name, size in entries
                if size
            ),
        )

    def _strip(self) -> RenderableType:
        columns = max(_LEAST_BAR, min(_MOST_COLUMNS, self._width - _LABEL - 1))
        strip = Text(no_wrap=True)
        for times in self._monitor.strip(self._window, columns):
            mark = _most_telling(times)
            strip.append(self._sign(mark), mark.style)
        return Group(strip, self._legend(self._monitor.phases(self._window).items()))

    def _legend(self, shares: Iterable[tuple[str, float]]) -> Text:
        legend, space = Text(), "\N{NO-BREAK SPACE}" if self._unicode else " "
        for phase, share in shares:
            mark = _MARKS.get(phase, _UNKNOWN)
            if share >= 0.001 or mark.stands_out:  # noqa: PLR2004 the smallest share with one decimal digit
                legend.append(self._sign(mark), mark.style)
                legend.append(f"{space}{phase}{space}{share:.1%}  ")
        return legend

    def _pushes(self) -> RenderableType:
        pushes = self._monitor.pushes(_MOST_PUSHES)
        if not pushes:
            return Text("none in the last 15 minutes", "dim")
        return Group(*(Text(self._push(push)) for push in pushes))

    def _push(self, push: Push) -> str:
        ago = _format.seconds(max(0.0, (self._monitor.now - push.start) / BILLION))
        what = push.kind or "push"
        if push.adapter is not None:
            what = f"adapter {push.adapter!r}"
        if push.is_open:
            return f"{what} {_format.size(push.bytes)} so far, open for {_format.seconds(push.seconds)}"
        done = "not applied"
        if push.weight_version is not None:
            done = f"paused {_format.seconds(push.pause_seconds)}, version {push.weight_version}"
        return f"{what} {_format.size(push.bytes)} in {_format.seconds(push.seconds)}, {done}, {ago} ago"

    def _bar(self, value: float, whole: float, style: str) -> Text:
        share = min(1.0, value / whole) if whole else 0.0
        if not self._unicode:
            full = round(share * self._bar_width)
            return Text("#" * full + "." * (self._bar_width - full))
        full, part = divmod(round(share * self._bar_width * 8), 8)
        filled = "█" * full + (_EIGHTHS[part] if part else "")
        return Text().append(filled, style).append("░" * (self._bar_width - len(filled)), "dim")

    def _sign(self, mark: _Mark) -> str:
        return mark.sign if self._unicode else mark.plain


def _most_telling(times: dict[str, float]) -> _Mark:
    marks = sorted(((seconds, _MARKS.get(phase, _UNKNOWN)) for phase, seconds in times.items()), key=lambda m: m[0])
    rare = [mark for seconds, mark in marks if mark.stands_out and seconds > 0]
    if rare:
        return rare[-1]
    return marks[-1][1] if marks else _Mark(" ", " ", "")


def console_of(file: io.TextIOBase) -> tuple[Console, bool]:
    """A console that writes to `file`, and whether it can show block characters."""
    console = Console(file=file, highlight=False)
    return console, console.encoding.lower().startswith("utf")


def picture(monitor: Monitor, address: str, window: float) -> str:
    """The view as self-contained SVG."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=_PICTURE_COLUMNS,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(StatusView(monitor, address, window, width=_PICTURE_COLUMNS).render())
    svg = console.export_svg(title="rollout status", unique_id="status")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
