"""The progress of pushes and of calls of `generate`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from .types import Sample, StreamEvent

ProgressArgument = bool | Callable[[int, int], object] | None
"""A function of bytes sent and all bytes; True shows a bar on a terminal; None prints a line after a long push."""

SampleProgressArgument = bool | Callable[[int, int, int], object]
"""A function of finished samples, all samples, and tokens of the finished ones; True shows a bar on a terminal; False
shows nothing."""

_LONG_SECONDS = 2.0
_BAR_SECONDS = 0.1
_BAR_WIDTH = 30


class Progress:
    """Counts and shows the bytes of a push."""

    def __init__(self, what: str, total: int, shown: ProgressArgument) -> None:
        """`total` bytes of `what` are to be sent."""
        self._bar, self._total, self._shown = _Bar(what), total, shown
        self._done = self._again = 0

    def add(self, size: int) -> None:
        """Counts `size` more bytes."""
        again = min(size, self._again)
        self._again -= again
        self._done += size - again
        if callable(self._shown):
            self._shown(self._done, self._total)
        elif self._shown:
            self._bar.draw(self._done, self._total, self._rate)

    def expect(self, total: int) -> None:
        """Sets the number of all bytes."""
        self._total = total

    def repeat(self, size: int) -> None:
        """The next `size` bytes were counted before, and are not counted twice."""
        self._again += size

    def finish(self) -> None:
        """Ends the progress of a push that was applied."""
        if callable(self._shown):
            return
        if self._shown or (self._shown is None and self._bar.seconds() >= _LONG_SECONDS):
            self._bar.finish(self._rate())

    def _rate(self) -> str:
        seconds = self._bar.seconds()
        done, total, rate = self._done / 1e6, self._total / 1e6, self._done / 1e9 / seconds
        return f"{done:,.0f} of {total:,.0f} MB in {seconds:.1f} s ({rate:.2f} GB/s)"


class SampleProgress:
    """Counts and shows finished samples. A context manager that encloses the call."""

    def __init__(self, total: int, shown: SampleProgressArgument) -> None:
        """`total` samples were requested."""
        self._bar, self._total, self._shown = _Bar("samples"), total, shown
        self._done = self._tokens = 0

    def add(self, event: StreamEvent) -> None:
        """Counts an event of the call."""
        if not self._shown or not isinstance(event, Sample):
            return
        self._done += 1
        self._tokens += len(event.token_ids)
        if callable(self._shown):
            self._shown(self._done, self._total, self._tokens)
        else:
            self._bar.draw(self._done, self._total, self._rate)

    def __enter__(self) -> SampleProgress:
        """Returns the count."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the line, whether the call has succeeded or failed."""
        if self._shown and not callable(self._shown):
            self._bar.finish(self._rate())

    def _rate(self) -> str:
        seconds = self._bar.seconds()
        rate = self._tokens / seconds
        return f"{self._done:,} of {self._total:,} in {seconds:.1f} s ({self._tokens:,} tokens, {rate:,.0f} tokens/s)"


class _Bar:
    """A line on standard error, which is redrawn if that is a terminal."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = self._last = time.monotonic()
        self._drawn = False

    def seconds(self) -> float:
        """Seconds since the start, above 0."""
        return max(time.monotonic() - self._start, 1e-9)

    def draw(self, done: int, total: int, text: Callable[[], str]) -> None:
        """Draws the line, unless it was drawn a moment ago, or standard error is not a terminal."""
        now = time.monotonic()
        if now - self._last < _BAR_SECONDS or not sys.stderr.isatty():
            return
        self._last, self._drawn = now, True
        filled = _BAR_WIDTH * min(done, total) // max(total, 1)
        bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
        print(f"\r\x1b[2K{self._what} {bar} {text()}", end="", file=sys.stderr, flush=True)

    def finish(self, text: str) -> None:
        """Prints the final line."""
        start = "\r\x1b[2K" if self._drawn else ""
        print(f"{start}{self._what}: {text}", file=sys.stderr, flush=True)
