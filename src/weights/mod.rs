//! Parameters: their names, shapes and shard rules, and the checkpoints they are read from.

mod checkpoint;
mod gguf;
mod gguf_config;
mod hub;
mod mapped;
mod partition;
mod safetensors;
mod shard;
mod source;
mod tensor;

pub use checkpoint::Checkpoint;
pub use gguf::{GgufCheckpoint, GgufMetadata};
pub use partition::Partition;
pub use safetensors::SafetensorsCheckpoint;
pub use shard::{ParamSpec, ShardRule, Slice, head_range, matrix_shape};
pub use source::{ModelFiles, ModelSource, TokenizerFiles};
pub use tensor::{Dtype, TensorData};

#[cfg(test)]
mod tests;
