//! Calls of the driver that fail while an engine works: a push, a wake or a step for which there is no memory is
//! refused and the old policy serves on, bit for bit; a device that has failed ends the process with a message.
//!
//! The emulator lets calls fail. As a failure may end the process, the engines run in a child: the same test, with
//! [`CHILD`] set. `CUDA_FAILURES_ALL=1` lets each call fail in its turn, not some of them only.

use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rollout_server::engine::{AdapterTarget, Command, DrainMode, LifecycleStatus, SleepLevel};
use rollout_server::error::{Error, Result};
use rollout_server::types::{SamplingParams, TokenId};
use rollout_server::weights::{Dtype, TensorEntry};

use crate::common::{Engine, Push, Request, StateDict, random_prompts, random_weights};
use crate::emulator::{calls, emulated, fail};
use crate::images;
use crate::require::require;

/// What a child does: the call that fails, the code, and the first case, separated by spaces.
const CHILD: &str = "CUDA_FAILURES_CHILD";
const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_FAILED: i32 = 719;
/// The exit status of a process whose rank has failed.
const RANK_FAILED: i32 = 70;
/// Most cases of one kind of failure, unless all are asked for. There are fewer allocations and mappings than this.
const MOST_WITHOUT_MEMORY: u64 = 40;
/// Each of these ends a process.
const SOME_OTHERS: u64 = 2;

/// A model with a tower.
const VISION_MODEL: &str = "qwen2_5_vl";

/// What an engine does while a call fails.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    Lora,
    /// An adapter into a base that a FULL push has brought, which is copied then.
    LoraOfPushed,
    Full,
    Delta,
    Resident,
    /// Of pushed weights and a resident adapter, which wait on the host.
    Sleep,
    Wake,
    WakeWithoutPolicy,
    /// An adapter whose merge wants whole rows, into pushed weights, on two ranks that gather them.
    DoraOfPushedOnTwoRanks,
    WakeWithDoraOnTwoRanks,
    Step,
    /// Encodes two pictures whose embeddings are not cached, then prefills and samples.
    Encode,
}

impl Work {
    fn is_on_two_ranks(self) -> bool {
        matches!(self, Self::DoraOfPushedOnTwoRanks | Self::WakeWithDoraOnTwoRanks)
    }
}

/// An engine, and two policies for it.
struct Bench {
    engine: Engine,
    work: Work,
    first: StateDict,
    second: StateDict,
}

/// The adapter with a magnitude for each row, as DoRA has it: its merge needs whole rows of the base.
fn with_magnitudes(mut adapter: Push) -> Push {
    let of_rows = |(tensor, _): &(TensorEntry, Vec<u8>)| {
        let layer = tensor.name.strip_suffix("lora_B.weight")?;
        let values = (0..tensor.shape[0]).flat_map(|row| ((row % 5) as f32 / 10.0 + 0.5).to_le_bytes());
        let values: Vec<u8> = values.collect();
        let name = format!("{layer}lora_magnitude_vector");
        let (shape, digest) = (vec![tensor.shape[0]], Some(xxhash_rust::xxh3::xxh3_128(&values).to_be_bytes()));
        Some((TensorEntry { name, dtype: Dtype::F32, shape, digest, ..tensor.clone() }, values))
    };
    let magnitudes: Vec<_> = adapter.tensors.iter().filter_map(of_rows).collect();
    adapter.tensors.extend(magnitudes);
    adapter.adapter_config = adapter.adapter_config.replacen('{', r#"{"use_dora":true,"#, 1);
    adapter
}

/// What can be seen of a policy: its checksums, and the bits of some samples.
type Seen = (Vec<(String, [u8; 32])>, Vec<Vec<(TokenId, u32, u32)>>);

impl Bench {
    /// An engine that is about to do the work.
    fn new(work: Work) -> Self {
        let tp = if work.is_on_two_ranks() { "2" } else { "1" };
        let flags = ["--dtype", "bfloat16", "--kv-cache-bytes", "2MiB", "--max-adapters", "2", "--tp", tp];
        let engine = match work {
            Work::Encode => images::start(VISION_MODEL, &flags),
            _ => Engine::start("qwen2", &[&["--device", "cuda"], &flags[..]].concat()),
        };
        let [first, second] = [1, 2].map(|seed| random_weights(engine.parameters(), seed));
        let bench = Self { engine, work, first, second };
        if matches!(work, Work::LoraOfPushed | Work::Full | Work::Delta | Work::Sleep) || work.is_on_two_ranks() {
            bench.full(&bench.first).unwrap();
        }
        if work == Work::Sleep {
            bench.resident().unwrap();
        }
        if work == Work::WakeWithDoraOnTwoRanks {
            bench.dora().unwrap();
        }
        bench.prepare();
        bench
    }

    fn full(&self, weights: &StateDict) -> Result<()> {
        self.engine.push(Push::full(weights)).map(drop)
    }

    fn delta(&self, before: &StateDict, after: &StateDict) -> Result<()> {
        let version = self.engine.status().stats.weight_version;
        self.engine.push(Push::delta(before, after, version)).map(drop)
    }

    fn dora(&self) -> Result<()> {
        self.engine.push(with_magnitudes(Push::lora_of_all(self.engine.parameters()))).map(drop)
    }

    fn resident(&self) -> Result<()> {
        let target = AdapterTarget { name: "one".into(), expected_generation: Some(0), evicts: false };
        let push = Push { adapter: Some(target), ..Push::lora_of_all(self.engine.parameters()) };
        self.engine.push(push).map(drop)
    }

    fn wake(&self) -> Result<()> {
        self.engine.wake(true, true).map(drop)
    }

    fn generate(&self) -> Result<Vec<Vec<(TokenId, u32, u32)>>> {
        self.engine.reset_prefix_cache();
        if self.work == Work::Encode {
            return self.encode();
        }
        let adapter = (!self.adapters().is_empty()).then(|| "one".to_string());
        let params = SamplingParams { max_tokens: 3, temperature: 0.8, top_p: 0.9, ..Default::default() };
        let prompts = random_prompts(5, 2, 3..20, 250);
        let reply = self.engine.generate(Request { adapter, ..Request::generate(prompts, 1, 7, 0) }.params(params));
        let bits = reply.bits();
        reply.error.map_or(Ok(bits), Err)
    }

    /// Encodes the pictures of two prompts again, and samples.
    fn encode(&self) -> Result<Vec<Vec<(TokenId, u32, u32)>>> {
        self.engine.ask(|reply| Command::ResetEncoderCache { reply });
        images::try_sample(&self.engine, &images::cases(VISION_MODEL))
    }

    fn adapters(&self) -> Vec<String> {
        let list = self.engine.ask(|reply| Command::ListAdapters { reply });
        list.into_iter().map(|adapter| adapter.name).collect()
    }

    /// Brings the engine to where the work begins, without memory that operators keep for their next use.
    fn prepare(&self) {
        let level = if self.work == Work::WakeWithoutPolicy { SleepLevel::Two } else { SleepLevel::One };
        self.engine.sleep(level, DrainMode::Abort).unwrap();
        if !self.is_asleep_first() {
            self.wake().unwrap();
        }
    }

    fn is_asleep_first(&self) -> bool {
        matches!(self.work, Work::Wake | Work::WakeWithoutPolicy | Work::WakeWithDoraOnTwoRanks)
    }

    fn run(&self) -> Result<()> {
        match self.work {
            Work::Lora | Work::LoraOfPushed => self.engine.push(Push::lora("peft/bfloat16")).map(drop),
            Work::Full => self.full(&self.second),
            Work::Delta => self.delta(&self.first, &self.second),
            Work::Resident => self.resident(),
            Work::Sleep => self.engine.sleep(SleepLevel::One, DrainMode::Abort).map(drop),
            Work::DoraOfPushedOnTwoRanks => self.dora(),
            Work::Wake | Work::WakeWithoutPolicy | Work::WakeWithDoraOnTwoRanks => self.wake(),
            Work::Step | Work::Encode => self.generate().map(drop),
        }
    }

    fn undo(&self) {
        match self.work {
            Work::Lora | Work::LoraOfPushed | Work::DoraOfPushedOnTwoRanks => {
                self.engine.push(Push::base()).unwrap();
            }
            Work::Full => self.full(&self.first).unwrap(),
            Work::Delta => self.delta(&self.second, &self.first).unwrap(),
            Work::Resident => {
                let remove = |reply| {
                    let (name, cancel) = ("one".into(), Default::default());
                    Command::RemoveAdapter { name, expected_generation: None, cancel, reply }
                };
                self.engine.ask(remove).unwrap();
            }
            Work::Sleep => self.wake().unwrap(),
            Work::Wake | Work::WakeWithoutPolicy | Work::WakeWithDoraOnTwoRanks | Work::Step | Work::Encode => {}
        }
        self.prepare();
    }

    fn seen(&self) -> Option<Seen> {
        let is_asleep = matches!(self.engine.status().lifecycle, LifecycleStatus::Asleep { .. });
        if self.work == Work::Sleep && is_asleep {
            self.wake().unwrap();
        }
        let has_policy = self.engine.status().lifecycle == LifecycleStatus::Running;
        has_policy.then(|| (self.engine.checksums(), self.generate().unwrap()))
    }
}

#[expect(clippy::disallowed_methods, reason = "a child gets its order, and a person asks for all cases")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// In a child: the cases from `from` on. Says on standard output what it does and what has come of it.
fn child(work: Work, order: &str) {
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    let [call, code, from] = order.split(' ').collect::<Vec<_>>()[..] else { panic!("{CHILD} is «{order}»") };
    let (call, code): (_, i32) = (CString::new(call).unwrap(), code.parse().unwrap());
    let bench = Bench::new(work);
    let before = bench.seen();
    bench.prepare();
    let made = calls(&call);
    bench.run().unwrap();
    let count = calls(&call) - made;
    let after = bench.seen();
    bench.undo();
    let most = if code == OUT_OF_MEMORY { MOST_WITHOUT_MEMORY } else { SOME_OTHERS };
    let cases = if variable("CUDA_FAILURES_ALL").is_some() { count } else { count.min(most) };
    println!("\nof {count} calls, cases {cases}");
    for case in from.parse().unwrap()..cases {
        println!("case {case}");
        fail(&call, case * count / cases, code);
        let result = catch_unwind(AssertUnwindSafe(|| bench.run()));
        fail(&call, 0, 0);
        match result {
            Ok(Ok(())) if code == OUT_OF_MEMORY => println!("went well"),
            Ok(Err(Error::ResourceExhausted(why))) if code == OUT_OF_MEMORY => {
                println!("refused: {why}");
                assert!(bench.seen() == before, "the old policy is another");
                bench.run().expect("it goes well when it is tried again");
            }
            other => {
                println!("then: {:?}", other.map_err(|_| "a panic"));
                // A device that has failed shows it at the next step, if not before.
                let _ = bench.wake();
                let _ = bench.generate();
                panic!("the process goes on");
            }
        }
        assert!(bench.seen() == after, "the new policy is another");
        bench.undo();
    }
    println!("all");
}

/// Runs the cases of `work`, which the test `name` is about, and says how they went.
fn check(name: &str, work: Work) {
    require!(emulated("calls of the driver fail"));
    if let Some(order) = variable(CHILD) {
        return child(work, &order);
    }
    let out_of_memory = ["allocation", "mapping"].map(|call| (call, OUT_OF_MEMORY));
    let failed = ["launch", "copy"].map(|call| (call, LAUNCH_FAILED));
    for (call, code) in [out_of_memory, failed].concat() {
        let (mut from, mut counts, mut ended) = (0, [0; 2], 0);
        loop {
            let child = crate::child(&format!("failures::{name}"))
                .env(CHILD, format!("{call} {code} {from}"))
                .env("RUST_BACKTRACE", "0")
                .output()
                .unwrap();
            let [said, log] = [child.stdout, child.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
            let lines = |start: &str| said.lines().filter(|line| line.starts_with(start)).count();
            let is = |what: &str| format!("{name}, {call}: {what}\n{said}\n{log}");
            counts[0] += lines("went well");
            counts[1] += lines("refused");
            if said.contains("\nall\n") {
                assert!(child.status.success(), "{}", is("the child has failed"));
                let of = said.lines().find(|line| line.starts_with("of ")).unwrap();
                println!(
                    "{name}, {call}: {of}: {} went well, {} refused, {ended} ended the process",
                    counts[0], counts[1]
                );
                break;
            }
            assert_eq!(child.status.code(), Some(RANK_FAILED), "{}", is("the child did not end as it should"));
            let reports = log.lines().filter(|line| line.contains(" ERROR ")).count();
            assert_eq!((reports, log.matches(" has failed (its").count()), (1, 1), "{}", is("not one message"));
            let is_expected = code == LAUNCH_FAILED || matches!(work, Work::Step | Work::Encode);
            assert!(is_expected, "{}", is("no memory has ended the process"));
            ended += 1;
            from += lines("case");
        }
    }
}

#[test]
fn a_lora_push() {
    check("a_lora_push", Work::Lora);
}

#[test]
fn a_lora_push_into_pushed_weights() {
    check("a_lora_push_into_pushed_weights", Work::LoraOfPushed);
}

#[test]
fn a_full_push() {
    check("a_full_push", Work::Full);
}

#[test]
fn a_delta_push() {
    check("a_delta_push", Work::Delta);
}

#[test]
fn a_resident_adapter() {
    check("a_resident_adapter", Work::Resident);
}

#[test]
fn a_sleep() {
    check("a_sleep", Work::Sleep);
}

#[test]
fn a_wake() {
    check("a_wake", Work::Wake);
}

#[test]
fn a_wake_without_a_policy() {
    check("a_wake_without_a_policy", Work::WakeWithoutPolicy);
}

#[test]
fn an_adapter_for_which_two_ranks_gather_rows() {
    check("an_adapter_for_which_two_ranks_gather_rows", Work::DoraOfPushedOnTwoRanks);
}

#[test]
fn a_wake_for_which_two_ranks_gather_rows() {
    check("a_wake_for_which_two_ranks_gather_rows", Work::WakeWithDoraOnTwoRanks);
}

#[test]
fn an_encode() {
    check("an_encode", Work::Encode);
}

#[test]
fn a_step() {
    check("a_step", Work::Step);
}
