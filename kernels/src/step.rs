//! One step, as the host describes it and as a device has prepared it.

use std::any::Any;
use std::ops::Range;

use crate::rotary::RotaryPositions;
use crate::sampling::SamplingTask;

/// The most axes of a position.
const MAX_AXES: usize = 3;

/// Rows of a step that belong to one sequence.
#[derive(Clone, Copy, Debug)]
pub struct AttentionSequence<'a> {
    /// Where its rows begin in the query and the output, after those of the sequence before it.
    pub first_row: usize,
    pub rows: usize,
    /// Index in the sequence of the first row; row `i` is at `start_position + i`, and sees the tokens up to its
    /// own unless `visible` is given.
    pub start_position: usize,
    /// If `Some(n)`, every row sees the tokens `0..n`, whatever its own position, as in the bidirectional attention of
    /// a vision tower: rows may come in chunks, once the keys and values of all `n` tokens are in the cache. If `None`,
    /// attention is causal. Cannot be combined with [`AttentionShape::sliding_window`].
    pub visible: Option<usize>,
    /// The blocks of tokens `0..`; those wholly below every row's window may hold anything in range.
    pub block_table: &'a [u32],
}

impl AttentionSequence<'_> {
    /// The end of the tokens that a row sees.
    pub(crate) fn end_of_row(&self, row: usize) -> usize {
        self.visible.unwrap_or(self.start_position + row + 1)
    }

    /// The end of the tokens that any row sees.
    pub(crate) fn end(&self) -> usize {
        self.visible.unwrap_or(self.start_position + self.rows)
    }
}

/// Values that all sequences share; the number of KV heads and `head_dim` are the cache's.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Query heads, a multiple of the KV heads.
    pub heads: usize,
    /// Factor of `q · k`, above 0.
    pub scale: f32,
    /// How many tokens a row sees, its own included; all if `None`.
    pub sliding_window: Option<usize>,
}

/// A row whose logits are wanted, and the tasks on them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowTasks {
    /// Index of the row in the batch.
    pub row: u32,
    /// Indices into [`StepInput::tasks`]; those of the row before it end where these start.
    pub tasks: Range<usize>,
}

/// One step as the host describes it: a flat batch of rows, those of all sequences behind each other.
#[derive(Clone, Copy)]
pub struct StepInput<'a> {
    /// Token of each row.
    pub tokens: &'a [u32],
    /// Positions of each row for the rotary embedding, `[rows, axes]`. May be empty if the step does not rotate rows.
    pub positions: &'a [u32],
    /// Positions of one row, 1 to 3: 1 for text, 2 (row and column) for a vision tower, 3 (time, height and width) for
    /// M-RoPE.
    pub axes: usize,
    /// Where the keys and values of each row go: `block * block_size + offset`.
    pub slots: &'a [u32],
    /// In the order of their rows.
    pub sequences: &'a [AttentionSequence<'a>],
    /// In the order of their rows.
    pub logits: &'a [RowTasks],
    /// The tasks on the rows of `logits`, in their order.
    pub tasks: &'a [SamplingTask<'a>],
}

impl<'a> StepInput<'a> {
    /// # Panics
    /// If the positions do not have the shape `[rows, axes]`, if `axes` is not 1 to 3, or if a sequence sees no tokens.
    pub(crate) fn check(&self) {
        let (rows, Self { axes, positions, .. }) = (self.tokens.len(), self);
        assert!((1..=MAX_AXES).contains(axes), "{axes} axes: a position has 1 to {MAX_AXES}");
        let is_whole = positions.is_empty() || positions.len() == rows * axes;
        assert!(is_whole, "{} positions for {rows} rows of {axes} axes", positions.len());
        assert!(self.sequences.iter().all(|s| s.visible != Some(0)), "the rows of a sequence see no tokens");
    }

    /// The positions for a rotation with this axis of each frequency.
    pub(crate) fn rotary_positions(&self, axis_of: &'a [u8]) -> RotaryPositions<'a> {
        RotaryPositions { positions: self.positions, axes: self.axes, axis_of }
    }
}

/// How a step may be padded ([`Ops::prepare_padded`](crate::Ops::prepare_padded)).
#[derive(Clone, Copy, Debug)]
pub struct Padding {
    /// Rows that there are buffers for.
    pub most_rows: usize,
    /// Columns of logits.
    pub vocabulary: usize,
    /// Tells graphs of the same shape apart: steps of different variants launch different operators. The same on all
    /// ranks.
    pub variant: Option<u64>,
}

/// A step that a device has prepared ([`Ops::prepare`](crate::Ops::prepare)), from which its operators take their
/// indices.
pub struct Step<'a> {
    input: StepInput<'a>,
    rows: usize,
    prepared: Box<dyn Any>,
}

impl<'a> Step<'a> {
    /// `prepared` is the device's own: what it has copied to its memory, for example.
    pub(crate) fn new(input: StepInput<'a>, rows: usize, prepared: Box<dyn Any>) -> Self {
        Self { input, rows, prepared }
    }

    /// Number of rows: those of the input, and those that it was padded with.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn input(&self) -> &StepInput<'a> {
        &self.input
    }

    /// The device's own form of it.
    ///
    /// # Panics
    /// If another device has prepared it.
    pub(crate) fn prepared<P: Any>(&self) -> &P {
        self.prepared.downcast_ref().expect("a step of this device")
    }
}
