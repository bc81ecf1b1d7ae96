//! Jinja as transformers has it, where minijinja differs: tests, filters and tags that templates of models use.

use std::borrow::Cow;
use std::sync::Arc;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, State, filters};
use regex::Regex;

/// Replaces tests and filters whose results differ from Jinja's.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_iterable);
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("callable", |value: &Value| value.is_undefined() || is_function(value));
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("first", first);
    environment.add_filter("last", last);
    environment.add_filter("int", |state: &State, value: &Value, default: Option<Value>, options: Kwargs| {
        let default = default_of(default, &options, Value::from(0))?;
        let base: Option<u32> = options.get("base")?;
        options.assert_all_used()?;
        Ok::<_, Error>(filters::int(state, value, Some(default.clone()), base, no_options()).unwrap_or(default))
    });
    environment.add_filter("float", |state: &State, value: &Value, default: Option<Value>, options: Kwargs| {
        let default = default_of(default, &options, Value::from(0.0))?;
        options.assert_all_used()?;
        Ok::<_, Error>(filters::float(state, value, Some(default.clone()), no_options()).unwrap_or(default))
    });
}

/// The argument `default` of a filter, by its place or by its name.
fn default_of(given: Option<Value>, options: &Kwargs, otherwise: Value) -> Result<Value, Error> {
    let named: Option<Value> = options.get("default")?;
    Ok(given.or(named).unwrap_or(otherwise))
}

fn no_options() -> Kwargs {
    std::iter::empty::<(String, Value)>().collect()
}

/// `source` with the tags that minijinja does not have, or reads otherwise, written as tags that it has:
/// - `generation` and `endgeneration`, with which transformers marks a model's text, become comments, which trim white
///   space alike.
/// - `raw` gets the mark that keeps the newline after it: Jinja trims the newline after every block but this one.
pub(super) fn with_known_tags(source: Arc<str>) -> Arc<str> {
    let replace = |source: Arc<str>, tag: &str, with: &str| {
        let tag = Regex::new(tag).expect("the expression is valid");
        match tag.replace_all(&source, with) {
            Cow::Borrowed(_) => source.clone(),
            Cow::Owned(changed) => changed.into(),
        }
    };
    let source = replace(source, r"\{%([-+]?)\s*((?:end)?generation)\s*([-+]?)%\}", "{#$1 $2 $3#}");
    replace(source, r"\{%([-+]?)\s*raw\s*%\}", "{%$1 raw +%}")
}

/// The tests `iterable` and `sequence`: true for texts, lists, objects and undefined values, false for none.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

fn is_function(value: &Value) -> bool {
    value.kind() == ValueKind::Plain && value.as_object().is_some()
}

/// The filters `length` and `count`, which are 0 for undefined values.
fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { filters::length(value) }
}

/// The filter `first`, which is undefined for undefined values.
fn first(value: &Value) -> Result<Value, Error> {
    if value.is_undefined() { Ok(Value::UNDEFINED) } else { filters::first(value) }
}

/// The filter `last`, which is undefined for undefined values, and the last key of an object.
fn last(value: Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::UNDEFINED),
        ValueKind::Map => Ok(value.try_iter()?.last().unwrap_or(Value::UNDEFINED)),
        _ => filters::last(value),
    }
}
