//! The model: one decoder with configuration flags, made of parallel layers.

pub mod config;
mod decoder;
mod layers;
mod workspace;

pub use decoder::{Additions, Decoder, Input, Site};
pub use layers::{Build, Slot};
pub use workspace::{LOGITS_ROWS, Workspace, WorkspaceShape, kv_bytes_per_block, kv_caches};
