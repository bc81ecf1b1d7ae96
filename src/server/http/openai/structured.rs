//! The grammar of a sample's text, as OpenAI (`response_format`) and vLLM (`structured_outputs`) write it.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::error::{Error, Result, shown};
use crate::server::pb::{self, structured_outputs::Kind};

/// vLLM's `structured_outputs`. Exactly one of the first five is set.
#[derive(Default, Deserialize)]
#[serde(default)]
struct StructuredOutputs {
    json: Option<Box<RawValue>>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
    json_object: Option<bool>,
    structural_tag: Option<Box<RawValue>>,
    disable_any_whitespace: Option<bool>,
    disable_additional_properties: Option<bool>,
    whitespace_pattern: Option<String>,
}

/// OpenAI's `response_format`.
#[derive(Deserialize)]
struct ResponseFormat {
    r#type: String,
    json_schema: Option<JsonSchema>,
}

#[derive(Deserialize)]
struct JsonSchema {
    schema: Option<Box<RawValue>>,
}

/// The grammar that the members of a body ask for; None if any text will do.
///
/// # Errors
/// `InvalidArgument` with the wrong member. Whether a grammar can be compiled is checked when the message is.
pub(super) fn structured(
    outputs: Option<&RawValue>,
    format: Option<&RawValue>,
) -> Result<Option<pb::StructuredOutputs>> {
    let outputs = outputs.map(of_vllm).transpose()?;
    let format = format.map(of_openai).transpose()?.flatten();
    match (outputs, format) {
        (Some(_), Some(_)) => {
            Err(Error::invalid("response_format", "cannot be combined with structured_outputs; send one of them"))
        }
        (kind, other) => Ok(kind.or(other).map(|kind| pb::StructuredOutputs { kind: Some(kind) })),
    }
}

fn of_vllm(given: &RawValue) -> Result<Kind> {
    let invalid = |message: String| Error::invalid("structured_outputs", message);
    let given: StructuredOutputs = serde_json::from_str(given.get()).map_err(|error| invalid(error.to_string()))?;
    if given.structural_tag.is_some() {
        return Err(Error::invalid("structured_outputs.structural_tag", "is not supported; send a grammar"));
    }
    // They would change the samples, so they are rejected, not ignored.
    let tuned = [
        ("disable_any_whitespace", given.disable_any_whitespace == Some(true)),
        ("disable_additional_properties", given.disable_additional_properties == Some(true)),
        ("whitespace_pattern", given.whitespace_pattern.is_some()),
    ];
    if let Some((name, _)) = tuned.iter().find(|(_, asked)| *asked) {
        let message = "is not supported; say it in the schema: additionalProperties, or x-guidance for white space";
        return Err(Error::invalid(format!("structured_outputs.{name}"), message));
    }
    let kinds = [
        given.json.map(|schema| text_of(&schema)).map(Kind::JsonSchema),
        given.regex.map(Kind::Regex),
        given.choice.map(|choices| Kind::Choice(pb::Choices { choices })),
        given.grammar.map(Kind::Grammar),
        given.json_object.filter(|asked| *asked).map(Kind::JsonObject),
    ];
    let mut kinds = kinds.into_iter().flatten();
    match (kinds.next(), kinds.next()) {
        (Some(kind), None) => Ok(kind),
        (None, _) => Err(invalid("is empty; give json, regex, choice, grammar or json_object".into())),
        (Some(_), Some(_)) => {
            Err(invalid("asks for more than one of json, regex, choice, grammar, json_object".into()))
        }
    }
}

fn of_openai(given: &RawValue) -> Result<Option<Kind>> {
    let invalid = |message: String| Error::invalid("response_format", message);
    let given: ResponseFormat = serde_json::from_str(given.get()).map_err(|error| invalid(error.to_string()))?;
    match given.r#type.as_str() {
        "text" => Ok(None),
        "json_object" => Ok(Some(Kind::JsonObject(true))),
        "json_schema" => {
            let schema = given.json_schema.and_then(|format| format.schema);
            let missing = || Error::invalid("response_format.json_schema.schema", "is missing; give a JSON schema");
            Ok(Some(Kind::JsonSchema(text_of(&schema.ok_or_else(missing)?))))
        }
        other => {
            let message = format!("{:?} is none of text, json_object and json_schema", shown(other, 64));
            Err(Error::invalid("response_format.type", message))
        }
    }
}

/// A schema's text: vLLM takes it as JSON, and as JSON in a text.
fn text_of(schema: &RawValue) -> String {
    serde_json::from_str::<String>(schema.get()).unwrap_or_else(|_| schema.get().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(outputs: &str, format: &str) -> Result<Option<Kind>> {
        let raw = |text: &str| (!text.is_empty()).then(|| RawValue::from_string(text.to_owned()).expect("is JSON"));
        structured(raw(outputs).as_deref(), raw(format).as_deref()).map(|found| found.and_then(|found| found.kind))
    }

    #[test]
    fn each_form_is_read() {
        let schema = |text: &str| Some(Kind::JsonSchema(text.into()));
        for (outputs, format, expected) in [
            ("", "", None),
            ("", r#"{"type": "text"}"#, None),
            ("", r#"{"type": "json_object"}"#, Some(Kind::JsonObject(true))),
            (
                "",
                r#"{"type": "json_schema", "json_schema": {"name": "x", "schema": {"b": 1,"a": 2}}}"#,
                schema("{\"b\": 1,\"a\": 2}"),
            ),
            (r#"{"json": {"type": "object"}}"#, "", schema(r#"{"type": "object"}"#)),
            (r#"{"json": "{\"type\": \"object\"}", "regex": null}"#, "", schema(r#"{"type": "object"}"#)),
            (r#"{"regex": "a+"}"#, r#"{"type": "text"}"#, Some(Kind::Regex("a+".into()))),
            (
                r#"{"choice": ["a", "b"]}"#,
                "",
                Some(Kind::Choice(pb::Choices { choices: vec!["a".into(), "b".into()] })),
            ),
            (r#"{"grammar": "start: \"a\"", "json_object": false}"#, "", Some(Kind::Grammar("start: \"a\"".into()))),
            (r#"{"json_object": true}"#, "", Some(Kind::JsonObject(true))),
            (r#"{"regex": "b", "disable_any_whitespace": null}"#, "", Some(Kind::Regex("b".into()))),
        ] {
            assert_eq!(read(outputs, format).expect("valid"), expected, "{outputs} {format}");
        }
    }

    #[test]
    fn a_wrong_member_is_named() {
        for (outputs, format, member) in [
            ("{}", "", "structured_outputs"),
            ("[]", "", "structured_outputs"),
            (r#"{"regex": 3}"#, "", "structured_outputs"),
            (r#"{"regex": "a", "choice": ["a"]}"#, "", "structured_outputs"),
            (r#"{"structural_tag": {}}"#, "", "structured_outputs.structural_tag"),
            (r#"{"json": {}, "disable_any_whitespace": true}"#, "", "structured_outputs.disable_any_whitespace"),
            (r#"{"regex": "a"}"#, r#"{"type": "json_object"}"#, "response_format"),
            ("", r#"{"type": "yaml"}"#, "response_format.type"),
            ("", r#"{"type": "json_schema"}"#, "response_format.json_schema.schema"),
            ("", r#""text""#, "response_format"),
        ] {
            match read(outputs, format) {
                Err(Error::InvalidArgument { field, .. }) => assert_eq!(field, member, "{outputs} {format}"),
                other => panic!("{outputs} {format}: {other:?}"),
            }
        }
    }
}
