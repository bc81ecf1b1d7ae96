//! Routes and bodies after the server's own description of them.

use serde_json::{Map, Value};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::dice::Dice;

/// A route with the description of its body.
pub struct Route {
    pub method: String,
    pub path: String,
    pub takes_body: bool,
    schema: Value,
    /// The schemas that others name.
    named: Map<String, Value>,
}

/// All routes that the server at `address` describes.
pub async fn routes(address: &str) -> Vec<Route> {
    let mut stream = tokio::net::TcpStream::connect(address).await.expect("it listens");
    stream.write_all(b"GET /openapi.json HTTP/1.0\r\n\r\n").await.expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).await.expect("it answers");
    let (_, body) = text.split_once("\r\n\r\n").expect("an answer");
    let description: Value = serde_json::from_str(body).expect("a description");
    let named = description["components"]["schemas"].as_object().expect("schemas").clone();
    let mut routes = Vec::new();
    for (path, operations) in description["paths"].as_object().expect("paths") {
        for (method, operation) in operations.as_object().expect("operations") {
            let body = &operation["requestBody"]["content"]["application/json"]["schema"];
            // Routes with bodies are most of what is to be tried.
            for _ in 0..if body.is_null() { 1 } else { 3 } {
                routes.push(Route {
                    method: method.to_uppercase(),
                    path: path.clone(),
                    takes_body: !body.is_null(),
                    schema: body.clone(),
                    named: named.clone(),
                });
            }
        }
    }
    assert!(routes.len() > 5, "{} routes are described", routes.len());
    routes
}

const HOSTILE: &[&str] = &[
    "null",
    "true",
    "0",
    "-1",
    "1.5",
    "1e999",
    "18446744073709551616",
    "4294967296",
    "\"\"",
    "\"\\ud800\"",
    "\"\\u0000\"",
    "[]",
    "{}",
    "[[[[[[[[1]]]]]]]]",
    "[null]",
    "NaN",
    "{\"a\":{\"a\":{\"a\":[]}}}",
];
/// Values of members whose description allows anything: prompts and stop strings.
const ANYTHING: &[&str] = &["\"Hello\"", "[1,2,3]", "[[1,2],[3]]", "[\"a\",\"b\"]", "\"e\"", "{\"type\":\"text\"}"];

impl Route {
    /// A body for this route, mostly a valid one.
    pub fn body(&self, dice: &mut Dice) -> String {
        let mut text = self.value(dice, &self.schema, 0);
        if dice.is_hostile() {
            text = format!("{{\"x\": {}, {}", dice.pick(HOSTILE), text.get(1..).unwrap_or("}"));
        }
        text
    }

    fn value(&self, dice: &mut Dice, schema: &Value, depth: usize) -> String {
        if dice.is_hostile() && dice.one_in(3) {
            let long = format!("\"{}\"", "ab c".repeat(dice.pick(&[1, 100, 20_000])));
            return if dice.one_in(6) { long } else { dice.pick(HOSTILE).into() };
        }
        if let Some(name) = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()) {
            return self.value(dice, &self.named[name], depth + 1);
        }
        for choice in ["oneOf", "anyOf"] {
            if let Some(choices) = schema[choice].as_array() {
                let choice = &choices[dice.below(choices.len())];
                return self.value(dice, choice, depth + 1);
            }
        }
        if schema["allOf"].is_array() || schema["properties"].is_object() {
            return self.object(dice, schema, depth);
        }
        if let Some(values) = schema["enum"].as_array() {
            return values[dice.below(values.len())].to_string();
        }
        let types: Vec<&str> = match &schema["type"] {
            Value::Array(types) => types.iter().filter_map(Value::as_str).collect(),
            Value::String(one) => vec![one],
            _ => return dice.pick(ANYTHING).into(),
        };
        match dice.pick(&types) {
            "null" => "null".into(),
            "boolean" => dice.coin().to_string(),
            "integer" => dice.pick(&["0", "1", "2", "3", "7", "20"]).into(),
            "number" => dice.pick(&["0", "0.5", "1", "1.0", "0.9"]).into(),
            "string" => {
                let text = if dice.one_in(4) { dice.text() } else { dice.pick(&["a", "b", "", "user"]).into() };
                Value::from(text).to_string()
            }
            "array" => {
                let items =
                    dice.list(if depth < 6 { 3 } else { 0 }, |dice| self.value(dice, &schema["items"], depth + 1));
                format!("[{}]", items.join(","))
            }
            _ => {
                let entry = |dice: &mut Dice| {
                    let value = self.value(dice, &schema["additionalProperties"], depth + 1);
                    format!("\"{}\":{value}", dice.pick(&["1", "2", "511", "512", "a"]))
                };
                format!("{{{}}}", dice.list(if depth < 6 { 2 } else { 0 }, entry).join(","))
            }
        }
    }

    /// An object with the members that it must have, and some others.
    fn object(&self, dice: &mut Dice, schema: &Value, depth: usize) -> String {
        let mut members = Vec::new();
        self.members(dice, schema, depth, &mut members);
        format!("{{{}}}", members.join(","))
    }

    fn members(&self, dice: &mut Dice, schema: &Value, depth: usize, members: &mut Vec<String>) {
        if let Some(name) = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()) {
            return self.members(dice, &self.named[name], depth, members);
        }
        for part in schema["allOf"].as_array().into_iter().flatten() {
            self.members(dice, part, depth, members);
        }
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (name, about) in schema["properties"].as_object().into_iter().flatten() {
            let is_wanted =
                required.contains(&Value::from(name.as_str())) || matches!(name.as_str(), "prompt" | "messages");
            if is_wanted || depth < 6 && dice.one_in(6) {
                members.push(format!("\"{name}\":{}", self.value(dice, about, depth + 1)));
            }
        }
    }
}
