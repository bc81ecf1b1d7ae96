//! The only place that checks requests: protobuf messages become valid types here, and answers become messages. Values
//! that leave this module need no further checks. HTTP makes the same messages of its bodies, so each field has one
//! check and one default. A wrong field is rejected with `InvalidArgument` and its path.

/// Returns `InvalidArgument` with the path of a field and a message, unless a condition holds.
macro_rules! ensure {
    ($condition:expr, $field:expr, $($message:tt)+) => {
        let holds: bool = $condition;
        if !holds {
            return Err($crate::error::Error::invalid($field, format!($($message)+)));
        }
    };
}

mod chat;
pub(super) mod data_url;
mod images;
mod lifecycle;
mod prompt;
mod returns;
mod routing;
mod sampling;
mod structured;
#[cfg(test)]
mod tests;
mod timeline;
mod update;

use std::collections::{BTreeMap, HashSet};
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

pub(super) use lifecycle::{asleep, drain_mode, lifecycle, sleep_level, sleep_reply, wake_tags};
pub(super) use prompt::unlimited;
pub(super) use timeline::{stall, timeline};
pub(super) use update::{adapters, describe, dtype, header, open_update, tensors, update_reply};

use super::encoder::PromptEncoder;
use super::pb;
use super::state::ModelFacts;
use crate::engine::{AbortTarget, RequestKind, ValidRequest};
use crate::error::{Error, Result};
use crate::grammar::Grammar;
use crate::memory::Charge;
use crate::text::{ReasoningFormat, StopStrings};
use crate::types::{Prompt, SamplingParams, TokenId, WeightVersion};

/// Most samples of one prompt: GRPO groups are 4 to 64, best-of-n and pass@k go up to 1,000.
const MAX_SAMPLES_PER_PROMPT: u32 = 1024;
/// Most samples (or scored sequences) of one request: the scheduler keeps a record of each for as long as the request
/// runs. Large trainers sample 1,024 prompts x 16; this is four times that.
const MAX_SAMPLES_PER_REQUEST: usize = 65_536;
/// Most log-probabilities per position: a reply carries 8 bytes for each of them at each token.
pub(super) const MAX_TOP_LOGPROBS: u32 = 100;
/// Most tokens that a request names for its log-probabilities at a position: vLLM's limit.
const MAX_LOGPROB_TOKEN_IDS: usize = 128;
/// Longest request id in bytes. Ids are kept, compared and logged.
const MAX_REQUEST_ID_BYTES: usize = 256;
/// Longest name of a resident adapter in bytes. Names are kept, compared and logged.
const MAX_ADAPTER_NAME_BYTES: usize = 256;
/// Longest name of a parameter in bytes. Names in today's models have up to 120.
const MAX_PARAMETER_NAME_BYTES: usize = 512;
/// Most requests that one Abort names: as many as one Generate can have samples.
const MAX_ABORTED_REQUESTS: usize = 65_536;

impl ValidRequest {
    /// Estimate of the bytes that the request takes while it runs, besides its prompts: the engine's and the
    /// scheduler's records of its samples. Sampled tokens are counted when they are made.
    pub(super) fn bytes(&self) -> u64 {
        /// Bytes that one prompt or one sample takes, including its entries in maps and queues.
        const RECORD: usize = 512;
        let n = self.num_samples() / self.prompts.len();
        let shared =
            params_bytes(&self.params, self.grammar.is_some(), (self.prompts.len() - self.prompt_sampling.len()) * n);
        let own = self.prompt_sampling.values().map(|own| RECORD + params_bytes(&own.params, own.grammar.is_some(), n));
        let records = (self.prompts.len() + self.num_samples()) * RECORD;
        (records + shared + own.sum::<usize>() + self.grammar_bytes()) as u64
    }

    /// Estimate of the bytes that the prompts take until the end of the reply, which sends each of them back: a copy of
    /// one at a time, and its encoded bytes.
    pub(super) fn prompt_bytes(&self) -> u64 {
        let bytes = self.prompts.iter().map(Prompt::heap_bytes);
        let longest = bytes.clone().max().unwrap_or(0);
        (bytes.sum::<usize>() + 2 * longest) as u64
    }

    /// Bytes of all grammars, without the state of each sample. Several prompts may share one.
    fn grammar_bytes(&self) -> usize {
        let all = self.grammar.iter().chain(self.prompt_sampling.values().filter_map(|own| own.grammar.as_ref()));
        let mut counted = HashSet::new();
        all.filter(|grammar| counted.insert(Arc::as_ptr(grammar))).map(|grammar| grammar.bytes()).sum()
    }
}

/// Bytes that sampling parameters take, with what each of so many samples has for itself to search for stop strings and
/// to follow a grammar.
fn params_bytes(params: &SamplingParams, has_grammar: bool, samples: usize) -> usize {
    let searched = StopStrings::bytes_for(&params.stop_strings);
    let each = params.stop_strings.len() * size_of::<usize>() + if has_grammar { Grammar::SAMPLE_BYTES } else { 0 };
    params.heap_bytes() + searched + samples * each
}

/// Checks a `GenerateRequest`. `charge` is the charge of the request's message; it also covers the memory of encoding
/// texts while they are encoded.
///
/// # Errors
/// `ResourceExhausted` if there is not enough memory to encode its texts, or too many grammars are being compiled.
pub(super) fn generate(request: pb::GenerateRequest, model: &ModelFacts, charge: &mut Charge) -> Result<ValidRequest> {
    generate_sparing(request, None, model, charge)
}

/// Checks a `GenerateRequest` of one prompt. Its grammar constrains only what follows the reasoning of the format
/// `spared`, if one is given.
///
/// # Errors
/// Those of [`generate`].
pub(super) fn generate_sparing(
    mut request: pb::GenerateRequest,
    spared: Option<ReasoningFormat>,
    model: &ModelFacts,
    charge: &mut Charge,
) -> Result<ValidRequest> {
    check_versions(request.if_weight_version, request.min_weight_version)?;
    let returns = returns::for_generate(&request, model)?;
    let return_routing = routing::returned(request.return_routing, model)?;
    let n = check_n(request.n, request.prompts.len())?;
    if request.return_text {
        encoder("return_text", model, "ask for token ids only")?;
    }
    let (sampling, prompt_sampling) = sampling::for_generate(&mut request, &returns, spared.is_some(), model)?;
    let request_id = request_id(request.request_id)?;
    let prompts = prompt::prompts(request.prompts, model, charge)?;
    let spare = |grammar| match spared.zip(prompts.first()) {
        Some((format, prompt)) => structured::after_reasoning(grammar, format, &prompt.tokens, model),
        None => grammar,
    };
    Ok(ValidRequest {
        request_id,
        kind: RequestKind::Generate {
            n,
            seed: sampling.seed.unwrap_or_else(rand::random),
            prompt_logprobs: request.prompt_logprobs,
            stream_tokens: request.stream_tokens,
            return_text: request.return_text,
        },
        params: sampling.params,
        grammar: sampling.grammar.map(spare),
        prompts,
        prompt_sampling,
        policies: returns.policies,
        top_arrays: returns.top_arrays,
        return_routing,
        adapter: named(request.adapter)?,
        if_weight_version: request.if_weight_version,
        min_weight_version: request.min_weight_version,
        time_limit: request.time_limit_seconds.map(time_limit).transpose()?,
    })
}

/// Checks a `ScoreRequest`. `charge` is the charge of the request's message.
pub(super) fn score(request: pb::ScoreRequest, model: &ModelFacts, charge: &mut Charge) -> Result<ValidRequest> {
    check_versions(request.if_weight_version, request.min_weight_version)?;
    let returns = returns::for_score(&request, model)?;
    let return_routing = routing::returned(request.return_routing, model)?;
    let params = sampling::for_score(&request.sampling.unwrap_or_default(), model)?;
    Ok(ValidRequest {
        request_id: request_id(String::new())?,
        prompts: prompt::sequences(
            request.sequences,
            (request.logprob_token_ids, request.images, request.routing),
            model,
            charge,
        )?,
        kind: RequestKind::Score,
        params: Arc::new(returns.applied(params)),
        grammar: None,
        prompt_sampling: BTreeMap::new(),
        policies: returns.policies,
        top_arrays: returns.top_arrays,
        return_routing,
        adapter: named(request.adapter)?,
        if_weight_version: request.if_weight_version,
        min_weight_version: request.min_weight_version,
        time_limit: None,
    })
}

/// The requests that an Abort ends, which names them or all.
pub(super) fn abort(request: pb::AbortRequest) -> Result<AbortTarget> {
    match (request.all, request.request_ids.is_empty()) {
        (true, true) => return Ok(AbortTarget::All),
        (true, false) => return Err(Error::invalid("all", "cannot be combined with request_ids; give one of them")),
        (false, true) => return Err(Error::invalid("request_ids", "is empty; name requests or set all")),
        (false, false) => {}
    }
    let ids = request.request_ids;
    check_most("request_ids", ids.len(), "ids", MAX_ABORTED_REQUESTS, "abort in several calls")?;
    check_lengths("request_ids", &ids, MAX_REQUEST_ID_BYTES)?;
    Ok(AbortTarget::Requests(ids))
}

fn request_id(given: String) -> Result<String> {
    if given.is_empty() {
        return Ok(format!("req-{:016x}", rand::random::<u64>()));
    }
    check_length("request_id", &given, MAX_REQUEST_ID_BYTES)?;
    Ok(given)
}

/// The adapter that a request names; None for an empty name, which means the policy itself. Whether the adapter is
/// resident is for the engine to check.
fn named(adapter: String) -> Result<Option<String>> {
    check_length("adapter", &adapter, MAX_ADAPTER_NAME_BYTES)?;
    Ok((!adapter.is_empty()).then_some(adapter))
}

/// The adapter that a `RemoveAdapter` names.
pub(super) fn adapter_name(name: String) -> Result<String> {
    check_length("name", &name, MAX_ADAPTER_NAME_BYTES)?;
    Ok(name)
}

/// The parameters that a `Checksum` names.
pub(super) fn parameter_names(names: Vec<String>) -> Result<Vec<String>> {
    check_lengths("names", &names, MAX_PARAMETER_NAME_BYTES)?;
    Ok(names)
}

/// Checks that `text` has at most `most` bytes. Every text of a client has a limit, because texts are kept, compared
/// and echoed.
fn check_length(field: impl Display, text: &str, most: usize) -> Result<()> {
    check_most(field, text.len(), "bytes", most, "choose a shorter one")
}

/// Checks that each text of a list has at most `most` bytes.
fn check_lengths(field: &str, texts: &[String], most: usize) -> Result<()> {
    texts.iter().enumerate().try_for_each(|(i, text)| check_length(format_args!("{field}[{i}]"), text, most))
}

/// Checks that `count`, of things called `unit`, is at most `most`.
fn check_most(field: impl Display, count: usize, unit: &str, most: usize, advice: &str) -> Result<()> {
    ensure!(count <= most, field.to_string(), "{count} {unit} are more than {most}; {advice}");
    Ok(())
}

/// Checks that token ids are below the vocabulary size.
fn check_ids(field: impl Display, ids: &[TokenId], model: &ModelFacts) -> Result<()> {
    let Some(i) = ids.iter().position(|&id| id as usize >= model.vocab_size) else { return Ok(()) };
    let message = format!("{} is not below the vocabulary size {}", ids[i], model.vocab_size);
    Err(Error::invalid(format!("{field}[{i}]"), message))
}

/// Checks tokens that a request names for their log-probabilities.
fn check_logprob_token_ids(field: impl Display + Copy, ids: &[TokenId], model: &ModelFacts) -> Result<()> {
    check_most(field, ids.len(), "tokens", MAX_LOGPROB_TOKEN_IDS, "name fewer")?;
    check_ids(field, ids, model)
}

/// The model's encoder, without which `field` means nothing.
fn encoder<'a>(field: &str, model: &'a ModelFacts, advice: &str) -> Result<&'a PromptEncoder> {
    let missing = || Error::invalid(field, format!("this model has no tokenizer; {advice}"));
    model.encoder.as_deref().ok_or_else(missing)
}

fn check_versions(exact: Option<WeightVersion>, least: Option<WeightVersion>) -> Result<()> {
    if let (Some(exact), Some(least)) = (exact, least)
        && exact < least
    {
        let message = format!("{exact} is below min_weight_version {least}, so both can never hold; give one of them");
        return Err(Error::invalid("if_weight_version", message));
    }
    Ok(())
}

fn check_top_logprobs(k: u32, model: &ModelFacts) -> Result<()> {
    ensure!(k <= MAX_TOP_LOGPROBS, "top_logprobs", "{k} is more than {MAX_TOP_LOGPROBS}");
    let vocab_size = model.vocab_size;
    ensure!(k as usize <= vocab_size, "top_logprobs", "{k} is more than the vocabulary size {vocab_size}");
    Ok(())
}

fn time_limit(seconds: f64) -> Result<Duration> {
    ensure!(seconds >= 0.0, "time_limit_seconds", "{seconds} is not a number of seconds from 0 on");
    Ok(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

fn check_n(n: Option<u32>, prompts: usize) -> Result<u32> {
    let n = n.unwrap_or(1);
    ensure!(n > 0, "n", "0 samples; ask for at least 1");
    if n > MAX_SAMPLES_PER_PROMPT {
        let message = format!("{n} is more than {MAX_SAMPLES_PER_PROMPT} samples of one prompt; repeat the prompt");
        return Err(Error::invalid("n", message));
    }
    let total = prompts.saturating_mul(n as usize);
    if total > MAX_SAMPLES_PER_REQUEST {
        let message = format!(
            "{prompts} prompts x {n} samples = {total}, more than {MAX_SAMPLES_PER_REQUEST}; split the request"
        );
        return Err(Error::invalid("n", message));
    }
    Ok(n)
}
