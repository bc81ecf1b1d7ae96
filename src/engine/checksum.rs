//! Checksums of what serves.

use std::collections::HashSet;

use sha2::{Digest, Sha256};

use super::{Attempt, ChecksumReply, Engine, Failure};
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::weights::{ParamSpec, matrix_shape};

/// Most bytes that are read at once, so that a checksum takes no memory to speak of (a longer row is read whole).
const CHUNK_BYTES: usize = 8 << 20;

impl<X: Executor> Engine<X> {
    /// SHA-256 of the parameters `names`, or of all, as they serve; in the model's order.
    pub(super) fn checksum(&mut self, names: &[String]) -> Attempt<ChecksumReply> {
        self.state.check_checksum()?;
        self.check_names(names)?;
        let (parameters, wanted) = (self.parameters.clone(), names.iter().collect::<HashSet<_>>());
        let mut reply = ChecksumReply { weight_version: self.policy.version, parameters: Vec::new() };
        for spec in parameters.iter().filter(|spec| wanted.is_empty() || wanted.contains(&spec.name)) {
            let sha = self.hash(spec).map_err(Failure::Fatal)?;
            reply.parameters.push((spec.name.clone(), sha));
        }
        Ok(reply)
    }

    fn check_names(&self, names: &[String]) -> Result<()> {
        let unknown: Vec<_> = names.iter().filter(|name| self.parameters.get(name).is_none()).collect();
        if unknown.is_empty() {
            return Ok(());
        }
        let (shown, count) = (&unknown[..unknown.len().min(8)], unknown.len());
        Err(Error::invalid("names", format!("{count} are no parameters of the model: {shown:?}; see ListParameters")))
    }

    fn hash(&mut self, spec: &ParamSpec) -> Result<[u8; 32]> {
        let (rows, columns) = matrix_shape(&spec.shape);
        let row_bytes = columns * self.parameters.dtype().size();
        let step = (CHUNK_BYTES / row_bytes.max(1)).max(1);
        let mut sha = Sha256::new();
        for start in (0..rows).step_by(step) {
            sha.update(self.executor.read(spec, start..rows.min(start + step))?);
        }
        Ok(sha.finalize().into())
    }
}
