//! Items of an input, as messages of a chat.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use crate::error::{Error, Result, shown};
use crate::server::http::openai::chat::{ASSISTANT, ChatCall, ChatMessage, ChatPart, joined, raw};
use crate::server::http::text_or_list;

/// Longest name of a type in an error.
const MAX_SHOWN: usize = 64;

/// A text of the user, or a list of items.
#[derive(ToSchema)]
#[schema(value_type = serde_json::Value)]
pub(super) struct ResponseInput(Vec<Item>);

/// A message, a call of a function, its output, or reasoning. Which of the members it has depends on its type.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Item {
    r#type: Option<String>,
    status: Option<String>,
    role: Option<String>,
    content: Option<Parts>,
    summary: Option<Parts>,
    encrypted_content: Option<IgnoredAny>,
    call_id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
    output: Option<Parts>,
}

/// A text, or a list of parts.
struct Parts(Vec<Part>);

#[derive(Default, Deserialize)]
#[serde(default)]
struct Part {
    r#type: String,
    text: Option<String>,
    refusal: Option<String>,
    image_url: Option<String>,
}

impl<'de> Deserialize<'de> for ResponseInput {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let message = |text: &str| {
            let parts = Parts(vec![Part::of(text)]);
            Item { role: Some("user".into()), content: Some(parts), ..Item::default() }
        };
        text_or_list(deserializer, "a string or a list of items", message).map(Self)
    }
}

impl<'de> Deserialize<'de> for Parts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        text_or_list(deserializer, "a string or a list of parts", Part::of).map(Self)
    }
}

impl ResponseInput {
    /// Whether the last item is a message of the assistant that has not ended, which the response continues.
    pub(super) fn ends_unfinished(&self) -> bool {
        let is_unfinished = |item: &Item| {
            let (kind, status) = (item.r#type.as_deref(), item.status.as_deref());
            item.role.as_deref() == Some(ASSISTANT)
                && matches!(kind, None | Some("message"))
                && matches!(status, Some("in_progress" | "incomplete"))
        };
        self.0.last().is_some_and(is_unfinished)
    }

    /// Appends the messages that the items are in a chat.
    ///
    /// # Errors
    /// `InvalidArgument` for an item that is not supported.
    pub(super) fn append_to(self, messages: &mut Vec<ChatMessage>) -> Result<()> {
        self.0.into_iter().enumerate().try_for_each(|(i, item)| item.append_to(&format!("input[{i}]"), messages))
    }
}

impl Item {
    fn append_to(self, path: &str, messages: &mut Vec<ChatMessage>) -> Result<()> {
        match self.r#type.as_deref().unwrap_or("message") {
            "message" => {
                let parts = given(self.content, path, "content")?.into_parts(&format!("{path}.content"))?;
                let role = match self.role.as_deref() {
                    Some(ASSISTANT) => {
                        let answer = answer(messages, |last| last.content.is_none());
                        answer.content = ChatMessage::new(ASSISTANT, parts).content;
                        return Ok(());
                    }
                    Some("user") => "user",
                    // No template knows the second name.
                    Some("system" | "developer") => "system",
                    other => {
                        let other = shown(other.unwrap_or("nothing"), MAX_SHOWN);
                        let message = format!("{other}: it is none of user, assistant, system and developer");
                        return Err(Error::invalid(format!("{path}.role"), message));
                    }
                };
                messages.push(ChatMessage::new(role, parts));
            }
            "function_call" => {
                let (id, name) = (given(self.call_id, path, "call_id")?, given(self.name, path, "name")?);
                let arguments = raw(&given(self.arguments, path, "arguments")?)?;
                answer(messages, |_| true).tool_calls.push(ChatCall::new(id, name, arguments));
            }
            "function_call_output" => {
                let id = given(self.call_id, path, "call_id")?;
                let parts = given(self.output, path, "output")?.into_parts(&format!("{path}.output"))?;
                messages.push(ChatMessage::result(id, parts));
            }
            "reasoning" if self.encrypted_content.is_some() => {
                let message = "is not supported: reasoning is not encrypted here; send its text in content";
                return Err(Error::invalid(format!("{path}.encrypted_content"), message));
            }
            "reasoning" => {
                let parts = self.content.filter(|parts| !parts.0.is_empty()).or(self.summary);
                let parts =
                    parts.map_or_else(|| Ok(Vec::new()), |parts| parts.into_parts(&format!("{path}.content")))?;
                let last = answer(messages, |last| last.reasoning_content.is_none());
                last.reasoning_content = (!parts.is_empty()).then(|| joined(parts, ""));
            }
            other => {
                let other = shown(other, MAX_SHOWN);
                let message =
                    format!("{other}: it is none of message, function_call, function_call_output and reasoning");
                return Err(Error::invalid(format!("{path}.type"), message));
            }
        }
        Ok(())
    }
}

/// The last message if it is an answer of the model and has room, else a new one.
fn answer(messages: &mut Vec<ChatMessage>, has_room: impl FnOnce(&ChatMessage) -> bool) -> &mut ChatMessage {
    if !messages.last().is_some_and(|last| last.role == ASSISTANT && has_room(last)) {
        messages.push(ChatMessage::new(ASSISTANT, Vec::new()));
    }
    messages.last_mut().expect("there is one")
}

impl Parts {
    fn into_parts(self, path: &str) -> Result<Vec<ChatPart>> {
        let part = |(i, part): (usize, Part)| match part.r#type.as_str() {
            "text" | "input_text" | "output_text" | "summary_text" | "reasoning_text" => {
                given(part.text, &format!("{path}[{i}]"), "text").map(ChatPart::from)
            }
            "refusal" => given(part.refusal, &format!("{path}[{i}]"), "refusal").map(ChatPart::from),
            "input_image" => {
                let image_url = given(part.image_url, &format!("{path}[{i}]"), "image_url")?;
                Ok(ChatPart::ImageUrl { image_url })
            }
            other => {
                let message = format!(
                    "{}: the server takes text and images; send parts of the types input_text and input_image",
                    shown(other, MAX_SHOWN)
                );
                Err(Error::invalid(format!("{path}[{i}].type"), message))
            }
        };
        self.0.into_iter().enumerate().map(part).collect()
    }
}

impl Part {
    fn of(text: &str) -> Self {
        Self { r#type: "text".into(), text: Some(text.into()), ..Self::default() }
    }
}

fn given<T>(value: Option<T>, path: &str, member: &str) -> Result<T> {
    value.ok_or_else(|| Error::invalid(format!("{path}.{member}"), "is missing"))
}
