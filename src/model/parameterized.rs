//! What holds parameters: layers, and the parts of a model that are made of them.

use rollout_kernels::{Buffer, Matrix};

use super::input::Site;
use crate::error::Result;
use crate::weights::ParamSpec;

/// Where this rank's part of a parameter is stored.
pub enum ParamSlot<'a> {
    /// Rows of a matrix from `first_row` on; several parameters can share one (query, key and value).
    Matrix { matrix: &'a mut Matrix, first_row: usize },
    /// Values of a float32 buffer from `offset` on; several parameters can share one.
    Vector { vector: &'a Buffer, offset: usize },
}

/// Called for each parameter of a model, in the model's order.
pub type Visitor<'v> = dyn FnMut(&ParamSpec, ParamSlot<'_>) -> Result<()> + 'v;

/// Called for each matrix of a model with the parameters that share it.
pub type MatrixVisitor<'v> = dyn FnMut(&[&ParamSpec], &mut Matrix) -> Result<()> + 'v;

/// The parameters whose outputs an adapter can add to at one site, each with its first column of what the site gives on
/// this rank.
pub type SiteParameters<'a> = (Site, Vec<(&'a ParamSpec, usize)>);

/// A layer with parameters, or a part of a model that is a list of such parts: a composite gives its lists, a layer
/// answers for itself.
pub trait Parameterized {
    /// The parts, in the model's order.
    fn parts(&self) -> Vec<&dyn Parameterized> {
        Vec::new()
    }

    /// The parts of [`Parameterized::parts`], to be changed.
    fn parts_mut(&mut self) -> Vec<&mut dyn Parameterized> {
        Vec::new()
    }

    /// Shows every parameter to `visitor`, in the model's order.
    ///
    /// # Errors
    /// The first that `visitor` gives; the parameters after it are not shown.
    fn visit(&mut self, visitor: &mut Visitor<'_>) -> Result<()> {
        self.parts_mut().into_iter().try_for_each(|part| part.visit(visitor))
    }

    /// Shows every matrix to `visitor`, in the model's order.
    ///
    /// # Errors
    /// The first that `visitor` gives; the matrices after it are not shown.
    fn visit_matrices(&mut self, visitor: &mut MatrixVisitor<'_>) -> Result<()> {
        self.parts_mut().into_iter().try_for_each(|part| part.visit_matrices(visitor))
    }

    /// The linear layers that adapters can add to.
    fn sites(&self) -> Vec<SiteParameters<'_>> {
        self.parts().into_iter().flat_map(|part| part.sites()).collect()
    }

    /// Bytes of this rank's part of the parameters.
    fn bytes(&self) -> u64 {
        self.parts().into_iter().map(|part| part.bytes()).sum()
    }
}
