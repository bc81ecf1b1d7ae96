//! The model: one decoder with configuration flags, and a vision tower, made of parts that hold parameters.

mod adapters;
mod attention;
pub mod config;
mod context;
mod decoder;
mod experts;
mod layers;
mod mlp;
mod parameterized;
mod rope;
mod tower;
mod workspace;

use std::collections::HashMap;

use config::ModelConfig;
use parameterized::Visitor;

use crate::error::Result;

pub use adapters::{AdapterDeltas, TargetModule};
pub use context::{ForwardContext, PlacedEmbeddings};
pub use decoder::Decoder;
pub use layers::Build;
pub use parameterized::{ParamSlot, Parameterized};
pub use tower::{Tower, TowerShape, TowerWorkspace};
pub use workspace::{LOGITS_ROWS, Workspace, WorkspaceShape, kv_bytes_per_block, kv_caches, routing, routing_shape};

/// This rank's part of a model.
pub struct Model {
    pub decoder: Decoder,
    /// `None` for a model that takes no images.
    pub tower: Option<Tower>,
    /// For each parameter's name, the index in [`Parameterized::parts`] of the part that has it.
    part_of: HashMap<String, usize>,
}

/// The longest inputs that a model has tables for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLimits {
    /// Tokens of a sequence.
    pub max_model_len: usize,
    /// Tokens of a picture; 0 for a model without its vision tower.
    pub max_image_tokens: usize,
}

impl Model {
    /// Its matrices have no memory until they are restored; its weights are set through [`Parameterized::visit`].
    pub fn new(config: &ModelConfig, build: &Build, limits: ModelLimits) -> Result<Self> {
        let vision = config.vision.as_ref().filter(|_| limits.max_image_tokens > 0);
        let tower = |vision| Tower::new(vision, build, limits.max_image_tokens);
        let mut model = Self {
            decoder: Decoder::new(config, build, limits.max_model_len)?,
            tower: vision.map(tower).transpose()?,
            part_of: HashMap::new(),
        };
        let mut part_of = HashMap::new();
        for (i, part) in model.parts_mut().into_iter().enumerate() {
            part.visit(&mut |spec, _| {
                part_of.insert(spec.name.clone(), i);
                Ok(())
            })?;
        }
        model.part_of = part_of;
        Ok(model)
    }

    /// Shows `visitor` the parameters of one part of the model: the part that has the parameter `name`. Shows nothing
    /// if the model has no such parameter.
    pub fn visit_near(&mut self, name: &str, visitor: &mut Visitor<'_>) -> Result<()> {
        let Some(&part) = self.part_of.get(name) else { return Ok(()) };
        self.parts_mut().swap_remove(part).visit(visitor)
    }
}

impl Parameterized for Model {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        self.decoder.parts().into_iter().chain(self.tower.iter().flat_map(Parameterized::parts)).collect()
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        self.decoder.parts_mut().into_iter().chain(self.tower.iter_mut().flat_map(Parameterized::parts_mut)).collect()
    }
}
