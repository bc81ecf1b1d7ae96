//! Random sampling parameters in all combinations.

use std::collections::HashMap;

use rollout_server::server::pb;
use rollout_server::server::pb::structured_outputs::Kind;

use super::dice::Dice;

/// Vocabulary size of the fixture.
pub const VOCABULARY: u32 = 512;
pub const CONTEXT: u32 = 256;

pub fn token(dice: &mut Dice) -> u32 {
    dice.between(0, VOCABULARY - 1)
}

pub fn tokens(dice: &mut Dice, longest: u32) -> pb::TokenIds {
    let length = dice.between(1, longest);
    // A small set of tokens makes prompts that share their beginnings.
    let few = dice.coin();
    let some = if few { 2 } else { VOCABULARY as usize };
    let mut ids: Vec<u32> = (0..length.min(2 * CONTEXT)).map(|_| dice.below(some) as u32).collect();
    if let Some(last) = ids.last_mut() {
        *last = token(dice);
    }
    pb::TokenIds { ids }
}

const TEMPERATURES: &[f32] = &[0.0, -0.0, 1e-6, 0.3, 1.0, 1.0, 2.0, 1e3, 1e30, f32::MAX];
const TOP_PS: &[f32] = &[f32::MIN_POSITIVE, 1e-45, 1e-6, 0.1, 0.5, 0.999, 1.0 - f32::EPSILON / 2.0, 1.0];
const MIN_PS: &[f32] = &[0.0, -0.0, 1e-45, 1e-6, 0.1, 0.999_999_9, 1.0];
const REPETITIONS: &[f32] = &[1e-6, 0.5, 1.0, 1.2, 1e6];
const PENALTIES: &[f32] = &[-2.0, -0.0, 0.0, 1e-45, 0.7, 2.0];
const BIASES: &[f32] = &[-1e9, -100.0, -1e-45, -0.0, 0.0, 5.0, 1e9];

fn logit_bias(dice: &mut Dice) -> HashMap<u32, f32> {
    match dice.below(8) {
        // All tokens are allowed.
        0 => {
            let bias = dice.float(BIASES);
            (0..VOCABULARY).map(|token| (token, bias)).collect()
        }
        1 | 2 => dice.list(9, |dice| (token(dice), dice.float(BIASES))).into_iter().collect(),
        _ => HashMap::new(),
    }
}

fn token_set(dice: &mut Dice) -> Vec<u32> {
    match dice.below(10) {
        0 => (0..VOCABULARY).collect(),
        1 => vec![token(dice); 3],
        2 | 3 => dice.list(9, token),
        _ => Vec::new(),
    }
}

fn stop_strings(dice: &mut Dice) -> Vec<String> {
    match dice.below(6) {
        0 => vec!["e".into(), "th".into(), "\u{fffd}".into()],
        1 => dice.list(3, Dice::text),
        2 if dice.is_hostile() => vec!["x".into(); 65],
        3 => (0..64).map(|i| "ab".repeat(512 - i)).collect(),
        _ => Vec::new(),
    }
}

/// Parameters that change the distribution, which are all that Score takes.
pub fn distribution(dice: &mut Dice) -> pb::SamplingParams {
    pb::SamplingParams {
        temperature: dice.maybe(|dice| dice.float(TEMPERATURES)),
        top_k: dice.maybe(|dice| if dice.coin() { dice.u32() as i32 } else { dice.between(0, VOCABULARY) as i32 - 1 }),
        top_p: dice.maybe(|dice| dice.float(TOP_PS)),
        min_p: dice.maybe(|dice| dice.float(MIN_PS)),
        logit_bias: logit_bias(dice),
        allowed_token_ids: token_set(dice),
        ..Default::default()
    }
}

pub fn params(dice: &mut Dice) -> pb::SamplingParams {
    let most = dice.pick(&[1, 8, 8, 30, CONTEXT]);
    let max_tokens = dice.maybe(|dice| dice.between(1, most));
    pb::SamplingParams {
        repetition_penalty: dice.maybe(|dice| dice.float(REPETITIONS)),
        presence_penalty: dice.maybe(|dice| dice.float(PENALTIES)),
        frequency_penalty: dice.maybe(|dice| dice.float(PENALTIES)),
        min_tokens: dice.maybe(|dice| dice.between(0, max_tokens.unwrap_or(16).max(1))),
        max_tokens,
        stop_token_ids: token_set(dice),
        stop: stop_strings(dice),
        ignore_eos: dice.coin(),
        seed: dice.maybe(Dice::u64),
        skip_special_tokens: dice.maybe(Dice::coin),
        bad_words: if dice.one_in(4) { stop_strings(dice) } else { Vec::new() },
        structured_outputs: if dice.one_in(4) { Some(structured(dice)) } else { None },
        thinking_token_budget: if dice.one_in(8) { Some(dice.u32()) } else { None },
        ..distribution(dice)
    }
}

/// Grammars that are right, wrong and too large.
fn structured(dice: &mut Dice) -> pb::StructuredOutputs {
    const REGEXES: &[&str] = &["[a-z]{1,9}", "a+", "(the|that) .*", r"\p{L}{1,50}", "(", "((a{1,99}){1,99}){1,99}", ""];
    const SCHEMAS: &[&str] = &[
        r#"{"type":"array","items":{"type":"integer"},"maxItems":3}"#,
        r##"{"type":"object","properties":{"a":{"$ref":"#"}},"additionalProperties":false}"##,
        r#"{"type":"string","minLength":9,"x-guidance":{"whitespace_flexible":false}}"#,
        r#"{"multipleOf":1e9}"#,
        "false",
        "[",
    ];
    const GRAMMARS: &[&str] =
        &["start: \"a\" start \"b\" | \"c\"", "start: start start | \"a\"", "start: x", "%json {"];
    let kind = match dice.below(6) {
        0 if dice.is_hostile() => None,
        0 | 1 => Some(Kind::Regex(dice.pick(REGEXES).into())),
        2 => Some(Kind::JsonSchema(dice.pick(SCHEMAS).into())),
        3 => Some(Kind::Choice(pb::Choices { choices: dice.list(4, Dice::text) })),
        4 => Some(Kind::Grammar(if dice.one_in(4) { dice.text() } else { dice.pick(GRAMMARS).into() })),
        _ => Some(Kind::JsonObject(!dice.is_hostile())),
    };
    pb::StructuredOutputs { kind }
}
