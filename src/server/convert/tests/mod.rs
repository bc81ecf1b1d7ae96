mod replies;
mod requests;
mod texts;

use crate::server::parts::ModelFacts;

/// Vocabulary 100, context 8, token 99 ends a sequence.
fn model() -> ModelFacts {
    ModelFacts { vocab_size: 100, max_model_len: 8, eos_token_ids: vec![99], text: None }
}
