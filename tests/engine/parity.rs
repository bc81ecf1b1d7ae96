//! Log-probabilities of every supported architecture against transformers, over 512-token sequences: in float32 on one
//! rank and on two of every device, in bfloat16 on every instruction set of the CPU.

use rollout_server::types::{ForcedRouting, SamplingParams, TokenId};
use safetensors::SafeTensors;

use crate::common::{Engine, Request, fixture, kernels, orders};

/// Models without experts, and those with experts. With experts, rounding decides which of them a token takes, so that
/// a bound for bfloat16 holds only where the tokens are given their experts.
const DENSE: [&str; 8] = ["llama", "llama-tied", "qwen2", "qwen3", "qwen_v1", "mistral", "smollm3", "phi3"];
const WITH_EXPERTS: [&str; 5] = ["qwen3_moe", "qwen3_moe_60", "qwen2_moe", "mixtral", "glm4_moe"];

/// Largest difference per token in float32 that the numerics contract allows.
const TOLERANCE: f32 = 1e-4;

/// The results of transformers for a fixture, made by `tests/fixtures/make_fixtures.py`.
struct Reference {
    sequences: Vec<Vec<TokenId>>,
    float32: Vec<f32>,
    greedy_prompt: Vec<TokenId>,
    greedy: Vec<TokenId>,
}

impl Reference {
    fn read(file: &str) -> Self {
        let file = std::fs::read(fixture(file)).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let ids = |name| words(&tensors, name).into_iter().map(u32::from_le_bytes);
        Self {
            sequences: ids("tokens").collect::<Vec<_>>().chunks_exact(512).map(<[_]>::to_vec).collect(),
            float32: floats(&tensors, "logprobs_f32"),
            greedy_prompt: ids("greedy_prompt").collect(),
            greedy: ids("greedy_tokens").collect(),
        }
    }
}

/// The results of transformers for many sequences, in both precisions.
struct Many {
    sequences: Vec<Vec<TokenId>>,
    float32: Vec<f32>,
    /// With experts, under those that each token takes in float32.
    bfloat16: Vec<f32>,
    /// The experts that the tokens of each sequence take in float32.
    routing: Vec<Option<ForcedRouting>>,
}

impl Many {
    fn read(model: &str) -> Self {
        let file = std::fs::read(fixture(&format!("{model}/statistics.safetensors"))).unwrap();
        let tensors = SafeTensors::deserialize(&file).unwrap();
        let tokens = tensors.tensor("tokens").unwrap().data().as_chunks::<2>().0;
        let tokens: Vec<TokenId> = tokens.iter().map(|t| TokenId::from(u16::from_le_bytes(*t))).collect();
        let sequences: Vec<Vec<TokenId>> = tokens.chunks_exact(512).map(<[_]>::to_vec).collect();
        let routing = tensors.tensor("routing").ok().map(|experts| {
            let row = experts.shape()[2] * experts.shape()[3];
            experts
                .data()
                .chunks_exact(512 * row)
                .map(|rows| Some(ForcedRouting::new(0, row, &rows[..511 * row])))
                .collect()
        });
        let bfloat16 = if routing.is_some() { "logprobs_bf16_replayed" } else { "logprobs_bf16" };
        Self {
            sequences,
            float32: floats(&tensors, "logprobs_f32"),
            bfloat16: floats(&tensors, bfloat16),
            routing: routing.unwrap_or_default(),
        }
    }
}

fn words(tensors: &SafeTensors<'_>, name: &str) -> Vec<[u8; 4]> {
    tensors.tensor(name).unwrap().data().as_chunks::<4>().0.to_vec()
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    words(tensors, name).into_iter().map(f32::from_le_bytes).collect()
}

/// Raw log-probabilities of all sequences, one after the other, without the first token of each.
fn score(engine: &Engine, sequences: &[Vec<TokenId>]) -> Vec<f32> {
    score_routed(engine, sequences, Vec::new())
}

fn score_routed(engine: &Engine, sequences: &[Vec<TokenId>], routing: Vec<Option<ForcedRouting>>) -> Vec<f32> {
    let reply = engine.generate(Request { routing, ..Request::score(sequences.to_vec()) });
    reply.prompt_logprobs.iter().flat_map(|(_, tokens)| tokens.iter().map(|t| t.raw)).collect()
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Distance between two sets of log-probabilities: mean, root mean square and 99.9th percentile of the differences. The
/// largest difference is left out, because it is that of one position and says nothing about other texts.
fn distance(a: &[f32], b: &[f32]) -> [(&'static str, f64); 3] {
    assert_eq!(a.len(), b.len());
    let mut apart: Vec<f64> = a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).collect();
    apart.sort_unstable_by(f64::total_cmp);
    let positions = apart.len() as f64;
    let mean = apart.iter().sum::<f64>() / positions;
    let square = apart.iter().map(|d| d * d).sum::<f64>() / positions;
    let percentile = apart[(0.999 * positions).ceil() as usize - 1];
    [("mean", mean), ("root mean square", square.sqrt()), ("99.9th percentile", percentile)]
}

fn check_float32(model: &str, reference: &Reference) {
    for (device, tp) in [("cpu", "1"), ("cpu", "2"), ("reference", "1"), ("reference", "2")] {
        let engine = Engine::start(model, &["--dtype", "float32", "--tp", tp, "--device", device]);
        let difference = largest(&score(&engine, &reference.sequences), &reference.float32);
        println!("{model} float32 on {device}, tp {tp}: largest difference {difference:e}");
        assert!(difference < TOLERANCE, "{model} on {device}, tp {tp}: {difference:e}");

        let params = SamplingParams { temperature: 0.0, max_tokens: 32, ..Default::default() };
        let prompt = vec![reference.greedy_prompt.clone()];
        let greedy = engine.generate(Request::generate(prompt, 1, 0, 0).params(params));
        let tokens: Vec<_> = greedy.completions[0].tokens.iter().map(|t| t.token).collect();
        assert_eq!(tokens, reference.greedy, "{model} on {device}, tp {tp}: greedy continuation");
    }
}

#[test]
fn float32_is_transformers_float32() {
    for model in DENSE.into_iter().chain(WITH_EXPERTS) {
        check_float32(model, &Reference::read(&format!("{model}/reference.safetensors")));
    }
}

#[test]
fn a_gguf_file_is_its_dequantised_weights() {
    check_float32("llama-tied.gguf", &Reference::read("llama-tied.gguf.reference.safetensors"));
}

#[test]
fn bfloat16_is_no_farther_from_float32_than_transformers_bfloat16() {
    for model in DENSE.into_iter().chain(WITH_EXPERTS) {
        let many = Many::read(model);
        assert!(many.float32.len() >= 20_000, "{} positions are too few", many.float32.len());
        let theirs = distance(&many.bfloat16, &many.float32);
        for kernel in orders() {
            let engine = Engine::start(model, &["--dtype", "bfloat16", "--kernel", kernel]);
            let ours = distance(&score_routed(&engine, &many.sequences, many.routing.clone()), &many.float32);
            println!("{model} on {kernel}: {ours:.5?}, transformers' {theirs:.5?}");
            assert!(ours[0].1 > 0.0, "{model}: bfloat16 was not used");
            for ((what, ours), (_, theirs)) in ours.into_iter().zip(theirs) {
                assert!(ours <= theirs, "{model} on {kernel}: {what} {ours:e} > {theirs:e}");
            }
        }
    }
}

/// Instruction sets that round activations are compared with their emulation, where the processor has both; all others
/// with each other.
#[test]
fn instruction_sets_give_the_same_bits() {
    for model in DENSE.into_iter().chain(WITH_EXPERTS) {
        let sequences = Reference::read(&format!("{model}/reference.safetensors")).sequences;
        for dtype in ["float32", "bfloat16"] {
            let bits = |kernel: &str| -> Vec<u32> {
                let engine = Engine::start(model, &["--dtype", dtype, "--kernel", kernel]);
                assert_eq!(engine.context().info.kernel, kernel);
                score(&engine, &sequences).into_iter().map(f32::to_bits).collect()
            };
            let (plain, pairs, tiles) = (bits("scalar"), bits("avx512_bf16_emulated"), bits("amx_emulated"));
            assert_eq!(plain == pairs, dtype == "float32", "only bfloat16 weights make activations bfloat16");
            assert_eq!(pairs == tiles, dtype == "float32", "only bfloat16 weights are multiplied as tiles");
            for kernel in kernels() {
                println!("{model} {dtype} on {kernel}");
                let expected = match kernel {
                    "avx512_bf16" | "avx512_bf16_emulated" => &pairs,
                    "amx" | "amx_emulated" => &tiles,
                    _ => &plain,
                };
                assert!(bits(kernel) == *expected, "{model} {dtype} on {kernel}");
            }
        }
    }
}

#[test]
fn heads_that_the_kernels_cannot_take_are_refused_at_the_start() {
    let model = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixture("llama")).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), model.path().join(entry.file_name())).unwrap();
    }
    let config = model.path().join("config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    assert!(text.contains("\"head_dim\": 16"));
    std::fs::write(&config, text.replace("\"head_dim\": 16", "\"head_dim\": 8")).unwrap();
    let error = Engine::try_start(model.path().to_str().unwrap(), &[]).err().expect("it is refused").to_string();
    assert!(error.contains("head_dim is 8") && error.contains("multiples of 16"), "{error}");
}
