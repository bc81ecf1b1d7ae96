//! Operators and filters whose result can be much larger than their input. Each counts the bytes of its result before
//! it makes it.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, Value, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, context, escape_formatter, filters};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::meter::{ITEM_BYTES, MAX_ITEMS, Meter, exceeded, shown_bytes, too_many_items};

/// Most bytes of memory per byte of a text that grows while it is written: the text itself, and twice its size when it
/// is reallocated.
const GROWTH: u64 = 3;
/// Most bytes that escaping makes of one byte.
const ESCAPED: u64 = 6;
/// Largest width to which a text is indented or padded. Real templates indent by 4.
pub(super) const MAX_WIDTH: u64 = 1024;

/// Replaces operators and filters that would make texts and lists without counting them.
pub(super) fn install(environment: &mut Environment<'static>) {
    environment.set_formatter(emit);
    environment.set_unknown_method_callback(method);
    // These print whole values with their nesting, to debug templates.
    environment.remove_filter("pprint");
    environment.remove_global("debug");
    guard(environment, "replace", Value::from_function(filters::replace), |args| match texts(args)[..] {
        [Some(text), Some(from), Some(to), ..] => replaced_bytes(text, from, to),
        _ => Ok(0),
    });
    guard(environment, "join", Value::from_function(filters::join), joined_bytes);
    guard(environment, "sum", Value::from_function(filters::sum), joined_bytes);
    guard(environment, "string", Value::from_function(filters::string), |args| args.first().map_or(Ok(0), shown_bytes));
    guard(environment, "format", Value::from_function(filters::format), formatted_bytes);
    guard(environment, "indent", Value::from_function(filters::indent), indented_bytes);
    guard(environment, "split", Value::from_function(filters::split), split_bytes);
    guard(environment, "batch", Value::from_function(filters::batch), parts_bytes);
    guard(environment, "slice", Value::from_function(filters::slice), parts_bytes);
    macro_rules! guard_elements {
        ($($name:ident),*) => {
            $(guard(environment, stringify!($name), Value::from_function(filters::$name), elements_bytes);)*
        };
    }
    guard_elements!(
        list, sort, unique, map, select, reject, selectattr, rejectattr, groupby, chain, zip, min, max, lines, reverse
    );
}

/// Makes the filter `name` count the bytes that `bytes` expects, before it calls `native`.
fn guard(
    environment: &mut Environment<'static>,
    name: &'static str,
    native: Value,
    bytes: fn(&[Value]) -> Result<u64, Error>,
) {
    environment.add_filter(name, move |state: &mut State, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        let bytes = bytes(&args)?;
        Meter::of(state)?.spend(bytes)?;
        native.call(state, &args)
    });
}

/// Writes a value into the text.
fn emit(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let escaped = if matches!(state.auto_escape(), AutoEscape::None) { 1 } else { ESCAPED };
    let bytes = shown_bytes(value)?;
    Meter::of(state)?.spend(bytes.saturating_mul(GROWTH * escaped))?;
    escape_formatter(out, state, value)
}

/// Python's methods of values.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let all: Vec<Value> = std::iter::once(value).chain(args).cloned().collect();
    let bytes = match (value.as_str(), name) {
        (Some(text), "replace") => match texts(args)[..] {
            [Some(from), Some(to), ..] => replaced_bytes(text, from, to)?,
            _ => 0,
        },
        // The receiver is the separator.
        (Some(_), "join") => args.first().map_or(Ok(0), |list| joined_bytes(&[list.clone(), value.clone()]))?,
        (Some(_), "format") => formatted_bytes(&all)?,
        (Some(_), "split") => split_bytes(&all)?,
        (Some(text), "removeprefix" | "removesuffix") => text.len() as u64,
        (Some(text), "splitlines") => text.len() as u64 + (lines(text) + 1) * ITEM_BYTES,
        _ => 0,
    };
    Meter::of(state)?.spend(bytes)?;
    match (value.as_str(), name, args) {
        (Some(text), "removeprefix", [prefix]) => {
            Ok(prefix.as_str().and_then(|prefix| text.strip_prefix(prefix)).map_or_else(|| value.clone(), Value::from))
        }
        (Some(text), "removesuffix", [suffix]) => {
            Ok(suffix.as_str().and_then(|suffix| text.strip_suffix(suffix)).map_or_else(|| value.clone(), Value::from))
        }
        _ => unknown_method_callback(state, value, name, args),
    }
}

/// `left ~ right`.
pub(super) fn concat(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    let bytes = shown_bytes(&left)? + shown_bytes(&right)?;
    Meter::of(state)?.spend(bytes)?;
    let mut text = String::with_capacity(bytes as usize);
    // Writing to a string cannot fail.
    let _ = write!(text, "{left}{right}");
    Ok(Value::from(text))
}

/// `left + right`.
pub(super) fn add(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    if let (Some(left), Some(right)) = (left.as_str(), right.as_str()) {
        Meter::of(state)?.spend((left.len() + right.len()) as u64)?;
        return Ok(Value::from([left, right].concat()));
    }
    if is_list(&left) && is_list(&right) && left.len().unwrap_or(0) + right.len().unwrap_or(0) > MAX_ITEMS {
        return Err(too_many_items());
    }
    native(state, "left + right", left, right)
}

/// `left * right`.
pub(super) fn multiply(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    for (value, times) in [(&left, &right), (&right, &left)] {
        let times = times.as_usize().unwrap_or(0);
        if let Some(text) = value.as_str() {
            Meter::of(state)?.spend((text.len() as u64).saturating_mul(times as u64))?;
        }
        if is_list(value) && value.len().unwrap_or(0).saturating_mul(times) > MAX_ITEMS {
            return Err(too_many_items());
        }
    }
    native(state, "left * right", left, right)
}

/// `left % right`. A text on the left is a format, as in Python.
pub(super) fn remainder(state: &mut State, left: Value, right: Value) -> Result<Value, Error> {
    // Templates ask for each message whether its index is even, and compiling an expression takes longer than that.
    if left.is_integer()
        && right.is_integer()
        && let (Some(left), Some(right @ 1..)) = (left.as_i64(), right.as_i64())
    {
        return Ok(Value::from(left.rem_euclid(right)));
    }
    if left.as_str().is_none() {
        return native(state, "left % right", left, right);
    }
    let names_members = left.as_str().is_some_and(|format| format.contains("%("));
    let args = match right.as_object() {
        Some(members) if right.kind() == ValueKind::Map && names_members => {
            let members = members.try_iter_pairs().into_iter().flatten();
            vec![members.map(|(name, member)| (name.to_string(), member)).collect::<Kwargs>().into()]
        }
        _ if right.is_tuple() => right.try_iter()?.collect(),
        _ => vec![right],
    };
    state.apply_filter("format", &[vec![left], args].concat())
}

/// minijinja's own operator.
fn native(state: &State, operation: &str, left: Value, right: Value) -> Result<Value, Error> {
    state.env().compile_expression(operation)?.eval(context! { left, right })
}

/// A value that is stored in a namespace. Only namespaces are mutable, so a namespace that is stored in another could
/// contain itself.
pub(super) fn stored(value: Value) -> Result<Value, Error> {
    if has_namespace(&value) {
        return Err(Error::new(ErrorKind::InvalidOperation, "a namespace cannot be kept in a namespace"));
    }
    Ok(value)
}

fn has_namespace(value: &Value) -> bool {
    let Some(object) = value.as_object() else { return false };
    if object.type_name().ends_with("::Namespace") {
        return true;
    }
    match value.kind() {
        ValueKind::Seq => value.try_iter().into_iter().flatten().any(|element| has_namespace(&element)),
        ValueKind::Map => object.try_iter_pairs().into_iter().flatten().any(|(_, element)| has_namespace(&element)),
        _ => false,
    }
}

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

fn texts(args: &[Value]) -> Vec<Option<&str>> {
    args.iter().map(Value::as_str).collect()
}

fn lines(text: &str) -> u64 {
    text.bytes().filter(|&byte| byte == b'\n').count() as u64
}

fn replaced_bytes(text: &str, from: &str, to: &str) -> Result<u64, Error> {
    Ok(text.len() as u64 + text.matches(from).count() as u64 * to.len() as u64)
}

/// Bytes of the elements as one text, with the second argument between them.
fn joined_bytes(args: &[Value]) -> Result<u64, Error> {
    let Some(list) = args.first() else { return Ok(0) };
    let between = args.get(1).and_then(Value::as_str).map_or(0, str::len) as u64;
    let elements = list.len().unwrap_or(0) as u64;
    Ok(shown_bytes(list)?.saturating_add(elements.saturating_mul(between)))
}

fn split_bytes(args: &[Value]) -> Result<u64, Error> {
    let Some(text) = args.first().and_then(Value::as_str) else { return Ok(0) };
    let pieces = match args.get(1).and_then(Value::as_str) {
        Some(separator) => text.matches(separator).count(),
        None => text.split_whitespace().count(),
    };
    Ok(text.len() as u64 + (pieces as u64 + 1) * ITEM_BYTES)
}

/// Bytes of a list of the characters of a text.
fn elements_bytes(args: &[Value]) -> Result<u64, Error> {
    Ok(args.iter().filter_map(Value::as_str).map(|text| text.len() as u64 * ITEM_BYTES).sum())
}

/// Bytes of a list of parts, whose number or size is an argument.
fn parts_bytes(args: &[Value]) -> Result<u64, Error> {
    if args.get(1).is_some_and(|count| count.as_usize().is_none_or(|count| count > MAX_ITEMS)) {
        return Err(too_many_items());
    }
    elements_bytes(args)
}

fn indented_bytes(args: &[Value]) -> Result<u64, Error> {
    let named = |arg: &Value| arg.get_attr("width").ok().filter(Value::is_number);
    let width = args.iter().skip(1).find_map(|arg| if arg.is_number() { Some(arg.clone()) } else { named(arg) });
    let width = width.and_then(|width| width.as_usize()).unwrap_or(4) as u64;
    check_width(width)?;
    let text = args.first().and_then(Value::as_str).unwrap_or_default();
    Ok((text.len() as u64 + (lines(text) + 1) * width) * GROWTH)
}

/// Checks the width that a text is padded to.
pub(super) fn check_width(width: u64) -> Result<(), Error> {
    if width <= MAX_WIDTH {
        return Ok(());
    }
    Err(exceeded(&format!("pads text by more than {MAX_WIDTH} characters")))
}

/// Bytes of a text in which `%s` or `{}` stand for arguments. Widths that are arguments themselves are rejected.
fn formatted_bytes(args: &[Value]) -> Result<u64, Error> {
    let Some(format) = args.first().and_then(Value::as_str) else { return Ok(0) };
    // The character that opened the current placeholder: `%`, `(` before its name, `{`, or `:` before its format.
    let (mut opened, mut last, mut number, mut fields) = (None, ' ', 0_u64, 1_u64);
    for c in format.chars() {
        match (opened, c) {
            (None, '%' | '{') => (opened, number, fields) = (Some(c), 0, fields + 1),
            (Some('%'), '*') | (Some(':'), '{') => check_width(u64::MAX)?,
            (Some('%'), '(') | (Some('{'), ':') => opened = Some(c),
            (Some('('), ')') => opened = Some('%'),
            (Some('{'), '{') if last == '{' => opened = None,
            (Some('{' | ':'), '}') | (Some('%'), '%') => opened = None,
            (Some('%'), c) if c.is_alphabetic() => opened = None,
            (Some('%' | ':'), '0'..='9') => {
                number = number.saturating_mul(10).saturating_add(u64::from(c) - u64::from('0'));
                check_width(number)?;
            }
            (Some(_), _) => number = 0,
            (None, _) => {}
        }
        last = c;
    }
    let shown = args.iter().map(shown_bytes).sum::<Result<u64, Error>>()?;
    Ok((shown.saturating_mul(fields)).saturating_add(fields * MAX_WIDTH))
}
