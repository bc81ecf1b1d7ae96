//! Log-probabilities of every supported architecture against transformers, over 512-token sequences, on one rank and
//! on two.

mod common;

use common::{Engine, Request, fixture};
use rollout_server::types::{SamplingParams, TokenId};
use safetensors::SafeTensors;

const ARCHITECTURES: [&str; 5] = ["llama", "llama-tied", "qwen2", "qwen3", "mistral"];

/// Per-token tolerance in float32 (the contract).
const TOLERANCE: f32 = 1e-4;

/// What transformers said of a fixture; made by `tests/fixtures/make_fixtures.py`.
struct Reference {
    sequences: Vec<Vec<TokenId>>,
    float32: Vec<f32>,
    bfloat16: Vec<f32>,
    greedy_prompt: Vec<TokenId>,
    greedy: Vec<TokenId>,
}

impl Reference {
    fn read(file: &str) -> Self {
        let bytes = std::fs::read(fixture(file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let words = |name: &str| -> Vec<[u8; 4]> {
            let data = tensors.tensor(name).unwrap().data();
            data.chunks_exact(4).map(|c| c.try_into().unwrap()).collect()
        };
        let ids = |name: &str| -> Vec<TokenId> { words(name).into_iter().map(u32::from_le_bytes).collect() };
        let floats = |name: &str| -> Vec<f32> { words(name).into_iter().map(f32::from_le_bytes).collect() };
        Self {
            sequences: ids("tokens").chunks_exact(512).map(<[_]>::to_vec).collect(),
            float32: floats("logprobs_f32"),
            bfloat16: floats("logprobs_bf16"),
            greedy_prompt: ids("greedy_prompt"),
            greedy: ids("greedy_tokens"),
        }
    }
}

/// Raw log-probabilities of all sequences behind each other, the first token of each left out.
fn score(engine: &Engine, sequences: &[Vec<TokenId>]) -> Vec<f32> {
    let reply = engine.generate(Request::score(sequences.to_vec()));
    reply.prompt_logprobs.iter().flat_map(|(_, tokens)| tokens.iter().map(|t| t.raw)).collect()
}

fn largest(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn mean(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| f64::from((a - b).abs())).sum::<f64>() / a.len() as f64
}

fn check_float32(model: &str, reference: &Reference) {
    for tp in ["1", "2"] {
        let engine = Engine::start(model, &["--dtype", "float32", "--tp", tp]);
        let difference = largest(&score(&engine, &reference.sequences), &reference.float32);
        println!("{model} float32 tp {tp}: largest difference {difference:e}");
        assert!(difference < TOLERANCE, "{model} tp {tp}: {difference:e}");

        let params = SamplingParams { temperature: 0.0, max_tokens: 32, ..Default::default() };
        let prompt = vec![reference.greedy_prompt.clone()];
        let greedy = engine.generate(Request::generate(prompt, 1, 0, 0).params(params));
        let tokens: Vec<_> = greedy.completions[0].tokens.iter().map(|t| t.token).collect();
        assert_eq!(tokens, reference.greedy, "{model} tp {tp}: greedy continuation");
    }
}

#[test]
fn float32_is_transformers_float32() {
    for model in ARCHITECTURES {
        check_float32(model, &Reference::read(&format!("{model}/reference.safetensors")));
    }
}

#[test]
fn a_gguf_file_is_its_dequantised_weights() {
    check_float32("llama-tied.gguf", &Reference::read("llama-tied.gguf.reference.safetensors"));
}

#[test]
fn bfloat16_is_no_farther_from_float32_than_transformers_bfloat16() {
    for model in ARCHITECTURES {
        let reference = Reference::read(&format!("{model}/reference.safetensors"));
        let engine = Engine::start(model, &["--dtype", "bfloat16"]);
        let ours = score(&engine, &reference.sequences);
        let (mean_ours, mean_theirs) = (mean(&ours, &reference.float32), mean(&reference.bfloat16, &reference.float32));
        println!("{model} bfloat16: mean difference {mean_ours:e}, transformers' {mean_theirs:e}");
        assert!(mean_ours > 0.0, "{model}: bfloat16 was not used");
        assert!(mean_ours <= mean_theirs, "{model}: {mean_ours:e} > {mean_theirs:e}");
        let (max_ours, max_theirs) =
            (largest(&ours, &reference.float32), largest(&reference.bfloat16, &reference.float32));
        assert!(max_ours <= max_theirs, "{model}: largest {max_ours:e} > {max_theirs:e}");
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
