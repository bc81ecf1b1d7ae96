//! Further values that requests ask for beside log-probabilities, and the lists of most likely tokens.

use super::{MAX_ADAPTER_NAME_BYTES, ModelFacts, check_length, check_most, check_top_logprobs, pb};
use crate::engine::{OtherPolicies, TopArrays};
use crate::error::{Error, Result};
use crate::types::{Distribution, SamplingParams, TaskReturns};

/// Most ids of a support, if a request does not say how many. A support of top-p 0.95 has some tens of tokens on
/// average, and some thousands where the model knows nothing.
const DEFAULT_SUPPORT_IDS: u32 = 4096;
/// Most ids of a support that a request may ask for: 256 KiB for each token.
const MAX_SUPPORT_IDS: u32 = 65_536;
/// Most likely tokens of `returns.top`: 8 KiB for each token.
const MAX_TOP: u32 = 1024;
/// Most policies under which a sample is scored: each is one more forward pass over it.
const MAX_REFERENCES: usize = 8;

/// The checked fields of a request.
pub(super) struct Returns {
    pub task: TaskReturns,
    pub top_logprobs: u32,
    pub top_logprobs_of: Distribution,
    pub top_arrays: Option<TopArrays>,
    pub policies: OtherPolicies,
}

impl Returns {
    /// Lists of most likely tokens, and nothing else.
    fn of_lists(top_logprobs: u32, top_logprobs_of: Distribution) -> Self {
        let (task, policies) = (TaskReturns::default(), OtherPolicies::default());
        Self { task, top_logprobs, top_logprobs_of, top_arrays: None, policies }
    }

    /// The sampling parameters with these.
    pub(super) fn applied(&self, params: SamplingParams) -> SamplingParams {
        let Self { task, top_logprobs, top_logprobs_of, .. } = *self;
        let keeps_hidden = self.policies.divergences;
        SamplingParams { top_logprobs, top_logprobs_of, returns: task, keeps_hidden, ..params }
    }

    /// Checks that a Score of a sample with these parameters has the distribution that its tokens are drawn from, if
    /// the request asks for one.
    pub(super) fn check_current(&self, params: &SamplingParams, has_grammar: bool) -> Result<()> {
        let unscored = [
            ("repetition_penalty, presence_penalty or frequency_penalty", params.needs_history()),
            ("min_tokens", params.min_tokens > 0),
            ("bad_words", !params.bad_words.is_empty()),
            ("structured_outputs", has_grammar),
        ];
        match unscored.iter().find(|(_, is_set)| self.policies.current && *is_set) {
            None => Ok(()),
            Some((name, _)) => {
                let message =
                    format!("cannot be combined with {name}, which Score does not know; leave one of them out");
                Err(Error::invalid("returns.current", message))
            }
        }
    }
}

/// Checks the fields `returns`, `top_logprobs` and `top_logprobs_of` of a `GenerateRequest`.
pub(super) fn for_generate(request: &pb::GenerateRequest, model: &ModelFacts) -> Result<Returns> {
    let of = distribution("top_logprobs_of", request.top_logprobs_of)?;
    let returns = returns(request.returns.as_ref(), request.top_logprobs, of, model)?;
    let excluded = returns.top_arrays.is_some() && !request.logprob_token_ids.is_empty();
    ensure!(!excluded, "returns.top", "cannot be combined with logprob_token_ids; ask for one of them");
    Ok(returns)
}

/// Checks the fields `returns` and `top_logprobs` of a `ScoreRequest`.
pub(super) fn for_score(request: &pb::ScoreRequest, model: &ModelFacts) -> Result<Returns> {
    let returns = returns(request.returns.as_ref(), request.top_logprobs, Distribution::Raw, model)?;
    let mixed = returns.top_logprobs_of == Distribution::Processed && !request.logprob_token_ids.is_empty();
    ensure!(!mixed, "returns.top_of", "PROCESSED cannot be combined with logprob_token_ids, which are RAW; use RAW");
    ensure!(
        !returns.policies.current,
        "returns.current",
        "Score is always under the policy that serves; leave it unset"
    );
    Ok(returns)
}

fn returns(
    given: Option<&pb::Returns>,
    top_logprobs: u32,
    top_logprobs_of: Distribution,
    model: &ModelFacts,
) -> Result<Returns> {
    check_top_logprobs(top_logprobs, model)?;
    let Some(given) = given else {
        return Ok(Returns::of_lists(top_logprobs, top_logprobs_of));
    };
    let max_ids = given.max_support_ids.unwrap_or(DEFAULT_SUPPORT_IDS);
    check_most("returns.max_support_ids", max_ids as usize, "ids", MAX_SUPPORT_IDS as usize, "ask for fewer")?;
    let unused = given.max_support_ids.is_some() && !given.support;
    ensure!(!unused, "returns.max_support_ids", "means nothing without returns.support; set both or none");
    let task = TaskReturns { entropy: given.entropy, support: given.support.then_some(max_ids) };
    let top_of = distribution("returns.top_of", given.top_of)?;
    let policies = policies(given, model)?;
    let lists = Returns { task, policies, ..Returns::of_lists(top_logprobs, top_logprobs_of) };
    if given.top == 0 {
        return Ok(lists);
    }
    let (top, vocab_size) = (given.top, model.vocab_size);
    ensure!(top_logprobs == 0, "returns.top", "cannot be combined with top_logprobs; ask for one of them");
    ensure!(top <= MAX_TOP, "returns.top", "{top} is more than {MAX_TOP}");
    ensure!(top as usize <= vocab_size, "returns.top", "{top} is more than the vocabulary size {vocab_size}");
    let top_arrays = Some(TopArrays { as_bfloat16: given.top_as_bfloat16 });
    Ok(Returns { top_logprobs: top, top_logprobs_of: top_of, top_arrays, ..lists })
}

/// The other policies under which a request has its tokens scored.
fn policies(given: &pb::Returns, model: &ModelFacts) -> Result<OtherPolicies> {
    let &pb::Returns { base, current, divergences, .. } = given;
    let references = references(&given.references)?;
    ensure!(
        !base || model.keeps_base,
        "returns.base",
        "the server does not keep the base below a merged adapter; start it with --keep-base, or push the policy as a \
         resident adapter and name \"\" in returns.references"
    );
    ensure!(
        !divergences || base || !references.is_empty(),
        "returns.divergences",
        "are those from references; name some in returns.references, or set returns.base"
    );
    Ok(OtherPolicies { references, base, current, divergences })
}

/// The policies that a request names, each once.
fn references(names: &[String]) -> Result<Vec<Option<String>>> {
    check_most("returns.references", names.len(), "policies", MAX_REFERENCES, "name fewer")?;
    for (i, name) in names.iter().enumerate() {
        let path = || format!("returns.references[{i}]");
        check_length(path(), name, MAX_ADAPTER_NAME_BYTES)?;
        ensure!(!names[..i].contains(name), path(), "{name:?} is there twice; name each policy once");
    }
    Ok(names.iter().map(|name| (!name.is_empty()).then(|| name.clone())).collect())
}

fn distribution(field: &str, given: i32) -> Result<Distribution> {
    match pb::Distribution::try_from(given) {
        Ok(pb::Distribution::Unspecified | pb::Distribution::Raw) => Ok(Distribution::Raw),
        Ok(pb::Distribution::Processed) => Ok(Distribution::Processed),
        Err(_) => Err(Error::invalid(field, format!("{given} is not a Distribution; use RAW or PROCESSED"))),
    }
}
