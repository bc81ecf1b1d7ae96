//! Engines with several ranks on CUDA devices: the bits of one rank, pushes with the CPU's checksums, sleep, and ranks
//! that fail. `make cuda-test` gives the emulator four devices for them.

use std::process::Stdio;
use std::time::{Duration, Instant};

use rollout_server::engine::AdapterTarget;
use rollout_server::types::{SamplingParams, TokenId};

use crate::common::{Bits, Engine, FAMILIES, Push, Request, check_pushes_and_sleep, random_prompts};
use crate::{images, own_driver};

/// Longest wait for a process that ends when a rank dies; a longer one is a hang.
const PATIENCE: Duration = Duration::from_secs(120);
/// Exit status after a rank has failed.
const RANK_FAILED: i32 = 70;

fn start(model: &str, tp: usize, flags: &[&str]) -> Engine {
    Engine::start(model, &[&["--device", "cuda", "--tp", &tp.to_string()], flags].concat())
}

fn prompts() -> Vec<Vec<TokenId>> {
    random_prompts(11, 4, 1..30, 250)
}

fn sampled(engine: &Engine, adapter: Option<&str>) -> Bits {
    let params = SamplingParams { max_tokens: 4, temperature: 0.8, top_p: 0.9, ..Default::default() };
    let mut request = Request::generate(prompts(), 1, 42, 0).params(params);
    request.adapter = adapter.map(Into::into);
    let reply = engine.generate(request);
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply.bits()
}

#[test]
fn results_have_the_same_bits_on_any_number_of_ranks() {
    let _own = own_driver();
    let dense = [("qwen2", "bfloat16"), ("qwen3", "float32"), ("llama-tied", "bfloat16")];
    let with_experts = [("qwen2_moe", "float32"), ("qwen3_moe", "bfloat16")];
    for (model, dtype) in dense.into_iter().chain(with_experts) {
        let expected = sampled(&start(model, 1, &["--dtype", dtype]), None);
        for tp in [2, 4] {
            let engine = start(model, tp, &["--dtype", dtype]);
            assert_eq!(sampled(&engine, None), expected, "{model} {dtype} --tp {tp}");
            assert_eq!(sampled(&engine, None), expected, "{model} {dtype} --tp {tp}: from the prefix cache");
        }
        let chunked = start(model, 2, &["--dtype", dtype, "--max-batch-tokens", "7"]);
        assert_eq!(sampled(&chunked, None), expected, "{model} {dtype} --tp 2: in chunks");
    }
}

#[test]
fn prompts_with_images_have_the_bits_of_one_rank_on_two_and_four() {
    let _own = own_driver();
    for model in images::TOWERS {
        let cases = images::cases(model);
        for (dtype, tp) in [("float32", "2"), ("bfloat16", "4")] {
            let [one, other] = ["1", tp].map(|tp| images::start(model, &["--dtype", dtype, "--tp", tp]));
            assert_eq!(images::score(&other, &cases), images::score(&one, &cases), "{model} {dtype} --tp {tp}: scored");
            assert_eq!(images::sample(&other, &cases), images::sample(&one, &cases), "{model} {dtype} --tp {tp}");
        }
    }
}

#[test]
fn pushes_and_sleep_leave_the_weights_of_the_processor_and_the_bits_of_one_rank() {
    let _own = own_driver();
    let flags = ["--dtype", "bfloat16", "--kv-cache-bytes", "32MiB"];
    let dense = ("qwen2", 2, Some("peft/bfloat16"));
    for (model, tp, adapter) in FAMILIES.map(|(model, adapter)| (model, 4, adapter)).into_iter().chain([dense]) {
        let (cpu, one, several) = (Engine::start(model, &flags), start(model, 1, &flags), start(model, tp, &flags));
        let what = format!("{model} --tp {tp}");
        let sample = |engine: &Engine| sampled(engine, None);
        let slept = check_pushes_and_sleep(&what, &several, &[&one, &cpu], adapter, sample);
        assert!(slept.kv_cache_bytes >= 32 << 20 && slept.weights_bytes > 0, "{what}: {slept:?}");
    }
}

#[test]
fn resident_adapters_have_the_same_bits_on_any_number_of_ranks() {
    let _own = own_driver();
    let results = [1, 2, 4].map(|tp| {
        let engine = start("qwen2", tp, &["--dtype", "bfloat16", "--max-adapters", "1"]);
        let base = sampled(&engine, None);
        let adapter = Some(AdapterTarget { name: "a".into(), expected_generation: None, evicts: false });
        engine.push(Push { adapter, ..Push::lora_of_all(engine.parameters()) }).expect("resident");
        let adapted = sampled(&engine, Some("a"));
        assert_ne!(adapted, base);
        (base, adapted)
    });
    assert!(results[1] == results[0], "--tp 2");
    assert!(results[2] == results[0], "--tp 4");
}

#[test]
fn sums_by_nccl_are_near_and_are_refused_on_the_processor() {
    let _own = own_driver();
    let score = |tp, flags: &[&str]| -> Vec<f32> {
        let reply = start("llama", tp, flags).generate(Request::score(prompts()));
        reply.prompt_logprobs.iter().flat_map(|(_, tokens)| tokens.iter().map(|t| t.raw)).collect()
    };
    let by_nccl = score(4, &["--dtype", "float32", "--all-reduce", "nccl"]);
    let apart = by_nccl.iter().zip(score(1, &["--dtype", "float32"])).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    println!("{apart:e} from one rank");
    assert!(apart < 1e-4, "{apart:e}");
    let refused = Engine::try_start("llama", &["--tp", "2", "--all-reduce", "nccl"]).err().expect("it is refused");
    assert!(refused.to_string().contains("--all-reduce nccl"), "{refused}");
}

/// Runs a rank's death in a process of its own, where the emulator has been told which call fails.
#[test]
fn a_rank_that_dies_ends_the_process_with_a_message() {
    let _own = own_driver();
    // The first collectives of a step, of any rank; and a kernel that fails on the device, behind which others wait.
    for failure in ["ncclAllGather@3=2", "kernel:join_columns@1=700"] {
        let mut child = crate::child("ranks::a_step_that_fails")
            .env("CUEMU_FAIL", failure)
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let started = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break status;
            }
            if started.elapsed() > PATIENCE {
                child.kill().unwrap();
                panic!("{failure}: the process hangs");
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let said = std::io::read_to_string(child.stderr.take().unwrap()).unwrap();
        assert_eq!(status.code(), Some(RANK_FAILED), "{failure}: {said}");
        assert!(said.contains("failed in a step"), "{failure}: {said}");
    }
}

#[test]
#[ignore = "ends the process: a_rank_that_dies_ends_the_process_with_a_message runs it"]
fn a_step_that_fails() {
    let engine = start("llama", 4, &["--dtype", "float32"]);
    sampled(&engine, None);
    unreachable!("a rank fails");
}

#[test]
fn ranks_that_do_not_divide_the_model_are_refused_with_those_that_do() {
    let refused = Engine::try_start("llama", &["--device", "cuda", "--tp", "3"]).err().expect("3 of 8 heads");
    assert!(refused.to_string().contains("Valid here: 1, 2, 4, 8."), "{refused}");
}
