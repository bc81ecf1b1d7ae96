//! After a push the server serves exactly what was pushed: results are compared, bit for bit, with those of an engine
//! started on the same weights.

use std::collections::BTreeMap;
use std::time::Duration;

use rollout_server::engine::{AdapterTarget, DrainMode, LifecycleStatus, RunningPolicy, SleepLevel, WakeTags};
use rollout_server::error::Error;
use rollout_server::types::FinishReason;
use safetensors::SafeTensors;
use sha2::{Digest as _, Sha256};

use crate::common::{
    Engine, Push, Reply, Request, StateDict, kernels, push_in_place, random_prompts, random_weights, to_bytes,
    with_fused_experts, write_checkpoint,
};

const MODES: [&[&str]; 3] =
    [&["--dtype", "float32"], &["--dtype", "bfloat16", "--tp", "2"], &["--dtype", "float32", "--tp", "2"]];

/// [`MODES`] on every instruction set.
fn modes() -> Vec<Vec<&'static str>> {
    kernels().into_iter().flat_map(|kernel| MODES.map(|mode| [&["--kernel", kernel], mode].concat())).collect()
}

fn prompts(seed: u64) -> Vec<Vec<u32>> {
    random_prompts(seed, 3, 20..60, 250)
}

/// Samples that depend on every weight. With a new `seed` their prompts are in no cache.
fn sample(engine: &Engine, seed: u64) -> Reply {
    let reply = engine.generate(Request::generate(prompts(seed), 3, 5, 12));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply
}

/// An engine started on `weights`.
fn fresh(like: &str, weights: &StateDict, flags: &[&str]) -> Engine {
    let dir = write_checkpoint(like, weights);
    // The engine keeps the file mapped when the directory is removed.
    Engine::try_start_at(dir.path(), flags).expect("the checkpoint is whole")
}

fn assert_same_policy(engine: &Engine, expected: &Engine, seed: u64, what: &str) {
    assert!(engine.checksums() == expected.checksums(), "{what}: checksums");
    assert_eq!(sample(engine, seed).bits(), sample(expected, seed).bits(), "{what}: outputs");
}

#[test]
fn a_full_push_serves_as_a_start_on_its_weights_does() {
    for (flags, model) in modes().iter().zip(["qwen2", "llama", "qwen3"].into_iter().cycle()) {
        println!("{model} {flags:?}");
        let engine = Engine::start(model, flags);
        let before = sample(&engine, 1).bits();
        let weights = random_weights(engine.parameters(), 11);
        let reply = engine.push(Push { new_version: Some(40), ..Push::full(&weights) }).expect("pushed");
        assert_eq!((reply.weight_version, reply.pending), (40, false));
        assert_same_policy(&engine, &fresh(model, &weights, flags), 1, model);
        let after = sample(&engine, 1);
        assert_ne!(after.bits(), before, "the prefix cache must not bring the old policy back");
        assert!(after.completions.iter().all(|c| c.weight_versions == [(40, 0, 12)]));
        engine.assert_all_free();
    }
}

#[test]
fn a_delta_push_changes_its_elements_and_no_others() {
    for flags in MODES {
        let engine = Engine::start("qwen2", flags);
        let old = random_weights(engine.parameters(), 21);
        engine.push(Push::full(&old)).expect("pushed");
        let mut new = old.clone();
        let other = random_weights(engine.parameters(), 22);
        for (i, (name, (_, values))) in new.iter_mut().enumerate().filter(|(i, _)| i % 3 != 0) {
            // Some parameters change completely, others in a few elements, the first and the last among them.
            let step = if i % 3 == 1 { 1 } else { values.len() - 1 };
            let indices = (0..values.len()).step_by(step.max(1));
            indices.for_each(|j| values[j] = other[name].1[j]);
        }
        let stale = engine.push(Push::delta(&old, &new, 7)).expect_err("version 7 does not serve");
        assert!(matches!(stale, Error::VersionConflict(_)), "{stale}");
        assert_eq!(engine.push(Push::delta(&old, &new, 1)).expect("pushed").weight_version, 2);
        assert_same_policy(&engine, &fresh("qwen2", &new, flags), 2, "delta");
        // The weights that a delta has made are the base of later adapters.
        engine.push(Push::lora("peft/bfloat16")).expect("merged");
        assert!(engine.checksums() != fresh("qwen2", &new, flags).checksums());
        engine.push(Push::base()).expect("back to the base");
        assert_same_policy(&engine, &fresh("qwen2", &new, flags), 3, "base after an adapter");
    }
}

#[test]
fn adapters_are_merged_into_the_untouched_base_again_and_again() {
    for flags in modes() {
        println!("{flags:?}");
        let engine = Engine::start("qwen2", &flags);
        let (base, base_bits) = (engine.checksums(), sample(&engine, 3).bits());
        engine.push(Push::lora("peft/bfloat16")).expect("merged");
        let (merged, merged_bits) = (engine.checksums(), sample(&engine, 3).bits());
        assert!(merged != base && merged_bits != base_bits);
        for _ in 0..5 {
            engine.push(Push::lora("peft/rslora_patterns")).expect("merged");
            assert!(engine.checksums() != merged);
            engine.push(Push::lora("peft/bfloat16")).expect("merged");
            assert!(engine.checksums() == merged, "a merge depends on what was merged before");
        }
        assert_eq!(sample(&engine, 3).bits(), merged_bits);
        engine.push(Push::base()).expect("back to the base");
        assert!(engine.checksums() == base, "the base has changed");
        assert_eq!(sample(&engine, 3).bits(), base_bits);
    }
}

/// Results of PEFT's own merge: `merged.json` has the SHA-256 of every parameter.
#[derive(serde::Deserialize)]
struct MergedByPeft {
    base: String,
    merged: BTreeMap<String, BTreeMap<String, String>>,
}

#[test]
fn every_adapter_is_merged_to_the_bits_of_peft() {
    let adapters = ["peft", "peft_experts"].map(|directory| {
        std::fs::read_dir(crate::common::fixture(directory)).unwrap().map(|entry| entry.unwrap().path())
    });
    let mut checked = 0;
    for adapter in adapters.into_iter().flatten().filter(|path| path.join("merged.json").exists()) {
        let text = std::fs::read_to_string(adapter.join("merged.json")).unwrap();
        let by_peft: MergedByPeft = serde_json::from_str(&text).unwrap();
        if !crate::common::fixture(&by_peft.base).join("config.json").exists() {
            continue; // it has layers only, so no engine can start on it; the unit tests of the merge use it
        }
        let modes = |kernel| [("float32", "1"), ("bfloat16", "2")].map(|(dtype, tp)| (kernel, dtype, tp));
        for (kernel, dtype, tp) in kernels().into_iter().flat_map(modes) {
            let engine = Engine::start(&by_peft.base, &["--kernel", kernel, "--dtype", dtype, "--tp", tp]);
            engine.push(Push::lora(adapter.to_str().unwrap())).expect("merged");
            for (name, sha256) in engine.checksums() {
                let hex: String = sha256.iter().map(|byte| format!("{byte:02x}")).collect();
                assert_eq!(hex, by_peft.merged[dtype][&name], "{name} of {} in {dtype} on {kernel}", adapter.display());
                checked += 1;
            }
        }
    }
    assert!(checked > 500, "{checked} parameters");
}

#[test]
fn in_place_and_staged_pushes_give_the_same_bits() {
    for (model, tp) in [("llama", "1"), ("llama", "2"), ("qwen3_moe", "1"), ("qwen3_moe_60", "4"), ("glm4_moe", "2")] {
        let flags = ["--dtype", "float32", "--tp", tp];
        let (staged, in_place) = (Engine::start(model, &flags), Engine::start_without_room(model, &flags));
        let [weights, others] = [31, 32].map(|seed| random_weights(staged.parameters(), seed));
        staged.push(Push::full(&weights)).expect("pushed");
        for tensors in [&weights, &others, &with_fused_experts(&weights)] {
            push_in_place(&in_place, Push::full(tensors));
        }
        assert_same_policy(&in_place, &staged, 4, &format!("{model} on {tp}, in place"));
    }
}

/// Starts a request that is longer than any push takes, and waits until the engine is some steps into it.
fn running(engine: &Engine) -> crate::common::Running {
    let before = engine.status().stats.generated_tokens;
    let running = engine.send(Request::generate(prompts(7), 2, 9, 800).named("long"));
    while engine.status().stats.generated_tokens < before + 30 {
        std::thread::sleep(Duration::from_millis(1));
    }
    running
}

#[test]
fn running_requests_follow_the_policy() {
    let engine = Engine::start("llama", &["--dtype", "float32", "--tp", "2"]);
    let new = random_weights(engine.parameters(), 41);
    let expected = fresh("llama", &new, &["--dtype", "float32"]);
    for policy in [RunningPolicy::Keep, RunningPolicy::Recompute, RunningPolicy::Wait, RunningPolicy::Abort] {
        let first = |push| Push { new_version: Some(1), force_version: true, ..push };
        engine.push(first(Push::base())).expect("back to the base");
        engine.push(first(Push::full(&random_weights(engine.parameters(), 40)))).unwrap();
        let push = Push { new_version: Some(2), running: policy, ..Push::full(&new) };
        let request = running(&engine);
        engine.push(push).expect("pushed");
        let reply = request.wait();
        assert!(reply.error.is_none() && reply.completions.len() == 6, "{policy:?}: {:?}", reply.error);
        for completion in &reply.completions {
            let spans = &completion.weight_versions;
            let len = completion.tokens.len() as u32;
            let ends: Vec<_> = spans.iter().map(|s| s.2).collect();
            assert_eq!((spans[0].1, ends.last()), (0, Some(&len)), "{policy:?}: {spans:?}");
            let versions: Vec<_> = spans.iter().map(|s| s.0).collect();
            match policy {
                RunningPolicy::Keep | RunningPolicy::Recompute => assert_eq!(versions, [1, 2], "{policy:?}"),
                RunningPolicy::Wait | RunningPolicy::Abort => assert_eq!(versions, [1], "{policy:?}"),
            }
            let aborted = completion.finish_reason == FinishReason::Aborted;
            assert_eq!(aborted, policy == RunningPolicy::Abort, "{policy:?}");
        }
        if policy == RunningPolicy::Recompute {
            // Every later log-probability is that of the new policy, given the tokens so far.
            for completion in &reply.completions {
                let mut tokens = prompts(7)[completion.prompt_index as usize].clone();
                let (prompt, split) = (tokens.len(), completion.weight_versions[1].1 as usize);
                tokens.extend(completion.tokens.iter().map(|t| t.token));
                let scored = expected.generate(Request::score(vec![tokens]));
                let scores = &scored.prompt_logprobs[0].1[prompt - 1..];
                for (i, (a, b)) in completion.tokens.iter().zip(scores).enumerate().skip(split) {
                    assert_eq!(a.raw.to_bits(), b.raw.to_bits(), "token {i} of {completion:?}");
                }
            }
        }
        assert_same_policy(&engine, &expected, 7, "a prompt straddling the push");
        engine.assert_all_free();
    }
}

#[test]
fn sleep_gives_back_and_wake_brings_back_the_same_policy() {
    for flags in MODES {
        let engine = Engine::start("qwen2", flags);
        engine.push(Push::lora("peft/bfloat16")).expect("merged");
        let (sums, bits) = (engine.checksums(), sample(&engine, 5).bits());
        for _ in 0..3 {
            let slept = engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
            assert!(slept.resident_bytes > 0);
            let refused = engine.generate(Request::generate(prompts(5), 1, 1, 4)).error.expect("it sleeps");
            assert!(matches!(refused, Error::FailedPrecondition(_)), "{refused}");
            let resident = WakeTags { weights: true, kv_cache: false };
            let asleep = LifecycleStatus::Asleep { level: SleepLevel::One, resident, pending_update: false };
            assert_eq!(engine.wake(true, false).expect("wakes"), asleep);
            assert_eq!(engine.wake(false, true).expect("wakes"), LifecycleStatus::Running);
            assert!(engine.checksums() == sums);
            assert_eq!(sample(&engine, 5).bits(), bits);
        }
    }
}

#[test]
fn a_push_to_sleeping_weights_is_merged_as_they_wake() {
    for level in [SleepLevel::One, SleepLevel::Two] {
        let engine = Engine::start("qwen2", &["--tp", "2"]);
        engine.push(Push::lora("peft/rslora_patterns")).expect("merged");
        let (sums, bits) = (engine.checksums(), sample(&engine, 6).bits());
        engine.push(Push::lora("peft/bfloat16")).expect("merged");
        engine.sleep(level, DrainMode::Wait).expect("sleeps");
        let reply = engine.push(Push { new_version: Some(9), ..Push::lora("peft/rslora_patterns") }).expect("pending");
        assert!(reply.pending);
        assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::Running);
        assert!(engine.checksums() == sums);
        let reply = sample(&engine, 6);
        assert_eq!(reply.bits(), bits);
        assert_eq!(reply.completions[0].weight_versions, [(9, 0, 12)]);
    }
}

#[test]
fn after_level_two_nothing_is_served_until_a_whole_policy_is_there() {
    let engine = Engine::start("llama", &["--dtype", "float32"]);
    let weights = random_weights(engine.parameters(), 51);
    engine.push(Push::full(&weights)).expect("pushed");
    let bits = sample(&engine, 8).bits();
    engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
    assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::WeightsMissing);
    let refused = engine.generate(Request::generate(prompts(8), 1, 1, 4)).error.expect("no weights");
    assert!(matches!(refused, Error::FailedPrecondition(_)), "{refused}");
    let delta = engine.push(Push::delta(&weights, &random_weights(engine.parameters(), 52), 1)).expect_err("no base");
    assert!(matches!(delta, Error::FailedPrecondition(_)), "{delta}");
    engine.push(Push::full(&weights)).expect("pushed");
    assert_eq!(sample(&engine, 8).bits(), bits);
}

#[test]
fn resident_adapters_serve_side_by_side_and_alone_the_same() {
    for flags in [&["--dtype", "float32"][..], &["--dtype", "bfloat16", "--tp", "2"]] {
        let flags = [flags, &["--max-adapters", "2"]].concat();
        let engine = Engine::start("qwen2", &flags);
        let names = ["bfloat16", "rslora_patterns"];
        for name in names {
            let target = AdapterTarget { name: name.into(), expected_generation: Some(0), evicts: false };
            let push = Push { adapter: Some(target), ..Push::lora(&format!("peft/{name}")) };
            assert!(engine.push(push).expect("resident").adapter_generation.is_some());
        }
        let names = [None, Some(names[0]), Some(names[1])];
        let request = |adapter: Option<&str>, id: &str| {
            let request = Request::generate(prompts(9), 2, 3, 16).named(id);
            Request { adapter: adapter.map(Into::into), ..request }
        };
        let alone: Vec<_> = names.map(|name| engine.generate(request(name, "alone")).bits()).into();
        assert!(alone[0] != alone[1] && alone[1] != alone[2]);
        engine.reset_prefix_cache();
        let together: Vec<_> = names.iter().zip(["a", "b", "c"]).map(|(n, id)| engine.send(request(*n, id))).collect();
        let together: Vec<_> = together.into_iter().map(|running| running.wait().bits()).collect();
        assert_eq!(together, alone);
        let unknown = engine.generate(request(Some("poems"), "unknown")).error.expect("there is none");
        assert!(matches!(unknown, Error::NotFound(_)), "{unknown}");
        engine.assert_all_free();
    }
}

/// The end of the name of the buffers of GLM-4.5's routers, which checkpoints have in float32.
const CORRECTION_BIAS: &str = ".mlp.gate.e_score_correction_bias";

/// The correction biases of a checkpoint.
fn stored_biases(model: &str) -> StateDict {
    let mut biases = StateDict::new();
    let entries = std::fs::read_dir(crate::common::fixture(model)).unwrap().map(|entry| entry.unwrap().path());
    for shard in entries.filter(|path| path.to_str().unwrap().contains("/model-")) {
        let file = std::fs::read(shard).unwrap();
        for (name, view) in SafeTensors::deserialize(&file).unwrap().tensors() {
            if name.ends_with(CORRECTION_BIAS) {
                assert_eq!(view.dtype(), safetensors::Dtype::F32, "{name}");
                let values = view.data().as_chunks().0.iter().map(|x| f32::from_le_bytes(*x)).collect();
                biases.insert(name, (view.shape().to_vec(), values));
            }
        }
    }
    biases
}

/// SHA-256 of the float32 bytes of each tensor.
fn float32_checksums(tensors: &StateDict) -> Vec<(String, [u8; 32])> {
    tensors.iter().map(|(name, (_, values))| (name.clone(), Sha256::digest(to_bytes(values)).into())).collect()
}

/// Random parameters, and correction biases that no bfloat16 holds.
fn random_glm(engine: &Engine, seed: u64) -> (StateDict, StateDict) {
    let all = random_weights(engine.parameters(), seed).into_iter();
    let (mut biases, parameters): (StateDict, StateDict) = all.partition(|(name, _)| name.ends_with(CORRECTION_BIAS));
    biases.values_mut().flat_map(|(_, values)| values).for_each(|value| *value += 1e-5);
    (parameters, biases)
}

#[test]
fn correction_biases_serve_unrounded_and_stay_where_a_full_push_lacks_them() {
    let flags = ["--dtype", "bfloat16", "--tp", "2"];
    let engine = Engine::start("glm4_moe", &flags);
    let serves = |biases: &StateDict| {
        let found: Vec<_> =
            engine.checksums().into_iter().filter(|(name, _)| name.ends_with(CORRECTION_BIAS)).collect();
        found.len() == 2 && found == float32_checksums(biases)
    };
    let is_fresh = |parameters: &StateDict, biases: &StateDict, seed: u64, what: &str| {
        let weights = parameters.clone().into_iter().chain(biases.clone()).collect();
        assert_same_policy(&engine, &fresh("glm4_moe", &weights, &flags), seed, what);
    };
    let stored = stored_biases("glm4_moe");
    assert!(serves(&stored), "the checkpoint's bytes");
    let ((first, _), (second, pushed)) = (random_glm(&engine, 61), random_glm(&engine, 62));
    engine.push(Push::full(&first)).expect("pushed without them");
    is_fresh(&first, &stored, 61, "those of the checkpoint stay");
    engine.push(Push::full(&second.clone().into_iter().chain(pushed.clone()).collect())).expect("pushed with them");
    assert!(serves(&pushed), "the pushed bytes");
    is_fresh(&second, &pushed, 62, "pushed with them");

    engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
    assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::WeightsMissing);
    engine.push(Push::full(&first)).expect("pushed without them after a deep sleep");
    is_fresh(&first, &pushed, 63, "those that were pushed last stay");
    engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
    assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::Running);
    is_fresh(&first, &pushed, 64, "after a sleep");
}
