//! The tools of a chat: their names, and whether the model may, must not or must call one.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::error::{Error, Result, shown};
use crate::text::KnownTool;
use crate::types::ToolFormat;

/// Longest part of a client's text in an error.
pub(super) const MAX_SHOWN: usize = 128;

/// How calls of tools are found in a sample's text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ToolCalling {
    /// There are none: the text is the content.
    Never,
    /// They are in the text, in this format, beside the content.
    Auto { format: ToolFormat, tools: Arc<[KnownTool]> },
    /// The text is a list of calls, and nothing else.
    Required { tools: Arc<[KnownTool]> },
    /// The text is the arguments of a call of this tool.
    Named(String),
}

/// A tool that the request offers, or the one that `tool_choice` names.
#[derive(Deserialize)]
struct Tool {
    function: ToolFunction,
}

#[derive(Deserialize)]
struct ToolFunction {
    name: String,
    parameters: Option<Box<RawValue>>,
}

impl ToolFunction {
    /// The schema of the arguments.
    fn schema(&self) -> &str {
        self.parameters.as_deref().map_or(r#"{"type":"object"}"#, RawValue::get)
    }
}

/// Definitions that a schema's references name by their path from its root.
#[derive(Deserialize)]
struct Definitions {
    #[serde(default, rename = "$defs")]
    defs: BTreeMap<String, Box<RawValue>>,
    #[serde(default)]
    definitions: BTreeMap<String, Box<RawValue>>,
}

impl ToolCalling {
    /// How the calls are found that the members `tools` and `tool_choice` of a body ask for, of a model that writes
    /// calls in `format`; and the JSON schema that the text must follow, if a call is forced.
    ///
    /// # Errors
    /// `InvalidArgument` with the wrong member.
    pub(super) fn new(
        tools: Option<&RawValue>,
        choice: Option<&RawValue>,
        format: Option<ToolFormat>,
    ) -> Result<(Self, Option<String>)> {
        let invalid = |message: String| Error::invalid("tool_choice", message);
        let tools = tools.map(functions).transpose()?.unwrap_or_default();
        let known = || tools.iter().map(|tool| KnownTool::new(tool.name.clone(), tool.schema())).collect();
        let named = match choice.map_or("\"auto\"", RawValue::get) {
            "\"none\"" => return Ok((Self::Never, None)),
            "\"auto\"" => {
                let format = format.filter(|_| !tools.is_empty());
                return Ok((format.map_or(Self::Never, |format| Self::Auto { format, tools: known() }), None));
            }
            "\"required\"" => None,
            text => Some(serde_json::from_str::<Tool>(text).map_err(|_| {
                invalid(format!(
                    "{} is none of \"none\", \"auto\", \"required\" and {{\"type\": \"function\", \"function\": \
                     {{\"name\": ...}}}}",
                    shown(text, MAX_SHOWN)
                ))
            })?),
        };
        if tools.is_empty() {
            return Err(invalid("asks for a call, and there are no tools; send tools".into()));
        }
        let Some(Tool { function: ToolFunction { name, .. } }) = named else {
            return Ok((Self::Required { tools: known() }, Some(list_schema(&tools)?)));
        };
        match tools.iter().find(|tool| tool.name == name) {
            Some(tool) => Ok((Self::Named(name), Some(tool.schema().to_owned()))),
            None => Err(invalid(format!("{:?} is not among the tools", shown(&name, MAX_SHOWN)))),
        }
    }

    /// Bytes on the heap that the tools take.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Never => 0,
            Self::Named(name) => name.len(),
            Self::Auto { tools, .. } | Self::Required { tools } => {
                tools.iter().map(|tool| tool.heap_bytes() + size_of::<KnownTool>()).sum()
            }
        }
    }

    /// Whether the text is nothing but calls.
    pub(super) fn is_forced(&self) -> bool {
        matches!(self, Self::Required { .. } | Self::Named(_))
    }
}

/// The schema of a list of calls, each of one of the tools.
fn list_schema(tools: &[ToolFunction]) -> Result<String> {
    let (mut calls, mut defs, mut definitions) = (Vec::new(), BTreeMap::<_, Box<RawValue>>::new(), BTreeMap::new());
    for (i, tool) in tools.iter().enumerate() {
        let path = || format!("tools[{i}].function.parameters");
        let schema = tool.schema();
        let found: Definitions = serde_json::from_str(schema)
            .map_err(|error| Error::invalid(path(), format!("is not the JSON schema of an object: {error}")))?;
        for (all, found) in [(&mut defs, found.defs), (&mut definitions, found.definitions)] {
            for (name, definition) in found {
                if all.get(&name).is_some_and(|other| other.get() != definition.get()) {
                    let message = format!("defines {:?} otherwise than another tool", shown(&name, MAX_SHOWN));
                    return Err(Error::invalid(path(), message));
                }
                all.insert(name, definition);
            }
        }
        calls.push(format!(
            r#"{{"type":"object","properties":{{"name":{{"enum":[{}]}},"parameters":{schema}}},"required":["name","parameters"],"additionalProperties":false}}"#,
            serde_json::Value::from(tool.name.as_str())
        ));
    }
    let object = |members| serde_json::to_string(&members).expect("its members are JSON");
    Ok(format!(
        r#"{{"type":"array","minItems":1,"items":{{"anyOf":[{}]}},"$defs":{},"definitions":{}}}"#,
        calls.join(","),
        object(defs),
        object(definitions)
    ))
}

/// Parses the tools.
fn functions(tools: &RawValue) -> Result<Vec<ToolFunction>> {
    let tools: Vec<Tool> = typed("tools", tools)?;
    Ok(tools.into_iter().map(|tool| tool.function).collect())
}

/// Parses the value of `member`.
///
/// # Errors
/// `InvalidArgument` with the path of the wrong member.
pub(in crate::server::http) fn typed<T: DeserializeOwned>(member: &str, json: &RawValue) -> Result<T> {
    let mut json = serde_json::Deserializer::from_str(json.get());
    serde_path_to_error::deserialize(&mut json).map_err(|error| {
        let path = shown(&error.path().to_string(), MAX_SHOWN);
        let path = match path.as_str() {
            "." => member.to_owned(),
            path if path.starts_with('[') => format!("{member}{path}"),
            path => format!("{member}.{path}"),
        };
        Error::invalid(path, error.into_inner().to_string())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOOLS: &str =
        r#"[{"type": "function", "function": {"name": "add", "parameters": {"a": [1]}}}, {"function": {"name": "f"}}]"#;

    fn calling(tools: &str, choice: &str) -> Result<ToolCalling> {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).expect("is JSON");
        let given = |text: &str| (!text.is_empty()).then(|| raw(text));
        ToolCalling::new(given(tools).as_deref(), given(choice).as_deref(), Some(ToolFormat::Hermes))
            .map(|found| found.0)
    }

    #[test]
    fn a_forced_call_has_a_schema() {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).expect("is JSON");
        let schema = |tools: &str, choice: &str| {
            ToolCalling::new(Some(&raw(tools)), Some(&raw(choice)), None).map(|(_, schema)| schema.expect("forced"))
        };
        let named = r#"{"type": "function", "function": {"name": "add"}}"#;
        assert_eq!(schema(TOOLS, named).expect("valid"), r#"{"a": [1]}"#);
        let tools = |second: &str| {
            format!(
                r##"[{{"function": {{"name": "a\"b", "parameters": {{"$ref": "#/$defs/X", "$defs": {{"X": {{"type": "null"}}}}}}}}}},
                    {{"function": {{"name": "f", "parameters": {{"$defs": {{"X": {second}}}}}}}}}, {{"function": {{"name": "g"}}}}]"##
            )
        };
        let list: serde_json::Value =
            serde_json::from_str(&schema(&tools(r#"{"type": "null"}"#), "\"required\"").expect("valid")).expect("JSON");
        assert_eq!(list["$defs"], serde_json::json!({ "X": { "type": "null" } }));
        let calls = list["items"]["anyOf"].as_array().expect("a list");
        let names: Vec<_> = calls.iter().map(|call| call["properties"]["name"]["enum"][0].as_str()).collect();
        assert_eq!(names, [Some("a\"b"), Some("f"), Some("g")]);
        assert_eq!(calls[2]["properties"]["parameters"], serde_json::json!({ "type": "object" }));
        let Err(Error::InvalidArgument { field, .. }) = schema(&tools("{}"), "\"required\"") else { panic!("taken") };
        assert_eq!(field, "tools[1].function.parameters");
    }

    #[test]
    fn each_choice_has_its_meaning() {
        let known = || ["add", "f"].map(|name| KnownTool::new(name.into(), "{}")).into();
        let auto = ToolCalling::Auto { format: ToolFormat::Hermes, tools: known() };
        for (tools, choice, expected) in [
            ("", "", ToolCalling::Never),
            ("[]", "\"auto\"", ToolCalling::Never),
            ("", "\"none\"", ToolCalling::Never),
            (TOOLS, "\"none\"", ToolCalling::Never),
            (TOOLS, "\"auto\"", auto.clone()),
            (TOOLS, "", auto),
            (TOOLS, "\"required\"", ToolCalling::Required { tools: known() }),
            (TOOLS, r#"{"type": "function", "function": {"name": "f"}}"#, ToolCalling::Named("f".into())),
        ] {
            assert_eq!(calling(tools, choice).expect("valid"), expected, "{tools} {choice}");
        }
        let tools = RawValue::from_string(TOOLS.into()).expect("is JSON");
        assert_eq!(ToolCalling::new(Some(&tools), None, None).expect("valid"), (ToolCalling::Never, None));
    }

    #[test]
    fn a_wrong_member_is_named() {
        let named = |name: &str| format!(r#"{{"type": "function", "function": {{"name": "{name}"}}}}"#);
        for (tools, choice, member, says) in [
            (TOOLS, "\"any\"", "tool_choice", "is none of"),
            (TOOLS, "5", "tool_choice", "is none of"),
            (TOOLS, "{}", "tool_choice", "is none of"),
            (TOOLS, &named("sub"), "tool_choice", "\"sub\" is not among"),
            ("", "\"required\"", "tool_choice", "no tools"),
            ("[]", &named("add"), "tool_choice", "no tools"),
            ("{}", "", "tools", "invalid type"),
            ("[{\"function\": {}}]", "", "tools[0].function", "missing field `name`"),
            ("[{\"function\": {\"name\": 3}}]", "", "tools[0].function.name", "invalid type"),
        ] {
            match calling(tools, choice) {
                Err(Error::InvalidArgument { field, message }) => {
                    assert_eq!(field, member, "{tools} {choice}");
                    assert!(message.contains(says), "{tools} {choice}: {message}");
                }
                other => panic!("{tools} {choice}: {other:?}"),
            }
        }
    }
}
