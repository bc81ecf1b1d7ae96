//! The rows of a picture as steps: chunks of rows, and the blocks of the KV cache in which they find each other.

use std::ops::Range;

use rollout_kernels::{AttentionSequence, Ops, Step, StepInput};

use super::geometry::Geometry;
use crate::error::Result;
use crate::model::tower::workspace::KV_BLOCK;

/// Axes of a patch's position: row and column.
const AXES: usize = 2;

/// The indices of all chunks of a picture.
pub(super) struct PictureIndices {
    /// The rows of each chunk, and its windows as indices into `windows`.
    chunks: Vec<(Range<usize>, Range<usize>)>,
    /// First row in its chunk, rows and KV blocks of each window. Windows of different chunks share blocks.
    windows: Vec<(usize, usize, Vec<u32>)>,
    window_slots: Vec<u32>,
    /// The KV blocks of all rows, where each sees all others.
    whole: Vec<u32>,
    whole_slots: Vec<u32>,
    /// The tower has no tokens.
    tokens: Vec<u32>,
}

/// The sequences of a chunk: one for each window, and one of all its rows.
pub(super) struct ChunkSequences<'a> {
    rows: Range<usize>,
    windows: Vec<AttentionSequence<'a>>,
    whole: [AttentionSequence<'a>; 1],
}

/// A chunk of rows that the device has prepared for attention inside windows, and over the whole picture.
pub(super) struct Chunk<'a> {
    pub rows: Range<usize>,
    pub windows: Step<'a>,
    pub whole: Step<'a>,
}

impl PictureIndices {
    /// Cuts the picture into chunks of at most `most` rows.
    pub fn new(geometry: &Geometry, most: usize) -> Self {
        let (mut windows, mut window_slots, mut chunks) = (Vec::new(), Vec::new(), Vec::new());
        for chunk in geometry.chunks(most) {
            let first_row = geometry.windows[chunk.start].start;
            let mut first_block = 0;
            for window in &geometry.windows[chunk.clone()] {
                let end_block = first_block + window.len().div_ceil(KV_BLOCK);
                window_slots.extend((0..window.len()).map(|row| (first_block * KV_BLOCK + row) as u32));
                windows.push((
                    window.start - first_row,
                    window.len(),
                    (first_block as u32..end_block as u32).collect(),
                ));
                first_block = end_block;
            }
            chunks.push((first_row..geometry.windows[chunk.end - 1].end, chunk));
        }
        let rows = geometry.rows();
        Self {
            chunks,
            windows,
            window_slots,
            whole: (0..rows.div_ceil(KV_BLOCK) as u32).collect(),
            whole_slots: (0..rows as u32).collect(),
            tokens: vec![0; rows],
        }
    }

    /// The sequences of each chunk.
    pub fn sequences(&self) -> Vec<ChunkSequences<'_>> {
        let of_chunk = |(rows, windows): &(Range<usize>, Range<usize>)| {
            let windows =
                self.windows[windows.clone()].iter().map(|(first_row, rows, block_table)| AttentionSequence {
                    first_row: *first_row,
                    rows: *rows,
                    start_position: 0,
                    visible: Some(*rows),
                    block_table,
                });
            let whole = AttentionSequence {
                first_row: 0,
                rows: rows.len(),
                start_position: rows.start,
                visible: Some(self.tokens.len()),
                block_table: &self.whole,
            };
            ChunkSequences { rows: rows.clone(), windows: windows.collect(), whole: [whole] }
        };
        self.chunks.iter().map(of_chunk).collect()
    }

    /// Prepares the steps of each chunk.
    pub fn prepare<'a>(
        &'a self,
        ops: &Ops,
        geometry: &'a Geometry,
        sequences: &'a [ChunkSequences<'a>],
    ) -> Result<Vec<Chunk<'a>>> {
        let prepare = |rows: &Range<usize>, slots: &'a [u32], sequences: &'a [AttentionSequence<'a>]| {
            ops.prepare(StepInput {
                tokens: &self.tokens[rows.clone()],
                positions: &geometry.positions[AXES * rows.start..AXES * rows.end],
                axes: AXES,
                slots: &slots[rows.clone()],
                sequences,
                logits: &[],
                tasks: &[],
            })
        };
        let of_chunk = |chunk: &'a ChunkSequences<'a>| {
            Ok(Chunk {
                rows: chunk.rows.clone(),
                windows: prepare(&chunk.rows, &self.window_slots, &chunk.windows)?,
                whole: prepare(&chunk.rows, &self.whole_slots, &chunk.whole)?,
            })
        };
        sequences.iter().map(of_chunk).collect()
    }
}
