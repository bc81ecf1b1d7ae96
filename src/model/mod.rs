//! The model: one decoder with configuration flags, made of parts that hold parameters.

mod adapters;
mod attention;
pub mod config;
mod context;
mod decoder;
mod layers;
mod mlp;
mod parameterized;
mod workspace;

pub use adapters::{AdapterDeltas, TargetModule};
pub use context::ForwardContext;
pub use decoder::Decoder;
pub use layers::Build;
pub use parameterized::{ParamSlot, Parameterized};
pub use workspace::{LOGITS_ROWS, Workspace, WorkspaceShape, kv_bytes_per_block, kv_caches};
