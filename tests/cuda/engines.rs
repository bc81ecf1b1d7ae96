//! Whole engines on a CUDA device, a card or the emulator: log-probabilities against transformers, the equalities of
//! the numerics contract, pushes and sleep against the CPU's bits. `make cuda-test` runs them on the emulator, where a
//! step takes tens of milliseconds, so sequences are short.

use rollout_server::engine::{DrainMode, LifecycleStatus, SleepLevel};
use rollout_server::types::{SamplingParams, TokenId, sample_seed};
use safetensors::SafeTensors;

use crate::common::{
    Engine, Push, Request, bits, fixture, push_in_place, random_prompts, random_weights, with_fused_experts,
};
use crate::share_driver;

const CUDA: [&str; 2] = ["--device", "cuda"];
const MODELS: [&str; 13] = [
    "llama",
    "llama-tied",
    "qwen2",
    "qwen3",
    "qwen_v1",
    "mistral",
    "smollm3",
    "phi3",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_moe_60",
    "mixtral",
    "glm4_moe",
];
/// Tokens of each sequence that are compared with transformers.
const COMPARED: usize = 48;
/// Largest difference per token in float32 that the numerics contract allows.
const TOLERANCE: f32 = 1e-4;
const SEED: u64 = 42;

fn start(model: &str, flags: &[&str]) -> Engine {
    Engine::start(model, &[&CUDA, flags].concat())
}

/// The first tokens of some sequences, and transformers' log-probabilities of them.
fn recorded(file: &str) -> (Vec<Vec<TokenId>>, Vec<Vec<f32>>) {
    let file = std::fs::read(fixture(file)).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let words = |name| tensors.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec();
    let tokens: Vec<TokenId> = words("tokens").into_iter().map(u32::from_le_bytes).collect();
    let logprobs: Vec<f32> = words("logprobs_f32").into_iter().map(f32::from_le_bytes).collect();
    let sequences = tokens.chunks_exact(512).take(2).map(|sequence| sequence[..COMPARED].to_vec()).collect();
    // The first token of a sequence has none.
    let logprobs = logprobs.chunks_exact(511).take(2).map(|of| of[..COMPARED - 1].to_vec()).collect();
    (sequences, logprobs)
}

fn score(engine: &Engine, sequences: &[Vec<TokenId>]) -> Vec<Vec<f32>> {
    let reply = engine.generate(Request::score(sequences.to_vec()));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.prompt_logprobs.iter().map(|(_, tokens)| tokens.iter().map(|token| token.raw).collect()).collect()
}

/// For each prompt, the tokens and the bits of both log-probabilities of its sample.
type Bits = Vec<Vec<(TokenId, u32, u32)>>;

fn prompts() -> Vec<Vec<TokenId>> {
    let mut prompts = random_prompts(11, 5, 1..40, 250);
    let stem = random_prompts(12, 1, 33..34, 250).remove(0);
    prompts.extend(random_prompts(13, 2, 1..12, 250).into_iter().map(|tail| [stem.clone(), tail].concat()));
    prompts
}

fn params() -> SamplingParams {
    SamplingParams { max_tokens: 6, temperature: 0.8, top_p: 0.9, ..Default::default() }
}

fn together(engine: &Engine) -> Bits {
    let reply = engine.generate(Request::generate(prompts(), 1, SEED, 0).params(params()));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.bits()
}

fn alone(engine: &Engine) -> Bits {
    let one = |(index, prompt)| {
        engine.reset_prefix_cache();
        let request = Request::generate(vec![prompt], 1, sample_seed(SEED, index as u32, 0), 0).params(params());
        engine.generate(request).bits().remove(0)
    };
    prompts().into_iter().enumerate().map(one).collect()
}

#[test]
fn float32_is_transformers_float32() {
    let _shared = share_driver();
    let files = MODELS.map(|model| (model, format!("{model}/reference.safetensors")));
    let gguf = ("llama-tied.gguf", "llama-tied.gguf.reference.safetensors".to_string());
    for (model, file) in files.into_iter().chain([gguf]) {
        let (sequences, expected) = recorded(&file);
        let found = score(&start(model, &["--dtype", "float32"]), &sequences);
        let apart = found.iter().flatten().zip(expected.iter().flatten()).map(|(a, b)| (a - b).abs());
        let largest = apart.fold(0.0, f32::max);
        println!("{model}: largest difference {largest:e}");
        assert_eq!(found.iter().map(Vec::len).sum::<usize>(), 2 * (COMPARED - 1));
        assert!(largest < TOLERANCE, "{model}: {largest:e}");
    }
}

#[test]
fn bfloat16_is_about_as_far_from_float32_as_the_processors() {
    let _shared = share_driver();
    for model in ["llama", "qwen3"] {
        let (sequences, expected) = recorded(&format!("{model}/reference.safetensors"));
        let distance = |engine: &Engine| {
            let found = score(engine, &sequences);
            let squares = found.iter().flatten().zip(expected.iter().flatten()).map(|(a, b)| f64::from(a - b).powi(2));
            squares.sum::<f64>().sqrt()
        };
        let ours = distance(&start(model, &["--dtype", "bfloat16"]));
        let flags = ["--dtype", "bfloat16", "--kernel", "avx512_bf16_emulated"];
        let processors = distance(&Engine::start(model, &flags));
        println!("{model}: {ours:e} on the device, {processors:e} on the processor");
        assert!(ours > 0.0 && ours < 1.5 * processors, "{model}: {ours:e} and {processors:e}");
    }
}

#[test]
fn a_sequence_has_the_same_bits_alone_in_a_batch_in_chunks_cached_and_scored() {
    let _shared = share_driver();
    let with_experts = [("qwen3_moe", "bfloat16"), ("qwen2_moe", "float32")];
    let dense = [("qwen2", "bfloat16"), ("mistral", "bfloat16"), ("qwen3", "float32")];
    for (model, dtype) in dense.into_iter().chain(with_experts) {
        let engine = start(model, &["--dtype", dtype]);
        let expected = alone(&engine);
        engine.reset_prefix_cache();
        assert_eq!(together(&engine), expected, "{model} {dtype}: in one batch");
        assert_eq!(together(&engine), expected, "{model} {dtype}: from the prefix cache");
        engine.assert_all_free();
        let chunked = start(model, &["--dtype", dtype, "--max-batch-tokens", "7"]);
        assert_eq!(together(&chunked), expected, "{model} {dtype}: in chunks");
        let sampled: Vec<Vec<TokenId>> = prompts()
            .into_iter()
            .zip(&expected)
            .map(|(prompt, sample)| prompt.into_iter().chain(sample.iter().map(|token| token.0)).collect())
            .collect();
        let scored = engine.generate(Request::score(sampled));
        for ((_, tokens), sample) in scored.prompt_logprobs.iter().zip(&expected) {
            let raw = |found: &[(TokenId, u32, u32)]| found.iter().map(|token| (token.0, token.1)).collect::<Vec<_>>();
            let last = &bits(tokens)[tokens.len() - sample.len()..];
            assert_eq!(raw(last), raw(sample), "{model} {dtype}: scored");
        }
    }
}

#[test]
fn merged_and_pushed_weights_are_those_of_the_processor() {
    let _shared = share_driver();
    let dense = ("qwen2", ["peft/bfloat16", "peft/rslora_patterns"]);
    let with_experts = ("qwen3_moe", ["peft_experts/bfloat16", "peft_experts/experts_apart"]);
    for ((model, adapters), dtype) in [(dense, "float32"), (dense, "bfloat16"), (with_experts, "bfloat16")] {
        let (ours, cpu) = (start(model, &["--dtype", dtype]), Engine::start(model, &["--dtype", dtype]));
        let same = |what: &str| assert!(ours.checksums() == cpu.checksums(), "{model} {dtype}: {what}");
        same("as loaded");
        let base = ours.checksums();
        for adapter in adapters {
            for engine in [&ours, &cpu] {
                engine.push(Push::lora(adapter)).expect("merged");
            }
            assert!(ours.checksums() != base);
            same(adapter);
        }
        ours.push(Push::base()).expect("back to the base");
        assert!(ours.checksums() == base, "{model} {dtype}: the base has changed");
        cpu.push(Push::base()).expect("back to the base");
        let (weights, after) = (random_weights(ours.parameters(), 21), random_weights(ours.parameters(), 22));
        for engine in [&ours, &cpu] {
            engine.push(Push { new_version: Some(40), ..Push::full(&weights) }).expect("pushed");
        }
        same("a FULL push");
        for engine in [&ours, &cpu] {
            engine.push(Push { new_version: Some(41), ..Push::delta(&weights, &after, 40) }).expect("pushed");
        }
        same("a DELTA push");
    }
}

#[test]
fn experts_pushed_in_place_or_in_one_tensor_are_those_pushed_beside_and_alone() {
    let _shared = share_driver();
    for (model, dtype) in [("qwen3_moe", "bfloat16"), ("qwen3_moe_60", "float32"), ("glm4_moe", "bfloat16")] {
        let flags = ["--dtype", dtype];
        let (engine, cpu) = (start(model, &flags), Engine::start(model, &flags));
        let in_place = Engine::start_without_room(model, &[&CUDA[..], &flags].concat());
        let [weights, others] = [51, 52].map(|seed| random_weights(engine.parameters(), seed));
        let fused = with_fused_experts(&weights);
        assert!(fused.len() < weights.len() && fused.keys().any(|name| name.ends_with(".experts.gate_up_proj")));
        cpu.push(Push::full(&weights)).expect("pushed");
        engine.push(Push::full(&weights)).expect("pushed");
        let (sums, bits) = (cpu.checksums(), together(&engine));
        assert!(engine.checksums() == sums, "{model} {dtype}");
        engine.push(Push::full(&others)).expect("pushed");
        engine.push(Push::full(&fused)).expect("pushed");
        let same = |engine: &Engine, what: &str| {
            assert!(engine.checksums() == sums, "{model} {dtype}: {what}");
            assert_eq!(together(engine), bits, "{model} {dtype}: {what}");
        };
        same(&engine, "in one tensor beside");
        for (what, tensors) in [("each in place", &weights), ("in one tensor in place", &fused)] {
            push_in_place(&in_place, Push::full(&others));
            assert!(in_place.checksums() != sums, "{model} {dtype}: {what}");
            push_in_place(&in_place, Push::full(tensors));
            same(&in_place, what);
        }
    }
}

#[test]
fn sleep_gives_the_devices_memory_back_and_wake_brings_the_same_policy() {
    let _shared = share_driver();
    for (model, adapter) in [("qwen2", "peft/bfloat16"), ("qwen2_moe", "peft_experts/router")] {
        let engine = start(model, &["--dtype", "bfloat16", "--kv-cache-bytes", "32MiB"]);
        engine.push(Push::lora(adapter)).expect("merged");
        let (sums, expected) = (engine.checksums(), together(&engine));
        for _ in 0..2 {
            let slept = engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
            assert!(slept.kv_cache_bytes >= 32 << 20 && slept.weights_bytes > 0, "{model}: {slept:?}");
            assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::Running);
            assert!(engine.checksums() == sums, "{model}: after level 1");
            assert_eq!(together(&engine), expected, "{model}: after level 1");
        }
        let weights = random_weights(engine.parameters(), 31);
        engine.push(Push::full(&weights)).expect("pushed");
        let (sums, expected) = (engine.checksums(), together(&engine));
        let slept = engine.sleep(SleepLevel::Two, DrainMode::Wait).expect("sleeps");
        assert!(slept.kv_cache_bytes >= 32 << 20 && slept.weights_bytes > 0, "{model}: {slept:?}");
        assert_eq!(engine.wake(true, true).expect("wakes"), LifecycleStatus::WeightsMissing);
        engine.push(Push::full(&weights)).expect("pushed");
        assert!(engine.checksums() == sums, "{model}: after level 2");
        assert_eq!(together(&engine), expected, "{model}: after level 2");
    }
}
