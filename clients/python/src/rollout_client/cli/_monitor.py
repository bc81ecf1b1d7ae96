"""The data of `rollout status`: a server's last replies, and rates between two of them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .._timeline import Span
from ..client import RolloutClient
from ..status import ServerStatus
from ..types import ServerInfo

BILLION = 1_000_000_000
_RATES = 512
_KEPT_SECONDS = 900
_PUSH_TRACK = "push"


@dataclass(frozen=True)
class Push:
    """A push in the timeline."""

    number: int
    """Since the server's start."""
    kind: str | None
    """`"lora"`, `"full"` or `"delta"`, if the push was open during a poll."""
    adapter: str | None
    """The name of the resident adapter, if `kind` is known."""
    start: int
    """In nanoseconds since 1970."""
    seconds: float
    """From its first byte to its end, or until now."""
    is_open: bool
    """Whether the push is still open."""
    bytes: int
    pause_seconds: float
    """How long generation paused for it."""
    weight_version: int | None
    """The policy's version after the push; None before it is applied."""


@dataclass
class Monitor:
    """Polls a server. A restarted server begins a new history."""

    client: RolloutClient
    info: ServerInfo | None = None
    status: ServerStatus | None = None
    now: int = 0
    """The server's clock at the last poll, in nanoseconds since 1970."""
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RATES))
    """Generated tokens per second between polls, the newest last."""
    prompt_rate: float | None = None
    """Prompt tokens per second between the last two polls."""
    _started: int = 0
    _spans: dict[tuple[str, int], Span] = field(default_factory=dict)
    _kinds: dict[int, tuple[str, str | None]] = field(default_factory=dict)

    def look(self) -> None:
        """Polls the server; raises `RolloutError` if it does not answer, and then keeps the last data."""
        status = self.client.status()
        timeline = self.client.timeline(since=self.now)
        if timeline.started != self._started:
            # The server has restarted: its counters and span numbers begin at 0.
            timeline = self.client.timeline()
            self.info, self.status, self._started = self.client.info(), None, timeline.started
            self.rates.clear()
            self._spans.clear()
            self._kinds.clear()
        self._measure(status, (timeline.now - self.now) / BILLION)
        self.status, self.now = status, timeline.now
        self._spans.update({(span.track, span.id): span for span in timeline.spans})
        oldest = self.now - _KEPT_SECONDS * BILLION
        self._spans = {key: span for key, span in self._spans.items() if span.end is None or span.end >= oldest}
        if status.update is not None:
            self._kinds[status.update.id] = status.update.kind, status.update.adapter

    def _measure(self, status: ServerStatus, seconds: float) -> None:
        if self.status is None or seconds <= 0:
            self.prompt_rate = None
            return
        self.rates.append(max(0, status.generated_tokens - self.status.generated_tokens) / seconds)
        self.prompt_rate = max(0, status.prompt_tokens - self.status.prompt_tokens) / seconds

    def phases(self, seconds: float) -> dict[str, float]:
        """Share of each phase of the engine in the last `seconds`, the largest first."""
        columns = self.strip(seconds, 1)[0]
        whole = sum(columns.values())
        return {phase: time / whole for phase, time in sorted(columns.items(), key=lambda item: -item[1])}

    def strip(self, seconds: float, columns: int) -> list[dict[str, float]]:
        """Seconds of each phase of the engine, in each of `columns` equal parts of the last `seconds`."""
        begin, width = self.now - seconds * BILLION, seconds * BILLION / columns
        parts: list[dict[str, float]] = [{} for _ in range(columns)]
        for (track, _), span in self._spans.items():
            start, end = max(span.start, begin), self.now if span.end is None else span.end
            if track == _PUSH_TRACK or end < start:
                continue
            times = [(part.phase, part.share) for part in span.parts] or [(span.phase, 1.0)]
            for column in range(int((start - begin) // width), min(columns, int((end - begin) // width) + 1)):
                left = begin + column * width
                inside = max(0.0, min(end, left + width) - max(start, left)) / BILLION
                for phase, share in times:
                    parts[column][phase] = parts[column].get(phase, 0.0) + inside * share
        return parts

    def pushes(self, count: int) -> list[Push]:
        """The last pushes, the newest first."""
        numbers = sorted({span.push for span in self._of_pushes()}, reverse=True)
        return [self._push(number) for number in numbers[:count]]

    def _of_pushes(self) -> list[Span]:
        return [span for span in self._spans.values() if span.push > 0]

    def _push(self, number: int) -> Push:
        spans = [span for span in self._of_pushes() if span.push == number]
        arriving = [span for span in spans if span.track == _PUSH_TRACK] or spans
        applied = [span for span in spans if span.phase == "push_apply"]
        start = min(span.start for span in arriving)
        end = max(self.now if span.end is None else span.end for span in arriving)
        kind, adapter = self._kinds.get(number, (None, None))
        return Push(
            number=number,
            kind=kind,
            adapter=adapter,
            start=start,
            seconds=(end - start) / BILLION,
            is_open=any(span.end is None for span in arriving),
            bytes=max(span.bytes for span in arriving),
            pause_seconds=sum((self.now if s.end is None else s.end) - s.start for s in applied) / BILLION,
            weight_version=max((span.weight_version for span in applied), default=None),
        )
