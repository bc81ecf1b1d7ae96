//! Messages, tools and template variables in the form in which a chat has them, for protocols that write them
//! otherwise.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};
use serde_json::{Value, json};

use super::tools::typed;
use crate::error::{Error, Result};

/// A message of a chat.
#[derive(Default, Serialize)]
pub(in crate::server::http) struct ChatMessage {
    pub(in crate::server::http) role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::server::http) content: Option<ChatContent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::server::http) reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(in crate::server::http) tool_calls: Vec<ChatCall>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(in crate::server::http) tool_call_id: Option<String>,
}

/// The content of a message: a text, or several parts.
#[derive(Serialize)]
#[serde(untagged)]
pub(in crate::server::http) enum ChatContent {
    Text(String),
    Parts(Vec<ChatPart>),
}

/// A part of a message: a text, or the URL of an image.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(in crate::server::http) enum ChatPart {
    Text { text: String },
    ImageUrl { image_url: String },
}

/// A call that an earlier answer has made.
#[derive(Serialize)]
pub(in crate::server::http) struct ChatCall {
    id: String,
    r#type: &'static str,
    function: CalledFunction,
}

#[derive(Serialize)]
struct CalledFunction {
    name: String,
    /// An object, or its JSON in a text.
    arguments: Box<RawValue>,
}

/// A tool that the model may call.
#[derive(Serialize)]
pub(in crate::server::http) struct ChatTool {
    r#type: &'static str,
    function: OfferedFunction,
}

#[derive(Serialize)]
struct OfferedFunction {
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    description: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parameters: Option<Box<RawValue>>,
}

impl ChatMessage {
    /// A message of `parts`, which may be none.
    pub(in crate::server::http) fn new(role: &'static str, parts: Vec<ChatPart>) -> Self {
        let content = match <[ChatPart; 1]>::try_from(parts) {
            Ok([ChatPart::Text { text }]) => Some(ChatContent::Text(text)),
            Ok(image) => Some(ChatContent::Parts(image.into())),
            Err(parts) => (!parts.is_empty()).then_some(ChatContent::Parts(parts)),
        };
        Self { role, content, ..Self::default() }
    }

    /// The result of the call `id`: its texts as one, if it has no images.
    pub(in crate::server::http) fn result(id: String, parts: Vec<ChatPart>) -> Self {
        let has_images = parts.iter().any(|part| matches!(part, ChatPart::ImageUrl { .. }));
        let parts = if has_images { parts } else { vec![ChatPart::from(joined(parts, "\n"))] };
        Self { tool_call_id: Some(id), ..Self::new("tool", parts) }
    }
}

impl From<String> for ChatPart {
    fn from(text: String) -> Self {
        Self::Text { text }
    }
}

/// The texts of `parts` as one, with `separator` between them.
pub(in crate::server::http) fn joined(parts: Vec<ChatPart>, separator: &str) -> String {
    let text = |part| match part {
        ChatPart::Text { text } => Some(text),
        ChatPart::ImageUrl { .. } => None,
    };
    parts.into_iter().filter_map(text).collect::<Vec<_>>().join(separator)
}

impl ChatCall {
    pub(in crate::server::http) fn new(id: String, name: String, arguments: Box<RawValue>) -> Self {
        Self { id, r#type: "function", function: CalledFunction { name, arguments } }
    }
}

impl ChatTool {
    pub(in crate::server::http) fn new(
        name: String,
        description: Option<String>,
        parameters: Option<Box<RawValue>>,
    ) -> Self {
        Self { r#type: "function", function: OfferedFunction { name, description, parameters } }
    }
}

/// `value` as JSON for a member of a chat's body.
///
/// # Errors
/// `Internal` if it cannot be written, which is a bug.
pub(in crate::server::http) fn raw(value: &impl Serialize) -> Result<Box<RawValue>> {
    to_raw_value(value).map_err(|error| Error::Internal(format!("a member of a chat cannot be written: {error}")))
}

/// The `tool_choice` that forces a call of the tool `name`.
pub(in crate::server::http) fn named_tool(name: &str) -> Value {
    json!({ "type": "function", "function": { "name": name } })
}

/// The `response_format` of texts that follow `schema`.
pub(in crate::server::http) fn schema_format(schema: &RawValue) -> Result<Box<RawValue>> {
    raw(&SchemaFormat { r#type: "json_schema", json_schema: NamedSchema { schema } })
}

#[derive(Serialize)]
struct SchemaFormat<'a> {
    r#type: &'static str,
    json_schema: NamedSchema<'a>,
}

#[derive(Serialize)]
struct NamedSchema<'a> {
    schema: &'a RawValue,
}

/// Variables of the template: those `given`, and those that say how much the model is to reason. `effort` is `none` for
/// no reasoning at all; `thinks` says whether it is to reason, if the effort does not.
///
/// # Errors
/// `InvalidArgument` if those given are not an object.
pub(in crate::server::http) fn reasoning_variables(
    given: Option<Box<RawValue>>,
    effort: Option<&str>,
    thinks: Option<bool>,
) -> Result<Option<Box<RawValue>>> {
    let Some(thinks) = effort.map(|effort| effort != "none").or(thinks) else { return Ok(given) };
    let given = given.map(|given| typed("chat_template_kwargs", &given)).transpose()?;
    let mut variables: BTreeMap<String, Box<RawValue>> = given.unwrap_or_default();
    variables.entry("enable_thinking".into()).or_insert(raw(&thinks)?);
    if let Some(effort) = effort {
        variables.entry("reasoning_effort".into()).or_insert(raw(&effort)?);
    }
    raw(&variables).map(Some)
}
