"""Where the engine's time went: `GetTimeline`'s answer as dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import _proto
from ._fields import set_field

_FACTS = ("steps", "computed_tokens", "sampled_tokens", "weight_version", "bytes", "push", "level")
"""Of a span, those that a trace tells where they are not 0."""


@dataclass(frozen=True)
class PhaseTime:
    """Time of one phase."""

    phase: str
    seconds: float
    share: float
    """Of the whole, from 0 to 1."""


@dataclass(frozen=True)
class Span:
    """A stretch of time that was spent on one thing. Times are nanoseconds since 1970."""

    track: str
    """`engine`, whose spans follow each other without gaps, or `push`."""
    id: int
    """Number of the span in its track."""
    phase: str
    """What the time was spent on; docs/observability.md lists the phases."""
    start: int
    end: int | None
    """None while it lasts."""
    steps: int
    computed_tokens: int
    sampled_tokens: int
    weight_version: int
    """Version of the policy at its end."""
    bytes: int
    """That a push brought, a sleep gave back or a wake took."""
    push: int
    """Number of the push."""
    level: int
    """Level of the sleep."""
    parts: list[PhaseTime]
    """Of the phase `brief`: the time of what it consists of."""


@dataclass(frozen=True)
class Timeline:
    """The engine's last phases, and those of pushes beside it. Times are nanoseconds since 1970."""

    started: int
    """Wall clock at the timeline's start; all times count from it by a clock that is never set."""
    start: int
    """Begin of the stretch that is described."""
    now: int
    """Its end; as `since` of the next call it gives what is new."""
    truncated: bool
    """Whether there were more spans than are given."""
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
    """Events in Chrome's trace format, which Perfetto opens as a JSON list. Times are in microseconds.

    Args:
        timeline: of one server.
        pid, name: of the process that the server is in the trace; several in one trace need different ones.
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
