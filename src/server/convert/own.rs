//! Sampling parameters that a prompt has of its own, instead of those of its request.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{ModelFacts, pb, sampling, structured};
use crate::engine::PromptSampling;
use crate::error::{Error, Result};
use crate::grammar::{Grammar, GrammarSource};
use crate::types::{Distribution, TokenId};

/// Most grammars of one request: each is compiled when the request comes, and kept while it runs.
const MAX_GRAMMARS: usize = 64;

/// What prompts share with their request.
pub(super) struct Shared {
    pub(super) top_logprobs: u32,
    pub(super) top_logprobs_of: Distribution,
}

/// The prompts of a request that have parameters of their own, by their index.
///
/// # Errors
/// `InvalidArgument` with the path of the field; `ResourceExhausted` if too many grammars are being compiled.
pub(super) fn own_sampling(
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

/// The grammars of one request, each of which its prompts share.
#[derive(Default)]
struct Grammars(HashMap<(GrammarSource, Vec<TokenId>), Arc<Grammar>>);

impl Grammars {
    fn sampling(&mut self, given: pb::SamplingParams, shared: &Shared, model: &ModelFacts) -> Result<PromptSampling> {
        let mut params = sampling::for_generate(Some(&given), shared.top_logprobs, model)?;
        params.top_logprobs_of = shared.top_logprobs_of;
        let grammar = given.structured_outputs.map(|outputs| {
            let asked = structured::asked(outputs, &params, model)?;
            let key = (asked.source.clone(), asked.ends.clone());
            let grammar = match self.0.get(&key) {
                Some(grammar) => grammar.clone(),
                None if self.0.len() == MAX_GRAMMARS => {
                    let message = format!("a request has at most {MAX_GRAMMARS} of them; split the request");
                    return Err(Error::invalid(asked.field(), message));
                }
                None => {
                    let grammar = Arc::new(asked.compile(model)?);
                    self.0.insert(key, grammar.clone());
                    grammar
                }
            };
            asked.check_start(&grammar, &params)?;
            Ok(grammar)
        });
        Ok(PromptSampling { grammar: grammar.transpose()?, params: Arc::new(params), seed: given.seed })
    }
}
