//! Sampling parameters of requests: checks every range and fills in every default.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{ModelFacts, pb, structured};
use crate::engine::PromptSampling;
use crate::error::{Error, Result};
use crate::grammar::{Grammar, GrammarSource};
use crate::types::{Distribution, SamplingParams, TokenId};

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
/// Most grammars of one request: each is compiled when the request is received, and kept while it runs.
const MAX_GRAMMARS: usize = 64;

/// Checks the `SamplingParams` of a `GenerateRequest`.
pub(super) fn for_generate(
    given: Option<&pb::SamplingParams>,
    top_logprobs: u32,
    model: &ModelFacts,
) -> Result<SamplingParams> {
    let unset = pb::SamplingParams::default();
    let p = given.unwrap_or(&unset);
    let default = SamplingParams::default();
    let max_tokens = p.max_tokens.unwrap_or(default.max_tokens);
    if max_tokens == 0 {
        return Err(Error::invalid("sampling.max_tokens", "0 tokens; ask for at least 1, or use Score"));
    }
    let min_tokens = p.min_tokens.unwrap_or(default.min_tokens);
    if min_tokens > max_tokens {
        let message = format!("{min_tokens} is more than max_tokens {max_tokens}");
        return Err(Error::invalid("sampling.min_tokens", message));
    }
    let penalty = "a number in [-2, 2]";
    let params = SamplingParams {
        repetition_penalty: float(
            "repetition_penalty",
            p.repetition_penalty,
            default.repetition_penalty,
            |v| (MIN_DIVISOR..=1.0 / MIN_DIVISOR).contains(&v),
            "a number in [1e-6, 1e6]",
        )?,
        presence_penalty: float("presence_penalty", p.presence_penalty, 0.0, |v| v.abs() <= 2.0, penalty)?,
        frequency_penalty: float("frequency_penalty", p.frequency_penalty, 0.0, |v| v.abs() <= 2.0, penalty)?,
        min_tokens,
        max_tokens,
        eos_token_ids: if p.ignore_eos { Vec::new() } else { model.eos_token_ids.clone() },
        stop_token_ids: token_set("stop_token_ids", &p.stop_token_ids, model)?,
        stop_strings: stop_strings(&p.stop, model)?,
        ..distribution(p, top_logprobs, model)?
    };
    check_satisfiable(&params, model)?;
    Ok(params)
}

/// Checks the `SamplingParams` of a `ScoreRequest`, which has only those of the distribution, as nothing is sampled.
pub(super) fn for_score(
    given: Option<&pb::SamplingParams>,
    top_logprobs: u32,
    model: &ModelFacts,
) -> Result<SamplingParams> {
    let unset = pb::SamplingParams::default();
    let p = given.unwrap_or(&unset);
    let meaningless = [
        ("repetition_penalty", p.repetition_penalty.is_some()),
        ("presence_penalty", p.presence_penalty.is_some()),
        ("frequency_penalty", p.frequency_penalty.is_some()),
        ("min_tokens", p.min_tokens.is_some()),
        ("max_tokens", p.max_tokens.is_some()),
        ("stop_token_ids", !p.stop_token_ids.is_empty()),
        ("stop", !p.stop.is_empty()),
        ("ignore_eos", p.ignore_eos),
        ("seed", p.seed.is_some()),
        ("structured_outputs", p.structured_outputs.is_some()),
    ];
    match meaningless.iter().find(|(_, set)| *set) {
        Some((name, _)) => Err(Error::invalid(format!("sampling.{name}"), "has no meaning in Score; leave it unset")),
        None => distribution(p, top_logprobs, model),
    }
}

/// Checks the parameters that Generate and Score share, and leaves the others at their defaults.
fn distribution(p: &pb::SamplingParams, top_logprobs: u32, model: &ModelFacts) -> Result<SamplingParams> {
    let default = SamplingParams::default();
    let temperature = float(
        "temperature",
        p.temperature,
        default.temperature,
        |v| v == 0.0 || (v >= MIN_DIVISOR && v.is_finite()),
        "a number >= 0 (0 for greedy, else at least 1e-6)",
    )?;
    let top_p = |v: f32| v > 0.0 && v <= 1.0;
    let min_p = |v: f32| (0.0..=1.0).contains(&v);
    let allowed = token_set("allowed_token_ids", &p.allowed_token_ids, model)?;
    Ok(SamplingParams {
        // Turns -0 into 0, as later code may look at the bits.
        temperature: temperature.abs(),
        top_k: p.top_k.map_or(Ok(default.top_k), top_k)?,
        top_p: float("top_p", p.top_p, default.top_p, top_p, "a number in (0, 1]")?,
        min_p: float("min_p", p.min_p, default.min_p, min_p, "a number in [0, 1]")?,
        logit_bias: logit_bias(p, model)?,
        allowed_tokens: (!allowed.is_empty()).then_some(allowed),
        top_logprobs,
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

fn float(name: &str, given: Option<f32>, default: f32, valid: impl Fn(f32) -> bool, must_be: &str) -> Result<f32> {
    let value = given.unwrap_or(default);
    if valid(value) {
        return Ok(value);
    }
    Err(Error::invalid(format!("sampling.{name}"), format!("{value} is not {must_be}")))
}

fn logit_bias(p: &pb::SamplingParams, model: &ModelFacts) -> Result<Vec<(TokenId, f32)>> {
    let mut bias: Vec<_> = p.logit_bias.iter().map(|(&token, &value)| (token, value)).collect();
    bias.sort_unstable_by_key(|&(token, _)| token);
    for &(token, value) in &bias {
        let path = || format!("sampling.logit_bias[{token}]");
        if token as usize >= model.vocab_size {
            let message = format!("{token} is not below the vocabulary size {}", model.vocab_size);
            return Err(Error::invalid(path(), message));
        }
        if value.is_nan() || value.abs() > MAX_LOGIT_BIAS {
            return Err(Error::invalid(path(), format!("{value} is not a number in [-1e9, 1e9]")));
        }
    }
    Ok(bias)
}

/// The tokens `ids` in ascending order, each once.
fn token_set(name: &str, ids: &[TokenId], model: &ModelFacts) -> Result<Vec<TokenId>> {
    if let Some(i) = ids.iter().position(|&id| id as usize >= model.vocab_size) {
        let message = format!("{} is not below the vocabulary size {}", ids[i], model.vocab_size);
        return Err(Error::invalid(format!("sampling.{name}[{i}]"), message));
    }
    let mut set = ids.to_vec();
    set.sort_unstable();
    set.dedup();
    Ok(set)
}

fn stop_strings(stop: &[String], model: &ModelFacts) -> Result<Vec<String>> {
    if stop.is_empty() {
        return Ok(Vec::new());
    }
    if model.encoder.is_none() {
        return Err(Error::invalid("sampling.stop", "this model has no tokenizer; use stop_token_ids"));
    }
    if stop.len() > MAX_STOP_STRINGS {
        let message = format!("{} strings are more than {MAX_STOP_STRINGS}", stop.len());
        return Err(Error::invalid("sampling.stop", message));
    }
    for (i, s) in stop.iter().enumerate() {
        let path = || format!("sampling.stop[{i}]");
        if s.is_empty() {
            return Err(Error::invalid(path(), "is empty, and would end every sample at once"));
        }
        if s.len() > MAX_STOP_STRING_BYTES {
            let message = format!("{} bytes are more than {MAX_STOP_STRING_BYTES}", s.len());
            return Err(Error::invalid(path(), message));
        }
    }
    Ok(stop.to_vec())
}

/// Checks that a token remains that may be sampled before `min_tokens`, when the tokens that end a sample are banned.
fn check_satisfiable(params: &SamplingParams, model: &ModelFacts) -> Result<()> {
    if params.min_tokens == 0 {
        return Ok(());
    }
    let ends =
        |t: &TokenId| params.eos_token_ids.binary_search(t).is_ok() || params.stop_token_ids.binary_search(t).is_ok();
    let (field, possible) = match &params.allowed_tokens {
        Some(allowed) => ("sampling.allowed_token_ids", !allowed.iter().all(ends)),
        None => ("sampling.stop_token_ids", !(0..model.vocab_size as TokenId).all(|t| ends(&t))),
    };
    if possible {
        return Ok(());
    }
    let message = format!("every token ends the sample, but min_tokens is {}; no token is possible", params.min_tokens);
    Err(Error::invalid(field, message))
}

/// The parameters that all prompts have from their request.
pub(super) struct Shared {
    pub(super) top_logprobs: u32,
    pub(super) top_logprobs_of: Distribution,
}

/// The prompts of a request that have parameters of their own, by their index.
///
/// # Errors
/// `InvalidArgument` with the path of the field; `ResourceExhausted` if too many grammars are being compiled.
pub(super) fn prompt_sampling(
    prompts: &mut [pb::Prompt],
    shared: &Shared,
    model: &ModelFacts,
) -> Result<BTreeMap<u32, PromptSampling>> {
    let mut grammars = Grammars::default();
    let mut own = BTreeMap::new();
    for (index, prompt) in (0..).zip(prompts) {
        if let Some(given) = prompt.sampling.take() {
            let sampling = grammars.sampling(*given, shared, model);
            own.insert(index, sampling.map_err(|error| error.within(&format!("prompts[{index}]")))?);
        }
    }
    Ok(own)
}

/// The grammars of one request, which its prompts share.
#[derive(Default)]
struct Grammars(HashMap<(GrammarSource, Vec<TokenId>), Arc<Grammar>>);

impl Grammars {
    fn sampling(&mut self, given: pb::SamplingParams, shared: &Shared, model: &ModelFacts) -> Result<PromptSampling> {
        let mut params = for_generate(Some(&given), shared.top_logprobs, model)?;
        params.top_logprobs_of = shared.top_logprobs_of;
        let grammar = given.structured_outputs.map(|outputs| {
            let requested = structured::requested(outputs, &params, model)?;
            let key = (requested.source.clone(), requested.ends.clone());
            let grammar = match self.0.get(&key) {
                Some(grammar) => grammar.clone(),
                None if self.0.len() == MAX_GRAMMARS => {
                    let message = format!("a request has at most {MAX_GRAMMARS} of them; split the request");
                    return Err(Error::invalid(requested.field(), message));
                }
                None => {
                    let grammar = Arc::new(requested.compile(model)?);
                    self.0.insert(key, grammar.clone());
                    grammar
                }
            };
            requested.check_start(&grammar, &params)?;
            Ok(grammar)
        });
        Ok(PromptSampling { grammar: grammar.transpose()?, params: Arc::new(params), seed: given.seed })
    }
}
