//! The grammars that a client may request.

use llguidance::api::TopLevelGrammar;
use regex::Regex;
use serde_json::Value;

use crate::error::{Error, Result};

/// Longest text of a grammar in bytes; all choices count together. The time and memory of compiling grow with it.
const MAX_BYTES: usize = 128 << 10;
/// Most choices. Each is an alternative of the grammar.
const MAX_CHOICES: usize = 4096;
/// Largest least common multiple of all `multipleOf`. Steps of 0.01, 15 minutes or 1000 are far below.
const MAX_MULTIPLE: u64 = 10_000;

/// Most work for comparing the patterns of one `patternProperties`: their number squared, times their mean length in
/// bytes. llguidance compares each pattern with every other one, without a limit: 400 patterns of 12 bytes take 25 s,
/// and this much work takes a second.
const MAX_PATTERN_WORK: usize = 50_000;
/// Values of `$schema` that llguidance knows, without the `#` that may follow. It rejects others at the root.
const KNOWN_DRAFTS: [&str; 5] = [
    "https://json-schema.org/draft/2020-12/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "http://json-schema.org/draft-07/schema",
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-04/schema",
];

/// The set of texts that a sample may have.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum GrammarSource {
    /// Texts that this regular expression matches as a whole.
    Regex(String),
    /// JSON documents that this JSON schema accepts.
    JsonSchema(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Texts of this Lark grammar.
    Lark(String),
    /// JSON objects.
    JsonObject,
}

impl GrammarSource {
    /// Bytes that the texts take.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Regex(text) | Self::JsonSchema(text) | Self::Lark(text) => text.len(),
            Self::Choice(choices) => choices.iter().map(|choice| choice.len() + size_of::<String>()).sum(),
            Self::JsonObject => 0,
        }
    }

    /// Makes all checks that need no compiling, and returns the grammar to compile.
    ///
    /// # Errors
    /// `InvalidArgument`; the caller names the field.
    pub(super) fn grammar(&self) -> Result<TopLevelGrammar> {
        let bytes = self.bytes();
        if bytes > MAX_BYTES {
            return Err(invalid(format!("{bytes} bytes are more than {MAX_BYTES}; simplify the grammar")));
        }
        match self {
            Self::Regex(regex) if regex.is_empty() => Err(invalid("is empty, and would match nothing but no text")),
            Self::Regex(regex) => Ok(TopLevelGrammar::from_regex(regex)),
            Self::JsonSchema(schema) => {
                let mut schema: Value =
                    serde_json::from_str(schema).map_err(|e| invalid(format!("is not JSON: {e}")))?;
                if !schema.is_object() && !schema.is_boolean() {
                    return Err(invalid("is no JSON schema: a schema is an object, or true"));
                }
                drop_unknown_draft(&mut schema);
                check_multiples([&schema])?;
                check_patterns(&schema)?;
                Ok(TopLevelGrammar::from_json_schema(schema))
            }
            Self::Choice(choices) => choice(choices),
            Self::Lark(lark) => {
                check_attributes(lark)?;
                let schemas = schemas_within(lark);
                check_multiples(&schemas)?;
                schemas.iter().try_for_each(check_patterns)?;
                Ok(TopLevelGrammar::from_lark(lark.clone()))
            }
            Self::JsonObject => Ok(TopLevelGrammar::from_json_schema(serde_json::json!({ "type": "object" }))),
        }
    }
}

/// The grammar of one of several texts.
fn choice(choices: &[String]) -> Result<TopLevelGrammar> {
    if choices.is_empty() || choices.len() > MAX_CHOICES {
        return Err(invalid(format!("{} choices; give 1 to {MAX_CHOICES}", choices.len())));
    }
    if let Some(i) = choices.iter().position(String::is_empty) {
        return Err(invalid(format!("choice {i} is empty; each needs a text")));
    }
    let alternatives: Vec<String> = choices.iter().map(|choice| regex::escape(choice)).collect();
    Ok(TopLevelGrammar::from_regex(&alternatives.join("|")))
}

/// The JSON schemas that a Lark grammar has after `%json`.
fn schemas_within(lark: &str) -> Vec<Value> {
    let values = lark.match_indices("%json").filter_map(|(at, name)| {
        let mut values = serde_json::Deserializer::from_str(&lark[at + name.len()..]).into_iter::<Value>();
        values.next()?.ok()
    });
    values.collect()
}

/// Checks that the numbers of all `multipleOf` have a small least common multiple. The automaton of the multiples of m
/// has m states, and llguidance builds it without a limit: a million states take seconds and 400 MB.
fn check_multiples<'a>(schemas: impl IntoIterator<Item = &'a Value>) -> Result<()> {
    let mut product = 1;
    let mut rest: Vec<&Value> = schemas.into_iter().collect();
    while let Some(value) = rest.pop() {
        match value {
            Value::Array(values) => rest.extend(values),
            Value::Object(members) => {
                rest.extend(members.values());
                if let Some(Value::Number(number)) = members.get("multipleOf") {
                    let digits = significant_digits(&number.to_string());
                    product = digits.map_or(u64::MAX, |digits| least_common_multiple(product, digits));
                    if product > MAX_MULTIPLE {
                        return Err(invalid(format!(
                            "multipleOf {number}: the least common multiple of all multipleOf, decimal points left out, \
                             is more than {MAX_MULTIPLE}"
                        )));
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

/// Removes a `$schema` that names none of [`KNOWN_DRAFTS`]; genson writes `http://json-schema.org/schema#`.
fn drop_unknown_draft(schema: &mut Value) {
    let Some(members) = schema.as_object_mut() else { return };
    let is_known = |draft: &str| KNOWN_DRAFTS.contains(&draft.trim_end_matches('#'));
    if members.get("$schema").and_then(Value::as_str).is_some_and(|draft| !is_known(draft)) {
        members.shift_remove("$schema");
    }
}

/// Checks that no `patternProperties` have more patterns than can be compared in a short time. llguidance compares the
/// patterns of all members of an `allOf` with each other, once for each member.
fn check_patterns(schema: &Value) -> Result<()> {
    let mut rest = vec![schema];
    while let Some(value) = rest.pop() {
        match value {
            Value::Array(values) => rest.extend(values),
            Value::Object(members) => {
                rest.extend(members.values());
                check_pattern_work(members.get("patternProperties"), 1)?;
                let all_of = members.get("allOf").and_then(Value::as_array);
                check_pattern_work(members.get("allOf"), all_of.map_or(1, Vec::len))?;
            }
            _ => {}
        }
    }
    Ok(())
}

/// Checks the names of `patternProperties` members in `value`, or those of `value` itself.
fn check_pattern_work(value: Option<&Value>, times: usize) -> Result<()> {
    let Some(value) = value else { return Ok(()) };
    let (mut count, mut bytes) = (0usize, 0usize);
    let mut rest = vec![(value, value.is_object())];
    while let Some((value, is_patterns)) = rest.pop() {
        match value {
            Value::Array(values) => rest.extend(values.iter().map(|value| (value, false))),
            Value::Object(members) if is_patterns => {
                count += members.len();
                bytes += members.keys().map(String::len).sum::<usize>();
            }
            Value::Object(members) => {
                rest.extend(members.iter().map(|(name, value)| (value, name == "patternProperties")))
            }
            _ => {}
        }
    }
    if count > 1 && count.saturating_mul(bytes).saturating_mul(times) > MAX_PATTERN_WORK {
        return Err(invalid(format!(
            "patternProperties has {count} patterns of {bytes} bytes together; their number times these bytes may be at \
             most {MAX_PATTERN_WORK}, and less by the number of schemas in allOf"
        )));
    }
    Ok(())
}

/// Checks that no rule has an attribute that would be ignored.
fn check_attributes(lark: &str) -> Result<()> {
    // Matches texts, regular expressions and comments, to skip their content.
    let text = r#""(?:\\.|[^"\\])*"|/(?:\\.|[^/\\\n])+/|(?:\#|//)[^\n]*"#;
    let attribute = Regex::new(&format!(r"{text}|\b(temperature)\s*=")).expect("a valid pattern");
    match attribute.captures_iter(lark).find(|found| found.get(1).is_some()) {
        Some(_) => Err(invalid("temperature= is not supported in a grammar; set the request's temperature")),
        None => Ok(()),
    }
}

/// The digits of a number without its sign, decimal point and trailing zeros; None if there are no digits or too many.
fn significant_digits(number: &str) -> Option<u64> {
    let mantissa = number.split(['e', 'E']).next().unwrap_or_default();
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    digits.trim_end_matches('0').parse().ok()
}

fn least_common_multiple(a: u64, b: u64) -> u64 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).saturating_mul(b)
}

pub(super) fn invalid(message: impl Into<String>) -> Error {
    Error::invalid("grammar", message)
}
