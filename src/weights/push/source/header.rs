//! The header of a safetensors file, of which only the tensors are kept.

use std::fmt;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::weights::{Dtype, TensorEntry};

/// Member of the header that has texts of its writer's, and no tensor.
const METADATA: &str = "__metadata__";
/// Most dimensions of a tensor: more than any parameter of a decoder has.
const MAX_DIMENSIONS: usize = 4;

/// The tensors of a file in the order of their bytes, each with its offset from where the header ends.
pub(super) struct Header(pub Vec<TensorEntry>);

impl Header {
    /// Reads the text of a header.
    ///
    /// # Errors
    /// What is wrong: the text is no header, a tensor has another element type than floats of 16 and 32 bits or too
    /// many dimensions, or the tensors are not one behind the other.
    pub fn parse(text: &[u8]) -> serde_json::Result<Self> {
        serde_json::from_slice(text)
    }

    /// Bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.0.last().map_or(0, |last| last.offset + bytes_of(last).unwrap_or(0))
    }
}

/// A tensor as the header declares it.
#[derive(serde::Deserialize)]
struct Stored {
    dtype: safetensors::Dtype,
    shape: Shape,
    data_offsets: (u64, u64),
}

/// A shape of at most [`MAX_DIMENSIONS`].
struct Shape(Vec<usize>);

impl Stored {
    /// The tensor of this name.
    fn entry(self, name: String) -> Result<TensorEntry, String> {
        let dtype = match self.dtype {
            safetensors::Dtype::F32 => Dtype::F32,
            safetensors::Dtype::F16 => Dtype::F16,
            safetensors::Dtype::BF16 => Dtype::Bf16,
            other => return Err(format!("{name} is stored as {other:?}; supported are F32, F16 and BF16")),
        };
        let (start, end) = self.data_offsets;
        let (digest, payload, allocation) = (None, None, None);
        let entry = TensorEntry { name, dtype, shape: self.shape.0, digest, payload, offset: start, allocation };
        if bytes_of(&entry).is_none_or(|bytes| start.checked_add(bytes) != Some(end)) {
            let TensorEntry { name, shape, .. } = &entry;
            return Err(format!("{name} of shape {shape:?} cannot take the bytes {start} to {end}"));
        }
        Ok(entry)
    }
}

/// Bytes of a tensor of this shape, if a number can say them.
fn bytes_of(entry: &TensorEntry) -> Option<u64> {
    let dimensions = entry.shape.iter().map(|&dimension| dimension as u64);
    dimensions.chain([entry.dtype.size() as u64]).try_fold(1, u64::checked_mul)
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;

        impl<'de> Visitor<'de> for Tensors {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "an object with a member for each tensor")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Header, A::Error> {
                let mut tensors = Vec::new();
                while let Some(name) = members.next_key::<String>()? {
                    if name == METADATA {
                        members.next_value::<IgnoredAny>()?;
                    } else {
                        tensors.push(members.next_value::<Stored>()?.entry(name).map_err(A::Error::custom)?);
                    }
                }
                tensors.sort_by_key(|tensor| tensor.offset);
                let mut end = 0;
                for tensor in &tensors {
                    if tensor.offset != end {
                        let TensorEntry { name, offset, .. } = tensor;
                        return Err(A::Error::custom(format!(
                            "{name} begins at {offset}, and the one before ends at {end}"
                        )));
                    }
                    end += bytes_of(tensor).unwrap_or(0);
                }
                Ok(Header(tensors))
            }
        }

        deserializer.deserialize_map(Tensors)
    }
}

impl<'de> Deserialize<'de> for Shape {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Dimensions;

        impl<'de> Visitor<'de> for Dimensions {
            type Value = Shape;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_DIMENSIONS} dimensions")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut dimensions: A) -> Result<Shape, A::Error> {
                let mut shape = Vec::new();
                while let Some(dimension) = dimensions.next_element()? {
                    if shape.len() == MAX_DIMENSIONS {
                        return Err(A::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                    }
                    shape.push(dimension);
                }
                Ok(Shape(shape))
            }
        }

        deserializer.deserialize_seq(Dimensions)
    }
}
