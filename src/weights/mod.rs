//! Weights, in four rooms: `parameters` (names, shapes, shard rules, values), `checkpoint` (model files on disk),
//! `lora` (what an adapter changes) and `push` (new weights from a trainer).

mod checkpoint;
mod lora;
mod parameters;
mod push;

pub use checkpoint::{
    Checkpoint, FileStamp, GgufCheckpoint, GgufMetadata, ModelFiles, ModelSource, SafetensorsCheckpoint, TokenizerFiles,
};
pub use lora::{Adapter, AdapterSpec, AdapterTensor, Factors};
pub use parameters::{Dtype, ParamSpec, Parameters, Partition, ShardRule, Slice, TensorData, head_range, matrix_shape};
pub use push::{
    Allocation, Changes, Delta, Received, Receiver, Segments, ShadowShard, ShadowWeights, Source, SourceRoom, Sources,
    TensorEntry, Tensors, UpdateKind, UpdateSpec, WeightUpdate,
};
pub(crate) use push::{BROADCAST_BUFFER_BYTES, largest_broadcast, most_announced};
