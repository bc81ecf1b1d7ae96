mod chats;
mod images;
mod requests;
mod returns;
mod texts;

use super::{ModelFacts, pb};
use crate::engine::ValidRequest;
use crate::error::{Error, Result};
use crate::memory::Traffic;

fn generate(request: pb::GenerateRequest, model: &ModelFacts) -> Result<ValidRequest> {
    super::generate(request, model, &mut Traffic::new(1 << 20).charge_always(0))
}

fn score(request: pb::ScoreRequest, model: &ModelFacts) -> Result<ValidRequest> {
    super::score(request, model, &mut Traffic::new(1 << 20).charge_always(0))
}

/// A model with a vocabulary of 100 and a context of 8, in which token 99 ends a sequence.
fn model() -> ModelFacts {
    model_of(8)
}

/// As [`model`], with a context of so many tokens.
fn model_of(max_model_len: usize) -> ModelFacts {
    ModelFacts { vocab_size: 100, max_model_len, eos_token_ids: vec![99], ..Default::default() }
}

/// The path and the message of the InvalidArgument that `result` is.
fn refusal<T>(result: Result<T>) -> (String, String) {
    match result {
        Err(Error::InvalidArgument { field, message }) => (field, message),
        Err(other) => panic!("not InvalidArgument: {other}"),
        Ok(_) => panic!("accepted"),
    }
}
