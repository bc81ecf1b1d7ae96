//! Chats of requests: messages, tools and template arguments, checked and brought into the form that templates expect.

use serde_json::{Map, Value, json};

use super::images::GivenImage;
use super::pb::image::Source;
use super::{data_url, pb};
use crate::error::{Error, Result, shown};
use crate::memory::Charge;
use crate::text::Conversation;

/// Most bytes that a byte of the chat's texts takes besides what the template makes of it: copies as JSON values and as
/// values of the template.
const RENDERING: u64 = 8;
/// Bytes that a value of JSON takes besides its text, as a value of JSON and of the template, in maps that grow.
const VALUE: u64 = 512;
/// Bytes that the values of one chat message take besides its text.
const MESSAGE: u64 = 1 << 10;
/// Longest name of a part's type in an error.
const MAX_SHOWN: usize = 64;
/// Variables of the template that cannot be template arguments.
const RESERVED: &[(&str, &str)] = &[
    ("messages", "the messages have a field of their own"),
    ("tools", "tools have a field of their own"),
    ("documents", "documents have a field of their own"),
    ("add_generation_prompt", "it has a field of its own"),
    ("continue_final_message", "it has a field of its own"),
    ("chat_template", "it has a field of its own"),
    ("tokenize", "a request always needs token ids"),
];

/// Estimate of the bytes that checking and rendering a chat takes, found without parsing it.
pub(super) fn rendering_bytes(chat: &pb::Chat) -> u64 {
    let json = [&chat.messages_json, &chat.tools_json, &chat.documents_json, &chat.template_arguments_json];
    let texts: usize = chat.messages.iter().map(|m| m.role.len() + m.content.len()).sum();
    let values: u64 = json.iter().map(|text| values(text)).sum();
    let bytes = texts + json.iter().map(|text| text.len()).sum::<usize>();
    bytes as u64 * RENDERING + values * VALUE + chat.messages.len() as u64 * MESSAGE
}

/// Upper bound on the number of values in a JSON text.
fn values(text: &str) -> u64 {
    1 + text.bytes().filter(|byte| matches!(byte, b'[' | b'{' | b',' | b':')).count() as u64
}

/// Takes the images out of the messages of a chat, in the order of its parts. A part of the type `image` stands for the
/// next image of `given`. One of the type `image_url` or `input_image` holds a file in a `data:` URL, and becomes a
/// part of the type `image`.
///
/// # Errors
/// `InvalidArgument` for a URL of another kind; `ResourceExhausted` if memory for the files is short.
pub(super) fn take_images(
    path: &str,
    chat: &mut pb::Chat,
    given: Vec<GivenImage>,
    charge: &mut Charge,
) -> Result<Vec<GivenImage>> {
    let json = &mut chat.messages_json;
    if !["image_url", "input_image"].into_iter().any(|kind| json.contains(kind)) {
        return Ok(given);
    }
    let path = format!("{path}.messages_json");
    let (mut given, mut found) = (given.into_iter(), Vec::new());
    // The files, which are shorter than their texts, stay.
    charge.grow(json.len() as u64)?;
    let copies = 2 * json.len() as u64 + values(json) * VALUE;
    let take = || -> Result<()> {
        let mut messages = parsed(&path, json)?;
        for (i, message) in messages.as_array_mut().into_iter().flatten().enumerate() {
            let parts = message.get_mut("content").and_then(Value::as_array_mut);
            for (j, part) in parts.into_iter().flatten().enumerate() {
                let path = format!("{path}[{i}].content[{j}]");
                found.extend(match part.get("type").and_then(Value::as_str) {
                    Some("image") => given.next(),
                    Some("image_url" | "input_image") => Some(image_of_part(&path, part)?),
                    _ => None,
                });
            }
        }
        *json = messages.to_string();
        Ok(())
    };
    charge.hold(copies, take)??;
    found.extend(given);
    Ok(found)
}

/// The image of a part, which becomes one of the type `image`.
fn image_of_part(path: &str, part: &mut Value) -> Result<GivenImage> {
    let path = format!("{path}.image_url");
    let given = part.get("image_url").unwrap_or(&Value::Null);
    let url = given.get("url").unwrap_or(given).as_str();
    let url = url.ok_or_else(|| Error::invalid(&path, "is neither a URL nor an object with a url"))?;
    let file = data_url::decode(url).map_err(|message| Error::invalid(&path, message))?;
    *part = json!({ "type": "image" });
    Ok(GivenImage { path, source: Some(Source::Encoded(file)) })
}

/// Checks a chat, for a model that takes images in messages or not. Needs as many bytes as [`rendering_bytes`] says.
pub(super) fn conversation(path: &str, chat: pb::Chat, takes_images: bool) -> Result<Conversation> {
    let add_generation_prompt = chat.add_generation_prompt.unwrap_or(!chat.continue_final_message);
    if add_generation_prompt && chat.continue_final_message {
        let message = "cannot be combined with continue_final_message; send one of them";
        return Err(Error::invalid(format!("{path}.add_generation_prompt"), message));
    }
    Ok(Conversation {
        messages: messages(path, chat.messages, &chat.messages_json, takes_images)?,
        tools: objects(&format!("{path}.tools_json"), &chat.tools_json)?,
        documents: objects(&format!("{path}.documents_json"), &chat.documents_json)?,
        arguments: arguments(&format!("{path}.template_arguments_json"), &chat.template_arguments_json)?,
        add_generation_prompt,
        continue_final_message: chat.continue_final_message,
    })
}

fn messages(path: &str, plain: Vec<pb::ChatMessage>, given: &str, takes_images: bool) -> Result<Vec<Value>> {
    let name = if given.is_empty() { "messages" } else { "messages_json" };
    let path = format!("{path}.{name}");
    let messages: Vec<Value> = match (plain.is_empty(), given.is_empty()) {
        (false, false) => return Err(Error::invalid(path, "cannot be combined with messages; give one of them")),
        (_, true) => plain.into_iter().map(|m| json!({ "role": m.role, "content": m.content })).collect(),
        (true, false) => match parsed(&path, given)? {
            Value::Array(messages) => messages,
            _ => return Err(Error::invalid(path, "is not a list of messages")),
        },
    };
    ensure!(!messages.is_empty(), path, "is empty; give at least one message");
    messages.into_iter().enumerate().map(|(i, value)| message(&format!("{path}[{i}]"), value, takes_images)).collect()
}

/// A message as templates expect it: without members that are null, as those of OpenAI's answers are, and with what
/// vLLM does to it.
fn message(path: &str, value: Value, takes_images: bool) -> Result<Value> {
    let Value::Object(mut members) = value else {
        return Err(Error::invalid(path, "is not an object; a message has role and content"));
    };
    let role = match members.get("role") {
        Some(Value::String(role)) if !role.is_empty() => role.clone(),
        _ => return Err(Error::invalid(format!("{path}.role"), "is not given; user or system, for example")),
    };
    let given = members.get_mut("content").map(Value::take);
    if role == "user" && given == Some(Value::Null) {
        return Err(Error::invalid(format!("{path}.content"), "is null; give text"));
    }
    let content = content(&format!("{path}.content"), given.unwrap_or_default(), takes_images)?;
    members.insert("content".into(), content);
    members.retain(|_, value| !value.is_null());
    for (name, why) in [("audio", "this model takes text"), ("function_call", "is no longer used; send tool_calls")] {
        ensure!(!members.contains_key(name), format!("{path}.{name}"), "{why}");
    }
    if members.get("tool_calls") == Some(&json!([])) {
        members.shift_remove("tool_calls");
    }
    if let Some(calls) = members.get_mut("tool_calls") {
        parse_arguments(&format!("{path}.tool_calls"), calls)?;
    }
    alias_reasoning(&mut members);
    Ok(Value::Object(members))
}

/// A text, or a list of parts, each of them a text or an image.
fn content(path: &str, given: Value, takes_images: bool) -> Result<Value> {
    match given {
        Value::Null => Ok(Value::String(String::new())),
        Value::String(text) => Ok(Value::String(text)),
        Value::Array(parts) => {
            let part = |(i, value)| part(&format!("{path}[{i}]"), value, takes_images);
            parts.into_iter().enumerate().map(part).collect::<Result<_>>().map(Value::Array)
        }
        _ => Err(Error::invalid(path, "is neither text nor null nor a list of parts")),
    }
}

fn part(path: &str, given: Value, takes_images: bool) -> Result<Value> {
    let mut members = match given {
        Value::String(text) => return Ok(json!({ "type": "text", "text": text })),
        Value::Object(members) => members,
        _ => return Err(Error::invalid(path, r#"is not a part; a part is {"type": "text", "text": ...}"#)),
    };
    let name = match members.get("type").map(|kind| kind.as_str()) {
        None | Some(Some("text" | "input_text" | "output_text")) => "text",
        Some(Some("refusal")) => "refusal",
        Some(Some("image")) if takes_images => return Ok(json!({ "type": "image" })),
        Some(kind) => {
            let kind = shown(kind.unwrap_or("not a text"), MAX_SHOWN);
            let taken = if takes_images { "text and images" } else { "text" };
            let message = format!("{kind}: this model takes {taken}; send parts of the type text");
            return Err(Error::invalid(format!("{path}.type"), message));
        }
    };
    match members.get_mut(name).map(Value::take) {
        Some(Value::String(text)) => Ok(json!({ "type": "text", "text": text })),
        _ => Err(Error::invalid(format!("{path}.{name}"), "is not a text")),
    }
}

/// Turns the arguments of calls, which OpenAI's clients send as JSON in a text, into objects, which templates write as
/// JSON. As in vLLM, arguments that are not an object become an empty one: a model wrote them, and an error would end
/// the conversation at each later turn.
fn parse_arguments(path: &str, calls: &mut Value) -> Result<()> {
    let Value::Array(calls) = calls else { return Err(Error::invalid(path, "is not a list of calls")) };
    for (i, call) in calls.iter_mut().enumerate() {
        let function = if call.get("function").is_some() { &mut call["function"] } else { call };
        let Value::Object(function) = function else {
            let message = "is not a call; a call has function: {name, arguments}";
            return Err(Error::invalid(format!("{path}[{i}]"), message));
        };
        let arguments = function.entry("arguments").or_insert(Value::Null);
        let object = match arguments.take() {
            Value::Object(object) => object,
            Value::String(text) => serde_json::from_str(&text).unwrap_or_default(),
            _ => Map::new(),
        };
        *arguments = Value::Object(object);
    }
    Ok(())
}

/// Gives reasoning under both names by which templates know it.
fn alias_reasoning(members: &mut Map<String, Value>) {
    let (old, new) = ("reasoning_content", "reasoning");
    match (members.get(old), members.get(new)) {
        (Some(text), None) => members.insert(new.into(), text.clone()),
        (None, Some(text)) => members.insert(old.into(), text.clone()),
        _ => None,
    };
}

/// A list of objects, or null if it is empty or not given.
fn objects(path: &str, given: &str) -> Result<Value> {
    match parsed(path, given)? {
        Value::Null => Ok(Value::Null),
        Value::Array(items) if items.is_empty() => Ok(Value::Null),
        Value::Array(items) => match items.iter().position(|item| !item.is_object()) {
            Some(i) => Err(Error::invalid(format!("{path}[{i}]"), "is not an object")),
            None => Ok(Value::Array(items)),
        },
        _ => Err(Error::invalid(path, "is not a list of objects")),
    }
}

fn arguments(path: &str, given: &str) -> Result<Map<String, Value>> {
    let arguments = match parsed(path, given)? {
        Value::Null => Map::new(),
        Value::Object(arguments) => arguments,
        _ => return Err(Error::invalid(path, "is not an object")),
    };
    match RESERVED.iter().find(|(name, _)| arguments.contains_key(*name)) {
        Some((name, reason)) => Err(Error::invalid(format!("{path}.{name}"), *reason)),
        None => Ok(arguments),
    }
}

/// The value of a JSON text; null if the text is empty.
fn parsed(path: &str, text: &str) -> Result<Value> {
    if text.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(text).map_err(|error| Error::invalid(path, format!("is not JSON: {error}")))
}
