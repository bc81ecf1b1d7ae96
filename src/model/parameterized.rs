//! Parts of a model that hold parameters: layers, and blocks that are made of layers.

use rollout_kernels::{DeviceBuffer, Matrix};

use super::adapters::TargetModule;
use crate::error::Result;
use crate::weights::ParamSpec;

/// Where this rank's part of a parameter is stored.
pub enum ParamSlot<'a> {
    /// Rows of a matrix from `first_row` on; several parameters can share one (query, key and value).
    Matrix { matrix: &'a mut Matrix, first_row: usize },
    /// Values of a float32 buffer from `offset` on; several parameters can share one.
    Vector { vector: &'a DeviceBuffer, offset: usize },
}

/// A callback that is shown each parameter of a model, in the model's order.
pub type Visitor<'v> = dyn FnMut(&ParamSpec, ParamSlot<'_>) -> Result<()> + 'v;

/// A callback that is shown each matrix of a model, with the parameters that share it.
pub type MatrixVisitor<'v> = dyn FnMut(&[&ParamSpec], &mut Matrix) -> Result<()> + 'v;

/// A part of a model: a layer with parameters of its own, or a list of further parts. A list implements
/// [`parts`](Self::parts) and [`parts_mut`](Self::parts_mut), a layer implements all other methods.
pub trait Parameterized {
    /// The parts that this one is a list of, in the model's order; none for a layer.
    fn parts(&self) -> Vec<&dyn Parameterized> {
        Vec::new()
    }

    /// As [`Parameterized::parts`], mutably.
    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        Vec::new()
    }

    /// Shows every parameter to `visitor`, in the model's order.
    ///
    /// # Errors
    /// The first error of `visitor`, which is shown no parameter after it.
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        self.parts_mut().into_iter().try_for_each(|part| part.visit(visitor))
    }

    /// Shows every matrix to `visitor`, in the model's order.
    ///
    /// # Errors
    /// The first error of `visitor`, which is shown no matrix after it.
    fn visit_matrices(&mut self, visitor: &mut MatrixVisitor<'_>) -> Result<()> {
        self.parts_mut().into_iter().try_for_each(|part| part.visit_matrices(visitor))
    }

    /// Its linear layers as target modules of adapters.
    fn target_modules(&self) -> Vec<TargetModule<'_>> {
        self.parts().into_iter().flat_map(|part| part.target_modules()).collect()
    }

    /// Bytes that the parameters take on this rank while none is released.
    fn bytes(&self) -> u64 {
        self.parts().into_iter().map(|part| part.bytes()).sum()
    }
}
