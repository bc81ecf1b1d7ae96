//! Blocks, of which the messages of a request are made, as messages of a chat.

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::error::{Error, Result, shown};
use crate::server::http::openai::chat::{ChatCall, ChatMessage, ChatPart, joined, raw};
use crate::server::http::text_or_list;

/// Longest name of a block's type in an error.
const MAX_SHOWN: usize = 64;
/// Claude Code begins its system prompt with a block that differs in each request, so that no prefix would be cached.
const ATTRIBUTION: &str = "x-anthropic-billing-header";

/// A message of the conversation.
#[derive(Deserialize, ToSchema)]
pub(super) struct InputMessage {
    pub(super) role: Speaker,
    pub(super) content: MessageBlocks,
}

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Speaker {
    User,
    Assistant,
    System,
}

/// A text, or a list of blocks.
#[derive(Default, ToSchema)]
#[schema(value_type = serde_json::Value)]
pub(super) struct MessageBlocks(Vec<Block>);

/// A part of a message. Which of the members it has depends on its type.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Block {
    r#type: String,
    text: Option<String>,
    thinking: Option<String>,
    id: Option<String>,
    name: Option<String>,
    input: Option<Box<RawValue>>,
    tool_use_id: Option<String>,
    content: Option<MessageBlocks>,
    source: Option<ImageSource>,
}

/// Where an image is: `base64` has it in `data`.
#[derive(Default, Deserialize)]
#[serde(default)]
struct ImageSource {
    r#type: String,
    media_type: String,
    data: String,
}

impl<'de> Deserialize<'de> for MessageBlocks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let block = |text: &str| Block { r#type: "text".into(), text: Some(text.into()), ..Block::default() };
        text_or_list(deserializer, "a string or a list of blocks", block).map(Self)
    }
}

impl InputMessage {
    /// Appends the messages that this one is in a chat: results of calls are messages of their own.
    ///
    /// # Errors
    /// `InvalidArgument` for a block that its author cannot send.
    pub(super) fn append_to(self, path: &str, messages: &mut Vec<ChatMessage>) -> Result<()> {
        let path = format!("{path}.content");
        match self.role {
            Speaker::System => {
                let text = self.content.into_system(&path)?;
                messages.extend((!text.is_empty()).then(|| ChatMessage::new("system", vec![text.into()])));
            }
            Speaker::User => {
                let mut parts = Vec::new();
                for (i, block) in self.content.0.into_iter().enumerate() {
                    match block.r#type.as_str() {
                        "tool_result" => messages.push(block.into_result(&path, i)?),
                        _ => parts.extend(block.into_part(&path, i)?),
                    }
                }
                messages.extend((!parts.is_empty()).then(|| ChatMessage::new("user", parts)));
            }
            Speaker::Assistant => messages.push(self.content.into_answer(&path)?),
        }
        Ok(())
    }
}

impl MessageBlocks {
    /// The texts as one, without what Claude Code says about itself.
    ///
    /// # Errors
    /// `InvalidArgument` for a block that is not a text.
    pub(super) fn into_system(self, path: &str) -> Result<String> {
        if let Some(i) = self.0.iter().position(|block| block.r#type != "text") {
            return Err(self.0[i].refused(path, i));
        }
        let mut parts = self.into_parts(path)?;
        parts.retain(|part| !matches!(part, ChatPart::Text { text } if text.starts_with(ATTRIBUTION)));
        Ok(joined(parts, ""))
    }

    /// The texts and images.
    fn into_parts(self, path: &str) -> Result<Vec<ChatPart>> {
        let parts = self.0.into_iter().enumerate().map(|(i, block)| block.into_part(path, i));
        parts.filter_map(Result::transpose).collect()
    }

    /// An earlier answer of the model.
    fn into_answer(self, path: &str) -> Result<ChatMessage> {
        let (mut parts, mut tool_calls, mut reasoning) = (Vec::new(), Vec::new(), None::<String>);
        for (i, block) in self.0.into_iter().enumerate() {
            match block.r#type.as_str() {
                "text" => parts.extend(block.into_part(path, i)?),
                "tool_use" => tool_calls.push(block.into_call(path, i)?),
                "thinking" => {
                    let thinking = given(block.thinking, path, i, "thinking")?;
                    reasoning.get_or_insert_default().push_str(&thinking);
                }
                // Only Anthropic can read them.
                "redacted_thinking" => {}
                _ => return Err(block.refused(path, i)),
            }
        }
        Ok(ChatMessage { tool_calls, reasoning_content: reasoning, ..ChatMessage::new("assistant", parts) })
    }
}

impl Block {
    /// The text, unless it is empty, or the image.
    fn into_part(self, path: &str, i: usize) -> Result<Option<ChatPart>> {
        match self.r#type.as_str() {
            "text" => {
                let text = given(self.text, path, i, "text")?;
                Ok((!text.is_empty()).then(|| text.into()))
            }
            "image" => {
                let ImageSource { r#type, media_type, data } = given(self.source, path, i, "source")?;
                if r#type == "base64" {
                    return Ok(Some(ChatPart::ImageUrl { image_url: format!("data:{media_type};base64,{data}") }));
                }
                let kind = shown(&r#type, MAX_SHOWN);
                let message =
                    format!("{kind:?} is not base64; the server opens no files or URLs: send the image in base64");
                Err(Error::invalid(format!("{path}[{i}].source.type"), message))
            }
            _ => Err(self.refused(path, i)),
        }
    }

    fn into_call(self, path: &str, i: usize) -> Result<ChatCall> {
        let (id, name) = (given(self.id, path, i, "id")?, given(self.name, path, i, "name")?);
        let input = match self.input {
            Some(input) if input.get().starts_with('{') => input,
            Some(_) => return Err(Error::invalid(format!("{path}[{i}].input"), "is not an object")),
            None => raw(&serde_json::Map::new())?,
        };
        Ok(ChatCall::new(id, name, input))
    }

    fn into_result(self, path: &str, i: usize) -> Result<ChatMessage> {
        let id = given(self.tool_use_id, path, i, "tool_use_id")?;
        let parts = self.content.unwrap_or_default().into_parts(&format!("{path}[{i}].content"))?;
        Ok(ChatMessage::result(id, parts))
    }

    /// The error for a block that is not understood where it is.
    fn refused(&self, path: &str, i: usize) -> Error {
        let kind = shown(&self.r#type, MAX_SHOWN);
        let message = match kind.as_str() {
            "" => "is missing; text, for example".to_owned(),
            "text" | "image" | "thinking" | "tool_use" | "tool_result" => {
                format!("{kind}: is not for this place; tool_use is of an assistant, image and tool_result of a user")
            }
            _ => format!("{kind}: the server takes text and images; send blocks of the types text and image"),
        };
        Error::invalid(format!("{path}[{i}].type"), message)
    }
}

fn given<T>(value: Option<T>, path: &str, i: usize, member: &str) -> Result<T> {
    value.ok_or_else(|| Error::invalid(format!("{path}[{i}].{member}"), "is missing"))
}
