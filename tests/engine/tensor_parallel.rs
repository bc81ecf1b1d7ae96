//! Every number of ranks that a refusal lists as possible starts, and computes the results of one rank.

use rand::{Rng, SeedableRng};
use serde_json::{Value, json};

use crate::common::{Engine, Request, StateDict, random_prompts, write_checkpoint};

/// Shape of a random Llama: number of attention heads of 16 values, number of key-value heads, width of the MLP.
struct Shape {
    heads: usize,
    kv_heads: usize,
    intermediate: usize,
}

/// Vocabulary size, divisible by 1, 2, 3, 4, 5, 6, 10, 12, ... ranks.
const VOCAB: usize = 540;
const HIDDEN: usize = 64;

impl Shape {
    fn weights(&self) -> StateDict {
        println!("weights from seed 31");
        let mut rng = rand_chacha::ChaCha8Rng::seed_from_u64(31);
        let mut weights = StateDict::new();
        let mut add = |name: String, shape: &[usize]| {
            let centre = if shape.len() == 1 { 1.0 } else { 0.0 };
            let value = |_| half::bf16::from_f32(centre + rng.random_range(-0.2..0.2)).to_f32();
            weights.insert(name, (shape.to_vec(), (0..shape.iter().product()).map(value).collect()));
        };
        let (q, kv) = (16 * self.heads, 16 * self.kv_heads);
        for layer in 0..2 {
            for (name, shape) in [
                ("input_layernorm", &[HIDDEN][..]),
                ("self_attn.q_proj", &[q, HIDDEN]),
                ("self_attn.k_proj", &[kv, HIDDEN]),
                ("self_attn.v_proj", &[kv, HIDDEN]),
                ("self_attn.o_proj", &[HIDDEN, q]),
                ("post_attention_layernorm", &[HIDDEN]),
                ("mlp.gate_proj", &[self.intermediate, HIDDEN]),
                ("mlp.up_proj", &[self.intermediate, HIDDEN]),
                ("mlp.down_proj", &[HIDDEN, self.intermediate]),
            ] {
                add(format!("model.layers.{layer}.{name}.weight"), shape);
            }
        }
        add("model.norm.weight".into(), &[HIDDEN]);
        add("model.embed_tokens.weight".into(), &[VOCAB, HIDDEN]);
        add("lm_head.weight".into(), &[VOCAB, HIDDEN]);
        weights
    }

    fn checkpoint(&self) -> tempfile::TempDir {
        let dir = write_checkpoint("llama", &self.weights());
        let path = dir.path().join("config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        let mut config: Value = serde_json::from_str(&config).unwrap();
        for (key, value) in [
            ("num_attention_heads", json!(self.heads)),
            ("num_key_value_heads", json!(self.kv_heads)),
            ("intermediate_size", json!(self.intermediate)),
            ("hidden_size", json!(HIDDEN)),
            ("vocab_size", json!(VOCAB)),
            ("attention_bias", json!(false)),
            ("mlp_bias", json!(false)),
        ] {
            config[key] = value;
        }
        std::fs::write(path, config.to_string()).unwrap();
        dir
    }
}

#[test]
fn every_listed_number_of_ranks_serves_the_model_of_one() {
    for (shape, listed) in [
        // The ranks' shares of the intermediate features are 8 of 96 for 12 ranks, 10 of 60 for 6, and 9 of 90 for 10:
        // too few for a reduction in eight leaves.
        (Shape { heads: 12, kv_heads: 2, intermediate: 96 }, "1, 2, 4, 6, 12"),
        (Shape { heads: 12, kv_heads: 1, intermediate: 60 }, "1, 2, 3, 4, 6, 12"),
        (Shape { heads: 10, kv_heads: 5, intermediate: 90 }, "1, 5, 10"),
    ] {
        let checkpoint = shape.checkpoint();
        let refused = Engine::try_start_at(checkpoint.path(), &["--tp", "7"]).err().expect("7 divide nothing");
        let refused = refused.to_string();
        let list = refused.split("Valid here: ").nth(1).and_then(|list| list.strip_suffix('.'));
        let list = list.unwrap_or_else(|| panic!("no list: {refused}"));
        assert_eq!(list, listed);
        for dtype in ["float32", "bfloat16"] {
            let score = |tp: &str| -> Vec<f32> {
                let engine = Engine::try_start_at(checkpoint.path(), &["--dtype", dtype, "--tp", tp]);
                let engine = engine.unwrap_or_else(|e| panic!("--tp {tp} of {listed}: {e}"));
                let reply = engine.generate(Request::score(random_prompts(32, 4, 10..60, VOCAB as u32)));
                reply.prompt_logprobs.iter().flat_map(|(_, tokens)| tokens.iter().map(|t| t.raw)).collect()
            };
            let one = score("1");
            for tp in list.split(", ") {
                let apart = score(tp).iter().zip(&one).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                println!("{dtype} --tp {tp}: {apart:e} from one rank");
                // The sums have the same products in another order. In bfloat16 that can change how later values are
                // rounded.
                let tolerance = if dtype == "float32" { 1e-4 } else { 0.1 };
                assert!(apart < tolerance, "{dtype} --tp {tp}: {apart:e}");
            }
        }
    }
}
