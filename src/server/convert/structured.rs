//! The grammar of a sample's text: the field of the request, compiled.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::pb::structured_outputs::Kind;
use super::{ModelFacts, encoder, pb};
use crate::error::{Error, Result};
use crate::grammar::{Grammar, GrammarSource};
use crate::text::{ReasoningFormat, ReasoningStart};
use crate::types::{SamplingParams, TokenId};

const FIELD: &str = "sampling.structured_outputs";
/// Most grammars of the prompts of one request: each is compiled when the request is received, and kept while it runs.
const MAX_GRAMMARS: usize = 64;

/// The grammars of one request, which its prompts share, by their sources and the tokens that end a sample.
#[derive(Default)]
pub(super) struct Grammars(HashMap<(GrammarSource, Vec<TokenId>), Arc<Grammar>>);

impl Grammars {
    /// The grammar of samples whose other parameters are `params`.
    ///
    /// # Errors
    /// `InvalidArgument` with the path of the field; `ResourceExhausted` if too many grammars are being compiled.
    pub(super) fn grammar(
        &mut self,
        given: pb::StructuredOutputs,
        params: &SamplingParams,
        model: &ModelFacts,
    ) -> Result<Arc<Grammar>> {
        let encoder = encoder(FIELD, model, "leave it unset")?;
        let (name, source) = source(given)?;
        let wrong = |message: String| Error::invalid(format!("{FIELD}.{name}"), message);
        // Special tokens have no text, so no grammar can ask for them; others are allowed where their text is.
        let stops = params.stop_token_ids.iter().filter(|token| encoder.tokenizer.is_special(**token));
        let ends = params.eos_token_ids.iter().chain(stops).copied().collect();
        let is_full = self.0.len() == MAX_GRAMMARS;
        let grammar = match self.0.entry((source, ends)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if is_full => {
                return Err(wrong(format!("a request has at most {MAX_GRAMMARS} of them; split the request")));
            }
            Entry::Vacant(new) => {
                let (source, ends) = new.key();
                let compiled = encoder.grammars.compile(source, model.vocab_size, ends);
                new.insert(Arc::new(compiled.map_err(|error| match error {
                    Error::InvalidArgument { message, .. } => wrong(message),
                    other => other,
                })?))
            }
        };
        if !grammar.can_start(params) {
            let message = "leaves no token to begin with; is it satisfiable, and do allowed_token_ids and min_tokens \
                           allow what it asks for?";
            return Err(wrong(message.into()));
        }
        Ok(grammar.clone())
    }
}

/// The grammar of what follows the reasoning, if a model with reasoning of this format may reason after `prompt`.
pub(super) fn after_reasoning(
    grammar: Arc<Grammar>,
    format: ReasoningFormat,
    prompt: &[TokenId],
    model: &ModelFacts,
) -> Arc<Grammar> {
    let Some((encoder, (open, close))) = model.encoder.as_ref().zip(model.reasoning_marks()) else { return grammar };
    match format.start_after(prompt, &encoder.tokenizer) {
        ReasoningStart::Closed => grammar,
        start => Arc::new(grammar.after_reasoning(open, close, start == ReasoningStart::Open)),
    }
}

/// The source of the grammar, and the name of its field.
fn source(given: pb::StructuredOutputs) -> Result<(&'static str, GrammarSource)> {
    match given.kind {
        Some(Kind::Regex(regex)) => Ok(("regex", GrammarSource::Regex(regex))),
        Some(Kind::JsonSchema(schema)) => Ok(("json_schema", GrammarSource::JsonSchema(schema))),
        Some(Kind::Choice(pb::Choices { choices })) => Ok(("choice", GrammarSource::Choice(choices))),
        Some(Kind::Grammar(lark)) => Ok(("grammar", GrammarSource::Lark(lark))),
        Some(Kind::JsonObject(true)) => Ok(("json_object", GrammarSource::JsonObject)),
        Some(Kind::JsonObject(false)) => {
            Err(Error::invalid(format!("{FIELD}.json_object"), "false; leave structured_outputs unset for any text"))
        }
        None => Err(Error::invalid(FIELD, "is empty; give regex, json_schema, choice, grammar or json_object")),
    }
}
