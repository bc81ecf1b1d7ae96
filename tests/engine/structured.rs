//! Samples with a grammar have the same bits alone or in a batch, in chunks, preempted, and with drafts, and their
//! texts are those of the grammar.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use rollout_server::engine::{Completion, Event};
use rollout_server::error::Error;
use rollout_server::grammar::{Grammar, GrammarCompiler, GrammarSource};
use rollout_server::text::Tokenizer;
use rollout_server::types::{FinishReason, SamplingParams, TokenId, sample_seed};

use crate::common::{Engine, Reply, Request, fixture, random_prompts};

const VOCAB: u32 = 512;
const EOS: TokenId = 0;
const SEED: u64 = 42;
const N: u32 = 3;

/// A grammar with its name, and a check of complete texts by other hands.
type Case = (&'static str, Arc<Grammar>, fn(&str) -> bool);

/// Grammars whose samples end by `ends`.
fn grammars(ends: &[TokenId]) -> Vec<Case> {
    let tokenizer = Tokenizer::from_file(&fixture("llama-tied/tokenizer.json")).unwrap();
    let compiler = GrammarCompiler::new(Arc::new(tokenizer));
    let schema = r#"{
        "type": "object", "required": ["name", "tags"], "additionalProperties": false,
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 3}
        },
        "x-guidance": {"whitespace_flexible": false}
    }"#;
    let is_json: fn(&str) -> bool = |text| {
        let Ok(value) = serde_json::from_str::<serde_json::Value>(text) else { return false };
        let tags = value["tags"].as_array().map_or(0, Vec::len);
        value.as_object().map(|o| o.len()) == Some(2) && value["name"].is_string() && (2..4).contains(&tags)
    };
    let is_balanced: fn(&str) -> bool = |text| {
        let depth = text.len() / 2;
        text == format!("{}c{}", "a".repeat(depth), "b".repeat(depth))
    };
    let is_word: fn(&str) -> bool = |text| {
        let (word, sign) = text.split_at(text.len() - 1);
        (3..=20).contains(&word.chars().count()) && word.chars().all(char::is_alphabetic) && "!?".contains(sign)
    };
    let is_chosen: fn(&str) -> bool = |text| ["yes", "no", "beautiful is better"].contains(&text);
    let choices = ["yes", "no", "beautiful is better"].map(String::from).to_vec();
    let compile = |source| Arc::new(compiler.compile(&source, VOCAB as usize, ends).unwrap());
    vec![
        ("schema", compile(GrammarSource::JsonSchema(schema.into())), is_json),
        ("regex", compile(GrammarSource::Regex(r"\p{L}{3,20}[!?]".into())), is_word),
        ("lark", compile(GrammarSource::Lark("start: \"a\" start \"b\" | \"c\"".into())), is_balanced),
        ("choice", compile(GrammarSource::Choice(choices)), is_chosen),
    ]
}

/// Plain sampling; sampling that repeats itself, so that drafts are right; and sampling with other edits and filters.
fn all_params() -> Vec<(&'static str, SamplingParams)> {
    let plain = SamplingParams { max_tokens: 40, eos_token_ids: vec![EOS], ..Default::default() };
    let cold = SamplingParams { temperature: 0.05, ..plain.clone() };
    let greedy = SamplingParams { temperature: 0.0, ..plain.clone() };
    let rich = SamplingParams {
        temperature: 0.8,
        top_k: 20,
        top_p: 0.9,
        repetition_penalty: 1.1,
        min_tokens: 4,
        logit_bias: vec![(5, 3.0)],
        top_logprobs: 3,
        ..plain.clone()
    };
    let without_end = SamplingParams { eos_token_ids: vec![], ..plain.clone() };
    vec![("plain", plain), ("cold", cold), ("greedy", greedy), ("rich", rich), ("without end", without_end)]
}

fn prompts() -> Vec<Vec<TokenId>> {
    random_prompts(31, 5, 3..40, VOCAB)
}

fn generate(
    engine: &Engine,
    prompts: Vec<Vec<TokenId>>,
    n: u32,
    seed: u64,
    with: (&SamplingParams, &Arc<Grammar>),
) -> Reply {
    let mut request = Request::generate(prompts, n, seed, 0).params(with.0.clone()).with_text();
    request.grammar = Some(with.1.clone());
    let reply = engine.generate(request);
    assert!(reply.error.is_none(), "{:?}", reply.error);
    reply
}

/// What must be the same of a completion.
fn seen(completion: &Completion) -> (Vec<(TokenId, u32, u32)>, FinishReason, Option<String>) {
    (crate::common::bits(&completion.tokens), completion.finish_reason, completion.text.clone())
}

#[test]
fn alone_in_a_batch_in_chunks_preempted_and_with_drafts_are_the_same() {
    let model = "llama-tied";
    let reference = Engine::start(model, &["--speculation", "off"]);
    let engines: Vec<(&[&str], Engine)> = [
        &[][..],
        &["--speculation", "off", "--max-batch-tokens", "7"],
        &["--kv-cache-bytes", "300KiB", "--max-model-len", "128"],
        &["--tp", "2"],
    ]
    .map(|flags| (flags, Engine::start(model, flags)))
    .into();
    let mut ends = [0; 3];
    for (what, params) in all_params() {
        for (name, grammar, is_whole) in grammars(&params.eos_token_ids) {
            let with = (&params, &grammar);
            let alone = |(i, prompt): (usize, Vec<TokenId>)| {
                let sample = move |j| sample_seed(SEED, i as u32, j);
                (0..N).map(move |j| (prompt.clone(), sample(j))).collect::<Vec<_>>()
            };
            let each = prompts().into_iter().enumerate().flat_map(alone);
            let expected: Vec<_> = each
                .map(|(prompt, seed)| generate(&reference, vec![prompt], 1, seed, with).completions.remove(0))
                .collect();
            for completion in &expected {
                let text = completion.text.as_deref().unwrap();
                match completion.finish_reason {
                    FinishReason::Length => ends[0] += 1,
                    reason => {
                        assert!(is_whole(text), "{name} {what}: {text:?} ended by {reason:?}");
                        ends[if reason == FinishReason::Eos { 1 } else { 2 }] += 1;
                    }
                }
            }
            let expected: Vec<_> = expected.iter().map(seen).collect();
            for (flags, engine) in &engines {
                let batch = generate(engine, prompts(), N, SEED, with);
                assert_eq!(batch.completions.iter().map(seen).collect::<Vec<_>>(), expected, "{name} {what} {flags:?}");
                engine.assert_all_free();
            }
        }
    }
    println!("{} ended by length, {} by their end, {} by their grammar", ends[0], ends[1], ends[2]);
    assert!(ends.iter().all(|count| *count > 20), "{ends:?}");
    assert!(engines[0].1.status().stats.accepted_tokens > 100, "{:?}", engines[0].1.status());
    assert!(engines[2].1.status().stats.preemptions > 0, "{:?}", engines[2].1.status());
}

#[test]
fn raw_log_probabilities_are_those_of_the_score() {
    let engine = Engine::start("qwen3", &[]);
    for (name, grammar, _) in grammars(&[EOS]) {
        let sampled = generate(&engine, prompts(), 1, SEED, (&all_params()[0].1, &grammar));
        let whole = prompts().into_iter().zip(&sampled.completions);
        let whole = whole.map(|(prompt, c)| prompt.into_iter().chain(c.tokens.iter().map(|t| t.token)).collect());
        let scored = engine.generate(Request::score(whole.collect()));
        for (completion, (_, scored)) in sampled.completions.iter().zip(&scored.prompt_logprobs) {
            let tail = &scored[scored.len() - completion.tokens.len()..];
            let raw = |t: &rollout_server::types::TokenLogprobs| (t.token, t.raw.to_bits());
            assert!(completion.tokens.iter().map(raw).eq(tail.iter().map(raw)), "{name}");
            // Renormalised over fewer tokens, each is likelier than before, but for rounding.
            assert!(completion.tokens.iter().all(|t| t.processed >= t.raw - 1e-5), "{name}");
        }
    }
}

/// Texts of a and b, which this grammar reads in so many ways that a mask soon takes milliseconds.
const AMBIGUOUS: &str = "start: e\ne: e e e | e e | \"a\" | \"b\" | ";

fn lark(text: &str) -> Arc<Grammar> {
    let tokenizer = Tokenizer::from_file(&fixture("llama-tied/tokenizer.json")).unwrap();
    let compiler = GrammarCompiler::new(Arc::new(tokenizer));
    Arc::new(compiler.compile(&GrammarSource::Lark(text.into()), VOCAB as usize, &[]).unwrap())
}

fn ambiguous(n: u32, max_tokens: u32, grammar: &Arc<Grammar>) -> Request {
    let mut request = Request::generate(vec![vec![5, 6, 7]], n, SEED, max_tokens).named("ambiguous");
    request.grammar = Some(grammar.clone());
    request
}

/// A grammar that takes too long ends its request alone, with the reason.
#[test]
fn a_grammar_that_takes_too_long_ends_its_request() {
    let engine = Engine::start("llama-tied", &[]);
    let other = engine.send(Request::generate(prompts(), 2, SEED, 300).named("other"));
    let reply = engine.generate(ambiguous(2, 800, &lark(AMBIGUOUS)));
    let error = reply.error.expect("it takes minutes");
    assert!(matches!(error, Error::ResourceExhausted(_)), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("sampling.structured_outputs") && text.contains("processor time"), "{text}");
    assert_eq!(other.wait().completions.len(), 10);
    engine.assert_all_free();
}

/// While masks take long, the samples that wait for them leave their places, and other requests get more tokens.
#[test]
fn a_grammar_that_takes_long_holds_no_other_request_up() {
    let engine = Engine::start("llama-tied", &["--max-num-seqs", "8", "--speculation", "off"]);
    let n = 32;
    for round in 0..2 {
        let before = engine.status().stats.generated_tokens;
        let attack = engine.send(ambiguous(n, 800, &lark(AMBIGUOUS)));
        let mut others = 0;
        let error = loop {
            match attack.events.try_recv() {
                Ok(Event::Failed(error)) => break error,
                Ok(event) => panic!("{event:?}"),
                Err(_) => {}
            }
            let reply = engine.generate(Request::generate(vec![vec![9, 8, 7]], 1, SEED, 10).named("other"));
            others += reply.completions[0].tokens.len() as u64;
        };
        let of_attack = (engine.status().stats.generated_tokens - before - others) / u64::from(n);
        println!("round {round}: {others} tokens beside {of_attack} of each ambiguous sample; {error}");
        assert!(others > 2 * of_attack, "{others} beside {of_attack}");
        engine.assert_all_free();
    }
}

/// How long a mask takes decides when a sample is given its next token, and never which.
#[test]
fn a_machine_with_other_work_samples_the_same() {
    let engine = Engine::start("llama-tied", &[]);
    let samples = || {
        let reply = engine.generate(ambiguous(3, 45, &lark(AMBIGUOUS)));
        assert!(reply.error.is_none(), "{:?}", reply.error);
        reply.completions.iter().map(seen).collect::<Vec<_>>()
    };
    let idle = samples();
    let stop = AtomicBool::new(false);
    let busy = thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let other = engine.send(Request::generate(prompts(), 8, SEED, 100).named("other"));
        let samples = samples();
        stop.store(true, Ordering::Relaxed);
        assert!(other.wait().error.is_none());
        samples
    });
    assert_eq!(busy, idle);
    engine.assert_all_free();
}
