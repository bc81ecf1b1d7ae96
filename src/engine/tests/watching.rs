//! Observers see the engine's phases without gaps, and numbers that agree with its status.

use std::sync::mpsc::{channel, sync_channel};
use std::time::{Duration, Instant};

use super::rig::*;
use crate::engine::*;
use crate::observe::{EngineWatchdog, Observer, Phase, ServedFacts, ServerFacts, Span, TrackName};
use crate::stacks::thread_stacks;
use crate::weights::UpdateKind;

/// An engine on a thread of its own.
struct Served {
    handle: EngineHandle,
    observer: Observer,
    thread: std::thread::JoinHandle<Result<()>>,
}

impl Served {
    fn new() -> Self {
        let (sender, commands) = sync_channel(COMMAND_QUEUE);
        let engine = Rig::with_commands(commands).engine;
        let observer = engine.core.telemetry.observer.clone();
        Self { handle: EngineHandle::new(sender), observer, thread: std::thread::spawn(move || engine.run()) }
    }

    fn call<T: Send + 'static>(&self, command: impl FnOnce(Reply<T>) -> Command) -> T {
        let (sender, receiver) = channel();
        self.handle.send(command(Box::new(move |value| drop(sender.send(value))))).unwrap();
        receiver.recv_timeout(Duration::from_secs(60)).expect("an answer")
    }

    fn generate(&self, id: &str, prompt: usize, max_tokens: u32) -> Vec<Event> {
        let (command, asked) = ask(id, prompt, max_tokens);
        self.handle.send(Command::Generate(Box::new(command))).unwrap();
        let mut events = Vec::new();
        while !matches!(events.last(), Some(Event::Done(_) | Event::Failed(_))) {
            events.push(asked.events.recv_timeout(Duration::from_secs(60)).expect("an event"));
        }
        events
    }

    /// The phases of the engine so far, without repetitions.
    fn phases(&self) -> Vec<Phase> {
        let mut phases: Vec<_> = self.spans().iter().map(|span| span.phase).collect();
        phases.dedup();
        phases
    }

    fn spans(&self) -> Vec<Span> {
        let spans = self.observer.timeline.window(0, usize::MAX).spans;
        spans.into_iter().filter(|(track, _)| *track == TrackName::Engine).map(|(_, span)| span).collect()
    }

    /// Waits until the engine is in `phase`.
    fn settles(&self, phase: Phase) {
        while self.spans().last().map(|span| span.phase) != Some(phase) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The value of a metric's line.
    fn metric(&self, line: &str) -> f64 {
        let text = self.observer.metrics.render(
            &self.observer.timeline,
            &self.observer.metric_names,
            &ServerFacts {
                served: Some(ServedFacts { max_model_len: 100, ..Default::default() }),
                ..Default::default()
            },
        );
        let value = text.lines().find_map(|l| l.strip_prefix(line)?.strip_prefix(' ')).map(str::parse);
        value.unwrap_or_else(|| panic!("no line {line} in\n{text}")).expect("a number")
    }
}

#[test]
fn phases_follow_each_other_without_gaps_and_cover_the_wall_clock() {
    let engine = Served::new();
    engine.settles(Phase::Idle);
    engine.generate("a", 5, 20);
    engine.settles(Phase::Idle);
    let cancel = CancelFlag::default;
    engine.call(|reply| Command::Pause { mode: DrainMode::Wait, cancel: cancel(), reply }).unwrap();
    engine.settles(Phase::Paused);
    engine.call(|reply| Command::Resume { reply }).unwrap();
    engine.settles(Phase::Idle);
    let mut ticket = engine.call(|reply| begin(UpdateKind::Lora).command(reply)).unwrap();
    engine
        .call(|reply| Command::CommitUpdate {
            update: ticket.id,
            content: lora(),
            tower: None,
            new_version: None,
            reply,
        })
        .unwrap();
    engine.settles(Phase::Idle);
    let (level, mode) = (SleepLevel::Two, DrainMode::Wait);
    engine.call(|reply| Command::Sleep { level, mode, cancel: cancel(), reply }).unwrap();
    engine.settles(Phase::Asleep);
    let tags = WakeTags { weights: true, kv_cache: true };
    engine.call(|reply| Command::Wake { tags, reload: false, reply }).unwrap();
    engine.settles(Phase::WeightsMissing);
    engine.call(|reply| Command::Wake { tags, reload: true, reply }).unwrap();
    engine.settles(Phase::Idle);
    let names = vec![PARAMETERS[0].to_owned()];
    engine.call(|reply| Command::Checksum { names, cancel: cancel(), reply }).unwrap();
    engine.settles(Phase::Idle);
    ticket = engine.call(|reply| begin(UpdateKind::Lora).command(reply)).unwrap();
    engine.settles(Phase::Idle);
    use Phase::{Asleep, Checksum, Idle, Load, Paused, PushApply, PushReserve, Reload, Sleep, Wake, WeightsMissing};
    let mut phases = engine.phases();
    // Whether the engine's thread idles between the two commands of a push depends on timing.
    phases.retain(|phase| *phase != Idle);
    phases.dedup();
    let expected = [
        Load,
        Phase::Prefill,
        Phase::Decode,
        Paused,
        PushReserve,
        PushApply,
        Sleep,
        Asleep,
        Wake,
        WeightsMissing,
        Reload,
        Checksum,
        PushReserve,
    ];
    assert_eq!(phases, expected);

    let (spans, now) = (engine.spans(), engine.observer.timeline.now());
    assert!(spans.windows(2).all(|pair| pair[0].end == Some(pair[1].start)), "{spans:#?}");
    assert_eq!(spans[0].start, 0);
    let decode = spans.iter().find(|span| span.phase == Phase::Decode).unwrap();
    assert_eq!((decode.steps, decode.sampled_tokens, decode.weight_version), (19, 19, 0));
    let apply = spans.iter().find(|span| span.phase == PushApply).unwrap();
    assert_eq!((apply.push, apply.weight_version, ticket.id), (1, 1, 2));
    assert_eq!(spans.iter().find(|span| span.phase == Sleep).unwrap().level, 2);
    let sums: u64 = engine.observer.timeline.sums().iter().map(|sum| sum.1).sum();
    assert!(sums >= now && sums <= engine.observer.timeline.now(), "{sums} is not about {now}");
    assert_eq!(engine.metric("rollout:sleep_seconds_count{level=\"2\"}"), 1.0);
    assert_eq!(engine.metric("rollout:wake_seconds_count{reload=\"true\"}"), 1.0);
    drop(engine.handle);
    engine.thread.join().unwrap().unwrap();
}

#[test]
fn numbers_are_exact_and_agree_with_the_status() {
    let engine = Served::new();
    engine.generate("a", 5, 20);
    engine.generate("b", 9, 1);
    let (mut refused, asked) = ask("c", 5, 1);
    refused.request.if_weight_version = Some(9);
    engine.handle.send(Command::Generate(Box::new(refused))).unwrap();
    assert!(matches!(asked.events.recv(), Ok(Event::Failed(_))));
    let status = engine.call(|reply| Command::Status { reply });
    engine.settles(Phase::Idle);
    let expected = [
        ("rollout:prompt_tokens_total", status.stats.prompt_tokens),
        ("rollout:prompt_tokens_total", 14),
        ("rollout:generation_tokens_total", status.stats.generated_tokens),
        ("rollout:generation_tokens_total", 21),
        ("rollout:prompt_tokens_cached_total", status.stats.cached_tokens),
        ("rollout:requests_total{outcome=\"finished\"}", 2),
        ("rollout:requests_total{outcome=\"version_conflict\"}", 1),
        ("rollout:requests_total{outcome=\"aborted\"}", 0),
        ("rollout:request_success_total{finished_reason=\"length\"}", 2),
        ("rollout:time_to_first_token_seconds_count", 2),
        ("rollout:request_queue_time_seconds_count", 2),
        ("rollout:inter_token_latency_seconds_count", 19),
        ("rollout:request_time_per_output_token_seconds_count", 1),
        ("rollout:request_generation_tokens_sum", 21),
        ("rollout:request_prompt_tokens_sum", 14),
        ("rollout:e2e_request_latency_seconds_count", 2),
        ("rollout:step_time_seconds_count{kind=\"decode\"}", 19),
        ("rollout:iteration_tokens_total_count", status.stats.steps),
        ("rollout:iteration_tokens_total_sum", 14 - status.stats.cached_tokens + 19),
        ("rollout:num_requests_running", 0),
        ("rollout:kv_cache_blocks{state=\"used\"}", 0),
        ("rollout:lifecycle{state=\"running\"}", 1),
        ("rollout:lifecycle{state=\"starting\"}", 0),
        ("rollout:memory_bytes{use=\"weights\"}", 120),
        ("rollout:memory_ceiling_bytes", 1000),
        ("vllm:generation_tokens_total{model_name=\"\",engine=\"0\"}", 21),
        ("vllm:request_prompt_tokens_sum{model_name=\"\",engine=\"0\"}", 14),
        ("vllm:request_generation_tokens_bucket{model_name=\"\",engine=\"0\",le=\"20.0\"}", 2),
        ("vllm:request_inference_time_seconds_count{model_name=\"\",engine=\"0\"}", 2),
    ];
    for (line, value) in expected {
        assert_eq!(engine.metric(line), value as f64, "{line}");
    }
    drop(engine.handle);
    engine.thread.join().unwrap().unwrap();
}

#[test]
fn an_engine_that_waits_says_what_for() {
    let engine = Served::new();
    let (mut command, newer) = ask("newer", 3, 1);
    command.request.min_weight_version = Some(1);
    engine.handle.send(Command::Generate(Box::new(command))).unwrap();
    engine.settles(Phase::WaitVersion);
    newer.cancel.cancel();
    engine.handle.look();
    engine.settles(Phase::Idle);

    let (command, lagging) = ask("lagging", 3, 50);
    let backlog = command.client.backlog.clone();
    backlog.add(u64::MAX / 4);
    engine.handle.send(Command::Generate(Box::new(command))).unwrap();
    engine.settles(Phase::WaitReaders);
    assert!(lagging.events().is_empty());
    lagging.cancel.cancel();
    engine.handle.look();
    engine.settles(Phase::Idle);
    drop(engine.handle);
    engine.thread.join().unwrap().unwrap();
}

#[test]
fn a_step_that_hangs_is_reported_once_with_the_stack_of_its_thread() {
    const LIMIT: Duration = Duration::from_secs(60);
    let (sender, commands) = sync_channel(COMMAND_QUEUE);
    let mut engine = Rig::with_commands(commands).engine;
    let (open, gate) = channel();
    engine.core.executor.gate = Some(gate);
    let observer = engine.core.telemetry.observer.clone();
    let thread = std::thread::Builder::new().name("hanging-engine".into()).spawn(move || engine.run()).unwrap();
    let served = Served { handle: EngineHandle::new(sender), observer: observer.clone(), thread };
    let Observer { timeline, journal, metrics, .. } = observer.clone();
    let mut watchdog = EngineWatchdog::new(timeline, journal, metrics, LIMIT);
    served.settles(Phase::Idle);
    assert_eq!(watchdog.look(Instant::now() + 2 * LIMIT), None, "there is nothing to do");

    let (command, asked) = ask("a", 5, 3);
    served.handle.send(Command::Generate(Box::new(command))).unwrap();
    served.settles(Phase::Prefill);
    assert_eq!(watchdog.look(Instant::now()), None, "it has just begun");
    let stall = watchdog.look(Instant::now() + LIMIT).expect("it hangs");
    assert_eq!((stall.phase, stall.push), (Phase::Prefill, None));
    assert_eq!(watchdog.look(Instant::now() + 9 * LIMIT), None, "it is reported");
    // It may not have come to the executor yet.
    for look in 0.. {
        let stacks = thread_stacks();
        let stack = stacks.iter().find(|stack| stack.name == "hanging-engine");
        if cfg!(not(target_os = "linux")) || stack.is_some_and(|stack| stack.frames.contains("collect")) {
            break;
        }
        assert!(look < 100_000, "{stack:?}");
        std::thread::sleep(Duration::from_millis(1));
    }

    drop(open);
    while !matches!(asked.events.recv_timeout(Duration::from_secs(60)).expect("an event"), Event::Done(_)) {}
    served.settles(Phase::Idle);
    assert_eq!(watchdog.look(Instant::now() + 2 * LIMIT), None);
    assert!(observer.journal.last_stall().is_some_and(|stall| stall.is_over));
    drop(served.handle);
    served.thread.join().unwrap().unwrap();
}

#[test]
fn the_oldest_requests_are_listed_with_what_they_have() {
    let mut rig = Rig::new();
    let (mut asked, mut replies) = (Vec::new(), Vec::new());
    for (id, version) in [("first", None), ("second", None), ("held", Some(9))] {
        let (mut command, answer) = ask(id, 5, 40);
        command.request.min_weight_version = version;
        rig.command(Command::Generate(Box::new(command)));
        asked.push(id);
        replies.push(answer);
    }
    let queued = rig.engine.admission.list(&rig.engine.core, 50);
    let ids: Vec<_> = queued.oldest.iter().map(|request| request.id.as_str()).collect();
    assert_eq!((queued.total, ids), (3, asked));
    let progress: Vec<_> = queued.oldest.iter().map(|request| request.progress).collect();
    assert_eq!(progress, [RequestProgress::Queued, RequestProgress::Queued, RequestProgress::Held]);
    (0..4).for_each(|_| rig.engine.steps.run(&mut rig.engine.core).unwrap());
    let list = rig.engine.admission.list(&rig.engine.core, 1);
    assert_eq!((list.total, list.oldest.len()), (3, 1));
    let first = &list.oldest[0];
    assert_eq!((first.progress, first.prompts, first.prompt_tokens), (RequestProgress::Running, 1, 5));
    assert!(first.samples == first.open_samples && first.tokens > 0, "{first:?}");
}
