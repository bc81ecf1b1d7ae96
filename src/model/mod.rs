//! The model: one decoder with configuration flags, made of parts that hold parameters.

mod attention;
pub mod config;
mod decoder;
mod input;
mod layers;
mod mlp;
mod parameterized;
mod pass;
mod workspace;

pub use decoder::Decoder;
pub use input::{Additions, Input, Site};
pub use layers::Build;
pub use parameterized::{ParamSlot, Parameterized};
pub use workspace::{LOGITS_ROWS, Workspace, WorkspaceShape, kv_bytes_per_block, kv_caches};
