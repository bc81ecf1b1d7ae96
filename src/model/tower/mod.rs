//! Vision towers: from the pixels of a picture to one embedding per token.
//!
//! Pictures are encoded one at a time and never see each other, so a picture's embeddings depend on its pixels and the
//! weights alone. Its rows run through the layers in chunks of whole windows or tiles; a row's bits do not depend on
//! the chunk.

mod intern_vit;
mod qwen2_5_vl;
mod workspace;

use rollout_kernels::Ops;

use self::intern_vit::InternVit;
use self::qwen2_5_vl::WindowedTower;
use super::config::{TowerKind, VisionConfig};
use super::layers::Build;
use super::parameterized::Parameterized;
use crate::comm::Communicator;
use crate::error::Result;
use crate::types::PictureEncode;

pub use workspace::{TowerShape, TowerWorkspace};

/// This rank's part of a vision tower.
pub struct Tower(Box<dyn Encode>);

/// The layers of one family's tower.
trait Encode: Parameterized + Send + Sync {
    /// See [`Tower::encode`].
    fn encode(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        workspace: &mut TowerWorkspace,
        encode: &PictureEncode,
    ) -> Result<()>;
}

impl Tower {
    /// A tower for pictures of at most `max_image_tokens` tokens. Its matrices have no memory until they are restored.
    pub fn new(config: &VisionConfig, build: &Build, max_image_tokens: usize) -> Result<Self> {
        Ok(Self(match &config.kind {
            TowerKind::Windowed { window, full_attention } => {
                Box::new(WindowedTower::new(config, *window, full_attention, build, max_image_tokens)?)
            }
            TowerKind::Tiled { norm_eps, qkv_bias, .. } => {
                Box::new(InternVit::new(config, *norm_eps, *qkv_bias, build)?)
            }
        }))
    }

    /// Runs some blocks over a picture, whose earlier blocks the last calls have run. The last block leaves the
    /// picture's embeddings in the workspace.
    ///
    /// # Panics
    /// If no picture of the model has the picture's size, or the workspace is too small for it.
    pub fn encode(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        workspace: &mut TowerWorkspace,
        encode: &PictureEncode,
    ) -> Result<()> {
        self.0.encode(ops, comm, workspace, encode)
    }
}

impl Parameterized for Tower {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        self.0.parts()
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        self.0.parts_mut()
    }
}
