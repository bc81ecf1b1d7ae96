//! The JSON of responses.

use serde::Serialize;
use utoipa::ToSchema;

use super::request::Echo;
use crate::engine::Summary;
use crate::server::http::openai::answers::Null;

/// The response.
#[derive(Serialize, ToSchema)]
pub(in crate::server::http) struct ResponseAnswer<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created_at: u64,
    /// `completed`, `incomplete`, `in_progress` in the first events of a stream, or `cancelled` if it was aborted.
    pub(super) status: &'static str,
    pub(super) error: Null,
    pub(super) incomplete_details: Option<IncompleteDetails>,
    pub(super) model: &'a str,
    pub(super) output: &'a [OutputItem],
    #[serde(flatten)]
    pub(super) echo: &'a Echo,
    pub(super) background: bool,
    pub(super) store: bool,
    pub(super) previous_response_id: Null,
    pub(super) service_tier: &'static str,
    pub(super) truncation: &'static str,
    pub(super) usage: Option<ResponseUsage>,
}

/// The reason of an incomplete response.
#[derive(Serialize, ToSchema)]
pub(super) struct IncompleteDetails {
    pub(super) reason: &'static str,
}

/// A message, or a call of a function.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputItem {
    Message {
        id: String,
        role: &'static str,
        status: &'static str,
        content: Vec<OutputText>,
    },
    FunctionCall {
        id: String,
        call_id: String,
        name: String,
        /// JSON, as the model has written it.
        arguments: String,
        status: &'static str,
    },
}

/// The text of a message.
#[derive(Serialize, ToSchema)]
pub(super) struct OutputText {
    r#type: &'static str,
    pub(super) text: String,
    #[schema(value_type = Vec<serde_json::Value>)]
    annotations: [Null; 0],
    #[schema(value_type = Vec<serde_json::Value>)]
    logprobs: [Null; 0],
}

impl OutputText {
    /// An empty one.
    pub(super) fn new() -> Self {
        Self { r#type: "output_text", text: String::new(), annotations: [], logprobs: [] }
    }
}

/// How many tokens a request has taken.
#[derive(Serialize, ToSchema)]
pub(super) struct ResponseUsage {
    input_tokens: u64,
    input_tokens_details: InputDetails,
    output_tokens: u64,
    output_tokens_details: OutputDetails,
    total_tokens: u64,
}

#[derive(Serialize, ToSchema)]
struct InputDetails {
    /// Tokens whose keys and values came from the prefix cache.
    cached_tokens: u64,
}

#[derive(Serialize, ToSchema)]
struct OutputDetails {
    reasoning_tokens: u64,
}

impl ResponseUsage {
    pub(super) fn of(summary: &Summary) -> Self {
        Self {
            input_tokens: summary.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens: summary.cached_tokens },
            output_tokens: summary.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: 0 },
            total_tokens: summary.prompt_tokens + summary.completion_tokens,
        }
    }
}

impl OutputItem {
    pub(super) fn end(&mut self, ended: &'static str) {
        let (Self::Message { status, .. } | Self::FunctionCall { status, .. }) = self;
        *status = ended;
    }
}

/// An event of a stream.
#[derive(Serialize)]
pub(super) struct ResponseEvent<'a> {
    pub(super) r#type: &'static str,
    /// Number of the event.
    pub(super) sequence_number: u64,
    #[serde(flatten)]
    pub(super) body: EventBody<'a>,
}

/// The members of an event, which depend on its type.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum EventBody<'a> {
    Response { response: &'a ResponseAnswer<'a> },
    Item { output_index: usize, item: &'a OutputItem },
    Part { item_id: &'a str, output_index: usize, content_index: usize, part: &'a OutputText },
    TextDelta { item_id: &'a str, output_index: usize, content_index: usize, delta: &'a str, logprobs: [Null; 0] },
    TextDone { item_id: &'a str, output_index: usize, content_index: usize, text: &'a str, logprobs: [Null; 0] },
    ArgumentsDelta { item_id: &'a str, output_index: usize, delta: &'a str },
    ArgumentsDone { item_id: &'a str, output_index: usize, name: &'a str, arguments: &'a str },
    Failed { code: &'static str, message: &'a str, param: Option<&'a str> },
}
