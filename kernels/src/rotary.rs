//! Rotary position embedding: the positions of rows, and the cosines and sines by which their heads are rotated.

use crate::buffer::DeviceBuffer;

/// The positions by which [`Ops::rope`](crate::Ops::rope) rotates rows.
#[derive(Clone, Copy)]
pub struct RotaryPositions<'a> {
    /// `[rows, axes]`.
    pub positions: &'a [u32],
    pub axes: usize,
    /// Axis of each frequency; the first axis for all of them if empty.
    pub axis_of: &'a [u8],
}

impl RotaryPositions<'_> {
    /// The position of a row for a frequency.
    pub(crate) fn position(&self, row: usize, frequency: usize) -> usize {
        let axis = self.axis_of.get(frequency).map_or(0, |axis| usize::from(*axis));
        self.positions[row * self.axes + axis] as usize
    }
}

/// The angles by which [`Ops::rope`](crate::Ops::rope) rotates the heads of rows.
#[derive(Clone, Copy)]
pub struct RotaryTables<'a> {
    /// How many of the first dimensions of each head are rotated, in halves: dimension `i` with `i + rotary_dim / 2`.
    /// Even. The dimensions behind them stay as they are.
    pub rotary_dim: usize,
    /// `[positions, rotary_dim / 2]`.
    pub cos: &'a DeviceBuffer,
    /// `[positions, rotary_dim / 2]`.
    pub sin: &'a DeviceBuffer,
    /// The axis of [`StepInput::positions`](crate::StepInput::positions) for each of the `rotary_dim / 2` frequencies,
    /// so that M-RoPE, the sections of which may be interleaved, and the 2-D rotation of a vision tower differ in this
    /// table alone. If it is empty, all frequencies take the first axis.
    pub axis_of: &'a [u8],
}
