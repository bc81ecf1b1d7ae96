//! Parameters: their names, shapes and shard rules, and the checkpoints they are read from.

mod checkpoint;
mod digest;
mod gguf;
mod gguf_config;
mod hub;
mod lora;
mod mapped;
mod parameters;
mod partition;
mod safetensors;
mod shard;
mod source;
mod tensor;
mod update;

pub use checkpoint::Checkpoint;
pub use gguf::{GgufCheckpoint, GgufMetadata};
pub use lora::{Adapter, AdapterPlan, Factors};
pub use mapped::Stamp;
pub use parameters::Parameters;
pub use partition::Partition;
pub use safetensors::SafetensorsCheckpoint;
pub use shard::{ParamSpec, ShardRule, Slice, head_range, matrix_shape};
pub use source::{ModelFiles, ModelSource, TokenizerFiles};
pub use tensor::{Dtype, TensorData};
pub use update::{
    Changes, Delta, Received, Receiver, Segments, Shard, Source, Sources, Stage, TensorEntry, Tensors, UpdateKind,
    UpdateSpec, WeightUpdate,
};

#[cfg(test)]
mod tests;
