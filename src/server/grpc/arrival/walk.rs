//! Reads an encoded message once before prost decodes it: checks that it is well formed, and computes how much memory
//! the decoded message will take.

use prost::encoding::decode_varint;

use super::schema::{Field, Kind, Schema, ShapeId};
use crate::error::{Error, Result};

/// Bytes that the allocator adds to each block, and its smallest block.
const BLOCK: u64 = 32;
/// Factor by which a list may have more capacity than elements: it doubles as it grows.
const GROWTH: u64 = 2;
/// Bytes of a hash map's entry besides its key and value: its place in the table, while the table grows and moves.
const ENTRY: u64 = 64;

/// What is wrong with a message, and in which field.
struct Flaw {
    path: Vec<String>,
    what: &'static str,
}

/// Upper bound on the bytes that the decoded message will take.
///
/// # Errors
/// `InvalidArgument` with the field where the message is malformed.
pub(super) fn decoded_bytes(schema: &Schema, shape: ShapeId, message: &[u8]) -> Result<u64> {
    let heap = walk(schema, shape, message).map_err(|flaw| {
        let mut path = flaw.path;
        path.reverse();
        let (name, place) = (&schema.shape(shape).name, path.join("."));
        let at = if place.is_empty() { String::new() } else { format!(" at {place}") };
        Error::invalid("request", format!("is no {name}: {}{at}", flaw.what))
    })?;
    Ok(schema.shape(shape).bytes + heap)
}

/// Value of a field as encoded.
enum Value<'a> {
    Varint,
    Fixed32,
    Fixed64,
    Delimited(&'a [u8]),
}

/// Bytes of everything that the fields of a message point to.
fn walk(schema: &Schema, shape: ShapeId, mut rest: &[u8]) -> std::result::Result<u64, Flaw> {
    let mut heap = 0u64;
    while !rest.is_empty() {
        let (number, value) = field(&mut rest).map_err(|what| Flaw { path: Vec::new(), what })?;
        let Some(field) = schema.shape(shape).field(number) else { continue };
        let bytes = field_heap(schema, field, value).map_err(|mut flaw| {
            flaw.path.push(field.name.clone());
            flaw
        })?;
        heap = heap.saturating_add(bytes);
    }
    Ok(heap)
}

/// Reads the number and value of the next field.
fn field<'a>(rest: &mut &'a [u8]) -> std::result::Result<(u32, Value<'a>), &'static str> {
    let key = u32::try_from(varint(rest)?).map_err(|_| "a field's key is too large")?;
    let value = match key & 7 {
        0 => varint(rest).map(|_| Value::Varint)?,
        1 => take(rest, 8).map(|_| Value::Fixed64)?,
        2 => {
            let len = varint(rest)?;
            Value::Delimited(take(rest, usize::try_from(len).unwrap_or(usize::MAX))?)
        }
        5 => take(rest, 4).map(|_| Value::Fixed32)?,
        3 | 4 => return Err("groups are not supported"),
        _ => return Err("a field has an unknown wire type"),
    };
    match key >> 3 {
        0 => Err("a field has the number 0"),
        number => Ok((number, value)),
    }
}

fn field_heap(schema: &Schema, field: &Field, value: Value<'_>) -> std::result::Result<u64, Flaw> {
    let flaw = |what| Flaw { path: Vec::new(), what };
    let wrong = || flaw("the field has another wire type");
    let listed = |bytes: u64| if field.is_repeated { bytes.saturating_mul(GROWTH) } else { 0 };
    match (field.kind, value) {
        (Kind::Varint(_), Value::Varint) | (Kind::Fixed32, Value::Fixed32) | (Kind::Fixed64, Value::Fixed64) => {
            Ok(if field.is_repeated { field.kind.bytes() * GROWTH + BLOCK } else { 0 })
        }
        (kind @ (Kind::Varint(_) | Kind::Fixed32 | Kind::Fixed64), Value::Delimited(packed)) if field.is_repeated => {
            Ok(listed(packed_values(kind, packed).map_err(flaw)? * kind.bytes()) + BLOCK)
        }
        (Kind::Text, Value::Delimited(text)) => {
            std::str::from_utf8(text).map_err(|_| flaw("the text is not UTF-8"))?;
            Ok(listed(field.kind.bytes()) + text.len() as u64 + BLOCK)
        }
        (Kind::Bytes, Value::Delimited(bytes)) => Ok(listed(field.kind.bytes()) + bytes.len() as u64 + BLOCK),
        (Kind::Message(inner), Value::Delimited(message)) => {
            let own = schema.shape(inner).bytes;
            let pointed = if field.is_boxed { own + BLOCK } else { listed(own) };
            Ok(pointed.saturating_add(walk(schema, inner, message)?))
        }
        (Kind::Entry(entry), Value::Delimited(message)) => {
            Ok((schema.shape(entry).bytes + ENTRY).saturating_add(walk(schema, entry, message)?))
        }
        _ => Err(wrong()),
    }
}

/// Number of values in a packed field.
fn packed_values(kind: Kind, mut packed: &[u8]) -> std::result::Result<u64, &'static str> {
    let fixed = match kind {
        Kind::Fixed32 => 4,
        Kind::Fixed64 => 8,
        _ => {
            let mut values = 0;
            while !packed.is_empty() {
                varint(&mut packed)?;
                values += 1;
            }
            return Ok(values);
        }
    };
    if packed.len().is_multiple_of(fixed) { Ok((packed.len() / fixed) as u64) } else { Err("a packed value is cut") }
}

fn varint(rest: &mut &[u8]) -> std::result::Result<u64, &'static str> {
    decode_varint(rest).map_err(|_| "a number is cut or too long")
}

fn take<'a>(rest: &mut &'a [u8], bytes: usize) -> std::result::Result<&'a [u8], &'static str> {
    let (taken, left) = rest.split_at_checked(bytes).ok_or("a value is cut")?;
    *rest = left;
    Ok(taken)
}
