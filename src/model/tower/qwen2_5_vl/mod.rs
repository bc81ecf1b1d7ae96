//! The vision tower of Qwen2.5-VL, most of whose attention sees windows of a picture.

mod block;
mod chunks;
mod geometry;

use rollout_kernels::{Ops, Patches};

use self::block::{NORM_EPS, TowerBlock, TowerContext};
use self::chunks::{Chunk, PictureIndices};
use self::geometry::Geometry;
use super::Encode;
use super::workspace::TowerWorkspace;
use crate::comm::Communicator;
use crate::error::Result;
use crate::model::config::{RopeConfig, RopeScaling, VisionConfig};
use crate::model::layers::{Build, Linear, Norm, Projection};
use crate::model::parameterized::Parameterized;
use crate::model::rope::RopeTables;
use crate::types::{Picture, PictureEncode};
use crate::weights::ShardRule;

/// Base of the tower's rotary frequencies.
const ROPE_THETA: f64 = 10_000.0;

/// This rank's part of the tower.
pub struct WindowedTower {
    config: VisionConfig,
    /// Tokens of a window's side.
    window: usize,
    /// The blocks whose attention sees the whole picture.
    full_attention: Vec<usize>,
    patch_embed: Linear,
    blocks: Vec<TowerBlock>,
    merger_norm: Norm,
    merger_up: Linear,
    merger_down: Linear,
    rope: RopeTables,
    /// Mean and standard deviation of each channel, for pixels from 0 to 255.
    mean: [f32; 3],
    std: [f32; 3],
}

impl WindowedTower {
    /// A tower for pictures of at most `max_image_tokens` tokens. Its matrices have no memory until they are restored.
    pub fn new(
        config: &VisionConfig,
        window: usize,
        full_attention: &[usize],
        build: &Build,
        max_image_tokens: usize,
    ) -> Result<Self> {
        let (hidden, merged) = (config.hidden_size, config.unit() * config.hidden_size);
        let linear = |name: &str, rows: usize, columns: &[usize], bias: bool| {
            let name = format!("visual.{name}");
            Linear::by_rows(build, vec![Projection { name, rows, rule: ShardRule::PaddedRows, bias }], columns)
        };
        let frequencies = config.head_dim() / 4;
        let rope = RopeConfig { theta: ROPE_THETA, scaling: RopeScaling::None, sections: vec![frequencies; 2] };
        // Rows and columns have the same frequencies.
        let inv_freq = rope.inv_freq(config.head_dim() / 2).repeat(2);
        let longest_side = max_image_tokens * config.merge_size();
        Ok(Self {
            patch_embed: linear("patch_embed.proj", hidden, &config.patch(), false)?,
            blocks: (0..config.depth).map(|index| TowerBlock::new(config, build, index)).collect::<Result<_>>()?,
            merger_norm: Norm::new(build, "visual.merger.ln_q.weight".into(), hidden, NORM_EPS)?,
            merger_up: linear("merger.mlp.0", merged, &[merged], true)?,
            merger_down: linear("merger.mlp.2", config.output_size, &[merged], true)?,
            rope: RopeTables::new(&build.device, &inv_freq, rope.axis_of(), longest_side)?,
            mean: config.preprocessor.mean_times_255(),
            std: config.preprocessor.std_times_255(),
            config: config.clone(),
            window,
            full_attention: full_attention.to_vec(),
        })
    }
}

impl Encode for WindowedTower {
    fn encode(
        &self,
        ops: &Ops,
        comm: &dyn Communicator,
        workspace: &mut TowerWorkspace,
        encode: &PictureEncode,
    ) -> Result<()> {
        let picture = &encode.picture;
        let grid = self.config.grid("picture", picture).expect("pictures of whole tokens are accepted");
        let geometry = Geometry::new(&self.config, self.window, grid);
        let indices = PictureIndices::new(&geometry, workspace.chunk_rows());
        let sequences = indices.sequences();
        let chunks = indices.prepare(ops, &geometry, &sequences)?;
        let context = TowerContext { ops, comm, rope: &self.rope };
        if encode.blocks.start == 0 {
            self.embed_patches(&context, workspace, picture, &geometry, &chunks)?;
        }
        for index in encode.blocks.clone() {
            match self.full_attention.contains(&index) {
                true => self.run_whole(index, &context, workspace, &chunks)?,
                false => self.run_windows(index, &context, workspace, &chunks)?,
            }
        }
        if encode.blocks.end == self.blocks.len() {
            self.merge(&context, workspace, &geometry, &chunks, encode.rows.start)?;
        }
        Ok(())
    }
}

impl WindowedTower {
    fn embed_patches(
        &self,
        context: &TowerContext<'_>,
        workspace: &TowerWorkspace,
        picture: &Picture,
        geometry: &Geometry,
        chunks: &[Chunk<'_>],
    ) -> Result<()> {
        for chunk in chunks {
            let (buffers, hidden) = workspace.rows(&chunk.rows)?;
            let [_, frames, side, _] = self.config.patch();
            let patches = Patches {
                rgb: picture.rgb(),
                width: picture.width() as usize,
                side,
                frames,
                mean: self.mean,
                std: self.std,
                corners: &geometry.corners[chunk.rows.clone()],
            };
            context.ops.patches(&patches, &buffers.patches)?;
            self.patch_embed.forward(context.ops, &buffers.patches, &buffers.delta.local)?;
            buffers.delta.gather(context.comm)?;
            let rows: Vec<u32> = (0..chunk.rows.len() as u32).collect();
            context.ops.put_rows(&buffers.delta.whole, &rows, &hidden)?;
        }
        Ok(())
    }

    /// A block whose attention sees windows.
    fn run_windows(
        &self,
        index: usize,
        context: &TowerContext<'_>,
        workspace: &mut TowerWorkspace,
        chunks: &[Chunk<'_>],
    ) -> Result<()> {
        let block = &self.blocks[index];
        for chunk in chunks {
            let (buffers, hidden) = workspace.rows(&chunk.rows)?;
            let queries = block.project(context, &chunk.windows, &hidden, &buffers, &mut workspace.kv)?;
            block.attend(context, &chunk.windows, &queries, &hidden, &buffers, &workspace.kv)?;
        }
        Ok(())
    }

    /// A block whose attention sees the whole picture: first the keys and values of all rows, then their attention.
    fn run_whole(
        &self,
        index: usize,
        context: &TowerContext<'_>,
        workspace: &mut TowerWorkspace,
        chunks: &[Chunk<'_>],
    ) -> Result<()> {
        let block = &self.blocks[index];
        for chunk in chunks {
            let (buffers, hidden) = workspace.rows(&chunk.rows)?;
            let queries = block.project(context, &chunk.whole, &hidden, &buffers, &mut workspace.kv)?;
            let rows: Vec<u32> = chunk.rows.clone().map(|row| row as u32).collect();
            context.ops.put_rows(&queries, &rows, workspace.queries())?;
        }
        for chunk in chunks {
            let (buffers, hidden) = workspace.rows(&chunk.rows)?;
            let queries = workspace.queries().narrow(0, chunk.rows.start, chunk.rows.len())?;
            block.attend(context, &chunk.whole, &queries, &hidden, &buffers, &workspace.kv)?;
        }
        Ok(())
    }

    /// Makes one embedding of the patches of each token, and puts them in the picture's order into the rows from
    /// `first_row` on.
    fn merge(
        &self,
        context: &TowerContext<'_>,
        workspace: &TowerWorkspace,
        geometry: &Geometry,
        chunks: &[Chunk<'_>],
        first_row: usize,
    ) -> Result<()> {
        let (ops, unit) = (context.ops, self.config.unit());
        for chunk in chunks {
            let (buffers, hidden) = workspace.rows(&chunk.rows)?;
            let tokens = chunk.rows.start / unit..chunk.rows.end / unit;
            self.merger_norm.forward(ops, &hidden, &buffers.normed)?;
            let merged = buffers.normed.reshape((tokens.len(), unit * self.config.hidden_size))?;
            self.merger_up.forward(ops, &merged, &buffers.merged.local)?;
            ops.gelu(&buffers.merged.local)?;
            buffers.merged.gather(context.comm)?;
            self.merger_down.forward(ops, &buffers.merged.whole, &buffers.embeddings.local)?;
            buffers.embeddings.gather(context.comm)?;
            let rows: Vec<u32> = geometry.tokens[tokens].iter().map(|token| first_row as u32 + token).collect();
            ops.put_rows(&buffers.embeddings.whole, &rows, workspace.embeddings())?;
        }
        Ok(())
    }
}

impl Parameterized for WindowedTower {
    fn parts(&self) -> Vec<&dyn Parameterized> {
        let mut parts: Vec<&dyn Parameterized> = vec![&self.patch_embed];
        parts.extend(self.blocks.iter().map(|block| block as &dyn Parameterized));
        parts.extend([&self.merger_norm as &dyn Parameterized, &self.merger_up, &self.merger_down]);
        parts
    }

    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        let mut parts: Vec<&mut dyn Parameterized> = vec![&mut self.patch_embed];
        parts.extend(self.blocks.iter_mut().map(|block| block as &mut dyn Parameterized));
        parts.extend([&mut self.merger_norm as &mut dyn Parameterized, &mut self.merger_up, &mut self.merger_down]);
        parts
    }
}
