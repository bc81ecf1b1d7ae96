//! Log-probabilities of candle-transformers' models beside ours, in float32 on the CPU: a second oracle beside
//! transformers (`tests/engine/parity.rs`). It needs no Python, so random shapes are compared too.

mod candle;
mod shapes;

use std::collections::BTreeSet;
use std::path::Path;

use candle::Candle;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rollout_server::types::TokenId;
use safetensors::SafeTensors;
use serde_json::Value;
use shapes::{ARCHITECTURES, random_config, random_weights};

use crate::common::{Engine, Request, fixture, random_prompts, write_checkpoint};

/// Largest difference per token in float32 that the numerics contract allows.
const TOLERANCE: f32 = 1e-4;
/// Most tokens of a sequence that are compared: candle gives the logits of the last token alone, so each token costs a
/// run of all before it.
const MOST_TOKENS: usize = 160;
/// Sequences of a fixture that are compared.
const SEQUENCES: usize = 2;
/// Random checkpoints of each architecture.
const SHAPES: usize = 6;

/// How a fixture is compared.
enum Comparison {
    Full,
    /// The first tokens of each sequence, for this reason.
    First(usize, &'static str),
    /// Not at all, for this reason.
    None(&'static str),
}

const FIXTURES: [(&str, Comparison); 14] = [
    ("glm4_moe", Comparison::None("candle has no GLM-4.5")),
    ("llama", Comparison::None("candle's Llama has no biases")),
    ("llama-tied", Comparison::Full),
    ("llama-tied.gguf", Comparison::None("candle's models of GGUF files multiply by quantised weights, ours do not")),
    ("mistral", Comparison::Full),
    ("mixtral", Comparison::None("candle's Mixtral divides its hidden size among the heads")),
    ("phi3", Comparison::First(100, "candle's Phi3 has no window")),
    ("qwen2", Comparison::First(100, "candle's Qwen2 has its window of 100 tokens in all layers, not from one on")),
    ("qwen2_moe", Comparison::Full),
    ("qwen3", Comparison::Full),
    ("qwen3_moe", Comparison::None("candle's Qwen3-MoE has experts in the layers of mlp_only_layers too")),
    ("qwen3_moe_60", Comparison::Full),
    ("qwen_v1", Comparison::None("candle has no Qwen v1; parity.rs compares it with transformers' Qwen2")),
    ("smollm3", Comparison::First(100, "candle's SmolLM3 has no window")),
];

fn config(model: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(model.join("config.json")).unwrap()).unwrap()
}

/// Compares the log-probabilities of all tokens but each sequence's first. Returns the largest difference.
fn compare(model: &Path, sequences: &[Vec<TokenId>]) -> f32 {
    let engine = Engine::try_start_at(model, &["--dtype", "float32"]).unwrap();
    let reply = engine.generate(Request::score(sequences.to_vec()));
    assert!(reply.error.is_none(), "{:?}", reply.error);
    assert_eq!(reply.prompt_logprobs.len(), sequences.len());
    let mut candle = Candle::load(model, &config(model));
    let mut largest = 0.0f32;
    for ((_, ours), sequence) in reply.prompt_logprobs.iter().zip(sequences) {
        let theirs = candle.logprobs(sequence);
        assert_eq!(ours.len(), theirs.len());
        for (ours, theirs) in ours.iter().zip(theirs) {
            assert!(theirs.is_finite() && ours.raw.is_finite(), "{} beside {theirs}", ours.raw);
            largest = largest.max((ours.raw - theirs).abs());
        }
    }
    largest
}

/// The sequences of a fixture that transformers has scored.
fn sequences(name: &str, tokens: usize) -> Vec<Vec<TokenId>> {
    let file = std::fs::read(fixture(name).join("reference.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&file).unwrap();
    let ids = stored.tensor("tokens").unwrap().data().as_chunks::<4>().0.to_vec();
    let ids: Vec<TokenId> = ids.into_iter().map(u32::from_le_bytes).collect();
    ids.chunks_exact(512).take(SEQUENCES).map(|sequence| sequence[..tokens].to_vec()).collect()
}

#[test]
fn fixtures_have_candles_log_probabilities() {
    let mut compared = BTreeSet::new();
    for (name, comparison) in FIXTURES {
        let tokens = match comparison {
            Comparison::Full => MOST_TOKENS,
            Comparison::First(tokens, reason) => {
                println!("{name}: the first {tokens} tokens: {reason}");
                tokens
            }
            Comparison::None(reason) => {
                println!("{name}: not compared: {reason}");
                continue;
            }
        };
        let model = fixture(name);
        let largest = compare(&model, &sequences(name, tokens));
        println!("{name}: largest difference {largest:e}");
        assert!(largest < TOLERANCE, "{name}: {largest:e}");
        compared.insert(config(&model)["architectures"][0].as_str().unwrap().to_owned());
    }
    // Its random shapes are compared.
    compared.insert("MixtralForCausalLM".to_owned());
    assert_eq!(compared, ARCHITECTURES.map(str::to_owned).into(), "each architecture has a fixture that is compared");
}

/// Fixtures whose architecture candle does not have; `images.rs` compares them with transformers.
const WITH_IMAGES: [&str; 4] = ["internvl3", "internvl3-chat", "qwen2_5_vl", "qwen2_5_vl-tied"];

#[test]
fn every_checkpoint_of_the_fixtures_is_in_the_list() {
    let entries = std::fs::read_dir(fixture("")).unwrap().map(|entry| entry.unwrap());
    let is_model = |path: &Path| path.join("config.json").exists() || path.extension().is_some_and(|e| e == "gguf");
    let found: BTreeSet<_> =
        entries.filter(|entry| is_model(&entry.path())).map(|entry| entry.file_name().into_string().unwrap()).collect();
    let known = FIXTURES.iter().map(|(name, _)| *name).chain(WITH_IMAGES);
    assert_eq!(found, known.map(str::to_owned).collect());
}

/// As on a machine to which the tests were copied, where the path of the build does not exist.
#[test]
fn fixtures_are_where_the_environment_says() {
    let elsewhere = tempfile::tempdir().unwrap();
    for (place, finds) in [(fixture(""), true), (elsewhere.path().to_owned(), false)] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child
            .args(["--exact", "oracle::every_checkpoint_of_the_fixtures_is_in_the_list"])
            .env("ROLLOUT_FIXTURES", &place);
        assert_eq!(child.output().unwrap().status.success(), finds, "{}", place.display());
    }
}

#[test]
fn random_shapes_have_candles_log_probabilities() {
    for (architecture, first) in ARCHITECTURES.into_iter().zip((0..).step_by(SHAPES)) {
        for seed in first..first + SHAPES as u64 {
            let mut dice = ChaCha8Rng::seed_from_u64(seed);
            let config = random_config(architecture, &mut dice);
            println!("{architecture}, seed {seed}: {config}");
            let model = write_checkpoint("qwen3", &random_weights(&config, &mut dice));
            std::fs::write(model.path().join("config.json"), config.to_string()).unwrap();
            let vocabulary = config["vocab_size"].as_u64().unwrap() as u32;
            let largest = compare(model.path(), &random_prompts(seed, 3, 2..65, vocabulary));
            println!("    largest difference {largest:e}");
            assert!(largest < TOLERANCE, "{architecture}, seed {seed}: {largest:e}");
        }
    }
}
