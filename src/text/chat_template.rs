//! Chat templates render messages to the text format that the model was trained on, as transformers does.

mod jinja;
mod meter;
mod operators;
mod program;
mod tojson;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::gguf_file::Value as GgufValue;
use minijinja::value::{Serde, Value};
use minijinja::{Environment, ErrorKind};
use serde_json::Value as Json;
use time::OffsetDateTime;
use time::format_description::parse_strftime_borrowed;

use super::gguf;
use super::reasoning::ReasoningFormat;
use crate::error::{Error, Result};
use crate::memory::{Charge, Traffic};
use crate::types::ToolFormat;
use program::Program;

/// Name of the template in its environment. It has no file extension, so minijinja does not escape for HTML.
const NAME: &str = "chat_template";

/// Mark that [`ChatTemplate::render`] appends to a message that the model is to continue, to find its end in the text.
/// The space at its end shows whether the template trims messages.
const CONTINUE: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// ChatML with the system message that Qwen v1 has by default; its checkpoints have no template.
const QWEN_V1: &str = concat!(
    "{% if messages[0]['role'] != 'system' %}",
    "{{ '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}{% endif %}",
    "{% for message in messages %}",
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}",
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
);

/// Longest format of a date, because the meter does not count the bytes of dates. Real formats have about 20 bytes.
const MAX_DATE_FORMAT_BYTES: usize = 1024;

/// The input of a template.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    /// Objects with `role`, `content` (a text, or a list of objects with a `text`), and any other fields that the
    /// template knows.
    pub messages: Vec<Json>,
    /// A list of tools, or null.
    pub tools: Json,
    /// A list of documents, or null.
    pub documents: Json,
    /// Further variables of the template, such as `enable_thinking`.
    pub arguments: serde_json::Map<String, Json>,
    /// Whether the text ends where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Whether the text ends with the text of the last message.
    pub continue_final_message: bool,
}

/// A compiled chat template and the special tokens that it may name. It is immutable; share it in an
/// [`std::sync::Arc`].
#[derive(Debug)]
pub struct ChatTemplate {
    source: Arc<str>,
    program: Program,
    /// Text of each special token by its variable in the template: `bos_token`, `eos_token` and so on.
    special_tokens: BTreeMap<String, String>,
    /// Whether it renders the parts of a content that is a list. Other templates expect a text.
    takes_parts: bool,
    tool_format: Option<ToolFormat>,
    reasoning_format: Option<ReasoningFormat>,
}

impl ChatTemplate {
    /// Most bytes that compiling `source` takes, of which the template keeps a part until it is dropped.
    ///
    /// # Errors
    /// `Config` if `source` is too large.
    pub fn compiling_bytes(source: &str) -> Result<u64> {
        Program::parsing_bytes(source)
    }

    /// Compiles `source`. `special_tokens` are visible in the template by their names (`bos_token`).
    ///
    /// # Errors
    /// `Config` with the line if `source` is not a template.
    pub fn new(source: Arc<str>, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        let mut environment = Environment::new();
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson::tojson);
        jinja::install(&mut environment);
        let (takes_parts, tool_format) = (loops_over_content(&source), ToolFormat::of_template(&source));
        let reasoning_format = ReasoningFormat::of_template(&source);
        let program = Program::new(NAME, jinja::with_known_tags(source.clone()), environment)?;
        Ok(Self { source, program, special_tokens, takes_parts, tool_format, reasoning_format })
    }

    /// Reads the template of a Hugging Face directory: `chat_template.jinja` if there is one, else `chat_template` in
    /// `tokenizer_config.json` (if that has several, the one named `default`). `None` if neither has a template.
    ///
    /// # Errors
    /// `Config` if a file cannot be read or parsed.
    pub fn from_files(tokenizer_config: &Json, chat_template: Option<&Path>) -> Result<Option<Self>> {
        let source = match chat_template {
            Some(path) => Some(read(path)?),
            None => template_of_config(&tokenizer_config["chat_template"])?,
        };
        source.map(|source| Self::new(source.into(), special_tokens_of_config(tokenizer_config))).transpose()
    }

    /// Reads the template from the file `chat_template`, or takes it from the metadata of a GGUF file. `None` if there
    /// is none.
    ///
    /// # Errors
    /// `Config` if the file cannot be read or the template cannot be compiled.
    pub fn from_gguf(metadata: &HashMap<String, GgufValue>, chat_template: Option<&Path>) -> Result<Option<Self>> {
        let source = match (chat_template, metadata.get("tokenizer.chat_template")) {
            (Some(path), _) => read(path)?,
            (None, Some(GgufValue::String(source))) => source.clone(),
            (None, _) => return Ok(None),
        };
        Self::new(source.into(), special_tokens_of_gguf(metadata)).map(Some)
    }

    /// The template of Qwen v1, with the special tokens of its `tokenizer_config.json`.
    ///
    /// # Errors
    /// As for [`ChatTemplate::new`].
    pub fn of_qwen_v1(tokenizer_config: &Json) -> Result<Self> {
        Self::new(QWEN_V1.into(), special_tokens_of_config(tokenizer_config))
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// The format in which the template shows tool calls to the model; None if that is not known.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        self.tool_format
    }

    /// The format of the reasoning that the template expects from the model; None if it expects none.
    pub fn reasoning_format(&self) -> Option<ReasoningFormat> {
        self.reasoning_format
    }

    /// Renders a conversation to text. Returns the text with the charge for all bytes that the render made.
    ///
    /// # Errors
    /// `InvalidArgument` with the template's message if the template rejects the messages, if the last one cannot be
    /// continued, or if the render exceeds a limit; `ResourceExhausted` if `traffic` has no room for it now, or if it
    /// takes too long.
    pub fn render(&self, mut conversation: Conversation, traffic: &Traffic) -> Result<(String, Charge)> {
        if !self.takes_parts {
            conversation.messages.iter_mut().for_each(join_parts);
        }
        let continued = match conversation.messages.last_mut() {
            Some(last) if conversation.continue_final_message => Some(mark_end(last)?),
            _ => None,
        };
        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        context.extend(self.special_tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token))));
        context.extend(conversation.arguments.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        context.insert("messages", Value::from(Serde(&conversation.messages)));
        context.insert("tools", Value::from(Serde(&conversation.tools)));
        context.insert("documents", Value::from(Serde(&conversation.documents)));
        context.insert("add_generation_prompt", Value::from(conversation.add_generation_prompt));
        let (text, charge) = self.program.render(context, traffic).map_err(|error| meter::typed(&error))?;
        match continued {
            Some(last) => Ok((cut_after(text, &last)?, charge)),
            None => Ok((text, charge)),
        }
    }
}

/// `tokenizer_config.json`, or null if the model has none.
///
/// # Errors
/// `Config` if the file cannot be read or parsed.
pub fn read_tokenizer_config(path: Option<&Path>) -> Result<Json> {
    let Some(path) = path else { return Ok(Json::Null) };
    serde_json::from_str(&read(path)?).map_err(|e| Error::Config(format!("{}: not JSON: {e}", path.display())))
}

/// Whether a template has a loop over the parts of a message's content.
fn loops_over_content(source: &str) -> bool {
    let words: Vec<&str> = source.split_whitespace().collect();
    let is_content = |word: &str| {
        let word = word.trim_end_matches(['%', '}', '-']);
        word.ends_with(".content") || word.ends_with("['content']") || word.ends_with("[\"content\"]")
    };
    words.windows(4).any(|w| w[0] == "for" && w[2] == "in" && is_content(w[3]))
}

/// Joins a content that is a list of parts into one text, with one part per line.
fn join_parts(message: &mut Json) {
    if let Some(Json::Array(parts)) = message.get("content") {
        let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
        message["content"] = texts.join("\n").into();
    }
}

/// Marks the end of the last text of a message. Returns the text.
fn mark_end(message: &mut Json) -> Result<String> {
    let content = message.get_mut("content");
    let text = match content {
        Some(Json::String(text)) => Some(text),
        Some(Json::Array(parts)) => parts.last_mut().and_then(|part| match part.get_mut("text") {
            Some(Json::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    let text = text.ok_or_else(|| Error::invalid("messages", "the last message has no text to continue"))?;
    let whole = text.clone();
    text.push_str(CONTINUE);
    Ok(whole)
}

/// `text` up to the end of its last message, which [`mark_end`] has marked.
fn cut_after(mut text: String, last: &str) -> Result<String> {
    let at = text.rfind(CONTINUE.trim_end()).filter(|_| text.contains(last.trim()));
    let Some(at) = at else {
        let message = "the chat template changes the last message, so that it cannot be continued";
        return Err(Error::invalid("messages", message));
    };
    let is_trimmed = !text[at..].starts_with(CONTINUE);
    text.truncate(at);
    if is_trimmed {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|e| Error::Config(format!("{}: {e}", path.display())))
}

fn template_of_config(value: &Json) -> Result<Option<String>> {
    let unusable = |what: &str| Err(Error::Config(format!("tokenizer_config.json: chat_template {what}")));
    match value {
        Json::Null => Ok(None),
        Json::String(source) => Ok(Some(source.clone())),
        Json::Array(named) => {
            let default = named.iter().find(|t| t["name"] == "default").map(|t| &t["template"]);
            match default.and_then(Json::as_str) {
                Some(source) => Ok(Some(source.to_string())),
                None => unusable("is a list without one named \"default\""),
            }
        }
        _ => unusable("is neither a string nor a list"),
    }
}

/// The special tokens that templates may name, from the metadata of a GGUF file.
pub fn special_tokens_of_gguf(metadata: &HashMap<String, GgufValue>) -> BTreeMap<String, String> {
    let names = [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")];
    let named = |(name, key): (&str, &str)| {
        let token = gguf::named_token(metadata, &format!("tokenizer.ggml.{key}_token_id"))?;
        Some((format!("{name}_token"), token.to_string()))
    };
    names.into_iter().filter_map(named).collect()
}

/// Every `*_token` of `tokenizer_config.json`, whether it is a string or an object with `content`.
pub fn special_tokens_of_config(config: &Json) -> BTreeMap<String, String> {
    let Json::Object(entries) = config else { return BTreeMap::new() };
    entries
        .iter()
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, value)| {
            let token = value.as_str().or_else(|| value["content"].as_str())?;
            Some((name.clone(), token.to_string()))
        })
        .collect()
}

fn raise_exception(message: String) -> std::result::Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// The current date, for templates. It is in UTC, although transformers uses the machine's time zone: a reply should
/// not depend on the server's location.
fn strftime_now(format: &str) -> std::result::Result<String, minijinja::Error> {
    let refusal = |e: String| minijinja::Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {e}"));
    if format.len() > MAX_DATE_FORMAT_BYTES {
        return Err(refusal(format!("the format has more than {MAX_DATE_FORMAT_BYTES} bytes")));
    }
    strftime(format, OffsetDateTime::now_utc()).map_err(|e| refusal(e.to_string()))
}

/// Formats a time in UTC as C's `strftime` does.
fn strftime(format: &str, time: OffsetDateTime) -> time::Result<String> {
    // The time crate knows no names of time zones.
    let format = format.split("%%").map(|part| part.replace("%Z", "UTC")).collect::<Vec<_>>().join("%%");
    Ok(time.format(&parse_strftime_borrowed(&format)?)?)
}

#[cfg(test)]
mod tests;
