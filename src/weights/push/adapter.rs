//! The adapter of a LORA push, while its tensors come.

use super::UpdateKind;
use super::manifest::{Declared, Manifest};
use super::receipt::Receipt;
use super::reservation::adapter_bytes;
use crate::error::{Error, Result};
use crate::memory::{Traffic, human_bytes};
use crate::weights::Slice;
use crate::weights::lora::{Adapter, AdapterSpec, AdapterTensor};
use crate::weights::parameters::tensor_of_bytes;

/// The adapter of a LORA push. Other pushes have an empty one.
pub(super) struct PushedAdapter {
    /// The text of `adapter_config.json`.
    config: String,
    /// Whether the adapter is to stay resident unmerged.
    unmerged: bool,
    /// The checked adapter, once all its tensors are declared. `None` for a push of nothing, which means the base.
    spec: Option<AdapterSpec>,
    /// Counts what reading the configuration takes.
    traffic: Traffic,
}

impl PushedAdapter {
    pub fn new(config: String, unmerged: bool, traffic: Traffic) -> Self {
        Self { config, unmerged, spec: None, traffic }
    }

    /// The checked adapter, once all its tensors are declared and unless it is the base.
    pub fn spec(&self) -> Option<&AdapterSpec> {
        self.spec.as_ref()
    }

    /// Checks the adapter against the model when all its tensors are declared.
    ///
    /// # Errors
    /// As for [`AdapterSpec::new`].
    pub fn check(&mut self, manifest: &Manifest) -> Result<()> {
        if manifest.kind() != UpdateKind::Lora || manifest.tensors().is_empty() && self.config.is_empty() {
            return Ok(());
        }
        let tensors: Vec<_> = manifest.tensors().iter().map(|tensor| AdapterTensor::from(&tensor.entry)).collect();
        self.spec = Some(AdapterSpec::new(&self.config, &tensors, manifest.parameters(), &self.traffic)?);
        Ok(())
    }

    /// Checks that the adapter fits into what was reserved for it when only `total`, the bytes of its tensors, was
    /// known.
    ///
    /// # Errors
    /// `ResourceExhausted` if it does not.
    pub fn check_reserved(&self, total: u64) -> Result<()> {
        let reserved = adapter_bytes(total);
        match &self.spec {
            Some(spec) if spec.bytes() > reserved => Err(Error::ResourceExhausted(format!(
                "the adapter takes {} beside its {} of tensors, and only {} were set aside; declare all its tensors in \
                 the header",
                human_bytes(spec.bytes()),
                human_bytes(total),
                human_bytes(reserved)
            ))),
            _ => Ok(()),
        }
    }

    /// Makes the adapter of its tensors, all of which are verified and kept.
    ///
    /// # Errors
    /// As for [`Adapter::check_unmerged`] if the adapter is to stay unmerged.
    pub fn build(self, tensors: &[Declared], receipts: &[Receipt]) -> Result<Adapter> {
        let Some(spec) = self.spec else { return Ok(Adapter::none()) };
        let adapter = spec.build(&|i| {
            let entry = &tensors[i].entry;
            let bytes = receipts[i].verified().expect("LORA tensors are not taken");
            let whole = Slice::whole(&entry.shape);
            tensor_of_bytes(entry.dtype, bytes, whole.cols.end, &whole)
        });
        if self.unmerged {
            adapter.check_unmerged()?;
        }
        Ok(adapter)
    }
}
