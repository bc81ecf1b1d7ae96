//! How much memory an encoded message takes once prost has decoded it, found by reading it once. A message of a few
//! bytes may become a struct of hundreds, and a list of token ids hardly more than its encoding, so no factor on the
//! length serves both. The read also finds malformed messages, with the path of the field.
//!
//! Tests: `test_a_chat_of_eight_million_messages` in `clients/python/tests/test_memory_ceiling.py`, and
//! `receive/tests.rs`, which compares with prost.

use std::collections::{BTreeMap, HashMap};

use prost::Message as _;
use prost::encoding::decode_varint;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

use crate::error::{Error, Result};

/// Fields that prost keeps behind a pointer, as `build.rs` says, so that messages without them are small.
const BOXED: [(&str, &str); 1] = [(".rollout.v1.Prompt", "sampling")];
/// Deepest nesting of messages. No request message contains its own type, which prost would store behind a pointer.
const MAX_DEPTH: usize = 16;
/// Bytes of a vector, a string or a map itself, without its elements.
const LIST: u64 = 48;
/// Bytes of the tag of an optional field or a oneof, with padding.
const TAG: u64 = 8;
/// Bytes that the allocator adds to each block, and its smallest block.
const BLOCK: u64 = 32;
/// Factor by which a list may have more capacity than elements: it doubles as it grows.
const GROWTH: u64 = 2;
/// Bytes of a hash map's entry besides its key and value: its place in the table, while the table grows and moves.
const ENTRY: u64 = 64;

/// The request messages of all methods that take one message, and all messages within them.
pub(super) struct Schema {
    messages: Vec<MessageType>,
    /// Index of each method's request message, by path: `/package.Service/Method`.
    inputs: HashMap<String, usize>,
}

struct MessageType {
    /// Full name, such as `rollout.v1.Prompt`.
    name: String,
    /// Fields by their numbers.
    fields: BTreeMap<u32, Field>,
    /// Whether it is an entry of a map: a message of a key and a value.
    is_entry: bool,
    /// Upper bound on the bytes of the decoded message itself, without the memory that its fields point to.
    bytes: u64,
}

struct Field {
    name: String,
    kind: Kind,
    is_repeated: bool,
    /// Whether its message is behind a pointer.
    is_boxed: bool,
    /// Index of the oneof that the field belongs to: only one of its fields is set at a time.
    oneof: Option<i32>,
}

#[derive(Clone, Copy)]
enum Kind {
    /// A varint, with the bytes that its value takes in memory.
    Varint(u64),
    /// A number of as many bytes.
    Fixed(u64),
    Text,
    Bytes,
    /// A message, by its index.
    Message(usize),
}

/// Value of a field as encoded.
enum Value<'a> {
    Varint,
    /// A number of as many bytes.
    Fixed(u64),
    Delimited(&'a [u8]),
}

/// A part of a message, or why the message is malformed.
type Parsed<T> = std::result::Result<T, &'static str>;

impl Schema {
    /// Builds the schema from encoded descriptor sets.
    ///
    /// # Errors
    /// `Internal` if a set cannot be decoded, or names a message that none contains.
    pub(super) fn new(sets: &[&[u8]]) -> Result<Self> {
        let (mut files, mut found) = (Vec::new(), Vec::new());
        for set in sets {
            files.extend(FileDescriptorSet::decode(*set).map_err(|e| broken(&e.to_string()))?.file);
        }
        for file in &files {
            collect(&format!(".{}", file.package()), &file.message_type, &mut found);
        }
        let index: HashMap<&str, usize> = found.iter().enumerate().map(|(i, (name, _))| (name.as_str(), i)).collect();
        let index_of = |name: &str| index.get(name).copied().ok_or_else(|| broken(name));
        let mut schema = Self { messages: Vec::new(), inputs: HashMap::new() };
        for (name, message) in &found {
            let numbered = |field: &FieldDescriptorProto| {
                Field::new(name, field, index_of).map(|read| (field.number().unsigned_abs(), read))
            };
            schema.messages.push(MessageType {
                name: name.trim_start_matches('.').into(),
                fields: message.field.iter().map(numbered).collect::<Result<_>>()?,
                is_entry: message.options.as_ref().is_some_and(|options| options.map_entry()),
                bytes: 0,
            });
        }
        for i in 0..schema.messages.len() {
            schema.messages[i].bytes = schema.struct_bytes(i, 0)?;
        }
        for file in &files {
            for service in &file.service {
                for method in service.method.iter().filter(|m| !m.client_streaming()) {
                    let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                    schema.inputs.insert(path, index_of(method.input_type())?);
                }
            }
        }
        Ok(schema)
    }

    /// The request message of a method; None if the method is unknown or takes a stream of messages.
    pub(super) fn input_of(&self, path: &str) -> Option<usize> {
        self.inputs.get(path).copied()
    }

    /// Bytes of a decoded message, with the messages in its fields, which prost stores inline.
    fn struct_bytes(&self, message: usize, depth: usize) -> Result<u64> {
        let MessageType { name, fields, .. } = &self.messages[message];
        if depth > MAX_DEPTH {
            return Err(broken(name));
        }
        let mut sums = HashMap::<Option<i32>, u64>::new();
        for field in fields.values() {
            let bytes = match field.kind {
                _ if field.is_repeated => LIST,
                Kind::Message(_) if field.is_boxed => TAG,
                Kind::Message(inner) => self.struct_bytes(inner, depth + 1)? + TAG,
                kind => kind.bytes() + TAG,
            };
            let sum = sums.entry(field.oneof).or_default();
            *sum = if field.oneof.is_some() { bytes.max(*sum) } else { *sum + bytes };
        }
        Ok(sums.values().sum())
    }

    /// Upper bound on the bytes that an encoded message of the type `input` takes once decoded.
    ///
    /// # Errors
    /// `InvalidArgument` with the field where the message is malformed.
    pub(super) fn decoded_bytes(&self, input: usize, message: &[u8]) -> Result<u64> {
        let MessageType { name, bytes, .. } = &self.messages[input];
        let mut path = Vec::new();
        let heap = self.heap_bytes(input, message, &mut path).map_err(|reason| {
            let at = if path.is_empty() { String::new() } else { format!(" at {}", path.join(".")) };
            Error::invalid("request", format!("is not a {name}: {reason}{at}"))
        })?;
        Ok(bytes.saturating_add(heap))
    }

    /// Bytes of everything that the fields of a message point to. If the message is malformed, `path` is that of the
    /// malformed field.
    fn heap_bytes<'a>(&'a self, message: usize, mut rest: &[u8], path: &mut Vec<&'a str>) -> Parsed<u64> {
        let mut heap = 0u64;
        while !rest.is_empty() {
            let (number, value) = next_field(&mut rest)?;
            let Some(field) = self.messages[message].fields.get(&number) else { continue };
            path.push(&field.name);
            heap = heap.saturating_add(self.field_bytes(field, value, path)?);
            path.pop();
        }
        Ok(heap)
    }

    fn field_bytes<'a>(&'a self, field: &Field, value: Value<'_>, path: &mut Vec<&'a str>) -> Parsed<u64> {
        let listed = |bytes: u64| if field.is_repeated { bytes.saturating_mul(GROWTH) } else { 0 };
        match (field.kind, value) {
            (Kind::Varint(_), Value::Varint)
            | (Kind::Fixed(4), Value::Fixed(4))
            | (Kind::Fixed(8), Value::Fixed(8)) => {
                Ok(if field.is_repeated { listed(field.kind.bytes()) + BLOCK } else { 0 })
            }
            (Kind::Varint(_) | Kind::Fixed(_), Value::Delimited(packed)) if field.is_repeated => {
                Ok(listed(packed_values(field.kind, packed)? * field.kind.bytes()) + BLOCK)
            }
            (Kind::Text, Value::Delimited(text)) if std::str::from_utf8(text).is_err() => Err("the text is not UTF-8"),
            (Kind::Text | Kind::Bytes, Value::Delimited(bytes)) => {
                Ok(listed(field.kind.bytes()) + bytes.len() as u64 + BLOCK)
            }
            (Kind::Message(inner), Value::Delimited(message)) => {
                let MessageType { bytes, is_entry, .. } = self.messages[inner];
                let own = match (field.is_boxed, is_entry) {
                    (true, _) => bytes + BLOCK,
                    (_, true) => bytes + ENTRY,
                    _ => listed(bytes),
                };
                Ok(own.saturating_add(self.heap_bytes(inner, message, path)?))
            }
            _ => Err("the field has another wire type"),
        }
    }
}

impl Field {
    fn new(message: &str, field: &FieldDescriptorProto, index_of: impl Fn(&str) -> Result<usize>) -> Result<Self> {
        let kind = match field.r#type() {
            Type::Bool => Kind::Varint(1),
            Type::Int32 | Type::Uint32 | Type::Sint32 | Type::Enum => Kind::Varint(4),
            Type::Int64 | Type::Uint64 | Type::Sint64 => Kind::Varint(8),
            Type::Float | Type::Fixed32 | Type::Sfixed32 => Kind::Fixed(4),
            Type::Double | Type::Fixed64 | Type::Sfixed64 => Kind::Fixed(8),
            Type::String => Kind::Text,
            Type::Bytes => Kind::Bytes,
            Type::Message => Kind::Message(index_of(field.type_name())?),
            Type::Group => return Err(broken(field.name())),
        };
        Ok(Self {
            name: field.name().into(),
            kind,
            is_repeated: field.label() == Label::Repeated,
            is_boxed: BOXED.contains(&(message, field.name())),
            // Descriptors list a proto3 optional field as a oneof of its own.
            oneof: field.oneof_index.filter(|_| !field.proto3_optional()),
        })
    }
}

impl Kind {
    /// Bytes of one value within the message or list that holds it. For a message see [`MessageType::bytes`].
    fn bytes(self) -> u64 {
        match self {
            Kind::Varint(bytes) | Kind::Fixed(bytes) => bytes,
            Kind::Text => 24,
            Kind::Bytes => 32,
            Kind::Message(_) => 0,
        }
    }
}

/// Collects all messages, nested ones too, with their full names.
fn collect<'a>(scope: &str, messages: &'a [DescriptorProto], all: &mut Vec<(String, &'a DescriptorProto)>) {
    for message in messages {
        let name = format!("{scope}.{}", message.name());
        all.push((name.clone(), message));
        collect(&name, &message.nested_type, all);
    }
}

fn broken(name: &str) -> Error {
    Error::Internal(format!("the descriptors of the protocol are broken: {name}"))
}

/// Reads the number and value of the next field.
fn next_field<'a>(rest: &mut &'a [u8]) -> Parsed<(u32, Value<'a>)> {
    let key = u32::try_from(varint(rest)?).map_err(|_| "a field's key is too large")?;
    let value = match key & 7 {
        0 => varint(rest).map(|_| Value::Varint)?,
        1 => take(rest, 8).map(|_| Value::Fixed(8))?,
        2 => {
            let len = varint(rest)?;
            Value::Delimited(take(rest, usize::try_from(len).unwrap_or(usize::MAX))?)
        }
        5 => take(rest, 4).map(|_| Value::Fixed(4))?,
        3 | 4 => return Err("groups are not supported"),
        _ => return Err("a field has an unknown wire type"),
    };
    if key >> 3 == 0 { Err("a field has the number 0") } else { Ok((key >> 3, value)) }
}

/// Number of values in a packed field.
fn packed_values(kind: Kind, mut packed: &[u8]) -> Parsed<u64> {
    if let Kind::Varint(_) = kind {
        let mut values = 0;
        while !packed.is_empty() {
            varint(&mut packed)?;
            values += 1;
        }
        return Ok(values);
    }
    let (length, size) = (packed.len() as u64, kind.bytes());
    if length.is_multiple_of(size) { Ok(length / size) } else { Err("a packed value is cut") }
}

fn varint(rest: &mut &[u8]) -> Parsed<u64> {
    decode_varint(rest).map_err(|_| "a number is cut or too long")
}

fn take<'a>(rest: &mut &'a [u8], bytes: usize) -> Parsed<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(bytes).ok_or("a value is cut")?;
    *rest = left;
    Ok(taken)
}
