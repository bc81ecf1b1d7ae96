//! Which experts the rows of a mixture-of-experts layer take, and with which weights.

use std::any::Any;
use std::ops::Range;

use candle_core::Result;

use crate::backend::storage::RoutingImpl;
use crate::buffer::DeviceBuffer;
use crate::matrix::Matrix;
use crate::routing_shape::RoutingShape;

/// How a layer's router chooses experts and weighs them. A row's logits are `gate x`, in float32 without rounding the
/// factors.
#[derive(Clone, Copy)]
pub struct Router<'a> {
    /// `[experts, hidden]`, of either type: a bfloat16 is taken as the float32 that it is.
    pub gate: &'a Matrix,
    pub scoring: Scoring<'a>,
    /// Whether the weights of a row are divided by their sum.
    pub normalise: bool,
    /// The factor of all weights: `routed_scaling_factor`, 1 where a model has none.
    pub scale: f32,
    /// Number of the layer among those with experts: where its experts are kept, if they are.
    pub layer: usize,
}

/// How a router scores the experts by their logits. The experts with the highest scores are chosen; of equal scores,
/// the expert with the lower number.
#[derive(Clone, Copy)]
pub enum Scoring<'a> {
    /// The logits choose, and their softmax over all experts weighs (Qwen-MoE; Mixtral, normalised).
    Softmax,
    /// The sigmoid of the logits weighs, and with `bias` `[experts]` added it chooses (GLM-4.5). A normalised sum has
    /// 1e-20 added, as in transformers.
    Sigmoid { bias: &'a DeviceBuffer },
}

/// The experts of each row with their weights, and some rows' pairs of (row, expert) sorted by expert. It belongs to a
/// device, and its addresses stay.
pub struct Routing {
    shape: RoutingShape,
    storage: Box<dyn RoutingImpl>,
    rows: usize,
    grouped: Range<usize>,
}

impl Routing {
    pub(crate) fn new(shape: RoutingShape, storage: Box<dyn RoutingImpl>) -> Self {
        Self { shape, storage, rows: 0, grouped: 0..0 }
    }

    pub fn shape(&self) -> &RoutingShape {
        &self.shape
    }

    /// Number of rows that were routed last.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// The rows whose pairs are sorted.
    pub fn grouped(&self) -> Range<usize> {
        self.grouped.clone()
    }

    /// The experts of these rows, `[rows, top_k]`, that with the largest weight first. Waits for the device.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If not all of them are routed.
    pub fn read_experts(&self, rows: Range<usize>) -> Result<Vec<u16>> {
        self.storage.read_experts(self.entries(&rows))
    }

    /// The weights of [`Routing::read_experts`]: NaN for a row whose logits are not all finite.
    ///
    /// # Errors
    /// If the device fails.
    ///
    /// # Panics
    /// If not all of them are routed.
    pub fn read_weights(&self, rows: Range<usize>) -> Result<Vec<f32>> {
        self.storage.read_weights(self.entries(&rows))
    }

    fn entries(&self, rows: &Range<usize>) -> Range<usize> {
        assert!(rows.start <= rows.end && rows.end <= self.rows, "rows {rows:?} of {} that are routed", self.rows);
        rows.start * self.shape.top_k..rows.end * self.shape.top_k
    }

    /// Notes that the first `rows` rows are routed, and none grouped.
    pub(crate) fn set_routed(&mut self, rows: usize) {
        (self.rows, self.grouped) = (rows, 0..0);
    }

    pub(crate) fn set_grouped(&mut self, rows: Range<usize>) {
        self.grouped = rows;
    }

    /// The device's own storage.
    ///
    /// # Panics
    /// If it is another device's.
    pub(crate) fn storage<S: RoutingImpl>(&self) -> &S {
        let storage: &dyn Any = &*self.storage;
        storage.downcast_ref().expect("a routing of this device")
    }

    /// As [`Routing::storage`], to be written.
    pub(crate) fn storage_mut<S: RoutingImpl>(&mut self) -> &mut S {
        let storage: &mut dyn Any = &mut *self.storage;
        storage.downcast_mut().expect("a routing of this device")
    }
}
