//! The arguments of a call whose format writes them as texts: JSON by the types in the tool's schema, as vLLM's parser
//! `qwen3_coder` converts them.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Number, Value};

use super::python::literal;

/// A tool that a call may name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KnownTool {
    pub name: String,
    parameters: BTreeMap<String, Parameter>,
}

/// How the text of a parameter becomes JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Parameter {
    kind: Kind,
    /// Whether the schema has null beside another type.
    is_nullable: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Integer,
    Number,
    Boolean,
    /// JSON, or else a literal of Python.
    Literal,
}

#[derive(Deserialize)]
struct Schema {
    #[serde(default)]
    properties: BTreeMap<String, Value>,
}

impl KnownTool {
    /// The tool `name`, whose arguments have this JSON schema. A parameter that the schema does not describe is a text.
    pub fn new(name: String, schema: &str) -> Self {
        let properties = serde_json::from_str::<Schema>(schema).map(|schema| schema.properties).unwrap_or_default();
        let parameters = properties.into_iter().map(|(name, schema)| (name, Parameter::of(&schema))).collect();
        Self { name, parameters }
    }

    /// Bytes on the heap.
    pub fn heap_bytes(&self) -> usize {
        let parameters: usize = self.parameters.keys().map(|name| name.len() + size_of::<(String, Parameter)>()).sum();
        self.name.len() + parameters
    }
}

impl Parameter {
    fn of(schema: &Value) -> Self {
        let types = types(schema);
        let mut named = types.iter().map(String::as_str).filter(|name| *name != "null");
        let kind = named.next().map_or(if types.is_empty() { Kind::Text } else { Kind::Literal }, Kind::of);
        Self { kind, is_nullable: types.iter().any(|name| name == "null") }
    }

    /// The JSON of `text`.
    fn json(self, text: &str) -> String {
        let is_null = ["null", "none"].iter().any(|null| text.eq_ignore_ascii_case(null));
        if is_null && (self.is_nullable || self.kind != Kind::Text) {
            return "null".to_owned();
        }
        let converted = match self.kind {
            Kind::Text => None,
            Kind::Integer => integer(text),
            Kind::Number => number(text),
            Kind::Boolean => Some(text.eq_ignore_ascii_case("true").to_string()),
            Kind::Literal => container(text),
        };
        converted.unwrap_or_else(|| quoted(text))
    }
}

impl Kind {
    /// The kind of a type, under its name in JSON schemas or one of those that vLLM takes too.
    fn of(name: &str) -> Self {
        let begins = |prefixes: &[&str]| prefixes.iter().any(|prefix| name.starts_with(prefix));
        match name {
            "string" | "str" | "text" | "varchar" | "char" | "enum" => Self::Text,
            "boolean" | "bool" | "binary" => Self::Boolean,
            _ if begins(&["int", "uint", "long", "short", "unsigned"]) => Self::Integer,
            _ if begins(&["num", "float"]) => Self::Number,
            _ => Self::Literal,
        }
    }
}

/// The types that a schema allows, in lower case; none if it names none.
fn types(schema: &Value) -> Vec<String> {
    let lower = |name: &Value| name.as_str().map(|name| name.trim().to_lowercase());
    match (schema.get("type"), schema.get("anyOf").or_else(|| schema.get("oneOf"))) {
        (Some(Value::Array(names)), _) => names.iter().filter_map(lower).collect(),
        (Some(name), _) => lower(name).into_iter().collect(),
        (None, Some(Value::Array(options))) => {
            options.iter().filter_map(|option| option.get("type")).filter_map(lower).collect()
        }
        _ => Vec::new(),
    }
}

fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

fn integer(text: &str) -> Option<String> {
    text.trim().parse::<i128>().map(|number| number.to_string()).ok()
}

/// The number, a whole one without a fraction.
fn number(text: &str) -> Option<String> {
    /// Up to here every whole number is a float64.
    const WHOLE: f64 = (1_u64 << 53) as f64;
    integer(text).or_else(|| {
        let number: f64 = text.trim().parse().ok()?;
        let is_whole = number.fract() == 0.0 && number.abs() <= WHOLE;
        let number = if is_whole { Some(Number::from(number as i64)) } else { Number::from_f64(number) };
        number.map(|number| number.to_string())
    })
}

/// JSON as the model has written it, or else that of a literal of Python. Some models write the latter within a text
/// of JSON.
fn container(text: &str) -> Option<String> {
    let Ok(json) = serde_json::from_str::<&RawValue>(text) else {
        return literal(text).map(|value| value.to_string());
    };
    let inner = serde_json::from_str::<String>(json.get()).ok().and_then(|inner| literal(&inner));
    Some(inner.map_or_else(|| json.get().to_owned(), |value| value.to_string()))
}

/// The JSON of a call's arguments. The last of two parameters with one name counts.
pub(super) fn arguments<'a>(parameters: impl Iterator<Item = (&'a str, &'a str)>, tool: Option<&KnownTool>) -> String {
    let mut members: Vec<(&str, String)> = Vec::new();
    for (name, text) in parameters {
        let parameter = tool.and_then(|tool| tool.parameters.get(name));
        let value = parameter.map_or_else(|| quoted(text), |parameter| parameter.json(text));
        match members.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => members.push((name, value)),
        }
    }
    let members: Vec<_> = members.iter().map(|(name, value)| format!("{}: {value}", quoted(name))).collect();
    format!("{{{}}}", members.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn converted(schema: &str, text: &str) -> String {
        let tool = KnownTool::new("f".into(), &format!(r#"{{"properties": {{"p": {schema}}}}}"#));
        let json = arguments([("p", text)].into_iter(), Some(&tool));
        json.strip_prefix("{\"p\": ").and_then(|json| json.strip_suffix('}')).expect("one member").to_owned()
    }

    #[test]
    fn values_have_the_types_of_the_schema() {
        let optional = r#"{"anyOf": [{"type": "null"}, {"type": "string"}]}"#;
        for (schema, text, json) in [
            (r#"{"type": "string"}"#, "5", r#""5""#),
            (r#"{"type": "string"}"#, "null", r#""null""#),
            (r#"{"type": "string"}"#, "a\n\"b\"", r#""a\n\"b\"""#),
            ("{}", "5", r#""5""#),
            ("true", "5", r#""5""#),
            (optional, "None", "null"),
            (optional, "7", r#""7""#),
            (r#"{"type": ["integer", "null"]}"#, "null", "null"),
            (r#"{"type": ["integer", "null"]}"#, " 7 ", "7"),
            (r#"{"type": "integer"}"#, "-3", "-3"),
            (r#"{"type": "integer"}"#, "18446744073709551615", "18446744073709551615"),
            (r#"{"type": "object"}"#, r#"{"b": 1.50, "a": {}}"#, r#"{"b": 1.50, "a": {}}"#),
            (r#"{"type": "integer"}"#, "1.5", r#""1.5""#),
            (r#"{"type": "integer"}"#, "None", "null"),
            (r#"{"type": "Integer"}"#, "3", "3"),
            (r#"{"type": "number"}"#, "2.0", "2"),
            (r#"{"type": "number"}"#, "2.5e-3", "0.0025"),
            (r#"{"type": "number"}"#, "inf", r#""inf""#),
            (r#"{"type": "number"}"#, "two", r#""two""#),
            (r#"{"type": "boolean"}"#, "True", "true"),
            (r#"{"type": "boolean"}"#, "yes", "false"),
            (r#"{"type": "array"}"#, "[1, \"a\", null]", r#"[1, "a", null]"#),
            (r#"{"type": "object"}"#, "{'a': True, 'b': (1, None)}", r#"{"a":true,"b":[1,null]}"#),
            (r#"{"type": "object"}"#, r#""{'a': 1}""#, r#"{"a":1}"#),
            (r#"{"type": "object"}"#, "{a}", r#""{a}""#),
            (r#"{"type": "null"}"#, "null", "null"),
        ] {
            assert_eq!(converted(schema, text), json, "{schema} {text}");
        }
    }

    #[test]
    fn a_parameter_that_the_schema_does_not_have_is_a_text() {
        let parameters = || [("x", "1"), ("y", "2"), ("x", "3")].into_iter();
        for schema in ["{}", "[]", "no JSON", r#"{"properties": 3}"#] {
            let tool = KnownTool::new("f".into(), schema);
            assert_eq!(arguments(parameters(), Some(&tool)), r#"{"x": "3", "y": "2"}"#, "{schema}");
        }
        let tool = KnownTool::new("f".into(), r#"{"properties": {"x": {"type": "integer"}}}"#);
        assert_eq!(arguments(parameters(), Some(&tool)), r#"{"x": 3, "y": "2"}"#);
        assert_eq!(arguments(parameters(), None), r#"{"x": "3", "y": "2"}"#);
    }
}
