//! The adapter of a LORA push.

use super::manifest::Manifest;
use super::staging::adapter_bytes;
use crate::error::{Error, Result};
use crate::memory::{Traffic, human_bytes};
use crate::weights::lora::{Adapter, AdapterSpec, AdapterTensor};
use crate::weights::parameters::{Slice, tensor_of_bytes};

/// The adapter that the declared tensors make, checked against the model; `None` for a push of nothing, which means the
/// base. `traffic` counts the memory for reading the configuration.
///
/// # Errors
/// As for [`AdapterSpec::new`].
pub(super) fn check(config: &str, manifest: &Manifest, traffic: &Traffic) -> Result<Option<AdapterSpec>> {
    if manifest.tensors.is_empty() && config.is_empty() {
        return Ok(None);
    }
    let tensors: Vec<_> = manifest.tensors.iter().map(|tensor| AdapterTensor::from(&tensor.entry)).collect();
    AdapterSpec::new(config, &tensors, &manifest.parameters, traffic).map(Some)
}

/// Checks that the adapter fits into the memory that was reserved when only `total`, the bytes of its tensors, was
/// known.
///
/// # Errors
/// `ResourceExhausted` if it does not.
pub(super) fn check_reserved(spec: Option<&AdapterSpec>, total: u64) -> Result<()> {
    let reserved = adapter_bytes(total);
    let Some(spec) = spec.filter(|spec| spec.bytes() > reserved) else { return Ok(()) };
    Err(Error::ResourceExhausted(format!(
        "the adapter takes {} beside its {} of tensors, and only {} were set aside; declare all its tensors in the \
         header",
        human_bytes(spec.bytes()),
        human_bytes(total),
        human_bytes(reserved)
    )))
}

/// Makes the adapter of its tensors, all of which are verified and kept.
pub(super) fn build(spec: Option<AdapterSpec>, manifest: &Manifest) -> Adapter {
    let Some(spec) = spec else { return Adapter::none() };
    spec.build(&|i| {
        let tensor = &manifest.tensors[i];
        let (bytes, whole) =
            (tensor.verified().expect("LORA tensors are not taken"), Slice::whole(&tensor.entry.shape));
        tensor_of_bytes(tensor.entry.dtype, bytes, whole.cols.end, &whole)
    })
}
