//! Sampling parameters of requests: checks every range and fills in every default.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::returns::Returns;
use super::structured::Grammars;
use super::{ModelFacts, check_ids, check_length, check_logprob_token_ids, check_most, encoder, pb};
use crate::engine::PromptSampling;
use crate::error::{Error, Result};
use crate::types::{SamplingParams, ThinkingBudget, TokenId};

/// Smallest temperature that is not greedy, and smallest repetition penalty. A float32 logit divided by less is
/// close to overflowing, and its distribution is the greedy one anyway.
const MIN_DIVISOR: f32 = 1e-6;
/// Largest magnitude of a logit bias: more than enough to force or to ban a token, and still finite after two divisions
/// by [`MIN_DIVISOR`].
const MAX_LOGIT_BIAS: f32 = 1e9;
/// Most stop strings of a request: each is searched for at every token.
const MAX_STOP_STRINGS: usize = 64;
/// Longest stop string in bytes: a stream holds back this much text.
const MAX_STOP_STRING_BYTES: usize = 1024;

/// Most token sequences that must not be generated: vLLM's limit.
const MAX_BAD_WORDS: usize = 128;
/// Longest bad word in bytes: its tokens are compared with the output at every step.
const MAX_BAD_WORD_BYTES: usize = 1024;

/// The numbers that a parameter may have: a test for them, and their name in errors.
type Numbers = (fn(f32) -> bool, &'static str);
const TEMPERATURES: Numbers =
    (|v| v == 0.0 || (v >= MIN_DIVISOR && v.is_finite()), "a number >= 0 (0 for greedy, else at least 1e-6)");
const TOP_P: Numbers = (|v| v > 0.0 && v <= 1.0, "a number in (0, 1]");
const MIN_P: Numbers = (|v| (0.0..=1.0).contains(&v), "a number in [0, 1]");
const REPETITION_PENALTIES: Numbers = (|v| (MIN_DIVISOR..=1.0 / MIN_DIVISOR).contains(&v), "a number in [1e-6, 1e6]");
const PENALTIES: Numbers = (|v| v.abs() <= 2.0, "a number in [-2, 2]");

/// Checks the sampling of a `GenerateRequest`. The map has that of the prompts that have their own, by index.
/// `spares_reasoning`: a grammar does not constrain the reasoning.
///
/// # Errors
/// `ResourceExhausted` if too many grammars are being compiled.
pub(super) fn for_generate(
    request: &mut pb::GenerateRequest,
    returns: &Returns,
    spares_reasoning: bool,
    model: &ModelFacts,
) -> Result<(PromptSampling, BTreeMap<u32, PromptSampling>)> {
    let named: Arc<[TokenId]> = std::mem::take(&mut request.logprob_token_ids).into();
    check_logprob_token_ids("logprob_token_ids", &named, model)?;
    let sampling = |given: pb::SamplingParams, grammars: &mut Grammars| {
        let logprob_token_ids = named.clone();
        let params = params(&given, spares_reasoning, model)?;
        let params = SamplingParams { logprob_token_ids, ..returns.applied(params) };
        returns.check_current(&params, given.structured_outputs.is_some())?;
        let grammar = given.structured_outputs.map(|outputs| grammars.grammar(outputs, &params, model)).transpose()?;
        Ok(PromptSampling { params: Arc::new(params), grammar, seed: given.seed })
    };
    let shared = sampling(request.sampling.take().unwrap_or_default(), &mut Grammars::default())?;
    let (mut grammars, mut own) = (Grammars::default(), BTreeMap::new());
    for (index, prompt) in (0..).zip(&mut request.prompts) {
        if let Some(given) = prompt.sampling.take() {
            let sampling = sampling(*given, &mut grammars);
            own.insert(index, sampling.map_err(|error: Error| error.within(&format!("prompts[{index}]")))?);
        }
    }
    Ok((shared, own))
}

/// Checks the `SamplingParams` of a request, or of a prompt, that generates.
fn params(p: &pb::SamplingParams, spares_reasoning: bool, model: &ModelFacts) -> Result<SamplingParams> {
    let default = SamplingParams::default();
    let max_tokens = p.max_tokens.unwrap_or(default.max_tokens);
    ensure!(max_tokens > 0, "sampling.max_tokens", "0 tokens; ask for at least 1, or use Score");
    let min_tokens = p.min_tokens.unwrap_or(default.min_tokens);
    ensure!(min_tokens <= max_tokens, "sampling.min_tokens", "{min_tokens} is more than max_tokens {max_tokens}");
    let repetition = default.repetition_penalty;
    let params = SamplingParams {
        repetition_penalty: float("repetition_penalty", p.repetition_penalty, repetition, REPETITION_PENALTIES)?,
        presence_penalty: float("presence_penalty", p.presence_penalty, 0.0, PENALTIES)?,
        frequency_penalty: float("frequency_penalty", p.frequency_penalty, 0.0, PENALTIES)?,
        min_tokens,
        max_tokens,
        eos_token_ids: if p.ignore_eos { Vec::new() } else { model.eos_token_ids.clone() },
        stop_token_ids: token_set("stop_token_ids", &p.stop_token_ids, model)?,
        stop_strings: stop_strings(&p.stop, model)?,
        bad_words: bad_words(&p.bad_words, model)?,
        skip_special_tokens: p.skip_special_tokens.unwrap_or(default.skip_special_tokens),
        thinking: p.thinking_token_budget.map(|tokens| thinking(tokens, p, spares_reasoning, model)).transpose()?,
        ..distribution(p, model)?
    };
    check_satisfiable(&params, model)?;
    Ok(params)
}

/// Checks the `SamplingParams` of a `ScoreRequest`, which has only those of the distribution, as nothing is sampled.
pub(super) fn for_score(p: &pb::SamplingParams, model: &ModelFacts) -> Result<SamplingParams> {
    let meaningless = [
        ("repetition_penalty", p.repetition_penalty.is_some()),
        ("presence_penalty", p.presence_penalty.is_some()),
        ("frequency_penalty", p.frequency_penalty.is_some()),
        ("min_tokens", p.min_tokens.is_some()),
        ("max_tokens", p.max_tokens.is_some()),
        ("stop_token_ids", !p.stop_token_ids.is_empty()),
        ("stop", !p.stop.is_empty()),
        ("bad_words", !p.bad_words.is_empty()),
        ("skip_special_tokens", p.skip_special_tokens.is_some()),
        ("ignore_eos", p.ignore_eos),
        ("seed", p.seed.is_some()),
        ("structured_outputs", p.structured_outputs.is_some()),
        ("thinking_token_budget", p.thinking_token_budget.is_some()),
    ];
    match meaningless.iter().find(|(_, set)| *set) {
        Some((name, _)) => Err(Error::invalid(format!("sampling.{name}"), "has no meaning in Score; leave it unset")),
        None => distribution(p, model),
    }
}

/// Checks the parameters that Generate and Score share, and leaves the others at their defaults.
fn distribution(p: &pb::SamplingParams, model: &ModelFacts) -> Result<SamplingParams> {
    let default = SamplingParams::default();
    let allowed = token_set("allowed_token_ids", &p.allowed_token_ids, model)?;
    Ok(SamplingParams {
        // Turns -0 into 0, as later code may look at the bits.
        temperature: float("temperature", p.temperature, default.temperature, TEMPERATURES)?.abs(),
        top_k: p.top_k.map_or(Ok(default.top_k), top_k)?,
        top_p: float("top_p", p.top_p, default.top_p, TOP_P)?,
        min_p: float("min_p", p.min_p, default.min_p, MIN_P)?,
        logit_bias: logit_bias(p, model)?,
        allowed_tokens: (!allowed.is_empty()).then_some(allowed),
        ..default
    })
}

/// 0 for the -1 by which trainers and other servers say that no token is left out.
fn top_k(given: i32) -> Result<u32> {
    match given {
        -1 => Ok(0),
        k => u32::try_from(k).map_err(|_| Error::invalid("sampling.top_k", format!("{k} is neither -1 nor a count"))),
    }
}

fn float(name: &str, given: Option<f32>, default: f32, (is_valid, numbers): Numbers) -> Result<f32> {
    let value = given.unwrap_or(default);
    ensure!(is_valid(value), format!("sampling.{name}"), "{value} is not {numbers}");
    Ok(value)
}

fn logit_bias(p: &pb::SamplingParams, model: &ModelFacts) -> Result<Vec<(TokenId, f32)>> {
    let mut bias: Vec<_> = p.logit_bias.iter().map(|(&token, &value)| (token, value)).collect();
    bias.sort_unstable_by_key(|&(token, _)| token);
    for &(token, value) in &bias {
        let (path, vocab_size) = (|| format!("sampling.logit_bias[{token}]"), model.vocab_size);
        ensure!((token as usize) < vocab_size, path(), "{token} is not below the vocabulary size {vocab_size}");
        let is_forbidden = value != 0.0 && model.forbidden_tokens().contains(&token);
        ensure!(!is_forbidden, path(), "no sample has this placeholder of an image or video; leave it out");
        ensure!(value.abs() <= MAX_LOGIT_BIAS, path(), "{value} is not a number in [-1e9, 1e9]");
    }
    Ok(bias)
}

/// The tokens `ids` in ascending order, each once.
fn token_set(name: &str, ids: &[TokenId], model: &ModelFacts) -> Result<Vec<TokenId>> {
    check_ids(format_args!("sampling.{name}"), ids, model)?;
    let mut set = ids.to_vec();
    set.sort_unstable();
    set.dedup();
    Ok(set)
}

fn stop_strings(stop: &[String], model: &ModelFacts) -> Result<Vec<String>> {
    if stop.is_empty() {
        return Ok(Vec::new());
    }
    encoder("sampling.stop", model, "use stop_token_ids")?;
    check_most("sampling.stop", stop.len(), "strings", MAX_STOP_STRINGS, "give fewer")?;
    for (i, s) in stop.iter().enumerate() {
        ensure!(!s.is_empty(), format!("sampling.stop[{i}]"), "is empty, and would end every sample at once");
        check_length(format_args!("sampling.stop[{i}]"), s, MAX_STOP_STRING_BYTES)?;
    }
    Ok(stop.to_vec())
}

/// The limit of `tokens` tokens on the model's reasoning.
fn thinking(tokens: u32, p: &pb::SamplingParams, spares_reasoning: bool, model: &ModelFacts) -> Result<ThinkingBudget> {
    let field = "sampling.thinking_token_budget";
    encoder(field, model, "leave it unset")?;
    let Some((open, close)) = model.reasoning_marks() else {
        let message = "this model's tokenizer does not have <think> and </think> as tokens; leave it unset";
        return Err(Error::invalid(field, message));
    };
    let message = "cannot be combined with structured_outputs, which constrain the text from its first token";
    ensure!(spares_reasoning || p.structured_outputs.is_none(), field, "{message}");
    let is_allowed = p.allowed_token_ids.is_empty() || p.allowed_token_ids.contains(&close);
    ensure!(is_allowed, "sampling.allowed_token_ids", "lacks {close} (</think>), which thinking_token_budget forces");
    Ok(ThinkingBudget { tokens, open, close })
}

/// The tokens of the words, by vLLM's rules: each as it is without white space in front, and with a space in front if
/// that makes another first token and not one more.
fn bad_words(words: &[String], model: &ModelFacts) -> Result<Vec<Vec<TokenId>>> {
    const FIELD: &str = "sampling.bad_words";
    const ADVICE: &str = "give fewer";
    if words.is_empty() {
        return Ok(Vec::new());
    }
    let tokenizer = &encoder(FIELD, model, "use logit_bias")?.tokenizer;
    check_most(FIELD, words.len(), "words", MAX_BAD_WORDS, ADVICE)?;
    let mut bad_words: Vec<Vec<TokenId>> = Vec::new();
    for (i, word) in words.iter().enumerate() {
        let path = format!("{FIELD}[{i}]");
        check_length(&path, word, MAX_BAD_WORD_BYTES)?;
        let word = word.trim_start();
        let plain = tokenizer.encode(word, false)?;
        ensure!(!plain.is_empty(), path, "{word:?} has no tokens; leave it out");
        let spaced = tokenizer.encode(&format!(" {word}"), false)?;
        let is_other = spaced.len() == plain.len() && spaced.first() != plain.first();
        bad_words.push(plain);
        bad_words.extend(is_other.then_some(spaced));
    }
    check_most(FIELD, bad_words.len(), "token sequences", MAX_BAD_WORDS, ADVICE)?;
    Ok(bad_words)
}

/// Checks that a token remains that may be sampled, also before `min_tokens`, when those that end a sample are banned.
fn check_satisfiable(params: &SamplingParams, model: &ModelFacts) -> Result<()> {
    let ends =
        |t: &TokenId| params.eos_token_ids.binary_search(t).is_ok() || params.stop_token_ids.binary_search(t).is_ok();
    let bad = params.bad_after(&[], &[]);
    let forbidden = model.forbidden_tokens();
    let is_banned = |t: &TokenId| params.min_tokens > 0 && ends(t) || bad.contains(t) || forbidden.contains(t);
    let (field, possible) = match &params.allowed_tokens {
        Some(allowed) => ("sampling.allowed_token_ids", !allowed.iter().all(is_banned)),
        None => ("sampling.stop_token_ids", !(0..model.vocab_size as TokenId).all(|t| is_banned(&t))),
    };
    ensure!(possible || bad.is_empty(), "sampling.bad_words", "they leave no token that may be sampled; give fewer");
    let least = params.min_tokens;
    ensure!(possible, field, "every token ends the sample, but min_tokens is {least}; no token is possible");
    Ok(())
}
