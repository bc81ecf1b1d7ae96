//! The layout of the messages in `proto/`, on the wire and in memory, computed from their descriptors.

use std::collections::HashMap;

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

use crate::error::{Error, Result};

/// Fields that prost keeps behind a pointer, as `build.rs` says, so that messages without them are small.
const BOXED: [(&str, &str); 1] = [(".rollout.v1.Prompt", "sampling")];

/// The request messages of all methods that take one message, and all messages within them.
pub(super) struct Schema {
    shapes: Vec<Shape>,
    /// Methods by path, `/package.Service/Method`.
    methods: HashMap<String, Method>,
}

/// A method whose request is one message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Method {
    pub(super) input: ShapeId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShapeId(usize);

/// The layout of one message type.
pub(super) struct Shape {
    /// Full name, such as `rollout.v1.Prompt`.
    pub(super) name: String,
    /// Fields in ascending order of their numbers.
    fields: Vec<Field>,
    /// Upper bound on the bytes of the decoded message itself, without what its fields point to.
    pub(super) bytes: u64,
}

pub(super) struct Field {
    number: u32,
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) is_repeated: bool,
    /// Whether its message is behind a pointer.
    pub(super) is_boxed: bool,
    /// Index of the oneof that the field belongs to. Only one field of a oneof is set at a time.
    oneof: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A varint, with the bytes that its value takes in memory.
    Varint(u64),
    Fixed32,
    Fixed64,
    Text,
    Bytes,
    Message(ShapeId),
    /// An entry of a map: a message of a key and a value.
    Entry(ShapeId),
}

impl Schema {
    /// Builds the schema from encoded descriptor sets, each of which is complete in itself.
    ///
    /// # Errors
    /// `Internal` if a set cannot be decoded, or names a message that it does not contain.
    pub(super) fn new(sets: &[&[u8]]) -> Result<Self> {
        let mut schema = Self { shapes: Vec::new(), methods: HashMap::new() };
        for set in sets {
            let set = FileDescriptorSet::decode(*set).map_err(|e| broken(&e.to_string()))?;
            schema.add(&set)?;
        }
        Ok(schema)
    }

    /// The method of a path; None if it is unknown or takes a stream of messages.
    pub(super) fn method(&self, path: &str) -> Option<Method> {
        self.methods.get(path).copied()
    }

    pub(super) fn shape(&self, id: ShapeId) -> &Shape {
        &self.shapes[id.0]
    }

    fn add(&mut self, set: &FileDescriptorSet) -> Result<()> {
        let mut messages = Vec::new();
        for file in &set.file {
            collect(&format!(".{}", file.package()), &file.message_type, &mut messages);
        }
        let first = self.shapes.len();
        let ids = messages.iter().enumerate().map(|(i, (name, _))| (name.clone(), ShapeId(first + i)));
        let ids: HashMap<String, ShapeId> = ids.collect();
        let entries: Vec<bool> =
            messages.iter().map(|(_, m)| m.options.as_ref().is_some_and(|o| o.map_entry())).collect();
        for (name, message) in &messages {
            let field = |f| Field::new(name, f, |name| ids.get(name).map(|&id| (id, entries[id.0 - first])));
            let mut fields: Vec<_> = message.field.iter().map(field).collect::<Result<_>>()?;
            fields.sort_by_key(|f| f.number);
            self.shapes.push(Shape { name: name.trim_start_matches('.').into(), fields, bytes: 0 });
        }
        for i in first..self.shapes.len() {
            self.shapes[i].bytes = self.struct_bytes(ShapeId(i), 0)?;
        }
        for file in &set.file {
            for service in &file.service {
                for method in service.method.iter().filter(|m| !m.client_streaming()) {
                    let path = format!("/{}.{}/{}", file.package(), service.name(), method.name());
                    let input = *ids.get(method.input_type()).ok_or_else(|| broken(method.input_type()))?;
                    self.methods.insert(path, Method { input });
                }
            }
        }
        Ok(())
    }

    /// Bytes of a decoded message, with the messages in its fields, which prost stores inline.
    fn struct_bytes(&self, id: ShapeId, depth: usize) -> Result<u64> {
        /// Deepest nesting of messages. No request message contains its own type, which prost would store behind a
        /// pointer.
        const DEEPEST: usize = 16;
        if depth > DEEPEST {
            return Err(broken(&self.shape(id).name));
        }
        let (mut sum, mut oneofs) = (0, HashMap::<i32, u64>::new());
        for field in &self.shape(id).fields {
            let bytes = match field.kind {
                _ if field.is_repeated => Kind::LIST,
                Kind::Message(_) if field.is_boxed => Kind::TAG,
                Kind::Message(inner) => self.struct_bytes(inner, depth + 1)? + Kind::TAG,
                kind => kind.bytes() + Kind::TAG,
            };
            match field.oneof {
                Some(index) => oneofs.entry(index).and_modify(|most| *most = bytes.max(*most)).or_insert(bytes),
                None => {
                    sum += bytes;
                    continue;
                }
            };
        }
        Ok(sum + oneofs.values().sum::<u64>())
    }
}

impl Shape {
    pub(super) fn field(&self, number: u32) -> Option<&Field> {
        self.fields.binary_search_by_key(&number, |f| f.number).ok().map(|i| &self.fields[i])
    }
}

impl Field {
    fn new(
        message: &str,
        field: &FieldDescriptorProto,
        find: impl Fn(&str) -> Option<(ShapeId, bool)>,
    ) -> Result<Self> {
        let kind = match field.r#type() {
            Type::Bool => Kind::Varint(1),
            Type::Int32 | Type::Uint32 | Type::Sint32 | Type::Enum => Kind::Varint(4),
            Type::Int64 | Type::Uint64 | Type::Sint64 => Kind::Varint(8),
            Type::Float | Type::Fixed32 | Type::Sfixed32 => Kind::Fixed32,
            Type::Double | Type::Fixed64 | Type::Sfixed64 => Kind::Fixed64,
            Type::String => Kind::Text,
            Type::Bytes => Kind::Bytes,
            Type::Message => match find(field.type_name()).ok_or_else(|| broken(field.type_name()))? {
                (entry, true) => Kind::Entry(entry),
                (message, false) => Kind::Message(message),
            },
            Type::Group => return Err(broken(field.name())),
        };
        // Descriptors list a proto3 optional field as a oneof of its own.
        let oneof = field.oneof_index.filter(|_| !field.proto3_optional());
        let is_repeated = field.label() == Label::Repeated;
        let is_boxed = BOXED.contains(&(message, field.name()));
        Ok(Self {
            number: field.number().unsigned_abs(),
            name: field.name().into(),
            kind,
            is_repeated,
            is_boxed,
            oneof,
        })
    }
}

impl Kind {
    /// Bytes of a vector, a string or a map itself, without its elements.
    const LIST: u64 = 48;
    /// Bytes of the tag of an optional field or a oneof, with padding.
    const TAG: u64 = 8;

    /// Bytes of one value within the message or list that holds it. For a field of message type see the message's
    /// shape.
    pub(super) fn bytes(self) -> u64 {
        match self {
            Kind::Varint(bytes) => bytes,
            Kind::Fixed32 => 4,
            Kind::Fixed64 => 8,
            Kind::Text => 24,
            Kind::Bytes => 32,
            Kind::Message(_) | Kind::Entry(_) => 0,
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

fn broken(what: &str) -> Error {
    Error::Internal(format!("the descriptors of the protocol are broken: {what}"))
}
