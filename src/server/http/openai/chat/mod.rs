//! `/v1/chat/completions`: the model's answers to a chat, with calls of tools found in them.

mod answers;
mod prompt;
mod render;
mod tools;
mod writer;

use std::fmt;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::report::Report;
use super::request_id;
use super::sampling::{Sampling, Unsupported, refuse};
use crate::error::{Error, Result};
use crate::server::http::Door;
use crate::server::http::body::JsonBody;
use crate::server::http::error::{ErrorBody, HttpError};
use crate::server::http::members::{BodyOf, Members, members};
use crate::server::http::samples::sample;
use crate::server::{ServingContext, pb};
use crate::text::ToolFormat;
use tools::Calling;
use writer::{ChatWriter, Options};

pub(in crate::server::http) use prompt::ChatPrompt;
pub(in crate::server::http) use render::*;

members! {
    /// The members that only a chat has, besides its prompt.
    pub(in crate::server::http) struct Chat {
        /// Most tokens of a sample (default: what is left of the context).
        max_tokens: u32,
        /// The same; it wins.
        max_completion_tokens: u32,
        /// Whether to report log-probabilities (default: false).
        logprobs: Flag,
        /// Report those of this many most likely tokens as well (default: 0).
        top_logprobs: u32,
        /// Whether the model may call a tool: `auto`, `none`, `required`, or an object that names one (default: auto).
        #[schema(value_type = Option<serde_json::Value>)]
        tool_choice: Box<RawValue>,
    }
}

/// The description of the body: its own members, those of the prompt and those of sampling.
#[derive(ToSchema)]
#[allow(dead_code, reason = "it is only described; the body is read as groups of members")]
pub(in crate::server::http) struct ChatRequest {
    #[serde(flatten)]
    prompt: ChatPrompt,
    #[serde(flatten)]
    own: Chat,
    #[serde(flatten)]
    sampling: Sampling,
}

/// All members of a body that are read.
pub(in crate::server::http) type Body = (((ChatPrompt, Chat), Sampling), (Unsupported, NotInChats));

/// Members of chats that would change the samples or what is reported, and that this server does not have.
#[derive(Default)]
pub(in crate::server::http) struct NotInChats;

impl Members for NotInChats {
    fn read<'de, A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> std::result::Result<bool, A::Error> {
        const MEMBERS: [&str; 9] = [
            "audio",
            "chat_template",
            "echo",
            "function_call",
            "functions",
            "modalities",
            "prediction",
            "reasoning_effort",
            "web_search_options",
        ];
        refuse(&MEMBERS, name, map)
    }
}

/// A boolean, which some clients send as a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ToSchema)]
#[schema(value_type = bool)]
pub(in crate::server::http) struct Flag(bool);

impl<'de> Deserialize<'de> for Flag {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct FlagVisitor;

        impl Visitor<'_> for FlagVisitor {
            type Value = Flag;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("true or false")
            }

            fn visit_bool<E: de::Error>(self, value: bool) -> std::result::Result<Flag, E> {
                Ok(Flag(value))
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> std::result::Result<Flag, E> {
                match value {
                    0 | 1 => Ok(Flag(value == 1)),
                    _ => Err(E::custom(format_args!("{value} is neither true nor false; top_logprobs takes a number"))),
                }
            }
        }

        deserializer.deserialize_any(FlagVisitor)
    }
}

/// Answers a chat: `n` samples, as one answer or as server-sent events.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    request_body = ChatRequest,
    responses(
        (status = 200, description = "the samples, or events of their tokens", body = answers::ChatAnswer),
        (status = 400, description = "a member of the body is wrong", body = ErrorBody),
        (status = 404, description = "no such model or adapter", body = ErrorBody),
        (status = 409, description = "asleep, without weights, or another weight version", body = ErrorBody),
        (status = 413, description = "the body is too large", body = ErrorBody),
        (status = 429, description = "queue or memory for requests is full, or no room for so large an answer", body = ErrorBody),
        (status = 503, description = "the server starts or ends", body = ErrorBody),
    )
)]
pub(in crate::server::http) async fn chat_completions(
    State(door): State<Door>,
    headers: HeaderMap,
    body: JsonBody<BodyOf<Body>>,
) -> std::result::Result<Response, HttpError> {
    sample::<_, ChatWriter>(&door, body, |BodyOf(body), context| message(body, request_id(&headers), context)).await
}

/// The message that a gRPC client would send for the body, and what its answer is to contain. `id` is the request's
/// name by its headers.
///
/// # Errors
/// `InvalidArgument` for members whose values only HTTP's bodies can have.
fn message(body: Body, id: Option<String>, context: &ServingContext) -> Result<(pb::GenerateRequest, Options)> {
    let (((prompt, own), mut sampling), _) = body;
    if id.is_some() {
        sampling.request_id = id;
    }
    if sampling.truncate_prompt_tokens.is_some() {
        return Err(Error::invalid("truncate_prompt_tokens", "is not supported for a chat; leave messages out"));
    }
    let report = Report::new(&sampling, context)?;
    let is_reported = own.logprobs == Some(Flag(true));
    if own.top_logprobs.is_some_and(|top| top > 0) && !is_reported {
        return Err(Error::invalid("top_logprobs", "needs logprobs: true"));
    }
    let format = context.model.encoder.as_ref().and_then(|encoder| encoder.tool_format());
    let (calling, schema) = Calling::new(prompt.tools.as_deref(), own.tool_choice.as_deref(), format)?;
    let logprobs = is_reported.then(|| own.top_logprobs.unwrap_or(0));
    let has_short_ids = format == Some(ToolFormat::Mistral);
    let options = Options { logprobs, role: prompt.role(), calling, has_short_ids, report };
    let prompt_logprobs = options.report.prompt_logprobs;
    // Ranks, which come with log-probabilities of prompts, are computed beside at least one most likely token.
    let top = logprobs.max(prompt_logprobs).unwrap_or(0).max(u32::from(prompt_logprobs.is_some()));
    let context_tokens = u32::try_from(context.model.max_model_len).unwrap_or(u32::MAX);
    let max_tokens = own.max_completion_tokens.or(own.max_tokens).unwrap_or(context_tokens);
    let mut message =
        sampling.into_message(vec![prompt.into_message()?], Some(max_tokens), top, &context.info.model)?;
    if let Some(schema) = schema {
        force(&mut message, schema)?;
    }
    let message = pb::GenerateRequest { prompt_logprobs: prompt_logprobs.is_some(), return_text: true, ..message };
    Ok((message, options))
}

/// Makes the text of all samples follow `schema`, which is that of a call.
fn force(message: &mut pb::GenerateRequest, schema: String) -> Result<()> {
    let sampling = message.sampling.get_or_insert_default();
    if sampling.structured_outputs.is_some() {
        let message = "forces a call, which cannot be combined with structured_outputs and response_format";
        return Err(Error::invalid("tool_choice", message));
    }
    let kind = Some(pb::structured_outputs::Kind::JsonSchema(schema));
    sampling.structured_outputs = Some(pb::StructuredOutputs { kind });
    Ok(())
}

#[cfg(test)]
mod tests;
