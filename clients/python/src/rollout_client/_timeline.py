"""How the engine spent its time: the response of `GetTimeline` as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _proto
from ._fields import set_field

_FACTS = ("steps", "computed_tokens", "sampled_tokens", "weight_version", "bytes", "push", "level")
"""Fields of a span that a trace shows if they are not 0."""


@dataclass(frozen=True)
class PhaseTime:
    """The time of one phase."""

    phase: str
    seconds: float
    share: float
    """Fraction of the whole time, from 0 to 1."""


@dataclass(frozen=True)
class Span:
    """A period that was spent on one phase. Times are nanoseconds since 1970."""

    track: str
    """`engine`, whose spans have no gaps, or `push`."""
    id: int
    """Number of the span in its track."""
    phase: str
    """Name of the phase; docs/observability.md lists them."""
    start: int
    end: int | None
    """None while the phase lasts."""
    steps: int
    computed_tokens: int
    sampled_tokens: int
    weight_version: int
    """Version of the policy at its end."""
    bytes: int
    """Bytes that a push sent, a sleep freed or a wake allocated."""
    push: int
    """Number of the push."""
    level: int
    """Level of the sleep."""
    parts: list[PhaseTime]
    """For the phase `brief`, which joins short phases: the time of each."""


@dataclass(frozen=True)
class Timeline:
    """The engine's last phases, and those of pushes beside it. Times are nanoseconds since 1970."""

    started: int
    """Wall-clock time at the timeline's start, to which all times add a monotonic clock."""
    start: int
    """Begin of the period that the timeline covers."""
    now: int
    """Its end; pass it as `since` to the next call to get the new spans."""
    truncated: bool
    """Whether older spans were left out because of `max_spans`."""
    spans: list[Span]
    """Spans of the track `engine`, then those of the track `push`, each in order."""
    phases: list[PhaseTime]
    """Time of the engine in each phase between `start` and `now`."""


def timeline_request(since: int, max_spans: int) -> Any:
    """The request for a part of the timeline."""
    request = _proto.GET_TIMELINE.request()
    set_field(request, "since", since, "since")
    set_field(request, "max_spans", max_spans, "max_spans")
    return request


def timeline(response: Any) -> Timeline:
    """The timeline of a `GetTimelineResponse`."""
    return Timeline(
        started=response.started,
        start=response.start,
        now=response.now,
        truncated=response.truncated,
        spans=[_span(span) for span in response.spans],
        phases=_times(response.phases),
    )


def trace_events(timeline: Timeline, pid: int = 1, name: str = "rollout-server") -> list[dict[str, Any]]:
    """Events in Chrome's trace format, times in microseconds; Perfetto opens them as a JSON list.

    Args:
        timeline: of one server.
        pid, name: of the server's process in the trace; use different ones for several servers.
    """
    tracks = list(dict.fromkeys(("engine", "push", *(span.track for span in timeline.spans))))
    events = [{"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}]
    for tid, track in enumerate(tracks, start=1):
        events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": track}})
    for span in timeline.spans:
        end = timeline.now if span.end is None else span.end
        facts = {fact: getattr(span, fact) for fact in _FACTS if getattr(span, fact)}
        facts |= {f"{part.phase}_us": round(part.seconds * 1e6) for part in span.parts}
        times = {"ts": span.start / 1000, "dur": max(0, end - span.start) / 1000}
        tid = 1 + tracks.index(span.track)
        events.append({"name": span.phase, "ph": "X", "pid": pid, "tid": tid, **times, "args": facts})
    return events


def _span(span: Any) -> Span:
    values = {name: getattr(span, name) for name in Span.__dataclass_fields__}
    values["end"] = span.end if span.HasField("end") else None
    values["parts"] = _times(span.parts)
    return Span(**values)


def _times(times: Any) -> list[PhaseTime]:
    return [PhaseTime(time.phase, time.seconds, time.share) for time in times]
