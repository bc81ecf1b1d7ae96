//! Buffers of the vision tower on one rank, made once.

use std::ops::Range;

use candle_core::Tensor;
use rollout_kernels::{Activations, KvCache, KvLayout};

use crate::comm::Communicator;
use crate::error::Result;
use crate::model::config::{TowerKind, VisionConfig};
use crate::model::layers::Build;

/// Tokens of a block of the tower's keys and values.
pub(super) const KV_BLOCK: usize = 16;

/// The values that determine the size of a rank's tower workspace.
#[derive(Clone)]
pub struct TowerShape {
    pub config: VisionConfig,
    pub build: Build,
    /// Most tokens of a picture.
    pub max_image_tokens: usize,
    /// Tokens whose embeddings are held at once.
    pub embedding_rows: usize,
    /// Rows that the layers take at once, if a window or a tile has no more.
    pub layer_rows: usize,
}

/// A buffer of columns that are divided among the ranks, and one of all columns. On a single rank both are the same.
#[derive(Clone)]
pub(super) struct Gathered {
    pub local: Tensor,
    pub whole: Tensor,
}

/// The tower's activations of some rows, float32: one row per patch, and per class token where there are some.
#[derive(Clone)]
pub(super) struct ChunkBuffers {
    pub patches: Tensor,
    pub normed: Tensor,
    pub qkv: Tensor,
    pub attention: Gathered,
    /// The term that attention or MLP adds to the residual stream.
    pub delta: Gathered,
    /// For a gated MLP.
    gate_up: Option<Tensor>,
    pub activation: Gathered,
    /// One row per token from here on: the activations of the merger or projector, and the embeddings.
    pub merged: Gathered,
    pub embeddings: Gathered,
}

/// A rank's buffers for one picture at a time, and the embeddings of those that are held.
pub struct TowerWorkspace {
    /// The residual stream of all rows of the picture, which outlasts a step.
    pub(super) hidden: Tensor,
    /// Queries of all patches of the picture, if attention may see the whole of it.
    queries: Option<Tensor>,
    pub(super) chunk: ChunkBuffers,
    /// Keys and values of one block of the tower.
    pub(super) kv: KvCache,
    embeddings: Tensor,
    /// Most rows of a chunk.
    chunk_rows: usize,
    /// Rows of a token.
    unit: usize,
    /// The buffers that the tensors are views of. The device's memory is freed with it.
    _memory: Vec<Activations>,
}

/// The width of each of [`ChunkBuffers`] on this rank, with that of all columns where they are gathered.
struct ChunkWidths {
    patches: usize,
    hidden: usize,
    heads: usize,
    /// Columns of gate and up, side by side; 0 without a gate.
    gate_up: usize,
    intermediate: usize,
    merged: usize,
    embedding: usize,
}

impl TowerShape {
    /// Most rows of a picture.
    fn max_rows(&self) -> usize {
        match self.config.kind {
            TowerKind::Windowed { .. } => self.max_image_tokens * self.config.unit(),
            TowerKind::Tiled { .. } => self.max_tiles() * self.config.tile_rows(),
        }
    }

    /// Most tiles of a picture.
    fn max_tiles(&self) -> usize {
        (self.max_image_tokens / self.config.fewest_tokens()).max(1)
    }

    /// Most rows of a chunk.
    fn chunk_rows(&self) -> usize {
        match self.config.kind {
            TowerKind::Windowed { window, .. } => {
                self.layer_rows.min(self.max_rows()).max(window * window * self.config.unit())
            }
            TowerKind::Tiled { .. } => {
                let rows = self.config.tile_rows();
                rows * (self.layer_rows / rows).clamp(1, self.max_tiles())
            }
        }
    }

    fn widths(&self) -> ChunkWidths {
        let (config, partition) = (&self.config, self.build.partition);
        let (gate_up, merged) = match config.kind {
            TowerKind::Windowed { .. } => {
                (2 * partition.padded_share(config.intermediate_size), config.unit() * config.hidden_size)
            }
            TowerKind::Tiled { .. } => (0, config.output_size),
        };
        ChunkWidths {
            patches: config.patch().iter().product(),
            hidden: config.hidden_size,
            heads: partition.share(config.num_heads) * config.head_dim(),
            gate_up,
            intermediate: config.intermediate_size,
            merged,
            embedding: config.output_size,
        }
    }

    /// Windows and tiles that are not whole blocks of keys and values take a block more than their rows need.
    fn kv_layout(&self) -> KvLayout {
        let blocks = match self.config.kind {
            TowerKind::Windowed { .. } => {
                self.max_rows().div_ceil(KV_BLOCK).max(self.chunk_rows().div_ceil(self.config.unit()))
            }
            TowerKind::Tiled { .. } => {
                let rows = self.config.tile_rows();
                self.chunk_rows() / rows * rows.div_ceil(KV_BLOCK)
            }
        };
        let (kv_heads, dtype) = (self.build.partition.share(self.config.num_heads), self.build.weights);
        KvLayout { blocks, block_size: KV_BLOCK, kv_heads, head_dim: self.config.head_dim(), dtype }
    }

    /// Whether attention may see the whole picture.
    fn sees_whole(&self) -> bool {
        matches!(self.config.kind, TowerKind::Windowed { .. })
    }

    /// Bytes that one rank's buffers take for one picture, with the packed copy of its input that a linear layer's
    /// kernel makes.
    pub fn workspace_bytes(&self) -> u64 {
        let (widths, partition) = (self.widths(), self.build.partition);
        let gathered = |width: usize| match partition.is_whole() {
            true => width,
            false => partition.padded_share(width) + width,
        };
        let ChunkWidths { patches, hidden, heads, gate_up, intermediate, merged, embedding } = widths;
        let attention = if partition.is_whole() { hidden } else { heads + hidden };
        let of_row = patches + hidden + 3 * heads + attention + gathered(hidden);
        let of_mlp = gate_up + gathered(intermediate);
        let packed = patches.max(hidden).max(intermediate);
        let of_token = gathered(merged) + gathered(embedding);
        let chunk = self.chunk_rows() * (of_row + of_mlp + packed) + self.chunk_rows() / self.config.unit() * of_token;
        let queries = if self.sees_whole() { heads } else { 0 };
        let values = self.max_rows() * (hidden + queries) + chunk;
        let layout = self.kv_layout();
        (size_of::<f32>() * values + layout.blocks * layout.bytes_per_block()) as u64
    }

    /// Bytes that the embeddings of pictures take on one rank.
    pub fn embedding_bytes(&self) -> u64 {
        (size_of::<f32>() * self.embedding_rows * self.config.output_size) as u64
    }
}

impl Gathered {
    /// Buffers with `local` and `width` columns; one for both if the rank `is_whole`.
    fn new(
        is_whole: bool,
        make: &mut impl FnMut(usize, usize) -> Result<Tensor>,
        rows: usize,
        local: usize,
        width: usize,
    ) -> Result<Self> {
        let whole = make(rows, width)?;
        let local = if is_whole { whole.clone() } else { make(rows, local)? };
        Ok(Self { local, whole })
    }

    /// The first `rows` rows.
    pub fn rows(&self, rows: usize) -> Result<Self> {
        Ok(Self { local: self.local.narrow(0, 0, rows)?, whole: self.whole.narrow(0, 0, rows)? })
    }

    /// Gathers the columns of all ranks.
    pub fn gather(&self, comm: &dyn Communicator) -> Result<()> {
        comm.all_gather_columns(&self.local, &self.whole)
    }
}

impl ChunkBuffers {
    /// The buffer of gate and up, side by side.
    ///
    /// # Panics
    /// If the tower's MLP has no gate.
    pub fn gate_up(&self) -> &Tensor {
        self.gate_up.as_ref().expect("the MLP is gated")
    }

    /// The first `rows` rows, and the first `tokens` rows of the buffers that have one per token.
    pub fn rows(&self, rows: usize, tokens: usize) -> Result<Self> {
        Ok(Self {
            patches: self.patches.narrow(0, 0, rows)?,
            normed: self.normed.narrow(0, 0, rows)?,
            qkv: self.qkv.narrow(0, 0, rows)?,
            attention: self.attention.rows(rows)?,
            delta: self.delta.rows(rows)?,
            gate_up: self.gate_up.as_ref().map(|buffer| buffer.narrow(0, 0, rows)).transpose()?,
            activation: self.activation.rows(rows)?,
            merged: self.merged.rows(tokens)?,
            embeddings: self.embeddings.rows(tokens)?,
        })
    }
}

impl TowerWorkspace {
    /// # Errors
    /// `ResourceExhausted` if the device has too little memory.
    pub fn new(shape: &TowerShape) -> Result<Self> {
        let TowerShape { config, build, .. } = shape;
        let (widths, partition) = (shape.widths(), build.partition);
        let mut memory = Vec::new();
        let mut make = |rows: usize, width: usize| -> Result<Tensor> {
            let activations = build.device.activations(rows, width)?;
            let tensor = Tensor::clone(&activations);
            memory.push(activations);
            Ok(tensor)
        };
        let (rows, tokens) = (shape.chunk_rows(), shape.chunk_rows() / config.unit());
        let is_whole = partition.is_whole();
        let share = |width| partition.padded_share(width);
        let ChunkWidths { patches, hidden, heads, gate_up, intermediate, merged, embedding } = widths;
        let chunk = ChunkBuffers {
            patches: make(rows, patches)?,
            normed: make(rows, hidden)?,
            qkv: make(rows, 3 * heads)?,
            attention: Gathered::new(is_whole, &mut make, rows, heads, hidden)?,
            delta: Gathered::new(is_whole, &mut make, rows, share(hidden), hidden)?,
            gate_up: (gate_up > 0).then(|| make(rows, gate_up)).transpose()?,
            activation: Gathered::new(is_whole, &mut make, rows, share(intermediate), intermediate)?,
            merged: Gathered::new(is_whole, &mut make, tokens, share(merged), merged)?,
            embeddings: Gathered::new(is_whole, &mut make, tokens, share(embedding), embedding)?,
        };
        let hidden = make(shape.max_rows(), hidden)?;
        let queries = shape.sees_whole().then(|| make(shape.max_rows(), heads)).transpose()?;
        let embeddings = make(shape.embedding_rows, embedding)?;
        let mut kv = build.device.kv_cache(shape.kv_layout());
        kv.restore()?;
        Ok(Self { hidden, queries, chunk, kv, embeddings, chunk_rows: rows, unit: config.unit(), _memory: memory })
    }

    pub(super) fn chunk_rows(&self) -> usize {
        self.chunk_rows
    }

    /// Queries of all patches of the picture.
    ///
    /// # Panics
    /// If no attention of the tower sees the whole picture.
    pub(super) fn queries(&self) -> &Tensor {
        self.queries.as_ref().expect("attention may see the whole picture")
    }

    /// Buffers for these rows of the picture, and their residual stream.
    pub(super) fn rows(&self, rows: &Range<usize>) -> Result<(ChunkBuffers, Tensor)> {
        let hidden = self.hidden.narrow(0, rows.start, rows.len())?;
        Ok((self.chunk.rows(rows.len(), rows.len() / self.unit)?, hidden))
    }

    /// The embeddings of pictures, `[embedding_rows, hidden]`.
    pub fn embeddings(&self) -> &Tensor {
        &self.embeddings
    }
}
