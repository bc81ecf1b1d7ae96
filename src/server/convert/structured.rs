//! What a sample's text must match: the field of the request, compiled.

use std::sync::Arc;

use super::pb::structured_outputs::Kind;
use super::{ModelFacts, pb};
use crate::error::{Error, Result};
use crate::grammar::{Grammar, GrammarSource};
use crate::types::SamplingParams;

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
    let Some(encoder) = &model.encoder else {
        return Err(Error::invalid(FIELD, "this model has no tokenizer, so that no text is known"));
    };
    let (name, source) = source(given)?;
    let field = || format!("{FIELD}.{name}");
    // Special tokens have no text, so no grammar can ask for them; others are allowed where their text is.
    let stops = params.stop_token_ids.iter().filter(|token| encoder.tokenizer().is_special(**token));
    let ends: Vec<_> = params.eos_token_ids.iter().chain(stops).copied().collect();
    let grammar = encoder.grammars().compile(&source, model.vocab_size, &ends).map_err(|error| match error {
        Error::InvalidArgument { message, .. } => Error::invalid(field(), message),
        other => other,
    })?;
    if !grammar.can_start(params) {
        let message = "leaves no token to begin with; is it satisfiable, and do allowed_token_ids and min_tokens allow \
                       what it asks for?";
        return Err(Error::invalid(field(), message));
    }
    Ok(Some(Arc::new(grammar)))
}

/// What is asked for, and the name of its field.
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
