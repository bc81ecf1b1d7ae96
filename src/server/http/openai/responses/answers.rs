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

/// The model's reasoning, a message, or a call of a function.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputItem {
    Reasoning {
        id: String,
        #[schema(value_type = Vec<serde_json::Value>)]
        summary: [Null; 0],
        content: Vec<OutputText>,
        status: &'static str,
    },
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

/// The text of reasoning or of a message.
#[derive(Serialize, ToSchema)]
pub(super) struct OutputText {
    pub(super) r#type: OutputKind,
    pub(super) text: String,
    /// Present only in messages, as are the log-probabilities.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<serde_json::Value>>)]
    annotations: Option<[Null; 0]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Vec<serde_json::Value>>)]
    pub(super) logprobs: Option<[Null; 0]>,
}

/// The kind of a text of an output.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub(super) enum OutputKind {
    #[serde(rename = "reasoning_text")]
    Reasoning,
    #[serde(rename = "output_text")]
    Message,
}

impl OutputKind {
    /// A new item of this kind, without its text.
    pub(super) fn item(self) -> OutputItem {
        let (content, status) = (Vec::new(), "in_progress");
        match self {
            Self::Reasoning => OutputItem::Reasoning { id: item_id("rs"), summary: [], content, status },
            Self::Message => OutputItem::Message { id: item_id("msg"), role: "assistant", status, content },
        }
    }

    /// An empty text.
    pub(super) fn text(self) -> OutputText {
        let none = (self == Self::Message).then_some([]);
        OutputText { r#type: self, text: String::new(), annotations: none, logprobs: none }
    }

    /// The types of the events of its text: more of it, and its end.
    pub(super) fn events(self) -> (&'static str, &'static str) {
        match self {
            Self::Reasoning => ("response.reasoning_text.delta", "response.reasoning_text.done"),
            Self::Message => ("response.output_text.delta", "response.output_text.done"),
        }
    }
}

/// A new name for an item.
pub(super) fn item_id(prefix: &str) -> String {
    format!("{prefix}_{:016x}", rand::random::<u64>())
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
    /// Tokens of the reasoning, without its marks.
    reasoning_tokens: u64,
}

impl ResponseUsage {
    pub(super) fn of(summary: &Summary, reasoning_tokens: u64) -> Self {
        Self {
            input_tokens: summary.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens: summary.cached_tokens },
            output_tokens: summary.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens },
            total_tokens: summary.prompt_tokens + summary.completion_tokens,
        }
    }
}

impl OutputItem {
    /// The kind of its text, if it has one.
    pub(super) fn kind(&self) -> Option<OutputKind> {
        match self {
            Self::Reasoning { .. } => Some(OutputKind::Reasoning),
            Self::Message { .. } => Some(OutputKind::Message),
            Self::FunctionCall { .. } => None,
        }
    }

    /// Its name and its text, if it has one.
    pub(super) fn text_mut(&mut self) -> Option<(&str, &mut Vec<OutputText>)> {
        match self {
            Self::Reasoning { id, content, .. } | Self::Message { id, content, .. } => Some((id, content)),
            Self::FunctionCall { .. } => None,
        }
    }

    pub(super) fn end(&mut self, ended: &'static str) {
        let (Self::Reasoning { status, .. } | Self::Message { status, .. } | Self::FunctionCall { status, .. }) = self;
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
    Response {
        response: &'a ResponseAnswer<'a>,
    },
    Item {
        output_index: usize,
        item: &'a OutputItem,
    },
    Part {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        part: &'a OutputText,
    },
    TextDelta {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        delta: &'a str,
        /// Present only in messages.
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<[Null; 0]>,
    },
    TextDone {
        item_id: &'a str,
        output_index: usize,
        content_index: usize,
        text: &'a str,
        /// Present only in messages.
        #[serde(skip_serializing_if = "Option::is_none")]
        logprobs: Option<[Null; 0]>,
    },
    ArgumentsDelta {
        item_id: &'a str,
        output_index: usize,
        delta: &'a str,
    },
    ArgumentsDone {
        item_id: &'a str,
        output_index: usize,
        name: &'a str,
        arguments: &'a str,
    },
    Failed {
        code: &'static str,
        message: &'a str,
        param: Option<&'a str>,
    },
}
