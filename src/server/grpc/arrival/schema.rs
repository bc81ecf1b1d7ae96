//! What the messages of `proto/` look like on the wire and in memory, from their descriptors.

use std::collections::HashMap;

use prost::Message as _;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, FieldDescriptorProto, FileDescriptorSet};

use crate::error::{Error, Result};

/// The messages that calls begin with, and all that these contain.
pub(super) struct Schema {
    shapes: Vec<Shape>,
    /// By path, `/package.Service/Method`.
    methods: HashMap<String, Method>,
}

/// A method whose requests are one message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Method {
    pub(super) input: ShapeId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ShapeId(usize);

/// A message.
pub(super) struct Shape {
    /// Such as `rollout.v1.Prompt`.
    pub(super) name: String,
    /// Ascending by number.
    fields: Vec<Field>,
    /// At most what its own fields take, without what they point to.
    pub(super) bytes: u64,
}

pub(super) struct Field {
    number: u32,
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) is_repeated: bool,
    /// The oneof that the field is in, of whose fields one is set at a time.
    oneof: Option<i32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A varint, so many bytes in memory.
    Varint(u64),
    Fixed32,
    Fixed64,
    Text,
    Bytes,
    Message(ShapeId),
    /// A map's entry: a key and a value.
    Entry(ShapeId),
}

impl Schema {
    /// From encoded sets of descriptors, each whole in itself.
    ///
    /// # Errors
    /// `Internal` if a set cannot be decoded or names a message that it does not have.
    pub(super) fn new(sets: &[&[u8]]) -> Result<Self> {
        let mut schema = Self { shapes: Vec::new(), methods: HashMap::new() };
        for set in sets {
            let set = FileDescriptorSet::decode(*set).map_err(|e| broken(&e.to_string()))?;
            schema.add(&set)?;
        }
        Ok(schema)
    }

    /// None for a method that is unknown or takes a stream of messages.
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
            let field = |f| Field::new(f, |name| ids.get(name).map(|&id| (id, entries[id.0 - first])));
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

    /// A message lies inside the one that has it as a field.
    fn struct_bytes(&self, id: ShapeId, depth: usize) -> Result<u64> {
        /// Messages of requests contain no message of their own kind, which would lie behind a pointer.
        const DEEPEST: usize = 16;
        if depth > DEEPEST {
            return Err(broken(&self.shape(id).name));
        }
        let (mut sum, mut oneofs) = (0, HashMap::<i32, u64>::new());
        for field in &self.shape(id).fields {
            let bytes = match field.kind {
                _ if field.is_repeated => Kind::LIST,
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
    fn new(field: &FieldDescriptorProto, find: impl Fn(&str) -> Option<(ShapeId, bool)>) -> Result<Self> {
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
        // An optional field is a oneof of its own to older readers of descriptors.
        let oneof = field.oneof_index.filter(|_| !field.proto3_optional());
        let is_repeated = field.label() == Label::Repeated;
        Ok(Self { number: field.number().unsigned_abs(), name: field.name().into(), kind, is_repeated, oneof })
    }
}

impl Kind {
    /// A vector, a string or a map, without what it holds.
    const LIST: u64 = 48;
    /// Whether an optional field is set, and which of a oneof, with padding.
    const TAG: u64 = 8;

    /// What a value takes in the message or list that has it; of a message this is in its shape.
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

/// All messages with their full names, nested ones too.
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
