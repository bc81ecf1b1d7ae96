//! The timeline, and work that makes no progress, as messages.

use std::time::UNIX_EPOCH;

use crate::observe::{Phase, Span, Stall, Timeline, TrackName};
use crate::server::pb;

/// Most spans of each track in an answer whose request names no number: some minutes of a busy engine, in a megabyte.
const DEFAULT_SPANS: u32 = 8192;

/// The requested part of the timeline.
pub(in crate::server) fn timeline(timeline: &Timeline, request: &pb::GetTimelineRequest) -> pb::GetTimelineResponse {
    let most = if request.max_spans == 0 { DEFAULT_SPANS } else { request.max_spans };
    let (window, started) = (timeline.window(request.since, most as usize), timeline.origin_unix());
    let now = window.now - started;
    pb::GetTimelineResponse {
        started,
        start: window.from,
        now: window.now,
        truncated: window.truncated,
        spans: window.spans.iter().map(|(track, span)| facts(*track, span, started, now)).collect(),
        phases: times(&window.times, window.now - window.from),
    }
}

/// Work that the watchdog has reported.
pub(in crate::server) fn stall(stall: &Stall) -> pb::Stall {
    pb::Stall {
        reported: stall.at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64),
        phase: stall.phase.name().into(),
        push: stall.push,
        seconds: stall.lasted.as_secs_f64(),
        over: stall.is_over,
    }
}

fn facts(track: TrackName, span: &Span, started: u64, now: u64) -> pb::Span {
    let parts = if span.phase == Phase::Brief { span.times(span.start, now) } else { Vec::new() };
    pb::Span {
        track: track.name().into(),
        id: span.id,
        phase: span.phase.name().into(),
        start: started + span.start,
        end: span.end.map(|end| started + end),
        steps: span.steps,
        computed_tokens: span.computed_tokens,
        sampled_tokens: span.sampled_tokens,
        weight_version: span.weight_version,
        bytes: span.bytes,
        push: span.push,
        level: u32::try_from(span.level).unwrap_or(0),
        parts: times(&parts, span.end_or(now) - span.start),
    }
}

/// The phases that have any time, each with its share of `whole`.
fn times(times: &[(Phase, u64)], whole: u64) -> Vec<pb::PhaseTime> {
    let some = times.iter().filter(|time| time.1 > 0);
    some.map(|&(phase, nanos)| pb::PhaseTime {
        phase: phase.name().into(),
        seconds: nanos as f64 / 1e9,
        share: nanos as f64 / whole.max(1) as f64,
    })
    .collect()
}
