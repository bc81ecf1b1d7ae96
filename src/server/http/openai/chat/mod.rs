//! `/v1/chat/completions`: the model's answers to a chat, and the tool calls in them.

mod answers;
mod message;
mod messages;
mod parser;
mod prompt;
mod render;
mod tools;
mod writer;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use serde_json::value::RawValue;

use super::answers::Report;
use super::logprobs::most_likely;
use super::request_id;
use super::sampling::Sampling;
use crate::engine::ValidRequest;
use crate::error::{Error, Result, shown};
use crate::memory::Traffic;
use crate::server::http::{AppState, HttpResult, JsonBody, members, sample};
use crate::server::{ServingContext, pb};
use crate::types::ToolFormat;
use tools::{MAX_SHOWN, ToolCalling};
use writer::ChatWriter;

pub(in crate::server::http) use message::*;
pub(in crate::server::http) use messages::*;
pub(super) use prompt::ASSISTANT;
pub(in crate::server::http) use prompt::ChatPrompt;
pub(in crate::server::http) use render::*;
pub(in crate::server::http) use tools::typed;

members! {
    /// The body.
    pub(in crate::server::http) struct ChatRequest {
        /// Maximum tokens of a sample (default: the rest of the context).
        pub(in crate::server::http) max_tokens: u32,
        /// Same as `max_tokens`, and takes precedence over it.
        pub(in crate::server::http) max_completion_tokens: u32,
        /// Whether to report log-probabilities (default: false).
        #[schema(value_type = Option<bool>)]
        pub(in crate::server::http) logprobs: Box<RawValue>,
        /// How many most likely tokens to report beside each sampled one; -1 is all (default: 0).
        pub(in crate::server::http) top_logprobs: i32,
        /// Whether the content begins with that of the last message, if it has the answer's role (default: false).
        pub(in crate::server::http) echo: bool,
        /// Whether the model may call a tool: `auto`, `none`, `required`, or an object that names one (default: auto).
        #[schema(value_type = Option<serde_json::Value>)]
        pub(in crate::server::http) tool_choice: Box<RawValue>,
        /// Whether a message may have more than one call; with false, it has the first alone (default: true).
        pub(in crate::server::http) parallel_tool_calls: bool,
        /// Whether the message has the model's reasoning (default: true).
        pub(in crate::server::http) include_reasoning: bool,
        ..pub(in crate::server::http) prompt: ChatPrompt,
        ..pub(in crate::server::http) sampling: Sampling,
    } rejects [
        "audio", "function_call", "functions", "kv_transfer_params", "modalities", "prediction", "web_search_options"
    ];
}

/// Generates `n` answers to a chat, returned as one answer or as server-sent events.
#[utoipa::path(post, path = "/v1/chat/completions", request_body = ChatRequest, responses(
    (status = 200, description = "the samples, or events of their tokens", body = answers::ChatAnswer),
    (status = 404, description = "no such model or adapter"),
    (status = 409, description = "asleep, without weights, or of another weight version"),
))]
pub(in crate::server::http) async fn chat_completions(
    State(app): State<AppState>,
    headers: HeaderMap,
    mut body: JsonBody<ChatRequest>,
) -> HttpResult<Response> {
    body.value.prompt.without_effect().for_each(|name| body.ignored.add(name));
    sample(&app, body, |body, context| {
        let (message, options) = message(body, request_id(&headers), context)?;
        let spared = options.spared;
        Ok((message, spared, |request: &ValidRequest, traffic: &Traffic| ChatWriter::new(request, options, traffic)))
    })
    .await
}

/// The message that a gRPC client would send for the body, and the options of its answer. `id` is the request's name by
/// its headers.
///
/// # Errors
/// `InvalidArgument` for members whose values only HTTP's bodies can have.
pub(in crate::server::http) fn message(
    body: ChatRequest,
    id: Option<String>,
    context: &ServingContext,
) -> Result<(pb::GenerateRequest, ChatOptions)> {
    let ChatRequest { prompt, mut sampling, .. } = body;
    sampling.request_id = id.or(sampling.request_id);
    let top_logprobs = most_likely("top_logprobs", body.top_logprobs, &context.model)?;
    let logprobs = is_true(body.logprobs.as_deref())?.then(|| top_logprobs.unwrap_or(0));
    let mut report = Report::new(&sampling, logprobs, context)?;
    let role = prompt.role();
    let is_echo = body.echo == Some(true);
    let echo = if is_echo { prompt.last_text(&role) } else { String::new() };
    // vLLM reports them for an echo too, though they were not requested.
    report.prompt_logprobs =
        report.prompt_logprobs.or(top_logprobs.or(Some(0)).filter(|_| is_echo && !report.is_stream));
    if top_logprobs.is_some_and(|top| top > 0) && logprobs.is_none() {
        return Err(Error::invalid("top_logprobs", "needs logprobs: true"));
    }
    let own_template = prompt.chat_template.as_deref().filter(|source| !source.is_empty());
    let encoder = context.model.encoder.as_ref();
    let format = encoder.and_then(|encoder| encoder.tool_format(own_template));
    let reasoning = encoder.and_then(|encoder| encoder.reasoning(own_template));
    let (calling, schema) = ToolCalling::new(prompt.tools.as_deref(), body.tool_choice.as_deref(), format)?;
    let prompt_logprobs = report.prompt_logprobs.is_some();
    let top = report.top_logprobs(prompt_logprobs);
    let has_short_ids = format == Some(ToolFormat::Mistral);
    let context_tokens = u32::try_from(context.model.max_model_len).unwrap_or(u32::MAX);
    let max_tokens = body.max_completion_tokens.or(body.max_tokens).unwrap_or(context_tokens);
    let has_grammar = sampling.structured_outputs.is_some();
    let mut message = sampling.into_message(vec![prompt.into_message()?], Some(max_tokens), top, &context.model)?;
    let outputs = &mut message.sampling.get_or_insert_default().structured_outputs;
    if let Some(schema) = schema {
        if has_grammar {
            let message = "forces a call, which cannot be combined with structured_outputs; leave one of them out";
            return Err(Error::invalid("tool_choice", message));
        }
        // As in vLLM, a forced call takes the place of `response_format`.
        *outputs = Some(pb::StructuredOutputs { kind: Some(pb::structured_outputs::Kind::JsonSchema(schema)) });
    }
    let marks = reasoning.and_then(|_| context.model.reasoning_marks());
    let includes_reasoning = body.include_reasoning.unwrap_or(true);
    // As in vLLM, a text whose reasoning is left out has the grammar from its first token.
    let spared = reasoning.filter(|_| outputs.is_some() && marks.is_some() && includes_reasoning);
    let options = ChatOptions {
        report,
        role,
        echo,
        calling,
        has_short_ids,
        has_one_call: body.parallel_tool_calls == Some(false),
        reasoning,
        marks,
        includes_reasoning,
        spared,
        is_constrained: outputs.is_some() && spared.is_none(),
        metrics: context.metrics.clone(),
    };
    Ok((pb::GenerateRequest { prompt_logprobs, return_text: true, ..message }, options))
}

/// The value of `logprobs`, which some clients send as a number.
fn is_true(logprobs: Option<&RawValue>) -> Result<bool> {
    match logprobs.map_or("false", RawValue::get) {
        "true" | "1" => Ok(true),
        "false" | "0" => Ok(false),
        other => {
            let message = format!("{} is neither true nor false; top_logprobs takes a number", shown(other, MAX_SHOWN));
            Err(Error::invalid("logprobs", message))
        }
    }
}

#[cfg(test)]
mod tests;
