//! The prompt of a chat: its messages, and everything else that the model's template shows.

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use crate::error::{Error, Result};
use crate::server::http::members;
use crate::server::pb;

pub(in crate::server::http::openai) const ASSISTANT: &str = "assistant";

members! {
    /// The messages, and everything else that the model's chat template shows.
    pub(in crate::server::http) struct ChatPrompt {
        /// Objects with `role`, `content` (text, null, or a list of parts of the types text and image_url), and
        /// whatever else the template knows, such as `tool_calls`, `tool_call_id` and `reasoning_content`. An image_url
        /// is a `data:` URL of a PNG or JPEG file.
        #[schema(value_type = Option<Vec<serde_json::Value>>)]
        pub(in crate::server::http) messages: Messages,
        /// Tools that the model may call: objects of the type `function`, with name, description and parameters.
        #[schema(value_type = Option<Vec<serde_json::Value>>)]
        pub(in crate::server::http) tools: Box<RawValue>,
        /// Documents that the template shows: objects with `title` and `text`.
        #[schema(value_type = Option<Vec<serde_json::Value>>)]
        pub(in crate::server::http) documents: Box<RawValue>,
        /// Further variables of the template, such as `{"enable_thinking": false}`.
        #[schema(value_type = Option<serde_json::Value>)]
        pub(in crate::server::http) chat_template_kwargs: Box<RawValue>,
        /// Jinja template to use instead of the model's; needs a server with `--trust-request-chat-template`.
        pub(in crate::server::http) chat_template: String,
        /// How much the model reasons: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`. A variable of the
        /// template; so is `enable_thinking`, which is false for `none`, unless chat_template_kwargs has it.
        pub(in crate::server::http) reasoning_effort: ReasoningEffort,
        /// Whether the prompt ends where the answer begins (default: true, but false with continue_final_message).
        pub(in crate::server::http) add_generation_prompt: bool,
        /// Whether the answer continues the last message (default: false).
        pub(in crate::server::http) continue_final_message: bool,
        /// Whether the tokenizer adds special tokens to those that the template writes (default: false).
        pub(in crate::server::http) add_special_tokens: bool,
    }
}

/// The messages of a chat, as JSON.
pub(in crate::server::http) struct Messages {
    pub(in crate::server::http) json: Box<RawValue>,
    /// Paths of the members of images that have no effect.
    without_effect: Vec<String>,
}

impl ChatPrompt {
    /// Paths of the members within messages that were given and have no effect.
    pub(in crate::server::http) fn without_effect(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().flat_map(|messages| &messages.without_effect).map(String::as_str)
    }

    /// The role of the answer: that of the last message, if there is no prompt for an assistant's.
    pub(super) fn role(&self) -> String {
        if self.add_generation_prompt != Some(false) && self.continue_final_message != Some(true) {
            return ASSISTANT.into();
        }
        self.last::<Speaker>().map_or_else(|| ASSISTANT.into(), |last| last.role)
    }

    /// The text of the last message, if it has this role.
    pub(super) fn last_text(&self, role: &str) -> String {
        match self.last::<Speech>() {
            Some(Speech { role: of, content: Some(content) }) if of == role => content.text(),
            _ => String::new(),
        }
    }

    /// The last message.
    fn last<T: DeserializeOwned>(&self) -> Option<T> {
        let messages = self.messages.as_ref()?;
        serde_json::from_str(items(&messages.json).last()?.get()).ok()
    }

    /// The prompt as a gRPC client would send it.
    ///
    /// # Errors
    /// `InvalidArgument` if there are no messages. Everything else is checked when the message is.
    pub(in crate::server::http) fn into_message(self) -> Result<pb::Prompt> {
        let messages =
            self.messages.ok_or_else(|| Error::invalid("messages", "is missing; give a list of messages"))?;
        let text = |json: Option<Box<RawValue>>| json.map_or_else(String::new, |json| Box::<str>::from(json).into());
        let chat = pb::Chat {
            messages: Vec::new(),
            messages_json: text(Some(messages.json)),
            tools_json: text(self.tools),
            documents_json: text(self.documents),
            template_arguments_json: template_arguments(text(self.chat_template_kwargs), self.reasoning_effort),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message.unwrap_or(false),
            chat_template: self.chat_template.unwrap_or_default(),
        };
        let (kind, add_special_tokens) = (Some(pb::prompt::Kind::Chat(chat)), self.add_special_tokens);
        Ok(pb::Prompt { kind, add_special_tokens, ..Default::default() })
    }
}

impl From<Box<RawValue>> for Messages {
    fn from(json: Box<RawValue>) -> Self {
        Self { json, without_effect: Vec::new() }
    }
}

impl<'de> Deserialize<'de> for Messages {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let json = Box::<RawValue>::deserialize(deserializer)?;
        Ok(Self { without_effect: without_effect(&json), json })
    }
}

/// Paths of the members of images that have no effect: how finely the image is seen, and the name by which vLLM caches
/// it. Messages that are malformed have none, because they are rejected later.
fn without_effect(messages: &RawValue) -> Vec<String> {
    // The files of images make the text long, and few clients send these members.
    if !["\"detail\"", "\"uuid\""].into_iter().any(|name| messages.get().contains(name)) {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (i, message) in items(messages).into_iter().enumerate() {
        let content = serde_json::from_str::<Shown<'_>>(message.get()).ok().and_then(|message| message.content);
        for (j, part) in content.map_or_else(Vec::new, items).into_iter().enumerate() {
            let Ok(ShownImage { image_url: Some(url), uuid }) = serde_json::from_str(part.get()) else { continue };
            let path = format!("messages.{i}.content.{j}");
            if serde_json::from_str::<ShownUrl>(url.get()).is_ok_and(|url| url.detail.is_some()) {
                found.push(format!("{path}.image_url.detail"));
            }
            found.extend(uuid.map(|_| format!("{path}.uuid")));
        }
    }
    found
}

/// The items of a list; none of anything else.
fn items(list: &RawValue) -> Vec<&RawValue> {
    serde_json::from_str(list.get()).unwrap_or_default()
}

/// A message, of which only the content is read.
#[derive(Deserialize)]
struct Shown<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

/// A part of a content that may be an image.
#[derive(Deserialize)]
struct ShownImage<'a> {
    #[serde(borrow)]
    image_url: Option<&'a RawValue>,
    uuid: Option<IgnoredAny>,
}

/// The object in which a part has its URL.
#[derive(Deserialize)]
struct ShownUrl {
    detail: Option<IgnoredAny>,
}

/// How much a model reasons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::server::http) enum ReasoningEffort {
    None,
    Minimal,
    Low,
    Medium,
    High,
    Xhigh,
    Max,
}

/// The JSON of the template's variables: those of `given`, JSON or empty, and those that `effort` stands for, as in
/// vLLM. The last of two members with one name counts.
fn template_arguments(mut given: String, effort: Option<ReasoningEffort>) -> String {
    #[derive(Deserialize)]
    struct Thinking {
        enable_thinking: Option<IgnoredAny>,
    }

    let Some(effort) = effort else { return given };
    if given.is_empty() {
        given.push_str("{}");
    }
    // Anything else is rejected when the message is checked.
    if !given.ends_with('}') {
        return given;
    }
    let is_chosen = serde_json::from_str::<Thinking>(&given).is_ok_and(|given| given.enable_thinking.is_some());
    given.pop();
    if given.trim_ascii() != "{" {
        given.push(',');
    }
    let name = serde_json::to_string(&effort).expect("it is a name");
    given.push_str(&format!(r#""reasoning_effort":{name}"#));
    if !is_chosen {
        given.push_str(&format!(r#","enable_thinking":{}"#, effort != ReasoningEffort::None));
    }
    given.push('}');
    given
}

/// The author of a message, whose other members are skipped.
#[derive(Deserialize)]
struct Speaker {
    role: String,
}

/// A message with its text.
#[derive(Deserialize)]
struct Speech {
    role: String,
    content: Option<Content>,
}

/// The content of a message: a text, or texts.
#[derive(Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

/// A part of a content; an image has no text.
#[derive(Deserialize)]
struct Part {
    text: Option<String>,
}

impl Content {
    fn text(self) -> String {
        match self {
            Self::Text(text) => text,
            Self::Parts(parts) => parts.into_iter().filter_map(|part| part.text).collect::<Vec<_>>().join("\n"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &str) -> ChatPrompt {
        serde_json::from_str(body).expect("a body")
    }

    #[test]
    fn the_role_is_that_of_the_next_speaker() {
        for (members, role) in [
            ("", "assistant"),
            (r#", "add_generation_prompt": true"#, "assistant"),
            (r#", "add_generation_prompt": false"#, "user"),
            (r#", "continue_final_message": true"#, "user"),
        ] {
            let body = format!(r#"{{"messages": [{{"role": "system"}}, {{"content": [], "role": "user"}}]{members}}}"#);
            assert_eq!(read(&body).role(), role, "{members}");
        }
        assert_eq!(read(r#"{"messages": 3, "add_generation_prompt": false}"#).role(), "assistant");
    }

    #[test]
    fn an_echo_is_the_last_message_of_the_role() {
        let last =
            |message: &str, role| read(&format!(r#"{{"messages": [{{"role": "a"}}, {message}]}}"#)).last_text(role);
        assert_eq!(last(r#"{"role": "assistant", "content": "One", "x": []}"#, "assistant"), "One");
        assert_eq!(last(r#"{"role": "assistant", "content": "One"}"#, "user"), "");
        let parts = r#"{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}"#;
        assert_eq!(last(parts, "user"), "a\nb");
        assert_eq!(last(r#"{"role": "user", "content": null}"#, "user"), "");
        assert_eq!(last("3", "user"), "");
    }

    #[test]
    fn the_effort_is_a_variable_of_the_template() {
        let arguments = |members: &str| {
            let body = format!(r#"{{"messages": []{members}}}"#);
            let prompt = read(&body).into_message().expect("valid");
            let Some(pb::prompt::Kind::Chat(chat)) = prompt.kind else { panic!("{body}") };
            chat.template_arguments_json
        };
        for (members, expected) in [
            ("", ""),
            (r#", "reasoning_effort": null"#, ""),
            (r#", "reasoning_effort": "low""#, r#"{"reasoning_effort":"low","enable_thinking":true}"#),
            (r#", "reasoning_effort": "none""#, r#"{"reasoning_effort":"none","enable_thinking":false}"#),
            (
                r#", "reasoning_effort": "xhigh", "chat_template_kwargs": { }"#,
                r#"{ "reasoning_effort":"xhigh","enable_thinking":true}"#,
            ),
            (
                r#", "reasoning_effort": "max", "chat_template_kwargs": {"enable_thinking": false, "a": {}}"#,
                r#"{"enable_thinking": false, "a": {},"reasoning_effort":"max"}"#,
            ),
            (r#", "reasoning_effort": "max", "chat_template_kwargs": [1]"#, "[1]"),
        ] {
            assert_eq!(arguments(members), expected, "{members}");
        }
        assert!(serde_json::from_str::<ChatPrompt>(r#"{"reasoning_effort": "much"}"#).is_err());
    }

    #[test]
    fn members_of_images_without_effect_are_named() {
        let named = |content: &str| {
            let body = format!(r#"{{"messages": [3, {{"role": "user", "content": {content}}}]}}"#);
            read(&body).without_effect().collect::<Vec<_>>().join(" ")
        };
        let image = r#"{"type": "image_url", "image_url": {"url": "data:", "detail": "low"}, "uuid": "a"}"#;
        let text = r#"{"type": "text", "text": "detail", "uuid": null}"#;
        let expected = "messages.1.content.1.image_url.detail messages.1.content.1.uuid";
        assert_eq!(named(&format!("[{text}, {image}]")), expected);
        let plain = r#"{"type": "image_url", "image_url": "data:", "uuid": null}"#;
        for content in [plain, text, "3", "null", "[]", "[\"detail\", 3, [], {}, null]"] {
            assert_eq!(named(content), "", "{content}");
        }
        assert_eq!(named(&format!("[{plain}]")), "");
    }

    #[test]
    fn json_arrives_as_it_was_sent() {
        let body = r#"{"messages": [ {"role":"user"} ], "tools": null, "chat_template_kwargs": {"b": 1,"a": 2},
            "continue_final_message": true, "add_special_tokens": true}"#;
        let message = read(body).into_message().expect("has messages");
        let chat = pb::Chat {
            messages_json: r#"[ {"role":"user"} ]"#.into(),
            template_arguments_json: r#"{"b": 1,"a": 2}"#.into(),
            continue_final_message: true,
            ..Default::default()
        };
        assert_eq!(message.kind, Some(pb::prompt::Kind::Chat(chat)));
        assert_eq!(message.add_special_tokens, Some(true));
        assert!(ChatPrompt::default().into_message().is_err());
    }
}
