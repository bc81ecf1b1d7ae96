//! Turns prompts of text and of chat messages into token ids. The engine knows only those.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::grammar::GrammarCompiler;
use crate::memory::{Charge, Traffic};
use crate::text::{ChatTemplate, Conversation, ReasoningFormat, Tokenizer};
use crate::types::TokenId;

/// Most bytes that encoding takes for a byte of text. Random letters, each of them a token, took 250.
const ENCODING: u64 = 256;

/// The model's tokenizer and, if the model has one, its chat template.
pub struct PromptEncoder {
    pub tokenizer: Arc<Tokenizer>,
    pub(super) chat_template: Option<ChatTemplate>,
    /// The format of the reasoning that chats over HTTP report apart from the answer.
    pub(super) reasoning: Option<ReasoningFormat>,
    /// Compiles the grammars of structured output.
    pub(super) grammars: GrammarCompiler,
}

impl PromptEncoder {
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        chat_template: Option<ChatTemplate>,
        reasoning: Option<ReasoningFormat>,
    ) -> Self {
        Self { grammars: GrammarCompiler::new(tokenizer.clone()), tokenizer, chat_template, reasoning }
    }

    /// Compiles the grammar of JSON objects, for a model with `logits` logits in a row.
    pub fn prepare_grammars(&self, logits: usize) {
        self.grammars.prepare(logits);
    }

    /// The ids of `text`, with the tokenizer's special tokens if `add_special`. A text that certainly does not fit the
    /// context, or for which there is no memory now, is rejected before any work.
    ///
    /// # Errors
    /// `InvalidArgument` for the field `path`.
    pub(super) fn encode_text(
        &self,
        path: &str,
        text: &str,
        add_special: bool,
        max_tokens: usize,
        charge: &mut Charge,
    ) -> Result<Vec<TokenId>> {
        if let Some(longest) = self.tokenizer.max_bytes_per_token().filter(|&b| text.len() / b > max_tokens) {
            let message = format!(
                "{} bytes of text cannot fit in the context of {max_tokens} tokens, of which none stands for more than \
                 {longest} bytes; shorten it",
                text.len(),
            );
            return Err(Error::invalid(path, message));
        }
        charge
            .hold(text.len() as u64 * ENCODING, || self.tokenizer.encode(text, add_special).map_err(|e| at(path, e)))?
    }

    /// The text of a chat by the model's template, and the charge that covers it.
    ///
    /// # Errors
    /// `InvalidArgument` for the field `path`; `ResourceExhausted` if there is no room for the text now.
    pub(super) fn render(&self, path: &str, conversation: Conversation, traffic: &Traffic) -> Result<(String, Charge)> {
        let Some(template) = &self.chat_template else {
            return Err(Error::invalid(path, "this model has no chat template; give text or token ids"));
        };
        template.render(conversation, traffic).map_err(|e| at(path, e))
    }
}

/// Adds the field's path to an error of the text layer, which does not know where in the request its input was.
fn at(path: &str, error: Error) -> Error {
    match error {
        Error::InvalidArgument { message, .. } => Error::invalid(path, message),
        other => other,
    }
}

#[cfg(test)]
mod tests;
