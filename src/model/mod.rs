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

use std::collections::{BTreeMap, HashMap, HashSet};

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
    layers: LayerIndex,
}

/// The layers of a model, by the parameters that they have.
#[derive(Default)]
struct LayerIndex {
    /// The way to each layer, in the model's order: its index in the [`Parameterized::parts`] of each list around it,
    /// from the outermost on.
    paths: Vec<Vec<usize>>,
    /// For each parameter's name, the index in `paths` of the layer that has it.
    layer_of: HashMap<String, usize>,
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
            layers: LayerIndex::default(),
        };
        let mut paths = Vec::new();
        add_paths(&model, &mut Vec::new(), &mut paths);
        let mut layer_of = HashMap::new();
        for (i, path) in paths.iter().enumerate() {
            layer_at(&mut model, path).visit(&mut |spec, _| {
                layer_of.insert(spec.name.clone(), i);
                Ok(())
            })?;
        }
        model.layers = LayerIndex { paths, layer_of };
        Ok(model)
    }

    /// As [`Parameterized::visit`], but shows only the parameters of these names. Only the layers that have one of them
    /// are looked at. A name that the model does not have is passed over.
    ///
    /// # Errors
    /// The first error that `visitor` returns; the remaining parameters are then not visited.
    pub fn visit_named<'n>(
        &mut self,
        names: impl IntoIterator<Item = &'n str>,
        visitor: &mut Visitor<'_>,
    ) -> Result<()> {
        let layers = std::mem::take(&mut self.layers);
        let mut chosen: BTreeMap<usize, HashSet<&str>> = BTreeMap::new();
        for name in names {
            if let Some(&layer) = layers.layer_of.get(name) {
                chosen.entry(layer).or_default().insert(name);
            }
        }
        let visited = chosen.into_iter().try_for_each(|(layer, names)| {
            layer_at(self, &layers.paths[layer]).visit(&mut |spec, slot| {
                if names.contains(spec.name.as_str()) { visitor(spec, slot) } else { Ok(()) }
            })
        });
        self.layers = layers;
        visited
    }
}

/// Adds the paths of the layers of `part`, to which `path` leads.
fn add_paths(part: &dyn Parameterized, path: &mut Vec<usize>, paths: &mut Vec<Vec<usize>>) {
    let parts = part.parts();
    if parts.is_empty() {
        paths.push(path.clone());
    }
    for (i, part) in parts.into_iter().enumerate() {
        path.push(i);
        add_paths(part, path, paths);
        path.pop();
    }
}

/// The layer to which `path` leads from `part`.
fn layer_at<'a>(part: &'a mut dyn Parameterized, path: &[usize]) -> &'a mut dyn Parameterized {
    match path {
        [] => part,
        [first, rest @ ..] => layer_at(part.parts_mut().swap_remove(*first), rest),
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
