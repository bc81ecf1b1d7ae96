//! Turns prompts of text and of chat messages into token ids. The engine knows only those.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::grammar::GrammarCompiler;
use crate::memory::{Charge, Traffic};
use crate::text::{ChatTemplate, Conversation, ReasoningFormat, Tokenizer};
use crate::types::{TokenId, ToolFormat};

/// Most bytes that encoding takes for a byte of text. Random letters, each of them a token, took 250.
const ENCODING: u64 = 256;

/// The model's tokenizer and, if the model has one, its chat template.
pub struct PromptEncoder {
    pub tokenizer: Arc<Tokenizer>,
    pub(super) chat_template: Option<ChatTemplate>,
    /// The format of the reasoning that chats over HTTP report apart from the answer.
    reasoning: Option<ReasoningFormat>,
    /// None if requests may not bring templates.
    request_templates: Option<RequestTemplates>,
    /// Compiles the grammars of structured output.
    pub(super) grammars: GrammarCompiler,
}

/// How templates that requests bring are used.
pub struct RequestTemplates {
    /// Text of each special token by its variable in templates.
    pub special_tokens: BTreeMap<String, String>,
    /// Whether the format of the reasoning is found from the template.
    pub finds_reasoning: bool,
}

impl PromptEncoder {
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        chat_template: Option<ChatTemplate>,
        reasoning: Option<ReasoningFormat>,
        request_templates: Option<RequestTemplates>,
    ) -> Self {
        let grammars = GrammarCompiler::new(tokenizer.clone());
        Self { grammars, tokenizer, chat_template, reasoning, request_templates }
    }

    /// The format of tool calls in the answers to a chat, which may bring its own template.
    pub(super) fn tool_format(&self, own_template: Option<&str>) -> Option<ToolFormat> {
        match own_template {
            Some(source) => ToolFormat::of_template(source),
            None => self.chat_template.as_ref()?.tool_format(),
        }
    }

    /// The format of the reasoning in the answers to a chat, which may bring its own template.
    pub(super) fn reasoning(&self, own_template: Option<&str>) -> Option<ReasoningFormat> {
        match own_template {
            Some(source) if self.request_templates.as_ref().is_some_and(|given| given.finds_reasoning) => {
                ReasoningFormat::of_template(source).filter(|_| ReasoningFormat::has_marks(&self.tokenizer))
            }
            _ => self.reasoning,
        }
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

    /// Most bytes that compiling a request's own template takes.
    ///
    /// # Errors
    /// `InvalidArgument` for the field `path` if requests may not bring templates, or if this one is too large.
    pub(super) fn compiling_bytes(&self, path: &str, own_template: &str) -> Result<u64> {
        self.request_templates(path)?;
        ChatTemplate::compiling_bytes(own_template).map_err(|e| at(path, e))
    }

    fn request_templates(&self, path: &str) -> Result<&RequestTemplates> {
        let message = "the server takes no templates from requests; leave it out, or start the server with \
                       --trust-request-chat-template";
        self.request_templates.as_ref().ok_or_else(|| Error::invalid(path, message))
    }

    /// The text of a chat by the model's template or by its own, and the charge that covers it.
    ///
    /// # Errors
    /// `InvalidArgument` for the field `path` or its template; `ResourceExhausted` if memory for the text is short.
    pub(super) fn render(
        &self,
        path: &str,
        own_template: Option<String>,
        conversation: Conversation,
        traffic: &Traffic,
    ) -> Result<(String, Charge)> {
        if let Some(source) = own_template {
            let field = format!("{path}.chat_template");
            let special_tokens = self.request_templates(&field)?.special_tokens.clone();
            let template = ChatTemplate::new(source.into(), special_tokens).map_err(|e| at(&field, e))?;
            return template.render(conversation, traffic).map_err(|e| at(path, e));
        }
        let Some(template) = &self.chat_template else {
            return Err(Error::invalid(path, "this model has no chat template; give text or token ids"));
        };
        template.render(conversation, traffic).map_err(|e| at(path, e))
    }
}

/// Adds the field's path to an error of the text layer, which does not know where its input was: in a request.
fn at(path: &str, error: Error) -> Error {
    match error {
        Error::InvalidArgument { message, .. } | Error::Config(message) => Error::invalid(path, message),
        other => other,
    }
}

#[cfg(test)]
mod tests;
