//! The JSON of answers.

use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::engine::Summary;
use crate::server::http::openai::answers::PromptDetails;

/// The model's message.
#[derive(Serialize, ToSchema)]
pub(in crate::server::http) struct MessageAnswer<'a> {
    pub(super) id: &'a str,
    pub(super) r#type: &'static str,
    pub(super) role: &'static str,
    #[schema(value_type = Vec<ContentBlock>)]
    pub(super) content: &'a RawValue,
    pub(super) model: &'a str,
    #[serde(flatten)]
    pub(super) ending: MessageEnding,
    pub(super) usage: MessageUsage,
}

/// The reason of a message's end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct MessageEnding {
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`; null if the request was aborted.
    pub(super) stop_reason: Option<&'static str>,
    /// The text that ended the message.
    pub(super) stop_sequence: Option<String>,
}

/// How many tokens a request has taken.
#[derive(Serialize, ToSchema)]
pub(super) struct MessageUsage {
    /// Tokens of the prompt; with the two members below, those that are in neither.
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    /// Tokens of the prompt that the request has added to the prefix cache. Absent without
    /// `--enable-prompt-tokens-details`, and at the beginning of a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_creation_input_tokens: Option<u64>,
    /// Tokens of the prompt that came from the prefix cache. Absent as the member above.
    #[serde(skip_serializing_if = "Option::is_none")]
    cache_read_input_tokens: Option<u64>,
}

impl MessageUsage {
    /// The figures of a request that has just begun.
    pub(super) fn at_start(input_tokens: u64) -> Self {
        Self { input_tokens, output_tokens: 0, cache_creation_input_tokens: None, cache_read_input_tokens: None }
    }

    /// The figures of a request that has ended, with the parts of its prompt if they are reported.
    pub(super) fn of(summary: &Summary, prompt: Option<PromptDetails>) -> Self {
        let cache_read_input_tokens = prompt.map(|prompt| prompt.cached_tokens);
        let cache_creation_input_tokens = prompt.and_then(|prompt| prompt.created_cache_tokens);
        let parts = cache_read_input_tokens.unwrap_or(0) + cache_creation_input_tokens.unwrap_or(0);
        Self {
            input_tokens: summary.prompt_tokens - parts,
            output_tokens: summary.completion_tokens,
            cache_creation_input_tokens,
            cache_read_input_tokens,
        }
    }
}

/// A part of the message.
#[derive(Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum ContentBlock {
    Thinking {
        thinking: String,
        /// Arbitrary, as nothing checks it. Absent at the beginning of a stream's block.
        #[serde(skip_serializing_if = "Option::is_none")]
        signature: Option<String>,
    },
    Text {
        text: String,
    },
    ToolUse {
        id: String,
        name: String,
        /// The arguments, as the model has written them.
        #[schema(value_type = serde_json::Value)]
        input: Box<RawValue>,
    },
}

/// An event of a stream.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum MessageEvent<'a> {
    MessageStart { message: &'a MessageAnswer<'a> },
    ContentBlockStart { content_block: ContentBlock, index: usize },
    ContentBlockDelta { delta: ContentDelta, index: usize },
    ContentBlockStop { index: usize },
    MessageDelta { delta: &'a MessageEnding, usage: MessageUsage },
    MessageStop,
}

impl MessageEvent<'_> {
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::MessageStart { .. } => "message_start",
            Self::ContentBlockStart { .. } => "content_block_start",
            Self::ContentBlockDelta { .. } => "content_block_delta",
            Self::ContentBlockStop { .. } => "content_block_stop",
            Self::MessageDelta { .. } => "message_delta",
            Self::MessageStop => "message_stop",
        }
    }
}

/// The new part of a block.
#[derive(Serialize)]
#[serde(tag = "type")]
pub(super) enum ContentDelta {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "signature_delta")]
    Signature { signature: String },
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// The number of a conversation's tokens.
#[derive(Serialize, ToSchema)]
pub(in crate::server::http) struct TokenCount {
    pub(super) input_tokens: usize,
    pub(super) context_management: ContextManagement,
}

/// The number of tokens before a conversation was shortened, which this server does not do.
#[derive(Serialize, ToSchema)]
pub(super) struct ContextManagement {
    pub(super) original_input_tokens: usize,
}
