//! Chat templates: they render messages to the text format that the model was trained on, as transformers does.

mod strftime;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use candle_core::quantized::gguf_file::Value as GgufValue;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::Serialize;
use serde_json::Value as Json;

use super::gguf;
use crate::error::{Error, Result};

/// Name of the template in its environment. It has no file extension, so minijinja does not escape for HTML.
const NAME: &str = "chat_template";

/// A compiled chat template and the special tokens that it may name. Immutable; share it in an [`std::sync::Arc`].
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// Text of each special token by its variable in the template: `bos_token`, `eos_token` and so on.
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    /// Compiles `source`. `special_tokens` are visible in the template by their names (`bos_token`).
    ///
    /// # Errors
    /// `Config` with the line if `source` is not a template.
    pub fn new(source: String, special_tokens: BTreeMap<String, String>) -> Result<Self> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|e| Error::Internal(e.to_string()))?);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_filter("tojson", tojson);
        environment
            .add_template_owned(NAME, source)
            .map_err(|e| Error::Config(format!("the model's chat template cannot be compiled: {e}")))?;
        Ok(Self { environment, special_tokens })
    }

    /// Reads the template of a Hugging Face directory: `chat_template.jinja` if there is one, else `chat_template` in
    /// `tokenizer_config.json` (if that has several, the one named `default`). `None` if neither has a template.
    ///
    /// # Errors
    /// `Config` if a file cannot be read or parsed.
    pub fn from_files(tokenizer_config: Option<&Path>, chat_template: Option<&Path>) -> Result<Option<Self>> {
        let config: Json = match tokenizer_config {
            None => Json::Null,
            Some(path) => serde_json::from_str(&read(path)?)
                .map_err(|e| Error::Config(format!("{}: not JSON: {e}", path.display())))?,
        };
        let source = match chat_template {
            Some(path) => Some(read(path)?),
            None => template_of_config(&config["chat_template"])?,
        };
        source.map(|source| Self::new(source, special_tokens_of_config(&config))).transpose()
    }

    /// Takes the template from the metadata of a GGUF file; `None` if there is none.
    ///
    /// # Errors
    /// `Config` if the template cannot be compiled.
    pub fn from_gguf(metadata: &HashMap<String, GgufValue>) -> Result<Option<Self>> {
        let Some(GgufValue::String(source)) = metadata.get("tokenizer.chat_template") else { return Ok(None) };
        let names = [("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")];
        let special_tokens = names
            .into_iter()
            .filter_map(|(name, key)| {
                let token = gguf::named_token(metadata, &format!("tokenizer.ggml.{key}_token_id"))?;
                Some((format!("{name}_token"), token.to_string()))
            })
            .collect();
        Self::new(source.clone(), special_tokens).map(Some)
    }

    /// Renders `messages` (objects with `role`, `content` and whatever else the template knows) to text. With
    /// `add_generation_prompt` the text ends where the assistant's answer begins. `variables` are further variables of
    /// the template, such as `enable_thinking`.
    ///
    /// # Errors
    /// `InvalidArgument` with the template's message if the template refuses the messages.
    pub fn render(
        &self,
        messages: &[Json],
        add_generation_prompt: bool,
        variables: &serde_json::Map<String, Json>,
    ) -> Result<String> {
        let mut context: BTreeMap<&str, Value> = BTreeMap::new();
        context.extend(self.special_tokens.iter().map(|(name, token)| (name.as_str(), Value::from(token))));
        context.extend(variables.iter().map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        context.insert("messages", Value::from(Serde(messages)));
        context.insert("add_generation_prompt", Value::from(add_generation_prompt));
        let template = self.environment.get_template(NAME).expect("added when this was made");
        template.render(Value::from(context)).map_err(|e| {
            let message = e.detail().map_or_else(|| e.to_string(), str::to_string);
            Error::invalid("messages", format!("the model's chat template refuses them: {message}"))
        })
    }
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

/// Every `*_token` of `tokenizer_config.json`, whether it is a string or an object with `content`.
fn special_tokens_of_config(config: &Json) -> BTreeMap<String, String> {
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

/// The current date, for templates. In UTC, where transformers uses the machine's time zone: a server's answer should
/// not depend on its location.
fn strftime_now(format: &str) -> std::result::Result<String, minijinja::Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    strftime::strftime(format, seconds).map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e))
}

/// Python's `json.dumps(value, ensure_ascii=False, indent=indent)`. minijinja's own filter escapes for HTML.
fn tojson(value: &Value, options: Kwargs) -> std::result::Result<String, minijinja::Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Templates pass this argument to ask for what this filter does in any case.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut json = Vec::new();
    let written = match indent {
        Some(indent) => {
            let indent = " ".repeat(indent);
            let formatter = serde_json::ser::PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, formatter))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, PythonFormatter)),
    };
    written.map_err(|e| minijinja::Error::new(ErrorKind::InvalidOperation, e.to_string()))?;
    Ok(String::from_utf8(json).expect("JSON is UTF-8"))
}

/// Formats JSON on one line with the separators `", "` and `": "`, as Python does.
struct PythonFormatter;

impl serde_json::ser::Formatter for PythonFormatter {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, writer: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests;
