//! Adapters below `--adapters-dir`, which are read when a request names one that is not resident.

use std::path::{Path, PathBuf, absolute};
use std::sync::Arc;
use std::time::Instant;

use tokio::task::spawn_blocking;

use crate::engine::{AdapterTarget, ReadAdapter};
use crate::error::{Error, Result};
use crate::memory::Traffic;
use crate::weights::{
    DeclaredPush, Parameters, ReceiveMode, Source, Sources, UpdateHeader, UpdateKind, VerifiedPush, WeightUpdate,
};

const FLAG: &str = "--adapters-dir";

/// The directory of adapters that requests may name although they are not resident.
#[derive(Debug)]
pub struct AdaptersDir {
    path: PathBuf,
    sources: Sources,
    parameters: Arc<Parameters>,
    traffic: Traffic,
}

impl AdaptersDir {
    /// The adapters below `path` for the model of these parameters. The memory for an adapter is counted in `traffic`
    /// until it is resident.
    pub fn new(path: PathBuf, parameters: Arc<Parameters>, traffic: Traffic) -> Self {
        let path = absolute(&path).unwrap_or(path);
        let sources = Sources::of_flag(FLAG, path.clone()).with_traffic(traffic.clone());
        Self { path, sources, parameters, traffic }
    }

    /// Whether `path` is the directory of the adapter of this name, if there is one.
    pub(super) fn is_path_of(&self, name: &str, path: &str) -> bool {
        is_below(name) && self.path.join(name) == Path::new(path)
    }

    /// Checks that there is an adapter of this name, as far as its declarations tell.
    ///
    /// # Errors
    /// `NotFound` if there is none of this name; `InvalidArgument` if its declarations do not fit the model;
    /// `ResourceExhausted` if reading them takes too much memory.
    pub(super) async fn check(self: &Arc<Self>, name: &str) -> Result<()> {
        let (directory, name) = (self.clone(), name.to_owned());
        let opened = spawn_blocking(move || directory.open(&name).map(drop)).await;
        opened.map_err(|error| Error::Internal(error.to_string()))?
    }

    /// Reads and verifies an adapter.
    ///
    /// # Errors
    /// `NotFound` if there is none of this name; `InvalidArgument`, `DataLoss` and `ResourceExhausted` as for a push.
    pub(super) fn read(&self, name: &str) -> Result<ReadAdapter> {
        let started = Instant::now();
        let declared = self.open(name)?;
        let charge = self.traffic.charge(declared.staging().staged)?;
        let read = declared.receive(ReceiveMode::Stage).and_then(|receiving| receiving.finish());
        let VerifiedPush { update: WeightUpdate::Lora(adapter), bytes, .. } = read.map_err(of_adapter)? else {
            return Err(Error::Internal("a LORA push brings an adapter".into()));
        };
        tracing::debug!(adapter = name, bytes, ms = started.elapsed().as_millis() as u64, "adapter read");
        Ok(ReadAdapter { adapter, directory: self.path.join(name).display().to_string(), charge })
    }

    /// Opens the files of an adapter and checks their declarations.
    fn open(&self, name: &str) -> Result<DeclaredPush> {
        if !is_below(name) {
            return Err(Error::NotFound(format!("it is no path below {FLAG}")));
        }
        let adapter = AdapterTarget { name: name.into(), expected_generation: None, evicts: false };
        let header = UpdateHeader {
            adapter: Some(adapter),
            source: Source::Directory(name.into()),
            ..UpdateHeader::new(UpdateKind::Lora)
        };
        DeclaredPush::open(Arc::new(header), Vec::new(), self.parameters.clone(), &self.sources).map_err(of_adapter)
    }
}

/// Whether a name is a relative path of which each part is the name of a file, so that no two names mean one directory.
fn is_below(name: &str) -> bool {
    name.split('/').all(|part| !["", ".", ".."].contains(&part)) && !name.contains('\0')
}

/// The error of a push from a directory, as that of the field `adapter`.
fn of_adapter(error: Error) -> Error {
    match error {
        Error::InvalidArgument { field, message } if field == "source.directory" => Error::invalid("adapter", message),
        Error::InvalidArgument { field, message } => Error::invalid("adapter", format!("{field}: {message}")),
        error => error,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_path_below_the_directory() {
        for name in ["a", "team/a", "a b", "..a", "a.", "é", "-"] {
            assert!(is_below(name), "{name}");
        }
        for name in ["", ".", "..", "/a", "a/", "a//b", "./a", "a/./b", "../a", "a/..", "a/../../b", "a\0b"] {
            assert!(!is_below(name), "{name:?}");
        }
    }
}
