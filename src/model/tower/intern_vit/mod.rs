//! InternViT with the pixel shuffle and projector of InternVL3. Each tile of a picture runs through the tower alone.

mod block;
mod layers;
mod tiles;

use std::ops::Range;

use rollout_kernels::{Ops, Patches, Step};

use self::block::InternVitBlock;
use self::layers::{LayerNorm, RowTable};
use self::tiles::{TileRows, chunks, corners};
use super::Encode;
use super::workspace::TowerWorkspace;
use crate::comm::Communicator;
use crate::error::Result;
use crate::model::config::VisionConfig;
use crate::model::layers::{Build, Linear, Projection};
use crate::model::parameterized::Parameterized;
use crate::types::{Picture, PictureEncode};
use crate::weights::ShardRule;

/// Epsilon of the projector's norm, whatever that of the blocks is.
const PROJECTOR_NORM_EPS: f32 = 1e-5;

/// This rank's part of the tower.
pub struct InternVit {
    config: VisionConfig,
    class_token: RowTable,
    positions: RowTable,
    patch_embed: Linear,
    blocks: Vec<InternVitBlock>,
    projector_norm: LayerNorm,
    projector_up: Linear,
    projector_down: Linear,
    /// Mean and standard deviation of each channel, for pixels from 0 to 255.
    mean: [f32; 3],
    std: [f32; 3],
}

/// Some tiles of the picture, whose rows run through the layers together.
struct TileChunk<'a> {
    tiles: Range<usize>,
    step: Step<'a>,
}

impl InternVit {
    /// The tower, whose matrices have no memory until they are restored.
    pub fn new(config: &VisionConfig, norm_eps: f32, qkv_bias: bool, build: &Build) -> Result<Self> {
        let (hidden, output) = (config.hidden_size, config.output_size);
        let merged = config.unit() * hidden;
        let linear = |name: &str, rows: usize, columns: &[usize]| {
            let projection = Projection { name: name.into(), rows, rule: ShardRule::PaddedRows, bias: true };
            Linear::by_rows(build, vec![projection], columns)
        };
        let [channels, _, rows, columns] = config.patch();
        let block = |index| InternVitBlock::new(config, norm_eps, qkv_bias, build, index);
        Ok(Self {
            class_token: RowTable::new(build, "vision_tower.embeddings.cls_token", 1, hidden),
            positions: RowTable::new(build, "vision_tower.embeddings.position_embeddings", config.tile_rows(), hidden),
            patch_embed: linear(
                "vision_tower.embeddings.patch_embeddings.projection",
                hidden,
                &[channels, rows, columns],
            )?,
            blocks: (0..config.depth).map(block).collect::<Result<_>>()?,
            projector_norm: LayerNorm::new(build, "multi_modal_projector.layer_norm", merged, PROJECTOR_NORM_EPS)?,
            projector_up: linear("multi_modal_projector.linear_1", output, &[merged])?,
            projector_down: linear("multi_modal_projector.linear_2", output, &[output])?,
            mean: config.preprocessor.mean_times_255(),
            std: config.preprocessor.std_times_255(),
            config: config.clone(),
        })
    }
}

impl Encode for InternVit {
    fn encode(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        workspace: &mut TowerWorkspace,
        encode: &PictureEncode,
    ) -> Result<()> {
        let picture = &encode.picture;
        let (tile_side, tiles) = (picture.width() as usize, picture.tiles() as usize);
        let most = tiles.min(workspace.chunk_rows() / self.config.tile_rows());
        let rows = TileRows::new(&self.config, tile_side, most);
        let sequences = rows.sequences();
        for tiles in chunks(tiles, most) {
            let chunk = TileChunk { step: rows.prepare(ops, tiles.len(), &sequences)?, tiles };
            if encode.blocks.start == 0 {
                self.embed(ops, comm, workspace, picture, &rows, &chunk)?;
            }
            for block in &self.blocks[encode.blocks.clone()] {
                let (buffers, hidden) = workspace.rows(&chunk.rows(&rows))?;
                block.forward(ops, comm, &chunk.step, &hidden, &buffers, &mut workspace.kv)?;
            }
            if encode.blocks.end == self.blocks.len() {
                self.project(ops, comm, workspace, &rows, &chunk, encode.rows.start)?;
            }
        }
        Ok(())
    }
}

impl InternVit {
    /// Begins the residual stream of a chunk: the class token or the embedding of a patch, and its position.
    fn embed(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        workspace: &TowerWorkspace,
        picture: &Picture,
        rows: &TileRows,
        chunk: &TileChunk<'_>,
    ) -> Result<()> {
        let (buffers, hidden) = workspace.rows(&chunk.rows(rows))?;
        self.positions.look_up(ops, &chunk.step, &hidden)?;
        self.class_token.look_up(ops, &chunk.step, &buffers.delta.whole)?;
        ops.add(&buffers.delta.whole, &hidden)?;
        let [_, frames, side, _] = self.config.patch();
        let (tile_side, patch_rows) = (picture.width() as usize, rows.patch_rows(chunk.tiles.len()));
        let patches = Patches {
            rgb: picture.rgb(),
            width: tile_side,
            side,
            frames,
            mean: self.mean,
            std: self.std,
            corners: &corners(&self.config, tile_side, chunk.tiles.clone()),
        };
        let values = buffers.patches.narrow(0, 0, patch_rows.len())?;
        let embedded = buffers.delta.rows(patch_rows.len())?;
        ops.patches(&patches, &values)?;
        self.patch_embed.forward(ops, &values, &embedded.local)?;
        embedded.gather(comm)?;
        Ok(ops.add_rows(&embedded.whole, patch_rows, &hidden)?)
    }

    /// The pixel shuffle and the projector: makes one embedding of the patches of each token, and puts those of a chunk
    /// into their rows, of which those of the picture begin at `first_row`. The class tokens are left out.
    fn project(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        workspace: &TowerWorkspace,
        rows: &TileRows,
        chunk: &TileChunk<'_>,
        first_row: usize,
    ) -> Result<()> {
        let (buffers, hidden) = workspace.rows(&chunk.rows(rows))?;
        let (unit, token_rows) = (self.config.unit(), rows.token_rows(chunk.tiles.len()));
        let (patches, tokens) = (token_rows.len(), token_rows.len() / unit);
        let shuffled = buffers.delta.whole.narrow(0, 0, patches)?;
        ops.select_rows(&hidden, token_rows, &shuffled)?;
        let of_tokens = |rows: &candle_core::Tensor| rows.reshape((tokens, unit * self.config.hidden_size));
        let normed = of_tokens(&buffers.normed.narrow(0, 0, patches)?)?;
        self.projector_norm.forward(ops, &of_tokens(&shuffled)?, &normed)?;
        let (activation, embeddings) = (buffers.merged.rows(tokens)?, buffers.embeddings.rows(tokens)?);
        self.projector_up.forward(ops, &normed, &activation.local)?;
        ops.gelu(&activation.local)?;
        activation.gather(comm)?;
        self.projector_down.forward(ops, &activation.whole, &embeddings.local)?;
        embeddings.gather(comm)?;
        let first = first_row + chunk.tiles.start * rows.patches() / unit;
        let placed: Vec<u32> = (first..first + tokens).map(|row| row as u32).collect();
        Ok(ops.put_rows(&embeddings.whole, &placed, workspace.embeddings())?)
    }
}

impl TileChunk<'_> {
    /// The rows of the chunk in the picture.
    fn rows(&self, rows: &TileRows) -> Range<usize> {
        self.tiles.start * rows.rows()..self.tiles.end * rows.rows()
    }
}

impl Parameterized for InternVit {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        let mut parts: Vec<&dyn Parameterized> = vec![&self.class_token, &self.positions, &self.patch_embed];
        parts.extend(self.blocks.iter().map(|block| block as &dyn Parameterized));
        parts.extend([&self.projector_norm as &dyn Parameterized, &self.projector_up, &self.projector_down]);
        parts
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        let Self { class_token, positions, patch_embed, blocks, projector_norm, projector_up, projector_down, .. } =
            self;
        let mut parts: Vec<&mut dyn Parameterized> = vec![class_token, positions, patch_embed];
        parts.extend(blocks.iter_mut().map(|block| block as &mut dyn Parameterized));
        parts.extend([projector_norm as &mut dyn Parameterized, projector_up, projector_down]);
        parts
    }
}
