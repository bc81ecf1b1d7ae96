//! The grammar of a sample's text: the field of the request, compiled.

use std::sync::Arc;

use super::pb::structured_outputs::Kind;
use super::{ModelFacts, pb};
use crate::error::{Error, Result};
use crate::grammar::{Grammar, GrammarSource};
use crate::server::encoder::PromptEncoder;
use crate::types::{SamplingParams, TokenId};

const FIELD: &str = "sampling.structured_outputs";

/// The grammar of a request whose other parameters are `params`; `None` if its texts may be any.
///
/// # Errors
/// `InvalidArgument` with the path of the field; `ResourceExhausted` if too many grammars are being compiled.
pub(super) fn grammar(
    given: Option<pb::StructuredOutputs>,
    params: &SamplingParams,
    model: &ModelFacts,
) -> Result<Option<Arc<Grammar>>> {
    let Some(given) = given else { return Ok(None) };
    let requested = requested(given, params, model)?;
    let grammar = requested.compile(model)?;
    requested.check_start(&grammar, params)?;
    Ok(Some(Arc::new(grammar)))
}

/// A requested grammar that is not compiled yet.
pub(super) struct RequestedGrammar {
    name: &'static str,
    pub(super) source: GrammarSource,
    /// The tokens that end a sample.
    pub(super) ends: Vec<TokenId>,
}

/// The grammar that samples with the other parameters `params` request.
///
/// # Errors
/// `InvalidArgument` with the path of the field.
pub(super) fn requested(
    given: pb::StructuredOutputs,
    params: &SamplingParams,
    model: &ModelFacts,
) -> Result<RequestedGrammar> {
    let encoder = encoder(model)?;
    let (name, source) = source(given)?;
    // Special tokens have no text, so no grammar can ask for them; others are allowed where their text is.
    let stops = params.stop_token_ids.iter().filter(|token| encoder.tokenizer.is_special(**token));
    let ends = params.eos_token_ids.iter().chain(stops).copied().collect();
    Ok(RequestedGrammar { name, source, ends })
}

impl RequestedGrammar {
    /// Path of its field.
    pub(super) fn field(&self) -> String {
        format!("{FIELD}.{}", self.name)
    }

    /// # Errors
    /// `InvalidArgument` with the path of the field; `ResourceExhausted` if too many grammars are being compiled.
    pub(super) fn compile(&self, model: &ModelFacts) -> Result<Grammar> {
        let grammars = &encoder(model)?.grammars;
        grammars.compile(&self.source, model.vocab_size, &self.ends).map_err(|error| match error {
            Error::InvalidArgument { message, .. } => Error::invalid(self.field(), message),
            other => other,
        })
    }

    /// Checks that samples with `params` can have a first token.
    ///
    /// # Errors
    /// `InvalidArgument` with the path of the field.
    pub(super) fn check_start(&self, grammar: &Grammar, params: &SamplingParams) -> Result<()> {
        if grammar.can_start(params) {
            return Ok(());
        }
        let message = "leaves no token to begin with; is it satisfiable, and do allowed_token_ids and min_tokens allow \
                       what it asks for?";
        Err(Error::invalid(self.field(), message))
    }
}

fn encoder(model: &ModelFacts) -> Result<&PromptEncoder> {
    let missing = || Error::invalid(FIELD, "this model has no tokenizer, so that no text is known");
    model.encoder.as_deref().ok_or_else(missing)
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
