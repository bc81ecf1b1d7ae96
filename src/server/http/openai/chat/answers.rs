//! The JSON of answers to a chat.

use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::server::http::openai::answers::{Null, RequestMetrics, StopReason, Usage, VersionSpan};
use crate::server::http::openai::logprobs::{ChatLogprobs, PromptLogprobs};
use crate::server::http::openai::returned::Returned;
use crate::types::TokenId;

/// The samples of a chat.
#[derive(Default, Serialize, ToSchema)]
pub(in crate::server::http) struct ChatAnswer<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    #[schema(value_type = Vec<ChatChoice>)]
    pub(super) choices: Vec<Box<RawValue>>,
    pub(super) service_tier: Null,
    pub(super) system_fingerprint: &'a str,
    pub(super) usage: Usage,
    pub(super) prompt_logprobs: Option<&'a PromptLogprobs>,
    pub(super) prompt_token_ids: Option<&'a [TokenId]>,
    pub(super) prompt_text: Null,
    pub(super) kv_transfer_params: Null,
    pub(super) ec_transfer_params: Null,
    pub(super) metrics: Option<RequestMetrics>,
}

/// One sample.
#[derive(Default, Serialize, ToSchema)]
pub(super) struct ChatChoice<'a> {
    pub(super) index: usize,
    pub(super) message: Message<'a>,
    pub(super) logprobs: Option<ChatLogprobs>,
    /// `stop`, `length`, `tool_calls`, or `abort` for a sample that was aborted.
    pub(super) finish_reason: &'static str,
    /// The stop string or stop token that ended the sample.
    pub(super) stop_reason: Option<StopReason>,
    pub(super) token_ids: Option<Vec<TokenId>>,
    /// The experts that the tokens of the prompt and the sample took but for the last, as a file of numpy's (`.npy`)
    /// in base64: `[tokens, layers, experts]`. Null unless the server has `--return-routing`.
    pub(super) routed_experts: Option<String>,
    /// The values that `returns` asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) returned: Option<Returned>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) weight_versions: Option<Vec<VersionSpan>>,
}

/// The model's answer.
#[derive(Default, Serialize, ToSchema)]
pub(super) struct Message<'a> {
    pub(super) role: &'a str,
    /// Null if there is nothing but reasoning or tool calls.
    pub(super) content: Option<String>,
    pub(super) refusal: Null,
    pub(super) annotations: Null,
    pub(super) audio: Null,
    pub(super) function_call: Null,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<Call>,
    /// The model's reasoning before the answer, if it is reported apart.
    pub(super) reasoning: Option<String>,
    /// The same, under its former name; absent if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
}

/// A call of a tool, or in a stream a part of one.
#[derive(Serialize, ToSchema)]
pub(super) struct Call {
    /// In the first part alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    /// Number of the call, in a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    function: Function,
}

/// The function that is called.
#[derive(Serialize, ToSchema)]
struct Function {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// JSON: the model's own, or what its texts stand for.
    #[serde(skip_serializing_if = "Option::is_none")]
    arguments: Option<String>,
}

impl Call {
    pub(super) fn new(id: String, name: String, arguments: String) -> Self {
        let function = Function { name: Some(name), arguments: Some(arguments) };
        Self { id: Some(id), r#type: Some("function"), index: None, function }
    }
}

/// The part of a sample in one event.
#[derive(Serialize, Default)]
pub(super) struct ChunkChoice<'a> {
    pub(super) index: usize,
    pub(super) delta: MessageDelta<'a>,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    /// In the last event alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) stop_reason: Option<Option<StopReason>>,
    /// In all events but the first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<Option<Vec<TokenId>>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) weight_versions: Option<Vec<VersionSpan>>,
}

/// The new part of the message.
#[derive(Serialize, Default)]
pub(super) struct MessageDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<Option<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tool_calls: Option<[Call; 1]>,
}

impl MessageDelta<'_> {
    pub(super) fn text(text: String) -> Self {
        Self { content: Some(Some(text)), ..Self::default() }
    }

    pub(super) fn reasoning(text: String) -> Self {
        Self { reasoning: Some(text.clone()), reasoning_content: Some(text), ..Self::default() }
    }

    /// The first part of the call with this number.
    pub(super) fn begun_call(index: usize, id: String, name: String) -> Self {
        let function = Function { name: Some(name), arguments: None };
        Self::call(Call { id: Some(id), r#type: Some("function"), index: Some(index), function })
    }

    /// A later part of a call.
    pub(super) fn arguments(index: usize, arguments: String) -> Self {
        let function = Function { name: None, arguments: Some(arguments) };
        Self::call(Call { id: None, r#type: None, index: Some(index), function })
    }

    fn call(call: Call) -> Self {
        Self { content: Some(None), tool_calls: Some([call]), ..Self::default() }
    }
}
