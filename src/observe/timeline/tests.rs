//! The engine's track under a clock that the test controls, and the trace file.

use std::time::Duration;

use super::*;

const MS: Duration = Duration::from_millis(1);

/// A timeline whose engine writes at times that the test gives, as milliseconds after its start.
struct Clock {
    timeline: Timeline,
    recorder: Recorder,
    now: Duration,
}

impl Clock {
    fn new() -> Self {
        let (timeline, recorder, _) = Timeline::new();
        Self { timeline, recorder, now: Duration::ZERO }
    }

    fn enter(&mut self, phase: Phase, for_ms: u64) {
        self.enter_for(phase, for_ms as u32 * MS);
    }

    fn enter_for(&mut self, phase: Phase, time: Duration) {
        self.recorder.enter(phase, self.timeline.origin + self.now);
        self.now += time;
        if phase.is_step() {
            self.recorder.count_step(self.timeline.origin + self.now, 10, 4, 7);
        }
    }

    fn spans(&self) -> Vec<Span> {
        let (mut spans, _) = self.timeline.newest(TrackName::Engine, 0, usize::MAX);
        spans.reverse();
        spans
    }

    /// Asserts that every moment up to the last span's begin belongs to one span.
    fn assert_seamless(&self) -> Vec<Span> {
        let spans = self.spans();
        for pair in spans.windows(2) {
            assert_eq!(pair[0].end, Some(pair[1].start), "{pair:?}");
            assert_eq!(pair[0].id + 1, pair[1].id, "{pair:?}");
        }
        assert!(spans.last().is_some_and(|last| last.end.is_none()));
        spans
    }
}

#[test]
fn steps_of_a_kind_are_one_span_up_to_a_second() {
    let mut clock = Clock::new();
    clock.enter(Phase::Load, 50);
    clock.enter(Phase::Idle, 30);
    clock.enter(Phase::Idle, 70);
    (0..300).for_each(|_| clock.enter(Phase::Decode, 10));
    clock.enter(Phase::Sleep, 5);
    clock.recorder.note(|span| (span.bytes, span.level) = (123, 2));
    clock.enter(Phase::Asleep, 5);
    let spans = clock.assert_seamless();
    let found: Vec<_> = spans.iter().map(|span| (span.phase, span.steps, span.start / 1_000_000)).collect();
    assert_eq!(
        found,
        [
            (Phase::Load, 0, 0),
            (Phase::Idle, 0, 50),
            (Phase::Decode, 100, 150),
            (Phase::Decode, 100, 1150),
            (Phase::Decode, 100, 2150),
            (Phase::Sleep, 0, 3150),
            (Phase::Asleep, 0, 3155),
        ]
    );
    assert_eq!((spans[2].computed_tokens, spans[2].sampled_tokens, spans[2].weight_version), (1000, 400, 7));
    assert_eq!((spans[5].bytes, spans[5].level), (123, 2));
}

#[test]
fn phases_that_alternate_fast_are_folded_and_lose_no_time() {
    let mut clock = Clock::new();
    // A thousand phases a second, for 20 minutes.
    for _ in 0..300_000 {
        clock.enter_for(Phase::Prefill, 2 * MS);
        clock.enter_for(Phase::Decode, MS);
        clock.enter_for(Phase::Idle, MS);
    }
    clock.enter(Phase::Paused, 0);
    let spans = clock.assert_seamless();
    assert!(spans.len() <= ENGINE_SPANS);
    let covered = clock.now.as_secs() - spans[0].start / 1_000_000_000;
    assert!(covered >= 15 * 60, "the ring covers {covered} s");
    let brief: Vec<_> = spans.iter().filter(|span| span.phase == Phase::Brief).collect();
    assert!(brief.len() > 1000, "{} of {}", brief.len(), spans.len());
    for span in &brief {
        assert_eq!(span.parts.iter().sum::<u64>(), span.end.expect("an end") - span.start, "{span:?}");
    }
    let (from, to) = (spans[0].start, spans[spans.len() - 1].start);
    let mut times = [0; span::PHASES];
    for span in &spans {
        span.times(from, to).into_iter().for_each(|(phase, time)| times[phase as usize] += time);
    }
    assert_eq!(times.iter().sum::<u64>(), to - from);
    let share = |phase: Phase| times[phase as usize] as f64 / (to - from) as f64;
    for (phase, expected) in [(Phase::Prefill, 0.5), (Phase::Decode, 0.25), (Phase::Idle, 0.25)] {
        assert!((share(phase) - expected).abs() < 0.001, "{phase:?}: {}", share(phase));
    }
    let sums = clock.timeline.sums.read().expect("nobody writes");
    let sum = |phase: Phase| sums[2 + phase as usize];
    assert_eq!((sum(Phase::Prefill), sum(Phase::Decode)), (600_000_000_000, 300_000_000_000));
}

#[test]
fn what_is_rare_or_long_keeps_its_span_among_many_short_ones() {
    let mut clock = Clock::new();
    for _ in 0..3000 {
        clock.enter(Phase::Prefill, 1);
        clock.enter(Phase::Decode, 1);
    }
    clock.enter(Phase::PushApply, 1);
    clock.enter(Phase::Decode, 1);
    clock.enter(Phase::Idle, 400);
    clock.enter(Phase::Decode, 1);
    clock.enter(Phase::Idle, 0);
    let spans = clock.assert_seamless();
    let find = |phase| spans.iter().rev().find(|span| span.phase == phase && span.end.is_some());
    let (push, idle) = (find(Phase::PushApply).expect("a push"), find(Phase::Idle).expect("a pause"));
    assert_eq!(push.end.expect("an end") - push.start, 1_000_000);
    assert_eq!(idle.end.expect("an end") - idle.start, 400_000_000);
    assert!(spans.iter().any(|span| span.phase == Phase::Brief));
}

#[test]
fn times_that_come_in_the_wrong_order_make_no_overlap() {
    let mut clock = Clock::new();
    clock.enter(Phase::Idle, 100);
    clock.enter(Phase::Decode, 100);
    clock.now -= 150 * MS;
    clock.enter(Phase::Sleep, 10);
    clock.enter(Phase::Asleep, 500);
    clock.enter(Phase::Idle, 0);
    let spans = clock.assert_seamless();
    assert!(spans.iter().all(|span| span.end.is_none_or(|end| end >= span.start)), "{spans:?}");
}

#[test]
fn a_window_has_the_newest_spans_and_their_shares() {
    let mut clock = Clock::new();
    clock.enter(Phase::Load, 100);
    clock.enter(Phase::Idle, 300);
    clock.enter(Phase::Decode, 600);
    std::thread::sleep(clock.now + MS);
    clock.enter(Phase::Asleep, 0);
    let origin = clock.timeline.origin_unix();
    let window = clock.timeline.window(origin + 200_000_000, 100);
    let phases: Vec<_> = window.spans.iter().map(|(_, span)| span.phase).collect();
    assert_eq!(phases, [Phase::Idle, Phase::Decode, Phase::Asleep]);
    for expected in [(Phase::Idle, 200_000_000), (Phase::Decode, 600_000_000)] {
        assert!(window.times.contains(&expected), "{:?}", window.times);
    }
    assert_eq!(window.times.iter().map(|time| time.1).sum::<u64>(), window.now - window.from);
    assert!(!window.truncated);
    let window = clock.timeline.window(0, 2);
    assert_eq!((window.spans.len(), window.truncated, window.from), (2, true, origin + 400_000_000));
    let window = clock.timeline.window(u64::MAX, 2);
    assert_eq!((window.spans.len(), window.from), (1, window.now), "only the open span is newer than now");
}

#[test]
fn a_trace_file_is_whole_at_the_end_and_lacks_a_bracket_before() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("trace.json");
    let mut clock = Clock::new();
    let trace = TraceFile::create(&path, clock.timeline.clone()).expect("a file");
    clock.enter(Phase::Load, 5);
    clock.enter(Phase::Decode, 5);
    clock.enter(Phase::Idle, 5);
    let text = || std::fs::read_to_string(&path).expect("text");
    while !text().contains("decode") {
        std::thread::sleep(MS);
    }
    let events = |text: &str| match serde_json::from_str(text).expect("JSON") {
        serde_json::Value::Array(events) => events,
        other => panic!("{other}"),
    };
    let names = |events: &[serde_json::Value]| -> Vec<String> {
        let complete = events.iter().filter(|event| event["ph"] == "X");
        complete.map(|event| event["name"].as_str().expect("a name").to_owned()).collect()
    };
    assert_eq!(names(&events(&(text() + "]"))), ["load", "decode"]);
    trace.finish();
    let events = events(&text());
    assert_eq!(names(&events), ["load", "decode", "idle"]);
    let decode = &events[4];
    assert_eq!(decode["args"]["sampled_tokens"], 4, "{decode}");
    assert_eq!((decode["ts"].as_f64(), decode["dur"].as_f64()), (Some(5000.0), Some(5000.0)), "{decode}");
}

#[test]
fn a_trace_file_that_cannot_be_made_is_named_and_a_full_disk_ends_only_the_file() {
    let (timeline, mut recorder, _) = Timeline::new();
    let error = TraceFile::create("/does/not/exist.json".as_ref(), timeline.clone()).err().expect("no such directory");
    assert!(error.to_string().contains("--trace-file /does/not/exist.json"), "{error}");
    // Every write fails with "no space left on device".
    assert!(TraceFile::create("/dev/full".as_ref(), timeline.clone()).is_err());
    let writer_ends = |path: &str| {
        let file = std::fs::OpenOptions::new().write(true).open(path).expect("it is there");
        let (_stop, stopped) = std::sync::mpsc::sync_channel(1);
        trace::run_on(file, timeline.clone(), &stopped);
    };
    recorder.enter(Phase::Idle, Instant::now());
    writer_ends("/dev/full");
}

#[test]
fn a_follower_is_given_every_span_and_those_that_still_change_again() {
    let mut clock = Clock::new();
    clock.enter(Phase::Load, 50);
    let mut follower = clock.timeline.follow(u64::MAX, u64::MAX);
    let mut seen = std::collections::BTreeMap::new();
    let mut read = |follower: &mut Follower| {
        let news = follower.news(16);
        assert!(news.spans[0].len() <= 16 && news.spans[1].is_empty());
        seen.extend(news.spans[0].iter().map(|span| (span.id, *span)));
        news.has_more
    };
    // The first phases are too short for spans of their own, and are folded into brief spans while the follower reads.
    for i in 0..5_000 {
        clock.enter(if i % 2 == 0 { Phase::Decode } else { Phase::Idle }, 1 + i / 1000);
        if i % 7 == 0 {
            read(&mut follower);
        }
    }
    while read(&mut follower) {}
    let all = clock.spans();
    assert!(all.len() > 1_000 && all.iter().any(|span| span.phase == Phase::Brief), "{}", all.len());
    let differs = all.iter().zip(seen.values()).find(|(span, given)| span != given);
    assert!(seen.len() == all.len() && differs.is_none(), "{} of {}: {differs:?}", seen.len(), all.len());
    let again: Vec<_> = follower.news(16).spans[0].iter().map(|span| span.id).collect();
    assert!(again.len() <= 2 && again.last() == all.last().map(|span| &span.id), "{again:?}");
}

#[test]
fn a_follower_begins_as_far_back_as_it_is_told() {
    let mut clock = Clock::new();
    (0..600).for_each(|i| clock.enter(if i % 2 == 0 { Phase::Decode } else { Phase::Idle }, 500));
    let all = clock.spans();
    let first = |nanos, most| clock.timeline.follow(nanos, most).news(u64::MAX).spans[0][0].id;
    assert_eq!(first(u64::MAX, u64::MAX), all[0].id);
    assert_eq!(first(u64::MAX, 40), all[all.len() - 40].id);
    // The test's clock runs ahead of the timeline's, so every ended span lies in the timeline's future.
    assert_eq!(first(0, 7), all[all.len() - 7].id);
}
