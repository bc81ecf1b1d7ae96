//! Checksums of the parameters that serve, computed in pieces between the steps, so that generation keeps running.

use std::collections::{HashSet, VecDeque};
use std::ops::Range;

use sha2::{Digest, Sha256};

use super::client::CancelFlag;
use super::command::{ChecksumReply, Reply};
use super::core::EngineCore;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::observe::Phase;
use crate::weights::matrix_shape;

/// Most bytes that are read between two steps; a longer row is read whole. Reading this many takes about a millisecond,
/// less than a step. Unit tests have tiny models, which must still be read in several pieces.
const PIECE_BYTES: usize = if cfg!(test) { 24 } else { 1 << 20 };
/// Most checksums in flight. Each may read all weights, so further callers must retry later.
const MOST_WAITING: usize = 64;

/// The checksums in flight, the oldest first. Between two steps the engine computes a piece of the oldest one.
#[derive(Default)]
pub(super) struct Checksums(VecDeque<Checksum>);

impl Checksums {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Forgets checksums whose callers are gone.
    pub fn drop_cancelled(&mut self) {
        self.0.retain(|checksum| !checksum.cancel.is_cancelled());
    }

    /// Answers all callers with an error.
    pub fn refuse(&mut self, error: &Error) {
        self.0.drain(..).for_each(|checksum| checksum.refuse(error.clone()));
    }

    /// Begins a checksum of the parameters `names`, or of all parameters if `names` is empty: the SHA-256 of each as it
    /// serves, in the model's order.
    pub fn begin<X: Executor>(
        &mut self,
        core: &EngineCore<X>,
        names: &[String],
        cancel: CancelFlag,
        reply: Reply<Result<ChecksumReply>>,
    ) {
        match self.check(core, names) {
            Err(error) => reply(Err(error)),
            Ok(parameters) => self.0.push_back(Checksum {
                parameters,
                epoch: core.policy.epoch(),
                sha: Sha256::new(),
                rows: 0,
                done: Vec::new(),
                cancel,
                reply,
            }),
        }
    }

    /// Checks that a checksum can begin, and returns the indices of its parameters.
    fn check<X: Executor>(&self, core: &EngineCore<X>, names: &[String]) -> Result<Vec<usize>> {
        core.state.check_checksum()?;
        if self.len() >= MOST_WAITING {
            return Err(Error::ResourceExhausted(format!("{MOST_WAITING} checksums wait already; try again later")));
        }
        let unknown: Vec<_> = names.iter().filter(|name| core.parameters.get(name).is_none()).collect();
        if !unknown.is_empty() {
            let (shown, count) = (&unknown[..unknown.len().min(8)], unknown.len());
            let message = format!("{count} names are not parameters of the model: {shown:?}; see ListParameters");
            return Err(Error::invalid("names", message));
        }
        let wanted: HashSet<_> = names.iter().collect();
        let all = core.parameters.iter().enumerate();
        Ok(all.filter(|(_, spec)| wanted.is_empty() || wanted.contains(&spec.name)).map(|(i, _)| i).collect())
    }

    /// Computes a piece of the oldest checksum, and answers its caller if it is complete.
    ///
    /// # Errors
    /// If the executor fails.
    pub fn compute_piece<X: Executor>(&mut self, core: &mut EngineCore<X>) -> Result<()> {
        let Some(mut checksum) = self.0.pop_front() else { return Ok(()) };
        if !core.can_step() {
            core.telemetry.enter(Phase::Checksum);
        }
        if let Err(error) = core.state.check_checksum() {
            checksum.refuse(error);
            return Ok(());
        }
        if checksum.epoch != core.policy.epoch() {
            checksum.begin_again(core.policy.epoch());
        }
        let Some(&index) = checksum.parameters.get(checksum.done.len()) else {
            let Checksum { done: parameters, reply, .. } = checksum;
            reply(Ok(ChecksumReply { weight_version: core.policy.version(), parameters }));
            return Ok(());
        };
        let parameters = core.parameters.clone();
        let spec = parameters.iter().nth(index).expect("its index was found among them");
        let (rows, columns) = matrix_shape(&spec.shape);
        let row_bytes = columns * spec.dtype(parameters.dtype()).size();
        let end = rows.min(checksum.rows + (PIECE_BYTES / row_bytes.max(1)).max(1));
        let piece = core.executor.read(spec, checksum.rows..end);
        match piece {
            Ok(bytes) => checksum.sha.update(bytes),
            Err(error) => {
                checksum.refuse(error.clone());
                return Err(error);
            }
        }
        checksum.rows = end;
        if end == rows {
            checksum.done.push((spec.name.clone(), std::mem::take(&mut checksum.sha).finalize().into()));
            checksum.rows = 0;
        }
        self.0.push_front(checksum);
        Ok(())
    }
}

/// Reads rows of a parameter as it serves.
///
/// # Errors
/// `FailedPrecondition` if the weights are asleep or missing; `NotFound` if the model has no such parameter; those of
/// the executor.
pub(super) fn read_rows<X: Executor>(core: &mut EngineCore<X>, parameter: &str, rows: Range<usize>) -> Result<Vec<u8>> {
    core.state.check_checksum()?;
    let parameters = core.parameters.clone();
    let spec = parameters.get(parameter).ok_or_else(|| Error::NotFound(format!("no parameter {parameter:?}")))?;
    core.executor.read(spec, rows)
}

/// A checksum in flight.
struct Checksum {
    /// Indices of the requested parameters, in the model's order.
    parameters: Vec<usize>,
    /// Epoch of the policy that is read. If another policy serves, the checksum restarts.
    epoch: u64,
    /// Digest of the first `rows` rows of the parameter that is being read.
    sha: Sha256,
    rows: usize,
    /// Names and digests of the finished parameters.
    done: Vec<(String, [u8; 32])>,
    cancel: CancelFlag,
    reply: Reply<Result<ChecksumReply>>,
}

impl Checksum {
    fn refuse(self, error: Error) {
        (self.reply)(Err(error));
    }

    fn begin_again(&mut self, epoch: u64) {
        self.epoch = epoch;
        self.sha = Sha256::new();
        self.rows = 0;
        self.done.clear();
    }
}
