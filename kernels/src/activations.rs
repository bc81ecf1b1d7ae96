//! Activations in a device's memory.

use std::ops::Deref;

use candle_core::Tensor;

/// Float32 activations whose memory goes back to the device when this is dropped: views of the tensor that are left
/// must not be used after that.
pub struct Activations {
    tensor: Tensor,
    _memory: Option<Box<dyn Send + Sync>>,
}

impl Activations {
    /// A tensor that keeps its memory itself.
    pub(crate) fn owned(tensor: Tensor) -> Self {
        Self { tensor, _memory: None }
    }

    /// A tensor over memory that `memory` gives back when it is dropped.
    #[cfg(feature = "cuda")]
    pub(crate) fn over(tensor: Tensor, memory: impl Send + Sync + 'static) -> Self {
        Self { tensor, _memory: Some(Box::new(memory)) }
    }
}

impl Deref for Activations {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}
