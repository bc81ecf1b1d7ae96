//! A whole engine on the emulator under other settings than the usual: races looked for, late operations and other
//! orders of threads, little device memory. The bits are the same each time, with steps that are captured and replayed
//! or launched kernel by kernel, and with tokens that are drafted or not.

use std::collections::BTreeSet;
use std::ffi::CString;

use rollout_server::engine::{AdapterTarget, DrainMode, SleepLevel};
use rollout_server::types::{SamplingParams, TaskReturns};

use crate::common::{Engine, Push, Request, random_prompts};
use crate::emulator::{self, emulated};
use crate::require::require;

/// Flags of a child's engine.
const CHILD: &str = "CUDA_SETTINGS_CHILD";

/// Settings under which nothing may be different.
const SETTINGS: [&[(&str, &str)]; 5] = [
    &[("CUEMU_RACES", "1")],
    &[("CUEMU_MEMORY_MIB", "2048")],
    &[("CUEMU_SEED", "1"), ("CUEMU_JITTER_US", "3000")],
    &[("CUEMU_SEED", "2"), ("CUEMU_JITTER_US", "3000")],
    &[("CUEMU_SEED", "3"), ("CUEMU_JITTER_US", "3000")],
];

/// Samplers that the device answers itself, and those whose logits go to the host.
fn all_params() -> Vec<SamplingParams> {
    let plain = SamplingParams { max_tokens: 4, temperature: 0.8, ..Default::default() };
    vec![
        SamplingParams { temperature: 0.0, ..plain.clone() },
        SamplingParams { top_k: 20, top_p: 0.9, min_p: 0.02, ..plain.clone() },
        SamplingParams { repetition_penalty: 1.1, presence_penalty: 0.1, top_logprobs: 2, ..plain.clone() },
        SamplingParams { top_p: 0.9, returns: TaskReturns { entropy: true, support: Some(50) }, ..plain },
    ]
}

/// Samples, scores, pushes, sleeps and wakes; the bits of everything that can be seen.
fn work(flags: &[&str]) -> String {
    let engine = Engine::start("qwen2", &[&["--device", "cuda", "--kv-cache-bytes", "2MiB"], flags].concat());
    let loaded = module_loads();
    let mut prompts = random_prompts(5, 3, 3..20, 250);
    prompts.iter_mut().for_each(|prompt| prompt.extend_from_within(..));
    let mut seen = Vec::new();
    let mut look = |adapter: Option<&str>| {
        for params in all_params() {
            let adapter = adapter.map(String::from);
            let request = Request { adapter, ..Request::generate(prompts.clone(), 2, 7, 0) };
            let reply = engine.generate(request.params(params));
            assert!(reply.error.is_none(), "{:?}", reply.error);
            seen.push(format!("{:?}", reply.completions.iter().map(|c| &c.tokens).collect::<Vec<_>>()));
        }
        let scored = engine.generate(Request::score(prompts.clone()));
        seen.push(format!(
            "{:?}",
            scored.prompt_logprobs.iter().map(|(_, of)| crate::common::bits(of)).collect::<Vec<_>>()
        ));
        seen.push(format!("{:x?}", engine.checksums()));
    };
    look(None);
    let target = AdapterTarget { name: "one".into(), expected_generation: Some(0), evicts: false };
    engine.push(Push { adapter: Some(target), ..Push::lora_of_all(engine.parameters()) }).expect("it becomes resident");
    look(Some("one"));
    let weights = crate::common::random_weights(engine.parameters(), 1);
    let after = crate::common::random_weights(engine.parameters(), 2);
    engine.push(Push::full(&weights)).expect("pushed");
    engine.push(Push::lora("peft/bfloat16")).expect("merged");
    engine.push(Push::base()).expect("back to the base");
    engine.push(Push::delta(&weights, &after, engine.status().stats.weight_version)).expect("changed");
    engine.push(Push::lora("peft/rslora_patterns")).expect("merged");
    engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
    engine.wake(true, true).expect("wakes");
    look(None);
    assert_eq!(module_loads(), loaded, "kernels are loaded at the start");
    assert_eq!(launches_of_ours(), emulator::calls(c"cuLaunchKernel"), "a kernel was launched that is not ours");
    seen.join("\n")
}

/// Modules that this process has loaded.
fn module_loads() -> u64 {
    [c"cuModuleLoad", c"cuModuleLoadData", c"cuModuleLoadDataEx", c"cuModuleLoadFatBinary"]
        .map(emulator::calls)
        .iter()
        .sum()
}

/// Launches of the kernels in `kernels/cu`. candle gives device, tensors and storage, and none of its own kernels runs.
fn launches_of_ours() -> u64 {
    let table = include_str!("../../kernels/cu/resources.tsv");
    let kernels: BTreeSet<&str> = table.lines().skip(1).map(|row| row.split('\t').next().unwrap()).collect();
    let launches = kernels.iter().map(|kernel| emulator::calls(&CString::new(format!("launch:{kernel}")).unwrap()));
    launches.sum()
}

#[expect(clippy::disallowed_methods, reason = "a child gets its flags")]
fn of_the_parent() -> Option<String> {
    std::env::var(CHILD).ok()
}

/// Runs the test `name` in a child under `settings`, and returns what it has seen.
fn seen(name: &str, flags: &str, settings: &[(&str, &str)]) -> String {
    let mut child = crate::child(&format!("settings::{name}"));
    let child = child.env(CHILD, flags).envs(settings.iter().copied()).output().unwrap();
    let [said, log] = [child.stdout, child.stderr].map(|text| String::from_utf8_lossy(&text).into_owned());
    assert!(child.status.success(), "{flags} under {settings:?}:\n{said}\n{log}");
    let (_, seen) = said.split_once("\nSEEN\n").expect("it has seen something");
    seen.split_once("\nEND\n").expect("to the end").0.into()
}

/// Compares engines of `dtype` under these settings.
fn check(name: &str, dtype: &str, all: &[&[(&str, &str)]]) {
    require!(emulated("threads run in orders of a seed, and races are looked for"));
    if let Some(flags) = of_the_parent() {
        println!("\nSEEN\n{}\nEND\n", work(&flags.split(' ').collect::<Vec<_>>()));
        return;
    }
    let flags = format!("--dtype {dtype} --max-adapters 1 --speculation");
    let expected = seen(name, &format!("{flags} off --graphs off"), &[]);
    // Steps with drafts are not replayed.
    for (settings, speculation) in all.iter().zip(["off", "auto"].into_iter().cycle()) {
        let found = seen(name, &format!("{flags} {speculation}"), settings);
        assert!(found == expected, "{dtype}: other bits under {settings:?} with --speculation {speculation}");
    }
}

#[test]
fn bfloat16_has_the_same_bits_under_all_settings() {
    check("bfloat16_has_the_same_bits_under_all_settings", "bfloat16", &SETTINGS);
}

#[test]
fn float32_has_the_same_bits_under_some_settings() {
    // Its kernels are other ones; what orders them is the same code.
    check("float32_has_the_same_bits_under_some_settings", "float32", &SETTINGS[..3]);
}
