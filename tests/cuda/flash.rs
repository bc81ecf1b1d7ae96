//! Whole engines whose prompts candle-flash-attn computes: near those of our own kernels, and their decoding the same.
//! `make cuda-test-flash` runs them on the emulator.

use rollout_server::engine::{DrainMode, SleepLevel};
use rollout_server::types::SamplingParams;

use crate::common::{Engine, Push, Request, random_prompts};
use crate::own_driver;

const FLASH: [&str; 4] = ["--attention", "flash", "--block-size", "32"];
const BF16: [&str; 4] = ["--device", "cuda", "--dtype", "bfloat16"];
/// Largest difference between our own kernels' and its log-probabilities of random models in bfloat16.
const TOLERANCE: f32 = 0.1;

fn start(model: &str, flags: &[&str]) -> Engine {
    Engine::start(model, &[&BF16, flags].concat())
}

/// Raw log-probabilities of the tokens of prompts of several lengths, the longest computed in several steps.
fn scored(engine: &Engine) -> Vec<f32> {
    let reply = engine.generate(Request::score(random_prompts(3, 6, 1..90, 250)));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.prompt_logprobs.iter().flat_map(|(_, tokens)| tokens.iter().map(|token| token.raw)).collect()
}

/// Largest difference, which must not be none: that were the same kernel.
fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(apart > 0.0 && apart < TOLERANCE, "{apart}");
    apart
}

#[test]
fn prompts_are_near_those_of_our_own_kernels_on_any_number_of_ranks_and_after_a_sleep() {
    let _own = own_driver();
    // Heads of 16 values; mistral has a window.
    for (model, tp) in [("llama", "1"), ("mistral", "1"), ("qwen2", "2")] {
        let small = ["--max-batch-tokens", "64", "--tp", tp];
        let expected = scored(&start(model, &small));
        let engine = start(model, &[&FLASH[..], &small].concat());
        let before = scored(&engine);
        println!("{model}: {} apart", apart(&before, &expected));
        engine.push(Push::lora_of_all(engine.parameters())).expect("pushed");
        let pushed = scored(&engine);
        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        engine.wake(true, true).expect("wakes");
        assert!(scored(&engine) == pushed, "{model}: after a sleep, with nothing else in a step");
    }
}

#[test]
fn samples_of_a_group_are_near_what_scoring_them_gives() {
    let _own = own_driver();
    let engine = start("qwen2", &FLASH);
    let prompts = random_prompts(5, 3, 20..70, 250);
    let params = SamplingParams { max_tokens: 12, ..Default::default() };
    let reply = engine.generate(Request::generate(prompts.clone(), 2, 7, 0).params(params));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    for (i, sample) in reply.bits().into_iter().enumerate() {
        let prompt = &prompts[i / 2];
        let tokens: Vec<_> = prompt.iter().copied().chain(sample.iter().map(|(token, ..)| *token)).collect();
        let scored = engine.generate(Request::score(vec![tokens])).prompt_logprobs.remove(0).1;
        let scored = scored[scored.len() - sample.len()..].iter().map(|token| token.raw);
        for (given, scored) in sample.iter().map(|(_, raw, _)| f32::from_bits(*raw)).zip(scored) {
            assert!((given - scored).abs() < TOLERANCE, "sample {i}: {given} and {scored}");
        }
    }
}

#[test]
fn what_it_cannot_do_is_refused_at_the_start() {
    let _own = own_driver();
    let refused = |flags: &[&str]| Engine::try_start("llama", flags).err().expect("it is refused").to_string();
    let all = |flags: &[&'static str]| [&["--attention", "flash"], flags].concat();
    assert!(refused(&all(&BF16)).contains("--block-size 16 is not a multiple of 32"));
    assert!(refused(&all(&["--device", "cuda", "--dtype", "float32", "--block-size", "32"])).contains("--dtype"));
    assert!(refused(&all(&["--device", "cpu"])).contains("--device cpu has only invariant"));
}
