//! Blocks, of which the messages of a request are made, as messages of a chat.

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::error::{Error, Result, shown};
use crate::server::http::openai::chat::{ChatCall, ChatMessage, raw};
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
                messages.extend((!text.is_empty()).then(|| ChatMessage::new("system", vec![text])));
            }
            Speaker::User => {
                let mut texts = Vec::new();
                for (i, block) in self.content.0.into_iter().enumerate() {
                    match block.r#type.as_str() {
                        "text" => texts.extend(block.into_text(&path, i)?),
                        "tool_result" => messages.push(block.into_result(&path, i)?),
                        _ => return Err(block.refused(&path, i)),
                    }
                }
                messages.extend((!texts.is_empty()).then(|| ChatMessage::new("user", texts)));
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
        let mut texts = self.into_texts(path)?;
        texts.retain(|text| !text.starts_with(ATTRIBUTION));
        Ok(texts.concat())
    }

    fn into_texts(self, path: &str) -> Result<Vec<String>> {
        let mut texts = Vec::new();
        for (i, block) in self.0.into_iter().enumerate() {
            if block.r#type != "text" {
                return Err(block.refused(path, i));
            }
            texts.extend(block.into_text(path, i)?);
        }
        Ok(texts)
    }

    /// An earlier answer of the model.
    fn into_answer(self, path: &str) -> Result<ChatMessage> {
        let (mut texts, mut tool_calls, mut reasoning) = (Vec::new(), Vec::new(), None::<String>);
        for (i, block) in self.0.into_iter().enumerate() {
            match block.r#type.as_str() {
                "text" => texts.extend(block.into_text(path, i)?),
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
        Ok(ChatMessage { tool_calls, reasoning_content: reasoning, ..ChatMessage::new("assistant", texts) })
    }
}

impl Block {
    /// The text, unless it is empty.
    fn into_text(self, path: &str, i: usize) -> Result<Option<String>> {
        let text = given(self.text, path, i, "text")?;
        Ok((!text.is_empty()).then_some(text))
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
        let texts = self.content.unwrap_or_default().into_texts(&format!("{path}[{i}].content"))?;
        Ok(ChatMessage::result(id, texts.join("\n")))
    }

    /// The error for a block that is not understood where it is.
    fn refused(&self, path: &str, i: usize) -> Error {
        let kind = shown(&self.r#type, MAX_SHOWN);
        let message = match kind.as_str() {
            "" => "is missing; text, for example".to_owned(),
            "text" | "thinking" | "tool_use" | "tool_result" => {
                format!("{kind}: is not for this place; tool_use is of an assistant, tool_result of a user")
            }
            _ => format!("{kind}: this model takes text; send blocks of the type text"),
        };
        Error::invalid(format!("{path}[{i}].type"), message)
    }
}

fn given<T>(value: Option<T>, path: &str, i: usize, member: &str) -> Result<T> {
    value.ok_or_else(|| Error::invalid(format!("{path}[{i}].{member}"), "is missing"))
}
