//! The engine on its own thread, with an executor without a model: token `t` is followed by `t + 1`.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use super::rig::{TRAFFIC_BYTES, ask};
use crate::cache::KvCacheManager;
use crate::clock::Clock;
use crate::engine::*;
use crate::executor::{MemoryKind, Released, WeightOrder};
use crate::memory::{Backlog, MemoryBudget, Traffic};
use crate::observe::Observer;
use crate::scheduler::{ImageScheduling, SchedulerConfig, Speculation};
use crate::types::{
    FinishReason, Prompt, SamplingParams, StepOutput, StepPlan, Tenant, TokenId, TokenLogprobs, WeightVersion,
};
use crate::weights::{Dtype, ParamSpec, Parameters, ShadowWeights};

const PATIENCE: Duration = Duration::from_secs(20);

/// An executor that counts up. Each step waits for a permit from the test.
struct Counting {
    permits: Receiver<()>,
    plan: Option<Arc<StepPlan>>,
}

impl Executor for Counting {
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()> {
        self.plan = Some(plan);
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput> {
        self.permits.recv().map_err(|_| Error::Internal("the device is gone".into()))?;
        let plan = self.plan.take().expect("collect follows launch");
        let mut output = StepOutput::default();
        for sequence in &plan.sequences {
            for row in &sequence.logits {
                let next = sequence.tokens[row.offset] + 1;
                output.tokens.extend(row.tasks.iter().map(|task| TokenLogprobs {
                    token: task.target.unwrap_or(next),
                    raw: -1.0,
                    processed: -0.5,
                    top: Vec::new(),
                    rank: 0,
                    returned: None,
                }));
            }
        }
        Ok(output)
    }

    fn check(&mut self, _: &WeightOrder) -> Result<()> {
        Ok(())
    }

    fn write(&mut self, order: WeightOrder) -> Result<()> {
        Err(Error::Internal(format!("{order:?} went wrong")))
    }

    fn shadow_weights(&mut self) -> Result<ShadowWeights> {
        Err(Error::Internal("the shadow weights went wrong".into()))
    }

    fn exchange(&mut self, _: ShadowWeights) -> Result<ShadowWeights> {
        Err(Error::Internal("the exchange went wrong".into()))
    }

    fn read(&mut self, _: &ParamSpec, _: std::ops::Range<usize>) -> Result<Vec<u8>> {
        Err(Error::Internal("the read went wrong".into()))
    }

    fn release(&mut self, memory: MemoryKind, _: u64) -> Result<Released> {
        Err(Error::Internal(format!("{memory:?} went wrong")))
    }

    fn discard(&mut self, _: ShadowWeights) -> Result<u64> {
        Err(Error::Internal("the discard went wrong".into()))
    }

    fn used_bytes(&self) -> u64 {
        0
    }

    fn restore(&mut self, memory: MemoryKind) -> Result<()> {
        Err(Error::Internal(format!("{memory:?} went wrong")))
    }
}

struct Fixture {
    handle: EngineHandle,
    permits: Sender<()>,
    thread: JoinHandle<Result<()>>,
}

impl Fixture {
    fn new() -> Self {
        let (permits, receiver) = channel();
        let (sender, commands) = sync_channel(COMMAND_QUEUE);
        let config = SchedulerConfig {
            max_num_seqs: 8,
            max_batch_tokens: 64,
            max_model_len: 100,
            max_queued_samples: 16,
            speculation: Speculation::OFF,
            images: ImageScheduling::default(),
            routing_row_bytes: 0,
        };
        let scheduler = Scheduler::new(config, KvCacheManager::new(64, 4));
        let executor = Counting { permits: receiver, plan: None };
        let (observer, recorder) = Observer::new();
        let setup = Setup {
            parameters: Arc::new(Parameters::new(Vec::new(), Dtype::F32, 1, false)),
            budget: MemoryBudget::new(1 << 30, 1.0),
            traffic: Traffic::new(TRAFFIC_BYTES),
            max_adapters: 0,
            max_lora_rank: 1,
            max_tenant_adapters: None,
            clock: Clock::System,
            observer,
            recorder,
        };
        let engine = Engine::new(executor, scheduler, None, commands, setup);
        Self { handle: EngineHandle::new(sender), permits, thread: std::thread::spawn(move || engine.run()) }
    }

    fn steps(&self, count: usize) {
        (0..count).for_each(|_| self.permits.send(()).unwrap());
    }

    fn start(&self, id: &str, prompts: &[&[TokenId]], n: u32, params: SamplingParams) -> (Receiver<Event>, CancelFlag) {
        let kind =
            RequestKind::Generate { n, seed: 1, prompt_logprobs: false, stream_tokens: false, return_text: false };
        self.start_with(id, prompts, kind, params, (None, None))
    }

    fn start_with(
        &self,
        id: &str,
        prompts: &[&[TokenId]],
        kind: RequestKind,
        params: SamplingParams,
        versions: (Option<WeightVersion>, Option<WeightVersion>),
    ) -> (Receiver<Event>, CancelFlag) {
        let (sender, events) = channel();
        let cancel = CancelFlag::default();
        let traffic = Traffic::new(TRAFFIC_BYTES);
        let request = ValidRequest {
            request_id: id.into(),
            prompts: prompts.iter().map(|&p| Prompt::from_tokens(p)).collect(),
            kind,
            params: Arc::new(params),
            grammar: None,
            prompt_sampling: BTreeMap::new(),
            policies: OtherPolicies::default(),
            top_arrays: None,
            return_routing: None,
            adapter: None,
            if_weight_version: versions.0,
            min_weight_version: versions.1,
            time_limit: None,
        };
        let client = RequestClient {
            owner: None,
            tenant: Tenant::default(),
            arrived: std::time::Instant::now(),
            waits_for_resume: true,
            cancel: cancel.clone(),
            responder: Box::new(move |event| drop(sender.send(event))),
            adapter_reader: None,
            backlog: Backlog::new(&traffic),
            charge: traffic.charge_always(0),
        };
        let command = GenerateCommand { request, client };
        self.handle.send(Command::Generate(Box::new(command))).unwrap();
        (events, cancel)
    }

    fn abort(&self, target: AbortTarget) -> AbortReply {
        let (sender, reply) = channel();
        let reply_to = Box::new(move |r| sender.send(r).unwrap());
        self.handle.send(Command::Abort { target, owner: None, reply: reply_to }).unwrap();
        reply.recv_timeout(PATIENCE).unwrap()
    }

    fn status(&self) -> EngineStatus {
        let (sender, reply) = channel();
        self.handle.send(Command::Status { reply: Box::new(move |s| sender.send(s).unwrap()) }).unwrap();
        reply.recv_timeout(PATIENCE).unwrap()
    }

    fn end(self) -> Result<()> {
        self.handle.send(Command::Shutdown { grace: Duration::ZERO }).unwrap();
        self.thread.join().unwrap()
    }
}

/// All events up to the terminal one, after which the channel must close.
fn drain(events: &Receiver<Event>) -> Vec<Event> {
    let mut all = Vec::new();
    loop {
        let event = events.recv_timeout(PATIENCE).expect("a terminal event");
        let terminal = matches!(event, Event::Done(_) | Event::Failed(_));
        all.push(event);
        if terminal {
            assert_eq!(events.recv_timeout(PATIENCE).unwrap_err(), RecvTimeoutError::Disconnected);
            return all;
        }
    }
}

fn completions(events: &[Event]) -> Vec<(u32, u32, Vec<TokenId>, FinishReason)> {
    let tokens = |c: &Completion| c.tokens.iter().map(|t| t.token).collect();
    events
        .iter()
        .filter_map(|e| match e {
            Event::Completion(c) => Some((c.prompt_index, c.sample_index, tokens(c), c.finish_reason)),
            _ => None,
        })
        .collect()
}

fn tokens(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, ..Default::default() }
}

#[test]
fn a_request_gets_its_completions_and_one_summary() {
    let engine = Fixture::new();
    engine.steps(3);
    let (events, _) = engine.start("a", &[&[10, 11], &[20]], 2, tokens(3));
    let events = drain(&events);
    let mut done = completions(&events);
    done.sort();
    let expected = [(0, 0, 12), (0, 1, 12), (1, 0, 21), (1, 1, 21)];
    assert_eq!(done, expected.map(|(p, s, t)| (p, s, vec![t, t + 1, t + 2], FinishReason::Length)));
    let Some(Event::Done(summary)) = events.last() else { panic!("{events:?}") };
    assert_eq!((summary.prompt_tokens, summary.completion_tokens), (3, 12));
    let status = engine.status();
    assert_eq!(
        (status.stats.finished_requests, status.stats.accepted_requests, status.stats.generated_tokens),
        (1, 0, 12)
    );
    assert_eq!(status.stats.free_blocks, status.stats.total_blocks);
    engine.end().unwrap();
}

#[test]
fn an_abort_delivers_what_there_is_and_frees_every_block() {
    let engine = Fixture::new();
    let (a, _) = engine.start("a", &[&[10]], 1, tokens(50));
    let (b, _) = engine.start("b", &[&[30]], 1, tokens(4));
    engine.steps(2);
    let abort = {
        // The engine takes commands between two steps, so it needs a third step to take this one.
        let (sender, reply) = channel();
        let target = AbortTarget::Requests(vec!["a".into(), "ghost".into()]);
        engine
            .handle
            .send(Command::Abort { target, owner: None, reply: Box::new(move |r| sender.send(r).unwrap()) })
            .unwrap();
        engine.steps(3);
        reply.recv_timeout(PATIENCE).unwrap()
    };
    assert_eq!(abort, AbortReply { aborted: vec!["a".into()], unknown: vec!["ghost".into()] });
    let aborted = completions(&drain(&a));
    let (_, _, tokens, reason) = &aborted[0];
    assert_eq!(*reason, FinishReason::Aborted);
    assert_eq!(tokens[..], (11..11 + tokens.len() as u32).collect::<Vec<_>>()[..]);
    engine.steps(4);
    assert_eq!(completions(&drain(&b))[0].2, [31, 32, 33, 34]);
    let status = engine.status();
    assert_eq!((status.stats.aborted_requests, status.stats.finished_requests), (1, 1));
    assert_eq!(status.stats.free_blocks, status.stats.total_blocks);
    engine.end().unwrap();
}

#[test]
fn a_client_that_vanishes_costs_nothing() {
    let engine = Fixture::new();
    let (events, cancel) = engine.start("a", &[&[1], &[2]], 4, tokens(90));
    engine.steps(1);
    drop(events);
    engine.handle.cancel(&cancel);
    engine.steps(1);
    let status = engine.status();
    assert_eq!((status.stats.accepted_requests, status.stats.running_samples, status.stats.waiting_samples), (0, 0, 0));
    assert_eq!(status.stats.free_blocks, status.stats.total_blocks);
    assert_eq!(status.stats.aborted_requests, 1);
    engine.end().unwrap();
}

#[test]
fn requests_that_cannot_run_are_refused_with_the_reason() {
    let engine = Fixture::new();
    let check = |events: Receiver<Event>, part: &str| match &drain(&events)[..] {
        [Event::Failed(error)] => assert!(error.to_string().contains(part), "{part:?} is missing in {error}"),
        other => panic!("{other:?}"),
    };
    let kind =
        || RequestKind::Generate { n: 1, seed: 1, prompt_logprobs: false, stream_tokens: false, return_text: false };
    check(engine.start_with("v", &[&[1]], kind(), tokens(1), (Some(3), None)).0, "if_weight_version: 3");
    check(engine.start("full", &[&[1]], 17, tokens(1)).0, "16 may wait");
    let (first, _) = engine.start("twice", &[&[1]], 1, tokens(3));
    let (second, _) = engine.start("twice", &[&[1]], 1, tokens(3));
    engine.steps(1);
    check(second, "\"twice\" is running already");
    engine.steps(2);
    drain(&first);
    engine.end().unwrap();
}

#[test]
fn a_request_for_a_newer_policy_waits_and_can_be_ended() {
    let engine = Fixture::new();
    let kind =
        || RequestKind::Generate { n: 1, seed: 1, prompt_logprobs: false, stream_tokens: false, return_text: false };
    let (first, cancel) = engine.start_with("first", &[&[1]], kind(), tokens(1), (None, Some(1)));
    let (second, _) = engine.start_with("second", &[&[1]], kind(), tokens(1), (None, Some(1)));
    let (third, _) = engine.start_with("third", &[&[1]], kind(), tokens(1), (None, Some(1)));
    assert_eq!(first.recv_timeout(Duration::from_millis(50)).unwrap_err(), RecvTimeoutError::Timeout);
    engine.handle.cancel(&cancel);
    assert!(matches!(&drain(&first)[..], [Event::Failed(Error::Aborted(_))]));
    assert_eq!(engine.abort(AbortTarget::Requests(vec!["second".into()])).aborted, ["second"]);
    assert!(matches!(&drain(&second)[..], [Event::Failed(Error::Aborted(_))]));
    engine.end().unwrap();
    assert!(matches!(&drain(&third)[..], [Event::Failed(Error::Unavailable(_))]));
}

#[test]
fn shutdown_finishes_what_runs_and_refuses_what_comes() {
    let engine = Fixture::new();
    let (running, _) = engine.start("running", &[&[1]], 1, tokens(5));
    engine.steps(1);
    engine.handle.send(Command::Shutdown { grace: PATIENCE }).unwrap();
    let (late, _) = engine.start("late", &[&[1]], 1, tokens(5));
    engine.steps(4);
    assert_eq!(completions(&drain(&running))[0].2, [2, 3, 4, 5, 6]);
    assert!(matches!(&drain(&late)[..], [Event::Failed(Error::Unavailable(_))]));
    engine.thread.join().unwrap().unwrap();
    let error = engine.handle.send(Command::Look).unwrap_err();
    assert!(matches!(error, Error::Unavailable(_)));
}

#[test]
fn the_end_of_grace_aborts_what_still_runs() {
    let engine = Fixture::new();
    let (running, _) = engine.start("running", &[&[1]], 1, tokens(90));
    engine.steps(1);
    engine.handle.send(Command::Shutdown { grace: Duration::ZERO }).unwrap();
    // Sending fails once the engine has ended.
    for _ in 0..2 {
        let _ = engine.permits.send(());
    }
    let done = completions(&drain(&running));
    assert_eq!(done[0].3, FinishReason::Aborted);
    engine.thread.join().unwrap().unwrap();
}

#[test]
fn a_device_that_fails_ends_every_request() {
    let Fixture { handle, permits, thread } = Fixture::new();
    drop(permits);
    let (mut command, asked) = ask("a", 1, 1);
    command.request.kind = RequestKind::Score;
    handle.send(Command::Generate(Box::new(command))).unwrap();
    assert!(matches!(drain(&asked.events)[..], [Event::Done(_)]));
    assert!(thread.join().unwrap().unwrap_err().to_string().contains("the device is gone"));
}

#[test]
fn an_order_that_fails_ends_the_engine_and_tells_all() {
    let Fixture { handle, permits: _permits, thread } = Fixture::new();
    let (sender, reply) = channel();
    let reply_to: Reply<Result<SleepReply>> = Box::new(move |r| sender.send(r).unwrap());
    let cancel = CancelFlag::default();
    handle.send(Command::Sleep { level: SleepLevel::One, mode: DrainMode::Keep, cancel, reply: reply_to }).unwrap();
    let told = reply.recv_timeout(PATIENCE).unwrap().unwrap_err();
    assert!(matches!(&told, Error::Internal(why) if why.contains("KvCache went wrong")), "{told}");
    assert_eq!(thread.join().unwrap().unwrap_err().to_string(), told.to_string());
}
