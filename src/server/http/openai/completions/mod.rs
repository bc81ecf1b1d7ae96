//! `/v1/completions`: prompts of text or of token ids are continued.

mod writer;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;

use super::prompt::{PromptInput, Prompts};
use super::report::Report;
use super::request_id;
use super::sampling::{Sampling, Unsupported};
use crate::error::{Error, Result};
use crate::server::http::Door;
use crate::server::http::body::JsonBody;
use crate::server::http::error::{ErrorBody, HttpError};
use crate::server::http::members::{BodyOf, members};
use crate::server::http::samples::sample;
use crate::server::pb;
use writer::{CompletionWriter, Options};

members! {
    /// The members that only a completion has.
    pub(in crate::server::http) struct Completion {
        /// A text, a list of texts, token ids, or a list of lists of token ids.
        prompt: Prompts,
        /// Most tokens of a sample (default: 16).
        max_tokens: u32,
        /// Report log-probabilities, with those of this many most likely tokens.
        logprobs: u32,
        /// Whether the text begins with the prompt (default: false).
        echo: bool,
        /// Whether a text gets the special tokens that the model wants around a text (default: true).
        add_special_tokens: bool,
    }
}

/// The description of the body: its own members and those of sampling.
#[derive(utoipa::ToSchema)]
#[allow(dead_code, reason = "it is only described; the body is read as groups of members")]
pub(in crate::server::http) struct CompletionRequest {
    #[serde(flatten)]
    own: Completion,
    #[serde(flatten)]
    sampling: Sampling,
}

/// Continues prompts: `n` samples of each, as one answer or as server-sent events.
#[utoipa::path(
    post,
    path = "/v1/completions",
    request_body = CompletionRequest,
    responses(
        (status = 200, description = "the samples, or events of their tokens", body = writer::CompletionAnswer),
        (status = 400, description = "a member of the body is wrong", body = ErrorBody),
        (status = 404, description = "no such model or adapter", body = ErrorBody),
        (status = 409, description = "asleep, without weights, or another weight version", body = ErrorBody),
        (status = 413, description = "the body is too large", body = ErrorBody),
        (status = 429, description = "queue or memory for requests is full, or no room for so large an answer", body = ErrorBody),
        (status = 503, description = "the server starts or ends", body = ErrorBody),
    )
)]
pub(in crate::server::http) async fn completions(
    State(door): State<Door>,
    headers: HeaderMap,
    body: JsonBody<BodyOf<((Completion, Sampling), Unsupported)>>,
) -> std::result::Result<Response, HttpError> {
    sample::<_, CompletionWriter>(&door, body, |BodyOf(((own, mut sampling), _)), context| {
        if let Some(id) = request_id(&headers) {
            sampling.request_id = Some(id);
        }
        let mut options = Options::new(&own, Report::new(&sampling, context)?);
        let message = message(own, sampling, &mut options, &context.info.model)?;
        Ok((message, options))
    })
    .await
}

/// The message that a gRPC client would send for the body.
fn message(own: Completion, sampling: Sampling, options: &mut Options, policy: &str) -> Result<pb::GenerateRequest> {
    let prompts = own.prompt.ok_or_else(|| Error::invalid("prompt", "is missing; give a text or token ids"))?.0;
    let keep = sampling.truncate_prompt_tokens.map(|keep| keep as usize);
    let prompt = |prompt: PromptInput| match (prompt, keep) {
        (PromptInput::Text(_), Some(_)) => {
            Err(Error::invalid("truncate_prompt_tokens", "is supported for prompts of token ids; send those"))
        }
        (PromptInput::Tokens(mut tokens), Some(keep)) => {
            tokens.drain(..tokens.len().saturating_sub(keep));
            Ok(PromptInput::Tokens(tokens).into_message(None))
        }
        (prompt, None) => Ok(prompt.into_message(own.add_special_tokens)),
    };
    if options.is_echo {
        options.prompt_texts = prompts.iter().map(PromptInput::text).collect();
    }
    let prompts = messages(prompts, prompt)?;
    // OpenAI's way to score a text: no token is made, and the text's own log-probabilities come back. One token is made
    // here too, and dropped.
    options.drops_tokens = options.is_echo && own.max_tokens == Some(0);
    let max_tokens = if options.drops_tokens { Some(1) } else { own.max_tokens };
    let prompt_logprobs = options.report.prompt_logprobs.is_some() || options.is_echo && options.logprobs.is_some();
    // Ranks, which come with log-probabilities of prompts, are computed beside at least one most likely token.
    let fewest = u32::from(prompt_logprobs);
    let top = options.logprobs.max(options.report.prompt_logprobs).unwrap_or(0).max(fewest);
    let message = sampling.into_message(prompts, max_tokens, top, policy)?;
    Ok(pb::GenerateRequest { prompt_logprobs, return_text: options.report.has_text(), ..message })
}

/// The messages that `message` makes of prompts. Their list does not grow, which would take it three times.
fn messages(prompts: Vec<PromptInput>, message: impl Fn(PromptInput) -> Result<pb::Prompt>) -> Result<Vec<pb::Prompt>> {
    let mut messages = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        messages.push(message(prompt)?);
    }
    Ok(messages)
}

#[cfg(test)]
mod tests;
