//! Every number of ranks that a refusal lists as possible starts, and computes the results of one rank.

use rand::{Rng, SeedableRng};
use rollout_server::engine::{AdapterTarget, DrainMode, SleepLevel};
use serde_json::{Value, json};

use crate::common::{
    Engine, FAMILIES, Push, Request, StateDict, check_pushes_and_sleep, random_prompts, random_weights,
    write_checkpoint,
};

/// Shape of a random Llama: number of attention heads of 16 values, number of key-value heads, width of the MLP.
struct Shape {
    heads: usize,
    kv_heads: usize,
    intermediate: usize,
}

/// Vocabulary size, a prime: the last of several ranks has fewer tokens than the others.
const VOCAB: usize = 509;
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

/// Everything that reads or writes the embedding and the head: tokens, log-probabilities, pushes of all kinds, resident
/// adapters, checksums, and sleep.
#[test]
fn an_uneven_vocabulary_has_the_bits_of_one_rank() {
    let checkpoint = Shape { heads: 8, kv_heads: 4, intermediate: 128 }.checkpoint();
    for dtype in ["float32", "bfloat16"] {
        let run = |tp: &str| {
            let flags = ["--dtype", dtype, "--tp", tp, "--max-adapters", "1"];
            let engine = Engine::try_start_at(checkpoint.path(), &flags).unwrap_or_else(|e| panic!("--tp {tp}: {e}"));
            let mut found = Vec::new();
            let mut note = |what: &'static str, adapter: Option<&str>| {
                let mut prompts = random_prompts(33, 3, 5..40, VOCAB as u32);
                prompts.push((VOCAB as u32 - 9..VOCAB as u32).collect());
                let of = |request: Request| Request { adapter: adapter.map(Into::into), ..request };
                let scored = engine.generate(of(Request::score(prompts.clone())));
                let scored: Vec<u32> =
                    scored.prompt_logprobs.iter().flat_map(|(_, all)| all.iter().map(|t| t.raw.to_bits())).collect();
                let sampled = engine.generate(of(Request::generate(prompts, 2, 7, 24))).bits();
                found.push((what, scored, sampled, engine.checksums()));
            };
            note("the checkpoint", None);
            let before = random_weights(engine.parameters(), 34);
            engine.push(Push::full(&before)).expect("full");
            note("a full push", None);
            let mut after = before.clone();
            for name in ["model.embed_tokens.weight", "lm_head.weight"] {
                let values = &mut after.get_mut(name).expect("the model has it").1;
                values.iter_mut().rev().step_by(53).for_each(|x| *x += 0.25);
            }
            engine.push(Push::delta(&before, &after, 1)).expect("delta");
            note("a delta", None);
            let adapter = Push::lora_of(engine.parameters(), &["q_proj", "down_proj", "lm_head"]);
            engine.push(adapter.clone()).expect("merged");
            note("a merged adapter", None);
            engine.push(Push::base()).expect("base");
            let target = AdapterTarget { name: "a".into(), expected_generation: Some(0), evicts: false };
            engine.push(Push { adapter: Some(target), ..adapter }).expect("resident");
            note("a resident adapter", Some("a"));
            engine.sleep(SleepLevel::One, DrainMode::Wait).expect("asleep");
            engine.wake(true, true).expect("awake");
            note("after sleep", None);
            engine.assert_all_free();
            found
        };
        let one = run("1");
        for tp in ["2", "4"] {
            for (mine, expected) in run(tp).iter().zip(&one) {
                assert!(mine == expected, "{dtype} --tp {tp}: {} differs from one rank", expected.0);
            }
        }
    }
}

#[test]
fn every_family_serves_is_pushed_to_sleeps_and_wakes_on_four_ranks() {
    for (model, adapter) in FAMILIES {
        for dtype in ["float32", "bfloat16"] {
            let [one, four] = ["1", "4"].map(|tp| Engine::start(model, &["--dtype", dtype, "--tp", tp]));
            check_pushes_and_sleep(&format!("{model} {dtype} --tp 4"), &four, &[&one], adapter, |engine| {
                let prompts = random_prompts(35, 4, 1..50, 512);
                let reply = engine.generate(Request::generate(prompts, 2, 8, 16));
                assert!(reply.error.is_none(), "{:?}", reply.error);
                reply.bits()
            });
        }
    }
}
