"""How a push tells how far it is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

ProgressArgument = bool | Callable[[int, int], object] | None
"""A function of bytes done and bytes in total; True for a bar on a terminal; None for a line after a long push."""

_LONG_SECONDS = 2.0
_BAR_SECONDS = 0.1
_BAR_WIDTH = 30


class Progress:
    """Counts bytes and shows them as the caller likes it."""

    def __init__(self, what: str, total: int, shown: ProgressArgument) -> None:
        """`total` bytes of `what` are to go."""
        self._what, self._total, self._shown = what, total, shown
        self._done = self._again = 0
        self._start = self._last = time.monotonic()

    def add(self, size: int) -> None:
        """So many bytes more are on their way."""
        again = min(size, self._again)
        self._again -= again
        self._done += size - again
        now = time.monotonic()
        if callable(self._shown):
            self._shown(self._done, self._total)
        elif self._shown and now - self._last >= _BAR_SECONDS and sys.stderr.isatty():
            self._last = now
            filled = _BAR_WIDTH * self._done // max(self._total, 1)
            bar = "█" * filled + "░" * (_BAR_WIDTH - filled)
            print(f"\r\x1b[2K{self._what} {bar} {self._rate()}", end="", file=sys.stderr, flush=True)

    def expect(self, total: int) -> None:
        """So many bytes are to go in all."""
        self._total = total

    def repeat(self, size: int) -> None:
        """So many bytes go once more, and next; they are not counted twice."""
        self._again += size

    def finish(self) -> None:
        """The push is over."""
        if callable(self._shown):
            return
        long = time.monotonic() - self._start >= _LONG_SECONDS
        if self._shown or (self._shown is None and long):
            start = "\r\x1b[2K" if self._shown and sys.stderr.isatty() else ""
            print(f"{start}{self._what}: {self._rate()}", file=sys.stderr, flush=True)

    def _rate(self) -> str:
        seconds = max(time.monotonic() - self._start, 1e-9)
        done, total, rate = self._done / 1e6, self._total / 1e6, self._done / 1e9 / seconds
        return f"{done:,.0f} of {total:,.0f} MB in {seconds:.1f} s ({rate:.2f} GB/s)"
