//! The JSON of tool calls.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::ToolCall;

/// Finds the end of a JSON list or object while its text arrives. It does not check that the JSON is valid.
#[derive(Clone, Debug)]
pub(super) struct ValueEnd {
    /// Index of the next byte to look at.
    at: usize,
    depth: usize,
    in_string: bool,
    is_escaped: bool,
}

impl ValueEnd {
    /// Searches for the end of the value that begins at index `start` of the text.
    pub(super) fn from(start: usize) -> Self {
        Self { at: start, depth: 0, in_string: false, is_escaped: false }
    }

    /// The index after the value's last byte, if `text` has that byte. `text` must begin with the text of the last
    /// call.
    pub(super) fn find(&mut self, text: &str) -> Option<usize> {
        for byte in &text.as_bytes()[self.at..] {
            self.at += 1;
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.in_string => self.is_escaped = true,
                b'"' => self.in_string = !self.in_string,
                b'{' | b'[' if !self.in_string => self.depth += 1,
                b'}' | b']' if !self.in_string => {
                    self.depth -= 1;
                    if self.depth == 0 {
                        return Some(self.at);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[derive(Deserialize)]
struct Call<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// The calls in a JSON object, or in a list of objects; None if the JSON is not a call.
pub(super) fn calls(text: &str, is_list: bool) -> Option<Vec<ToolCall>> {
    let calls: Vec<Call<'_>> =
        if is_list { serde_json::from_str(text).ok()? } else { vec![serde_json::from_str(text).ok()?] };
    let is_valid = !calls.is_empty() && calls.iter().all(|call| !call.name.is_empty());
    let call = |call: Call<'_>| ToolCall { name: call.name, arguments: arguments(call.arguments) };
    is_valid.then(|| calls.into_iter().map(call).collect())
}

/// The arguments as clients expect them: the JSON of an object. Some models write this JSON as a string.
fn arguments(given: Option<&RawValue>) -> String {
    let Some(given) = given else { return "{}".to_owned() };
    match serde_json::from_str::<String>(given.get()) {
        Ok(text) if serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&text).is_ok() => text,
        _ => given.get().to_owned(),
    }
}
