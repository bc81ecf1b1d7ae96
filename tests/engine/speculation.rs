//! Results have the same bits with drafts and without: tokens, both log-probabilities, and the reason why each sample
//! ended.

use rollout_server::types::{FinishReason, SamplingParams, TokenId};
use std::time::Duration;

use crate::common::{Engine, Push, Reply, Request, orders, random_prompts, random_weights};

const VOCAB: u32 = 512;
const SEED: u64 = 42;

/// Prompts in which tokens repeat, because drafts are found by what came before.
fn prompts() -> Vec<Vec<TokenId>> {
    let mut prompts = random_prompts(21, 3, 4..20, VOCAB);
    prompts.iter_mut().for_each(|prompt| prompt.extend_from_within(..));
    prompts
}

/// Parameters with low temperatures, so that samples repeat themselves and each other: greedy, filtered, with penalties
/// on earlier tokens, with stop tokens that count only after a while, and with stop strings that end a sample within a
/// run of drafts.
fn all_params() -> Vec<(&'static str, SamplingParams)> {
    let greedy = SamplingParams { max_tokens: 60, temperature: 0.0, ..Default::default() };
    let cold = SamplingParams { temperature: 0.1, ..greedy.clone() };
    let filtered = SamplingParams { temperature: 0.3, top_p: 0.9, top_k: 40, ..greedy.clone() };
    let penalties = SamplingParams {
        repetition_penalty: 1.02,
        presence_penalty: 0.01,
        frequency_penalty: 0.001,
        top_logprobs: 3,
        ..cold.clone()
    };
    let stop_tokens =
        SamplingParams { min_tokens: 30, stop_token_ids: (0..VOCAB).step_by(9).collect(), ..cold.clone() };
    let text = ["e", "a", "o", "t"].map(String::from).to_vec();
    let stop_strings = SamplingParams { stop_strings: text, ..cold.clone() };
    vec![
        ("greedy", greedy),
        ("cold", cold),
        ("filtered", filtered),
        ("penalties", penalties),
        ("stop tokens", stop_tokens),
        ("stop strings", stop_strings),
    ]
}

fn generate(engine: &Engine, params: &SamplingParams) -> Reply {
    let before = engine.status().stats;
    let reply = engine.generate(Request::generate(prompts(), 3, SEED, 0).params(params.clone()).with_text());
    assert!(reply.error.is_none(), "{:?}", reply.error);
    let tokens: usize = reply.completions.iter().map(|c| c.tokens.len()).sum();
    for c in &reply.completions {
        let streamed = reply.streamed_text.get(&(c.prompt_index, c.sample_index)).map_or("", String::as_str);
        assert_eq!(Some(streamed), c.text.as_deref(), "the pieces of a text add up to it");
        assert!(params.stop_strings.iter().all(|stop| !streamed.contains(stop)), "{streamed:?} has a stop string");
    }
    assert_eq!(
        engine.status().stats.generated_tokens - before.generated_tokens,
        tokens as u64,
        "tokens that are counted"
    );
    engine.assert_all_free();
    reply
}

fn assert_same(a: &Reply, b: &Reply, what: &str) {
    assert_eq!(a.bits(), b.bits(), "{what}");
    let rest = |reply: &Reply| -> Vec<_> {
        let tops = |c: &rollout_server::engine::Completion| c.tokens.iter().map(|t| t.top.clone()).collect::<Vec<_>>();
        reply.completions.iter().map(|c| (c.finish_reason, c.text.clone(), c.seed, tops(c))).collect()
    };
    assert_eq!(rest(a), rest(b), "{what}");
}

fn accepted(engine: &Engine) -> u64 {
    let status = engine.status();
    assert!(status.stats.accepted_tokens <= status.stats.drafted_tokens, "{status:?}");
    status.stats.accepted_tokens
}

#[test]
fn with_drafts_is_without() {
    for kernel in orders() {
        for (model, flags) in [
            ("llama", &[][..]),
            ("qwen3", &["--tp", "2"]),
            ("mistral", &["--dtype", "float32"]),
            ("qwen2", &["--max-batch-tokens", "5"]),
            ("llama-tied", &["--kv-cache-bytes", "600KiB", "--max-model-len", "128"]),
        ] {
            check_drafts(model, &[&["--kernel", kernel], flags].concat());
        }
    }
}

fn check_drafts(model: &str, flags: &[&str]) {
    let without = Engine::start(model, &[flags, &["--speculation", "off"]].concat());
    let with = Engine::start(model, flags);
    for (what, params) in all_params() {
        let before = accepted(&with);
        for _ in 0..2 {
            // In the second round the prompts are cached.
            let (expected, reply) = (generate(&without, &params), generate(&with, &params));
            assert_same(&reply, &expected, &format!("{model} {flags:?} {what}"));
            let stopped = |c: &rollout_server::engine::Completion| c.finish_reason == FinishReason::StopString;
            assert_eq!(reply.completions.iter().any(stopped), !params.stop_strings.is_empty(), "{model} {what}");
        }
        println!("{model} {flags:?} {what}: {} drafts were right", accepted(&with) - before);
    }
    assert_eq!(accepted(&without), 0);
    assert!(accepted(&with) > 100, "{model} {flags:?}: only {} drafts were right", accepted(&with));
}

/// A step gives a lone sample one token and every draft that was right. Tokens that the steps made and the sample did
/// not get come after a stop string.
#[test]
fn tokens_behind_a_stop_string_are_dropped() {
    let [without, with] = [&["--speculation", "off"][..], &[]].map(|flags| Engine::start("llama-tied", flags));
    let tokenizer = with.context().model.encoder.as_ref().expect("the fixture has a tokenizer").tokenizer.clone();
    let greedy = SamplingParams { max_tokens: 60, temperature: 0.0, ..Default::default() };
    let mut dropped = 0;
    for mut prompt in prompts() {
        // The sample's text becomes the prompt, so that the model says the same again, in few steps.
        let said = without.generate(Request::generate(vec![prompt.clone()], 1, SEED, 0).params(greedy.clone()));
        let said: Vec<TokenId> = said.completions[0].tokens.iter().map(|t| t.token).collect();
        prompt.extend(&said);
        for len in 1..20 {
            let text = tokenizer.decode(&said[said.len() - len..], true);
            let params = SamplingParams { stop_strings: vec![text.clone()], ..greedy.clone() };
            let request = Request::generate(vec![prompt.clone()], 1, SEED, 0).params(params).with_text();
            let before = with.status().stats;
            let reply = with.generate(request.clone());
            assert_same(&reply, &without.generate(request), &format!("until {text:?}"));
            let after = with.status().stats;
            let sampled = after.steps - before.steps + after.accepted_tokens - before.accepted_tokens;
            let given = after.generated_tokens - before.generated_tokens;
            assert_eq!(given, reply.completions[0].tokens.len() as u64);
            dropped += sampled - given;
        }
    }
    println!("{dropped} tokens were dropped");
    assert!(dropped > 0, "no stop string came amid a run of drafts");
}

/// Pushes the serving weights again while samples run: after whichever step that happens, no result changes.
#[test]
fn a_push_under_running_samples_changes_nothing_but_the_version() {
    let [without, with] = [&["--speculation", "off"][..], &[]].map(|flags| Engine::start("llama", flags));
    let mut weights = random_weights(with.parameters(), 5);
    // With layers that add little, the next token depends mostly on the last one. Samples then repeat themselves, and
    // hundreds of drafts are right on every instruction set.
    let adds = |name: &str| name.ends_with("o_proj.weight") || name.ends_with("down_proj.weight");
    for (_, (_, values)) in weights.iter_mut().filter(|(name, _)| adds(name)) {
        values.iter_mut().for_each(|x| *x /= 4.0);
    }
    for engine in [&without, &with] {
        engine.push(Push::full(&weights)).expect("pushed");
    }
    let params = SamplingParams { max_tokens: 300, temperature: 0.1, ..Default::default() };
    let request = Request::generate(prompts(), 2, SEED, 0).params(params);
    let expected = without.generate(request.clone());
    let before = with.status().stats.generated_tokens;
    let running = with.send(request);
    while with.status().stats.generated_tokens < before + 60 {
        std::thread::sleep(Duration::from_millis(1));
    }
    with.push(Push::full(&weights)).expect("pushed");
    let reply = running.wait();
    assert_same(&reply, &expected, "KEEP");
    assert!(reply.completions.iter().any(|c| c.weight_versions.len() == 2), "the push came too late");
    assert!(accepted(&with) > 100, "only {} drafts were right", accepted(&with));
}
