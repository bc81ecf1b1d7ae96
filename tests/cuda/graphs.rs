//! Steps that are captured as CUDA graphs and replayed: they have the bits of eager steps, after every change of
//! weights or memory, with far fewer launches, which the emulator counts. And drivers that cannot capture.

use std::ffi::{CStr, CString};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rollout_server::engine::{AdapterTarget, DrainMode, LifecycleStatus, SleepLevel};
use rollout_server::types::{SamplingParams, TokenId, sample_seed};

use crate::common::{Engine, Push, Request, random_prompts, random_weights};
use crate::emulator::{self, calls, emulated, fail, gpus};
use crate::own_driver;
use crate::require::require;

const MODELS: [(&str, &str); 7] = [
    ("llama", "bfloat16"),
    ("llama-tied", "float32"),
    ("qwen2", "bfloat16"),
    ("qwen3", "float32"),
    ("mistral", "bfloat16"),
    ("qwen2_moe", "float32"),
    ("qwen3_moe", "bfloat16"),
];
const SEED: u64 = 42;
const LAUNCH: &CStr = c"cuLaunchKernel";
const GRAPH_LAUNCH: &CStr = c"cuGraphLaunch";
/// What a child does: the call that fails, when and how, and with how many ranks, separated by spaces.
const CHILD: &str = "CUDA_GRAPHS_CHILD";
const OUT_OF_MEMORY: i32 = 2;
const NOT_SUPPORTED: i32 = 801;
const LAUNCH_FAILED: i32 = 719;
const CAPTURE_INVALIDATED: i32 = 901;
/// The exit status of a process whose rank has failed.
const RANK_FAILED: i32 = 70;
/// Longest wait for a child; a longer one is a hang.
const PATIENCE: Duration = Duration::from_secs(180);

/// For each sample, the tokens and the bits of both log-probabilities.
type Bits = Vec<Vec<(TokenId, u32, u32)>>;

/// An engine whose steps have one row of each sequence as soon as they sample. `flags` go before the test's own.
fn start(model: &str, dtype: &str, flags: &[&str]) -> Engine {
    let mut all = vec!["--device", "cuda", "--dtype", dtype, "--speculation", "off"];
    for own in [["--kv-cache-bytes", "4MiB"], ["--graphs", "on"]] {
        if !flags.contains(&own[0]) {
            all.extend(own);
        }
    }
    Engine::start(model, &[&all, flags].concat())
}

/// Graph launches of this process; `None` on a card.
fn replays() -> Option<u64> {
    emulator::is_there().then(|| calls(GRAPH_LAUNCH))
}

/// How many there were since; `None` on a card.
fn replays_since(before: Option<u64>) -> Option<u64> {
    Some(replays()? - before?)
}

fn prompts() -> Vec<Vec<TokenId>> {
    random_prompts(11, 11, 1..30, 250)
}

fn params(max_tokens: u32) -> SamplingParams {
    SamplingParams { max_tokens, temperature: 0.8, top_p: 0.9, ..Default::default() }
}

fn generate(engine: &Engine, prompts: Vec<Vec<TokenId>>, max_tokens: u32) -> Bits {
    let reply = engine.generate(Request::generate(prompts, 1, SEED, 0).params(params(max_tokens)));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.bits()
}

/// The request of one prompt that has the bits that it has among others.
fn own(index: usize, prompt: Vec<TokenId>, max_tokens: u32) -> Request {
    Request::generate(vec![prompt], 1, sample_seed(SEED, index as u32, 0), 0).params(params(max_tokens))
}

fn alone(engine: &Engine, max_tokens: impl Fn(usize) -> u32) -> Bits {
    let one = |(i, prompt)| engine.generate(own(i, prompt, max_tokens(i))).bits().remove(0);
    prompts().into_iter().enumerate().map(one).collect()
}

#[test]
fn a_step_is_launched_at_once() {
    require!(emulated("launches are counted"));
    let _own = own_driver();
    // What one more step of one sequence launches: kernels, and graphs.
    let more = |graphs: &str| {
        let engine = start("qwen2", "bfloat16", &["--graphs", graphs]);
        let launched = |max_tokens| {
            let before = [LAUNCH, GRAPH_LAUNCH].map(calls);
            assert_eq!(generate(&engine, vec![vec![1, 2, 3]], max_tokens)[0].len(), max_tokens as usize);
            std::array::from_fn::<u64, 2, _>(|i| calls([LAUNCH, GRAPH_LAUNCH][i]) - before[i])
        };
        launched(5);
        let [few, many] = [launched(5), launched(15)];
        [(many[0] - few[0]) / 10, (many[1] - few[1]) / 10]
    };
    let ([eager, none], [besides, replayed]) = (more("off"), more("auto"));
    println!("a step launches {eager} kernels, or {replayed} graph and {besides} kernels");
    assert_eq!((none, replayed, besides), (0, 1, 0));
    assert!(eager > 50, "{eager}");
}

#[test]
fn every_model_has_the_same_bits_alone_in_a_batch_and_in_chunks() {
    let _own = own_driver();
    for (model, dtype) in MODELS {
        let expected = alone(&start(model, dtype, &["--graphs", "off"]), |_| 8);
        let engine = start(model, dtype, &[]);
        let before = replays();
        assert_eq!(alone(&engine, |_| 8), expected, "{model} {dtype}: alone");
        let replayed = replays_since(before);
        assert!(replayed.is_none_or(|steps| steps > 50), "{model} {dtype}: {replayed:?} steps were replayed");
        engine.reset_prefix_cache();
        assert_eq!(generate(&engine, prompts(), 8), expected, "{model} {dtype}: in a batch");
        // Rows of the buffers are no bucket.
        let chunked = start(model, dtype, &["--max-batch-tokens", "11"]);
        assert_eq!(generate(&chunked, prompts(), 8), expected, "{model} {dtype}: in chunks");
    }
}

#[test]
fn ranks_repeat_their_steps_together() {
    require!(gpus(4));
    let _own = own_driver();
    for (model, dtype, worlds) in [("qwen2", "bfloat16", &[2, 4][..]), ("llama-tied", "float32", &[2])] {
        let expected = generate(&start(model, dtype, &["--graphs", "off"]), prompts(), 8);
        for tp in worlds {
            let engine = start(model, dtype, &["--tp", &tp.to_string()]);
            let before = replays();
            assert_eq!(generate(&engine, prompts(), 8), expected, "{model} {dtype}, {tp} ranks: in a batch");
            assert_eq!(alone(&engine, |_| 8), expected, "{model} {dtype}, {tp} ranks: alone");
            let replayed = replays_since(before);
            println!("{model} {dtype}, {tp} ranks: {replayed:?} graph launches");
            assert!(replayed.is_none_or(|steps| steps > 50 * tp && steps.is_multiple_of(*tp)), "{replayed:?}");
        }
    }
    // With several ranks graphs are off by default.
    let sums_by_nccl = ["auto", "on"].map(|graphs| {
        let engine = start("qwen2", "float32", &["--tp", "2", "--all-reduce", "nccl", "--graphs", graphs]);
        let before = replays();
        let bits = generate(&engine, prompts(), 8);
        assert!(replays_since(before).is_none_or(|steps| (steps > 0) == (graphs == "on")), "{graphs}");
        bits
    });
    assert_eq!(sums_by_nccl[0], sums_by_nccl[1]);
}

#[test]
fn answers_are_the_same_from_a_graph_and_after_it() {
    let _own = own_driver();
    let other = start("qwen2", "bfloat16", &["--graphs", "off"]);
    for tp in [1, 2].into_iter().filter(|&tp| gpus(tp)) {
        check_answers(&start("qwen2", "bfloat16", &["--tp", &tp.to_string()]), &other);
        other.reset_prefix_cache();
    }
}

/// Tasks that a graph answers, and those that are answered after it, by memory of the first rank alone.
fn check_answers(ours: &Engine, other: &Engine) {
    let plain = params(4);
    let all_params = [
        SamplingParams { temperature: 0.0, ..plain.clone() },
        SamplingParams { temperature: 1.0, top_p: 1.0, ..plain.clone() },
        SamplingParams { top_k: 7, min_p: 0.02, ..plain.clone() },
        // These are answered by the host.
        SamplingParams { repetition_penalty: 1.1, top_logprobs: 3, ..plain.clone() },
        SamplingParams { min_tokens: 2, ..plain },
    ];
    // One batch of all of them, then more rows than logits are computed at once.
    for (what, n) in [("once", 1), ("often", 30)] {
        let seen = [ours, other].map(|engine| {
            let send = |(i, params): (usize, &SamplingParams)| {
                let request = Request::generate(prompts()[i..i + 2].to_vec(), n, SEED + i as u64, 0);
                engine.send(request.named(format!("{what} {i}")).params(params.clone()))
            };
            let running: Vec<_> = all_params.iter().enumerate().map(send).collect();
            running.into_iter().map(|request| request.wait().bits()).collect::<Vec<_>>()
        });
        assert_eq!(seen[0], seen[1], "{what}");
    }
    let before = replays();
    let many = |engine: &Engine| {
        let request = Request::generate(prompts()[..2].to_vec(), 37, SEED, 0).params(all_params[2].clone());
        engine.generate(request).bits()
    };
    assert_eq!(many(ours), many(other), "74 rows");
    assert_ne!(replays_since(before), Some(0));
}

#[test]
fn batches_grow_and_shrink() {
    let _own = own_driver();
    let lengths = |i: usize| 3 + (7 * i as u32) % 23;
    let expected = alone(&start("qwen3", "bfloat16", &["--graphs", "off"]), lengths);
    let engine = start("qwen3", "bfloat16", &[]);
    let before = replays();
    for round in 0..2 {
        let send = |(i, prompt)| engine.send(own(i, prompt, lengths(i)).named(i.to_string()));
        let running: Vec<_> = prompts().into_iter().enumerate().map(send).collect();
        let found: Bits = running.into_iter().map(|request| request.wait().bits().remove(0)).collect();
        assert_eq!(found, expected, "round {round}");
    }
    assert_ne!(replays_since(before), Some(0));
    engine.assert_all_free();
}

#[test]
fn preempted_sequences_have_the_same_bits() {
    let _own = own_driver();
    let expected = alone(&start("llama", "float32", &["--graphs", "off"]), |_| 24);
    for tp in [1, 2].into_iter().filter(|&tp| gpus(tp)) {
        let flags = ["--tp", &tp.to_string(), "--kv-cache-bytes", "192KiB", "--max-model-len", "128"];
        let engine = start("llama", "float32", &flags);
        let before = replays();
        assert_eq!(generate(&engine, prompts(), 24), expected, "--tp {tp}");
        assert_ne!(replays_since(before), Some(0), "--tp {tp}");
        assert!(engine.status().stats.preemptions > 0, "--tp {tp}: {:?}", engine.status());
    }
}

#[test]
fn longer_sequences_are_of_more_spans() {
    let _own = own_driver();
    let prompts = random_prompts(17, 2, 250..253, 250);
    for flags in [&["--graphs", "off"][..], &[]] {
        let engine = start("llama", "bfloat16", flags);
        let both = generate(&engine, prompts.clone(), 14);
        let first = generate(&engine, prompts[..1].to_vec(), 14);
        assert_eq!(both[..1], first);
        assert_eq!(both, generate(&engine, prompts.clone(), 14), "again");
        if flags.is_empty() {
            assert_eq!(both, generate(&start("llama", "bfloat16", &["--graphs", "off"]), prompts.clone(), 14));
        }
    }
}

#[test]
fn pushes_sleeps_and_resident_adapters_change_what_is_repeated() {
    let _own = own_driver();
    check_changes("1");
}

#[test]
fn pushes_sleeps_and_resident_adapters_change_what_ranks_repeat() {
    require!(gpus(2));
    let _own = own_driver();
    check_changes("2");
}

#[test]
fn steps_of_one_resident_adapter_are_repeated() {
    let _own = own_driver();
    for ranks in [1, 2].into_iter().filter(|&ranks| gpus(ranks)) {
        check_adapters("qwen2", ranks);
    }
}

fn check_adapters(model: &str, ranks: usize) {
    let [ours, other] = [&["--tp", &ranks.to_string()][..], &["--graphs", "off"]]
        .map(|flags| start(model, "bfloat16", &[&["--max-adapters", "2"], flags].concat()));
    let keep = |name: &str, push: Push| {
        let target = AdapterTarget { name: name.into(), expected_generation: None, evicts: false };
        let push = Push { adapter: Some(target), ..push };
        for engine in [&ours, &other] {
            engine.push(push.clone()).expect("it becomes resident");
        }
    };
    // Several samples of prompts with these adapters in turn, of which both engines give the same bits. Whether
    // graphs were launched for most steps, as far as that is counted.
    let mut seen = Vec::new();
    let mut same = |what: &str, adapters: &[Option<&str>]| {
        let before = replays();
        let run = |engine: &Engine| -> Vec<Bits> {
            engine.reset_prefix_cache();
            let send = |(i, prompt): (usize, Vec<TokenId>)| {
                let adapter = adapters[i % adapters.len()].map(String::from);
                let request = Request { adapter, ..Request::generate(vec![prompt], 3, SEED + i as u64, 0) };
                engine.send(request.named(i.to_string()).params(params(8)))
            };
            let running: Vec<_> = prompts()[..4].iter().cloned().enumerate().map(send).collect();
            running.into_iter().map(|request| request.wait().bits()).collect()
        };
        let found = run(&ours);
        let replayed = replays_since(before);
        assert_eq!(found, run(&other), "{model}, {ranks} ranks: {what}");
        println!("{model}, {ranks} ranks: {what}: {replayed:?} graph launches");
        seen.push(found);
        replayed.is_none_or(|steps| steps >= 4 * ranks as u64)
    };
    let plain = same("no adapter", &[None]);
    keep("one", Push::lora_of_all(ours.parameters()));
    keep("two", Push::lora("peft/bfloat16"));
    assert!(plain);
    for name in ["one", "two", "one"] {
        assert!(same(name, &[Some(name)]), "{name}");
    }
    // Rows of several adapters are launched each by itself.
    same("both of them", &[Some("one"), Some("two")]);
    same("one of the rows has none", &[Some("one"), None]);
    assert!(same("no adapter again", &[None]));
    keep("one", Push::lora("peft/rslora_patterns"));
    assert!(same("another under the name", &[Some("one")]));
    for engine in [&ours, &other] {
        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        engine.wake(true, true).expect("wakes");
    }
    assert!(same("after level 1", &[Some("one")]));
    let different = |a: usize, b: usize| assert_ne!(seen[a], seen[b], "adapters change what is sampled");
    assert_eq!((&seen[1], &seen[0], &seen[7]), (&seen[3], &seen[6], &seen[8]), "the same again");
    [(0, 1), (1, 2), (1, 4), (1, 5), (1, 7)].into_iter().for_each(|(a, b)| different(a, b));
}

fn check_changes(tp: &str) {
    let [ours, other] = [&["--tp", tp][..], &["--graphs", "off"]]
        .map(|flags| start("qwen2", "bfloat16", &[&["--max-adapters", "1"], flags].concat()));
    let mut seen = Vec::new();
    let mut same = |what: &str| {
        let before = replays();
        let [found, expected] = [&ours, &other].map(|engine| {
            engine.reset_prefix_cache();
            (generate(engine, prompts()[..3].to_vec(), 5), generate(engine, prompts()[..1].to_vec(), 5))
        });
        assert_eq!(found, expected, "{what}");
        assert!(replays_since(before).is_none_or(|steps| steps >= 6), "{what}: nothing was replayed");
        seen.push(found);
    };
    same("as loaded");
    let weights = random_weights(ours.parameters(), 1);
    let after = random_weights(ours.parameters(), 2);
    let both = |push: &Push| [&ours, &other].map(|engine| engine.push(push.clone()).expect("pushed"));
    both(&Push::lora("peft/bfloat16"));
    same("an adapter");
    both(&Push { new_version: Some(40), ..Push::full(&weights) });
    same("a FULL push");
    both(&Push { new_version: Some(41), ..Push::full(&after) });
    same("a FULL push into what served before");
    both(&Push { new_version: Some(42), ..Push::delta(&after, &weights, 41) });
    same("a DELTA push");
    both(&Push::lora("peft/rslora_patterns"));
    same("an adapter on pushed weights");
    for engine in [&ours, &other] {
        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        engine.wake(true, true).expect("wakes");
    }
    same("after level 1");
    let target = AdapterTarget { name: "one".into(), expected_generation: Some(0), evicts: false };
    both(&Push { adapter: Some(target), ..Push::lora_of_all(ours.parameters()) });
    same("beside a resident adapter");
    for engine in [&ours, &other] {
        engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
        assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::WeightsMissing);
        engine.push(Push { new_version: Some(50), ..Push::full(&after) }).expect("pushed");
    }
    same("after level 2");
    assert!(seen.windows(2).filter(|pair| pair[0] != pair[1]).count() >= 5, "pushes change what is sampled");
}

#[expect(clippy::disallowed_methods, reason = "a child gets its order")]
fn of_the_parent() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// Samples before and after `call` fails, and says what of.
fn child(order: &str) {
    tracing_subscriber::fmt().with_ansi(false).with_writer(std::io::stderr).init();
    let [call, after, code, tp] = order.split(' ').collect::<Vec<_>>()[..] else { panic!("{CHILD} is «{order}»") };
    let expected = generate(&start("qwen2", "bfloat16", &["--graphs", "off"]), prompts(), 6);
    let engine = start("qwen2", "bfloat16", &["--tp", tp]);
    let before = calls(GRAPH_LAUNCH);
    let made = calls(&CString::new(call).unwrap());
    fail(&CString::new(call).unwrap(), after.parse().unwrap(), code.parse().unwrap());
    let found = generate(&engine, prompts(), 6);
    assert!(found == expected, "other bits");
    assert!(calls(&CString::new(call).unwrap()) > made, "it was not called");
    assert!(generate(&engine, prompts(), 6) == expected, "other bits afterwards");
    println!("\n{} replayed", calls(GRAPH_LAUNCH) - before);
}

/// Whether the test is to judge its children. A child obeys its order here, and on a card the test is left out.
fn is_parent() -> bool {
    if !emulated("calls of the driver fail") {
        return false;
    }
    let order = of_the_parent();
    order.iter().for_each(|order| child(order));
    order.is_none()
}

/// Runs the test `name` in a child in which a call of one rank of `tp` fails. Returns its exit status and its log, and
/// how many steps were replayed.
fn fails(name: &str, tp: usize, call: &str, after: u64, code: i32) -> (Option<i32>, String, Option<u64>) {
    let mut child = crate::child(&format!("graphs::{name}"));
    child.env(CHILD, format!("{call} {after} {code} {tp}")).env("RUST_BACKTRACE", "0");
    child.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (started, mut child) = (Instant::now(), child.spawn().unwrap());
    let is_hanging = loop {
        match child.try_wait().unwrap() {
            Some(_) => break false,
            None if started.elapsed() > PATIENCE => break true,
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    if is_hanging {
        child.kill().unwrap();
    }
    let child = child.wait_with_output().unwrap();
    let [said, log] = [child.stdout, child.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(!is_hanging, "{call} after {after} with {code}, {tp} ranks: the process hangs\n{log}");
    let replayed = said.lines().find_map(|line| line.strip_suffix(" replayed")?.parse().ok());
    println!("{call} after {after} with {code}, {tp} ranks: {:?}, {replayed:?} replayed", child.status);
    (child.status.code(), log, replayed)
}

/// Asserts that a child has run all steps eagerly after one warning.
fn assert_is_eager((status, log, replayed): (Option<i32>, String, Option<u64>)) {
    assert_eq!((status, replayed), (Some(0), Some(0)), "{log}");
    let warnings: Vec<_> = log.lines().filter(|line| line.contains(" WARN ")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("CUDA graphs are off"), "{log}");
}

/// Asserts that a child has ended with one message of a rank.
fn assert_has_ended((status, log, _): (Option<i32>, String, Option<u64>)) {
    assert_eq!(status, Some(RANK_FAILED), "{log}");
    let reports = log.lines().filter(|line| line.contains(" ERROR ")).count();
    assert_eq!((reports, log.matches(" has failed (its").count()), (1, 1), "not one message:\n{log}");
}

#[test]
fn steps_run_eagerly_where_the_driver_cannot_capture() {
    let name = "steps_run_eagerly_where_the_driver_cannot_capture";
    if !is_parent() {
        return;
    }
    let calls = ["cuStreamBeginCapture_v2", "cuGraphInstantiateWithFlags", "cuGraphUpload"];
    for (call, code) in calls.into_iter().zip([NOT_SUPPORTED, OUT_OF_MEMORY, OUT_OF_MEMORY]) {
        assert_is_eager(fails(name, 1, call, 0, code));
        // The first or the second rank that comes so far; the other could capture.
        assert_is_eager(fails(name, 2, call, 0, code));
        assert_is_eager(fails(name, 2, call, 1, code));
    }
}

#[test]
fn a_graph_that_is_not_launched_ends_the_process() {
    let name = "a_graph_that_is_not_launched_ends_the_process";
    if !is_parent() {
        return;
    }
    for (tp, after) in [(1, 0), (1, 2), (2, 0), (2, 3)] {
        assert_has_ended(fails(name, tp, "cuGraphLaunch", after, LAUNCH_FAILED));
    }
}

#[test]
fn ranks_of_which_one_has_not_captured_end_the_process() {
    let name = "ranks_of_which_one_has_not_captured_end_the_process";
    if !is_parent() {
        return;
    }
    // Both ranks launch it for the prompts, for the first step, and for the second, which is captured.
    assert_has_ended(fails(name, 2, "launch:embed_bf16", 5, OUT_OF_MEMORY));
    assert_has_ended(fails(name, 2, "cuStreamEndCapture", 1, OUT_OF_MEMORY));
}

#[test]
fn a_launch_that_is_not_captured_runs_eagerly() {
    let name = "a_launch_that_is_not_captured_runs_eagerly";
    if !is_parent() {
        return;
    }
    // The rows of the embedding: launched for the prompts, for the first step, and for the second, which is captured.
    assert_is_eager(fails(name, 1, "launch:embed_bf16", 2, OUT_OF_MEMORY));
}

#[test]
fn a_capture_that_another_thread_invalidates_is_repeated() {
    let name = "a_capture_that_another_thread_invalidates_is_repeated";
    if !is_parent() {
        return;
    }
    let (status, log, replayed) = fails(name, 1, "launch:embed_bf16", 2, CAPTURE_INVALIDATED);
    assert!(status == Some(0) && replayed > Some(0) && !log.contains(" WARN "), "{log}");
}
