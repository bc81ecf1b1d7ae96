//! Weights, in five rooms: `parameters` (names, shapes, shard rules, values), `checkpoint` (model files on disk),
//! `lora` (an adapter and its changes), `update` (the header and the content of an update) and `push` (its way from a
//! trainer).

mod checkpoint;
mod lora;
mod parameters;
mod push;
mod update;

pub use checkpoint::{
    Checkpoint, FileStamp, GgufCheckpoint, GgufMetadata, ModelFiles, ModelSource, SafetensorsCheckpoint, TokenizerFiles,
};
pub use lora::{Adapter, AdapterSpec, AdapterTensor, Factors};
pub use parameters::{
    Dtype, ParamSpec, Parameters, Partition, ShardRule, Slice, TensorData, head_range, is_of_tower, matrix_shape,
    padded_share,
};
pub(crate) use push::{BROADCAST_BUFFER_BYTES, largest_broadcast, most_announced};
pub use push::{
    DeclaredPush, ReceiveMode, ReceivingPush, Segments, ServingWeights, Sources, StagingBytes, VerifiedPush,
};
pub use update::{
    AdapterTarget, Allocation, Changes, Delta, DeltaStore, Replaced, RunningPolicy, ShadowShard, ShadowWeights, Source,
    StoredUpdate, StoredVersion, TensorEntry, Tensors, TransitBytes, UpdateHeader, UpdateKind, WeightUpdate,
};
