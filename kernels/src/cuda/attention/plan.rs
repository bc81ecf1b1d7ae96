//! How the attention of a step is cut into blocks. No choice changes a bit of the result.

use crate::kv_layout::KvLayout;
use crate::step::{AttentionSequence, AttentionShape};
use crate::values::StorageDtype;

/// Positions that are folded as one. `SPAN` in `cu/attention.cuh`.
const SPAN: usize = 256;
/// Positions that are read at once. `UNIT` in `cu/attention.cuh`.
const UNIT: usize = 32;
/// Words of a sequence. `Sequence` in `cu/attention.cuh`.
const SEQUENCE_WORDS: usize = 7;
/// Most memory for partial results: beyond it there is enough to do for whole queries.
pub(in crate::cuda) const MAX_PARTIAL_BYTES: usize = 64 << 20;
/// So many blocks for each multiprocessor keep it busy.
const BUSY_BLOCKS: usize = 4;

/// The host's view of a step's attention; the kernels read the rest from the words that it has written.
#[derive(Default)]
pub(in crate::cuda) struct CudaAttentionPlan {
    sequences: Vec<SequenceExtent>,
    /// Sequences without rows behind them.
    empty: usize,
    /// Of all sequences, and one for each empty one.
    pub rows: usize,
    /// Of one sequence.
    most_rows: usize,
    /// Behind the last row.
    end: usize,
    /// Spans of each row, those below a window too.
    pub partials: usize,
    /// Spans of the longest sequence.
    pub spans: usize,
    /// The largest number of a block in a table.
    last_block: u32,
}

struct SequenceExtent {
    /// Positions that any row sees.
    len: usize,
    /// Blocks in its table.
    blocks: usize,
}

/// A kernel for some head dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttentionTile {
    pub kernel: &'static str,
    pub dtype: StorageDtype,
    /// The largest head dimension.
    pub head_dim: usize,
    /// Queries of a block.
    pub queries: usize,
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

const fn bf16(kernel: &'static str, head_dim: usize, warps: usize, stages: usize) -> AttentionTile {
    let units = stages * 2 * UNIT * (head_dim + 8) * size_of::<half::bf16>();
    // The values that are folded are of 16 queries a warp.
    let (queries, shared) = (16 * warps, units + 16 * warps * head_dim * size_of::<f32>());
    AttentionTile {
        kernel,
        dtype: StorageDtype::Bf16,
        head_dim,
        queries,
        threads: 32 * warps as u32,
        shared: shared as u32,
    }
}

const fn f32(kernel: &'static str, head_dim: usize) -> AttentionTile {
    let queries = 16;
    let shared = (queries + 2 * UNIT) * (head_dim + 4) * size_of::<f32>();
    AttentionTile { kernel, dtype: StorageDtype::F32, head_dim, queries, threads: 128, shared: shared as u32 }
}

/// The kernels of `cu/attention_bf16.cu` and `cu/attention_f32.cu`; those for more queries behind those for few: they
/// share what is read.
pub(super) const TILES: [AttentionTile; 9] = [
    bf16("attention_bf16_32_x1", 32, 1, 3),
    bf16("attention_bf16_64_x1", 64, 1, 3),
    bf16("attention_bf16_128_x1", 128, 1, 3),
    bf16("attention_bf16_256_x1", 256, 1, 2),
    bf16("attention_bf16_32_x4", 32, 4, 2),
    bf16("attention_bf16_64_x4", 64, 4, 2),
    bf16("attention_bf16_128_x4", 128, 4, 2),
    bf16("attention_bf16_256_x2", 256, 2, 2),
    f32("attention_f32", 256),
];

/// How one call is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CallPlan {
    /// Which of [`TILES`].
    pub tile: usize,
    /// Blocks that share the spans of the same queries, whose results another kernel folds; 1 if one block has all.
    pub spans: usize,
}

impl CudaAttentionPlan {
    /// Appends sequences and block tables to the words of a step.
    ///
    /// # Panics
    /// If sequences share rows.
    pub fn write(sequences: &[AttentionSequence<'_>], words: &mut Vec<u32>) -> Self {
        Self::with_empty(sequences, 0, words)
    }

    /// As [`CudaAttentionPlan::write`], for sequences of one row, with so many empty ones behind them that there are
    /// `rows`. The kernels are started alike for all steps of as many rows and [`CudaAttentionPlan::spans`].
    ///
    /// # Panics
    /// If a sequence has not one row, or there are more than `rows`.
    pub fn write_padded(sequences: &[AttentionSequence<'_>], rows: usize, words: &mut Vec<u32>) -> Self {
        assert!(sequences.iter().all(|s| s.rows == 1), "a padded step has sequences of one row");
        let empty = rows.checked_sub(sequences.len()).expect("no more sequences than rows");
        let mut plan = Self::with_empty(sequences, empty, words);
        plan.rows = rows;
        plan.spans = plan.spans.next_power_of_two();
        plan.partials = rows * plan.spans;
        plan
    }

    fn with_empty(sequences: &[AttentionSequence<'_>], empty: usize, words: &mut Vec<u32>) -> Self {
        let word = |count: usize| u32::try_from(count).expect("rows and positions of a step fit into 32 bits");
        let mut plan = Self { empty, ..Self::default() };
        let with_rows: Vec<_> = sequences.iter().filter(|s| s.rows > 0).collect();
        let mut table = SEQUENCE_WORDS * (with_rows.len() + empty);
        for s in &with_rows {
            assert!(s.first_row >= plan.end, "row {} is of two sequences", s.first_row);
            plan.end = s.first_row + s.rows;
            // Partial results are not numbered where there are more than memory for them.
            let partials = u32::try_from(plan.partials).unwrap_or(u32::MAX);
            words.extend([plan.rows, s.first_row, s.rows, s.start_position, s.visible.unwrap_or(0), table].map(word));
            words.push(partials);
            let len = s.end();
            plan.sequences.push(SequenceExtent { len, blocks: s.block_table.len() });
            plan.rows += s.rows;
            plan.most_rows = plan.most_rows.max(s.rows);
            plan.partials += s.rows * len.div_ceil(SPAN);
            plan.spans = plan.spans.max(len.div_ceil(SPAN));
            plan.last_block = s.block_table.iter().copied().fold(plan.last_block, u32::max);
            table += s.block_table.len();
        }
        for _ in 0..empty {
            words.extend([plan.rows, plan.end, 0, 0, 0, 0, 0].map(word));
        }
        with_rows.iter().for_each(|s| words.extend_from_slice(s.block_table));
        plan
    }

    /// Sequences, empty ones too.
    pub fn sequences(&self) -> usize {
        self.sequences.len() + self.empty
    }

    /// # Panics
    /// If there are fewer rows, or a block table is too short or names a block outside the cache.
    pub fn check(&self, layout: &KvLayout, rows: usize) {
        let KvLayout { blocks, block_size, kv_heads, .. } = *layout;
        assert!(self.end <= rows, "row {} of {rows}", self.end);
        assert!(blocks * block_size * kv_heads <= i32::MAX as usize, "{layout:?} is too large for the kernels");
        assert!((self.last_block as usize) < blocks, "block {} of {blocks}", self.last_block);
        for s in &self.sequences {
            assert!(s.blocks * block_size >= s.len, "{} blocks of {block_size} for {} tokens", s.blocks, s.len);
        }
    }

    /// The fastest way for a device with this many multiprocessors.
    pub(super) fn way(&self, layout: &KvLayout, shape: &AttentionShape, processors: usize) -> CallPlan {
        let whole = CallPlan { tile: self.tile(layout, shape), spans: 1 };
        let is_busy = self.blocks(whole.tile, layout, shape) * layout.kv_heads >= BUSY_BLOCKS * processors;
        let fits = self.partials * shape.heads * partial_bytes(layout) <= MAX_PARTIAL_BYTES;
        if is_busy || !fits { whole } else { CallPlan { spans: self.spans(whole.tile, shape), ..whole } }
    }

    /// All ways there are.
    #[cfg(test)]
    pub(super) fn ways(&self, layout: &KvLayout, shape: &AttentionShape) -> Vec<CallPlan> {
        let tiles = (0..TILES.len()).filter(|tile| fits(&TILES[*tile], layout));
        let ways = |tile| [1, self.spans(tile, shape)].map(|spans| CallPlan { tile, spans });
        tiles.flat_map(ways).collect()
    }

    /// That of the smallest head dimension that fits; the one for few queries, unless a sequence has more.
    fn tile(&self, layout: &KvLayout, shape: &AttentionShape) -> usize {
        let queries = self.most_rows * (shape.heads / layout.kv_heads);
        let head_dim = |tile: &usize| TILES[*tile].head_dim;
        let all: Vec<usize> = (0..TILES.len()).filter(|tile| fits(&TILES[*tile], layout)).collect();
        let smallest = all.iter().map(head_dim).min().expect("the largest head dimension has a kernel");
        let mut tiles = all.into_iter().filter(|tile| head_dim(tile) == smallest);
        let few = tiles.next().expect("one has the smallest head dimension");
        if TILES[few].queries >= queries { few } else { tiles.next().unwrap_or(few) }
    }

    /// Blocks of each KV head, as many as `Work` in `cu/attention.cuh` counts.
    pub(super) fn blocks(&self, tile: usize, layout: &KvLayout, shape: &AttentionShape) -> usize {
        self.rows * (shape.heads / layout.kv_heads) / TILES[tile].queries + self.sequences()
    }

    /// Most spans that the queries of a block see.
    fn spans(&self, tile: usize, shape: &AttentionShape) -> usize {
        // A window of a block's queries begins and ends inside a span.
        let of_window = |window: usize| window.saturating_add(TILES[tile].queries).div_ceil(SPAN) + 1;
        shape.sliding_window.map_or(usize::MAX, of_window).min(self.spans.max(1))
    }
}

fn fits(tile: &AttentionTile, layout: &KvLayout) -> bool {
    tile.dtype == layout.dtype && tile.head_dim >= layout.head_dim
}

/// Bytes of the weighted values and of the softmax of a partial result.
pub(super) fn partial_bytes(layout: &KvLayout) -> usize {
    (layout.head_dim + 2) * size_of::<f32>()
}
