//! Pushes whose tensors lie in device memory of another process: the trainer is a child, which is this binary again.
//! They leave the checksums and bits of the same pushes inline; what cannot be opened or read changes nothing.

mod on_device;
mod peers;
mod trainer;

use std::sync::Arc;

use rollout_server::engine::{CancelFlag, Command, DrainMode, LifecycleStatus, SleepLevel};
use rollout_server::error::{Error, Result};
use rollout_server::types::{SamplingParams, TokenId};
use rollout_server::weights::{Allocation, DeclaredPush, Source, TensorEntry, VerifiedPush};
use trainer::{BLOCK_BYTES, Trainer, lend, open, uuid};

use crate::common::{
    Engine, Push, Request, StateDict, random_prompts, random_weights, update_sender, with_fused_experts,
};
use crate::emulator::{self, emulated, gpus};
use crate::own_driver;
use crate::require::require;

const FLAGS: [&str; 6] = ["--device", "cuda", "--dtype", "bfloat16", "--kv-cache-bytes", "2MiB"];
const OUT_OF_MEMORY: i32 = 2;
/// As for a handle that has expired. Of other failures no device recovers.
const INVALID_VALUE: i32 = 1;

fn start(model: &str, flags: &[&str]) -> Engine {
    Engine::start(model, &[&FLAGS, flags].concat())
}

#[test]
#[ignore = "the trainer of the other tests: it does what it reads from its standard input"]
fn a_trainer() {
    trainer::serve();
}

/// How many allocations were opened and closed until now; `None` on a card.
fn opened_and_closed() -> [Option<u64>; 2] {
    [c"cuIpcOpenMemHandle_v2", c"cuIpcCloseMemHandle"].map(|call| emulator::is_there().then(|| emulator::calls(call)))
}

/// How many more calls were made to open an allocation than to close one; `None` on a card.
fn unbalanced() -> Option<u64> {
    let [opened, closed] = opened_and_closed();
    Some(opened? - closed?)
}

/// Bytes of a whole tensor of float32.
fn bytes_of(entry: &TensorEntry) -> u64 {
    entry.shape.iter().product::<usize>() as u64 * 4
}

/// The tensors of a push, as it declares them.
fn entries(push: &Push) -> Vec<TensorEntry> {
    push.tensors.iter().map(|(entry, _)| entry.clone()).collect()
}

/// Pushes as the server does. Tensors of `later` are declared after the first ones were read.
fn push_lent(engine: &Engine, push: &Push, later: Vec<TensorEntry>, between: impl FnOnce()) -> Result<()> {
    let mut header = push.header(Source::DeviceMemory);
    if !later.is_empty() {
        header.total_bytes = Some(entries(push).iter().chain(&later).map(bytes_of).sum());
    }
    let header = Arc::new(header);
    let declared =
        DeclaredPush::open(header.clone(), entries(push), engine.parameters().clone(), &engine.context().sources)?;
    let (cancel, staging) = (CancelFlag::default(), declared.staging());
    let sender = update_sender(cancel.clone());
    let ticket = engine.ask(|reply| Command::BeginUpdate { header, staging, sender, reply })?;
    let received = (|| {
        let mut receiving = declared.receive(ticket.mode)?;
        between();
        if !later.is_empty() {
            receiving.declare(later)?;
        }
        receiving.finish()
    })();
    let VerifiedPush { update: content, tower, .. } = received.inspect_err(|_| cancel.cancel())?;
    engine.ask(|reply| Command::CommitUpdate { update: ticket.id, content, tower, new_version: None, reply }).map(drop)
}

fn push(engine: &Engine, push: &Push) -> Result<()> {
    push_lent(engine, push, Vec::new(), || {})
}

/// What can be seen of a policy: its checksums, and the bits of some samples.
type Seen = (Vec<(String, [u8; 32])>, Vec<Vec<(TokenId, u32, u32)>>);

fn seen(engine: &Engine) -> Seen {
    engine.reset_prefix_cache();
    let params = SamplingParams { max_tokens: 3, temperature: 0.8, top_p: 0.9, ..Default::default() };
    let reply = engine.generate(Request::generate(random_prompts(5, 2, 3..20, 250), 1, 7, 0).params(params));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    (engine.checksums(), reply.bits())
}

fn delta(engine: &Engine, before: &StateDict, after: &StateDict) -> Push {
    Push::delta(before, after, engine.status().stats.weight_version)
}

#[test]
fn pushes_from_device_memory_are_those_inline() {
    let _own = own_driver();
    let (dense, with_experts) = (("qwen2", "peft/bfloat16"), ("qwen3_moe", "peft_experts/all_linear"));
    for ((model, adapter), tp, allocations) in [(dense, 1, 3), (dense, 2, 4), (with_experts, 2, 4)] {
        if !gpus(tp) {
            continue;
        }
        let [inline, lent] = [(); 2].map(|()| start(model, &["--tp", &tp.to_string()]));
        let [first, second] = [1, 2].map(|seed| random_weights(inline.parameters(), seed));
        let mut trainer = Trainer::new();
        for (i, what) in ["an adapter", "a FULL push", "an adapter on it", "a DELTA", "no digests"].iter().enumerate() {
            let mut given = match i {
                0 | 2 => Push::lora(adapter),
                1 => Push::full(&first),
                3 => delta(&inline, &first, &second),
                _ => Push::full(&second),
            };
            inline.push(given.clone()).expect(what);
            if i == 1 {
                given = Push::full(&with_fused_experts(&first));
            }
            let allocations = lend(&mut trainer, &mut given, allocations, tp, Some(4), i as u64);
            if *what == "no digests" {
                given.tensors.iter_mut().for_each(|(entry, _)| entry.digest = None);
            }
            let before = opened_and_closed();
            push(&lent, &given).expect(what);
            let expected = before.map(|count| count.map(|count| count + allocations));
            assert_eq!(opened_and_closed(), expected, "{what}: each allocation is opened once, and closed");
            assert!(seen(&lent) == seen(&inline), "{model}: {what}, --tp {tp}");
            trainer.ask("free");
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_by_the_tensors_name_and_changes_nothing() {
    let _own = own_driver();
    let engine = start("llama", &[]);
    let weights = random_weights(engine.parameters(), 3);
    let mut trainer = Trainer::new();
    let mut good = Push::full(&weights);
    lend(&mut trainer, &mut good, 2, 1, None, 9);
    let handle = trainer.allocate(0, &[7; 100]);
    let (expected, before) = (seen(&engine), unbalanced());
    let victim = good.tensors.len() / 2;
    let name = good.tensors[victim].0.name.clone();
    let own = Allocation::new(uuid(0), &handle).unwrap();
    let garbage = |byte: u8| Some(Allocation::new(uuid(0), &[byte; 64]).unwrap());
    let nan = good.tensors[victim].0.offset - 1;
    type Spoil<'a> = Box<dyn Fn(&mut TensorEntry) + 'a>;
    let cases: Vec<(&str, Spoil<'_>, &str)> = vec![
        ("invalid_argument", Box::new(|entry| entry.allocation = None), "is missing"),
        ("invalid_argument", Box::new(|entry| entry.offset += 1 << 40), "are outside"),
        ("invalid_argument", Box::new(|entry| entry.offset = u64::MAX), "are outside"),
        ("invalid_argument", Box::new(|entry| entry.offset = u64::MAX - 3), "are outside"),
        (
            "invalid_argument",
            Box::new(|entry| (entry.allocation, entry.offset) = (Some(own.clone()), BLOCK_BYTES as u64)),
            "are outside",
        ),
        ("not_found", Box::new(|entry| entry.allocation = garbage(0)), "cannot be opened"),
        ("not_found", Box::new(|entry| entry.allocation = garbage(0x5a)), "cannot be opened"),
        (
            "failed_precondition",
            Box::new(|entry| entry.allocation = Some(Allocation::new("GPU-of-others".into(), &handle).unwrap())),
            "\"GPU-of-others\", but this server computes on",
        ),
        ("data_loss", Box::new(|entry| entry.offset = nan), "XXH3-128"),
        ("invalid_argument", Box::new(|entry| (entry.offset, entry.digest) = (nan - 3, None)), "is not finite"),
    ];
    for (kind, spoil, says) in cases {
        let mut bad = good.clone();
        spoil(&mut bad.tensors[victim].0);
        let error = push(&engine, &bad).expect_err(says);
        let said = error.to_string();
        assert!(error.kind() == kind && said.contains(says) && said.contains(&name), "{kind}, {says}: {error}");
        assert!(seen(&engine) == expected, "{says}");
    }
    assert_eq!(unbalanced(), before.map(|count| count + 2), "of the two garbage handles nothing was opened");
    push(&engine, &good).expect("the good one");
    assert!(seen(&engine) != expected);
}

#[test]
fn only_tensors_of_such_a_push_name_allocations() {
    let _own = own_driver();
    let engine = start("llama", &[]);
    let mut given = Push::full(&random_weights(engine.parameters(), 4));
    given.tensors[0].0.allocation = Some(Allocation::new(uuid(0), &[1; 64]).unwrap());
    let error = engine.push(given).expect_err("it comes inline");
    assert!(error.to_string().contains("tensors[0].allocation"), "{error}");
}

#[test]
fn a_trainer_that_dies_or_frees_its_memory_leaves_the_old_policy() {
    let _own = own_driver();
    let engine = start("llama", &[]);
    let weights = random_weights(engine.parameters(), 5);
    let expected = seen(&engine);
    for dies in [true, false] {
        let mut trainer = Trainer::new();
        let mut given = Push::full(&weights);
        lend(&mut trainer, &mut given, 4, 1, None, 10);
        let later: Vec<TensorEntry> = given.tensors.iter().map(|(entry, _)| entry.clone()).collect();
        let (first, later) = later.split_at(later.len() / 2);
        let first = Push { tensors: given.tensors[..first.len()].to_vec(), ..given.clone() };
        let before = unbalanced();
        let pushed = push_lent(&engine, &first, later.to_vec(), || {
            if dies {
                trainer.child.kill().unwrap();
                trainer.child.wait().unwrap();
            } else {
                trainer.ask("free");
            }
        });
        let error = pushed.expect_err("half of its memory is gone");
        assert!(matches!(error, Error::NotFound(_) | Error::DataLoss(_)), "{error}");
        assert!(seen(&engine) == expected, "{error}");
        // Memory of the dead is not opened; the emulator still opens what was freed, and it is full of NaN.
        assert_eq!(unbalanced(), before.map(|count| count + u64::from(dies)), "{error}");
    }
    let mut trainer = Trainer::new();
    let mut given = Push::full(&weights);
    lend(&mut trainer, &mut given, 1, 1, None, 11);
    push(&engine, &given).expect("from another trainer");
}

#[test]
fn calls_that_fail_are_typed_errors_and_the_old_policy_serves_on() {
    let _own = own_driver();
    require!(emulated("calls of the driver fail"));
    let engine = start("llama", &[]);
    let [first, second] = [6, 7].map(|seed| random_weights(engine.parameters(), seed));
    let mut trainer = Trainer::new();
    let [mut full, mut again, mut lora] =
        [Push::full(&first), Push::full(&second), Push::lora_of_all(engine.parameters())];
    for given in [&mut full, &mut again, &mut lora] {
        lend(&mut trainer, given, 3, 1, None, 12);
    }
    push(&engine, &full).expect("the first");
    let expected = seen(&engine);
    let cases = [
        (c"cuIpcOpenMemHandle_v2", 0, OUT_OF_MEMORY, "resource_exhausted"),
        (c"cuIpcOpenMemHandle_v2", 2, INVALID_VALUE, "not_found"),
        (c"cuMemGetAddressRange_v2", 1, INVALID_VALUE, "not_found"),
        (c"cuMemcpyDtoHAsync_v2", 0, INVALID_VALUE, "data_loss"),
        (c"cuMemcpyDtoHAsync_v2", 5, INVALID_VALUE, "data_loss"),
    ];
    for (call, after, code, kind) in cases {
        for given in [&again, &lora] {
            engine.reset_prefix_cache();
            let before = unbalanced();
            emulator::fail(call, after, code);
            let error = push(&engine, given).expect_err("a call fails");
            assert_eq!(error.kind(), kind, "{call:?} at {after}: {error}");
            let failed = u64::from(call == c"cuIpcOpenMemHandle_v2");
            assert_eq!(
                unbalanced(),
                before.map(|count| count + failed),
                "{call:?} at {after}: what was opened is closed"
            );
            assert!(seen(&engine) == expected, "{call:?} at {after}");
        }
    }
    // One that fails to close does no harm.
    emulator::fail(c"cuIpcCloseMemHandle", 0, INVALID_VALUE);
    push(&engine, &again).expect("goes well");
    let inline = start("llama", &[]);
    inline.push(Push::full(&second)).expect("inline");
    assert!(seen(&engine) == seen(&inline));
}

#[test]
fn after_a_sleep_a_push_comes_from_device_memory() {
    let _own = own_driver();
    for ranks in [1, 2].into_iter().filter(|&ranks| gpus(ranks)) {
        // The processor's, which takes nothing of the device.
        let (lent, inline) = (start("qwen2", &["--tp", &ranks.to_string()]), Engine::start("qwen2", &FLAGS[2..]));
        let weights = random_weights(lent.parameters(), 8);
        let mut trainer = Trainer::new();
        let [mut full, mut lora] = [Push::full(&weights), Push::lora("peft/bfloat16")];
        let own: Vec<_> = (0..ranks).map(|rank| open(rank).unwrap()).collect();
        lend(&mut trainer, &mut full, 2, 1, None, 13);
        lend(&mut trainer, &mut lora, 2, 1, None, 14);
        let asleep = || {
            lent.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
            own.iter().map(|device| device.free_bytes()).collect::<Vec<_>>()
        };
        let bare = asleep();
        lent.wake(true, true).expect("wakes");
        for level in [SleepLevel::One, SleepLevel::Two] {
            for (given, is_full) in [(&full, true), (&lora, false)] {
                lent.sleep(level, DrainMode::Wait).expect("sleeps");
                lent.wake(true, false).expect("wakes");
                push(&lent, given).expect("pushed while there is no cache");
                assert_eq!(lent.wake(false, true).expect("wakes"), LifecycleStatus::Running);
                inline.push(if is_full { Push::full(&weights) } else { Push::lora("peft/bfloat16") }).expect("inline");
                if is_full || level == SleepLevel::One {
                    assert!(lent.checksums() == inline.checksums(), "{level:?}");
                }
                assert_eq!(asleep(), bare, "of what was pushed nothing is left on the device");
                lent.wake(true, true).expect("wakes");
            }
        }
    }
}
