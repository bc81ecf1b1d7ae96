//! Integrity of the checkpoint: whether it is still the one that was loaded. Its files stay mapped and are read again
//! for an adapter, a wake and a reload, and any process with write access can change them in between.
//!
//! Each rank keeps a digest of the part of each parameter that it has read. Before an order that reads the checkpoint,
//! it compares the files' times and, if these have changed, all digests, before it changes any weight. The values that
//! an order reads are digested again as they are read, so that every change is noticed, even one that keeps the times.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rollout_kernels::{Ops, StorageDtype, TensorView};

use super::RankWeights;
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::executor::WeightOrder;
use crate::weights::{Checkpoint, FileStamp, Slice};

/// Elements that a thread digests at a time.
const PIECE_ELEMENTS: usize = 1 << 19;

/// The checkpoint, with digests of what was loaded from it.
pub(super) struct CheckpointBase {
    pub checkpoint: Arc<Checkpoint>,
    /// For each parameter, its rows on this rank and their digest.
    digests: HashMap<String, (Range<usize>, u64)>,
    /// Times and sizes of the files when the digests were last known to be right.
    stamps: Vec<FileStamp>,
    /// The first damage found by reads since the last [`CheckpointBase::settle`].
    damage: Option<Error>,
}

impl CheckpointBase {
    pub fn new(checkpoint: Arc<Checkpoint>) -> Self {
        let stamps = checkpoint.opened();
        Self { checkpoint, digests: HashMap::new(), stamps, damage: None }
    }

    /// Reads a parameter: `use_reader` gets a reader, and must read each of `rows`, which this rank has, once. Bytes
    /// that differ from the first time are noted for [`CheckpointBase::settle`] and do not end the order here, because
    /// other ranks may wait for this one in a collective.
    pub fn read(
        &mut self,
        name: &str,
        rows: Range<usize>,
        use_reader: impl FnOnce(&Reader<'_>) -> Result<()>,
    ) -> Result<()> {
        let reader = Reader { checkpoint: &self.checkpoint, name, digest: AtomicU64::new(0) };
        use_reader(&reader)?;
        let digest = reader.digest.into_inner();
        self.checkpoint.release(name);
        let (_, loaded) = self.digests.entry(name.to_string()).or_insert((rows, digest));
        if *loaded != digest {
            self.damage.get_or_insert_with(|| self.checkpoint.other_bytes(name));
        }
        // A truncated file is the better reason, and at the first load the only one that can be detected.
        if let Err(cut) = self.checkpoint.stamps() {
            self.damage = Some(cut);
        }
        Ok(())
    }

    /// # Errors
    /// `DataLoss` if something that was read since the last call was damaged.
    pub fn settle(&mut self) -> Result<()> {
        self.damage.take().map_or(Ok(()), Err)
    }

    /// Compares all digests with the files, unless the files' times have not changed.
    ///
    /// # Errors
    /// `DataLoss` naming a file.
    pub fn verify(&mut self, ops: &Ops) -> Result<()> {
        let stamps = self.checkpoint.stamps()?;
        if stamps == self.stamps {
            return Ok(());
        }
        for (name, (rows, loaded)) in &self.digests {
            let digest = self.digest(ops, name, rows.clone())?;
            self.checkpoint.release(name);
            if digest != *loaded {
                return Err(self.checkpoint.other_bytes(name));
            }
        }
        self.stamps = stamps;
        Ok(())
    }

    fn digest(&self, ops: &Ops, name: &str, rows: Range<usize>) -> Result<u64> {
        let elements: usize = self.checkpoint.shape(name)?.iter().skip(1).product();
        let step = (PIECE_ELEMENTS / elements.max(1)).max(1);
        let piece = |start| (start..rows.end.min(start + step), Ok(0));
        let mut pieces: Vec<(Range<usize>, Result<u64>)> = rows.clone().step_by(step).map(piece).collect();
        ops.for_each(&mut pieces, |(rows, digest)| *digest = self.checkpoint.digest(name, rows.clone()));
        pieces.into_iter().try_fold(0, |sum, (_, digest)| Ok(digest?.wrapping_add(sum)))
    }

    /// Opens the files at the checkpoint's paths again: the right ones may have been restored.
    ///
    /// # Errors
    /// `DataLoss` if they cannot be the same.
    pub fn reopen(&mut self) -> Result<()> {
        self.checkpoint = Arc::new(self.checkpoint.reopened()?);
        self.stamps.clear();
        Ok(())
    }
}

/// Reads one parameter, from several threads at once, and keeps a digest of what it has read.
pub(super) struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    digest: AtomicU64,
}

impl Reader<'_> {
    /// Passes the stored values of `slice` to `store`.
    pub fn rows(&self, slice: &Slice, store: &mut dyn FnMut(TensorView<'_>)) {
        let read = self.checkpoint.read(self.name, slice, |stored| store(stored.view()));
        self.note(slice, read);
    }

    /// Writes the values of `slice` to `values`, as float32 of the serving precision `dtype`.
    pub fn values(&self, slice: &Slice, dtype: StorageDtype, values: &mut [f32]) {
        let read = self.checkpoint.read_f32(self.name, slice, dtype, values);
        self.note(slice, read);
    }

    /// Adds the rows of `slice` to the digest, after they were read: they are in the core's cache, a change before is
    /// noticed, and a change after was not used.
    fn note(&self, slice: &Slice, read: Result<()>) {
        match read.and_then(|()| self.checkpoint.digest(self.name, slice.rows.clone())) {
            Ok(digest) => {
                self.digest.fetch_add(digest, Ordering::Relaxed);
            }
            // The mapped file remembers that it was cut short, and `CheckpointBase::read` asks it.
            Err(Error::DataLoss(_)) => {}
            Err(error) => panic!("a read that was checked: {error}"),
        }
    }
}

impl RankWeights {
    /// Checks, before an order, that the parts of the checkpoint that it will read are what was loaded, and prepares a
    /// merge. A load is prepared when it begins: the weights that it fills may be released until then.
    ///
    /// # Errors
    /// `DataLoss` naming a file; and those of [`RankWeights::prepare`].
    pub fn check(&mut self, ops: &Ops, comm: &dyn Communicator, order: &WeightOrder) -> Result<()> {
        let bases = &mut self.bases;
        let is_loaded = |name: &str| bases.base.digests.contains_key(name) && !bases.replaced.contains(name);
        let reads = match order {
            WeightOrder::Load { .. } => bases.base.digests.keys().any(|name| is_loaded(name)),
            WeightOrder::Merge { before, after } => before.parameters().chain(after.parameters()).any(is_loaded),
            _ => false,
        };
        if reads {
            bases.base.verify(ops)?;
        }
        match order {
            WeightOrder::Merge { .. } => self.prepare(ops, comm, order),
            _ => Ok(()),
        }
    }

    /// Opens the checkpoint's files again, after [`RankWeights::check`] has failed.
    ///
    /// # Errors
    /// `DataLoss` if they cannot be the same.
    pub fn reopen(&mut self) -> Result<()> {
        self.bases.base.reopen()
    }
}
