//! Whether the checkpoint is what was loaded. Its files stay mapped and are read again for an adapter, a wake and a
//! reload, and whoever can write to them can change them meanwhile.
//!
//! Each rank keeps a digest of what it has read of each parameter. Before an order that reads the checkpoint, the times
//! of the files are compared; where they say that somebody was there, all digests are, before anything is touched. What
//! an order then reads is digested as it is read, so that no change goes unnoticed, whatever the times say.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rollout_kernels::{Ops, WeightDtype, WeightRows};

use super::RankWeights;
use crate::error::{Error, Result};
use crate::executor::WeightOrder;
use crate::weights::{Adapter, Checkpoint, Slice, Stamp};

/// Elements that a thread digests at a time.
const PIECE_ELEMENTS: usize = 1 << 19;

/// The checkpoint, and what of it was loaded.
pub(super) struct Base {
    pub checkpoint: Arc<Checkpoint>,
    /// By parameter, of its rows on this rank.
    digests: HashMap<String, (Range<usize>, u64)>,
    /// What the system said of the files when the digests were right.
    stamps: Vec<Stamp>,
    /// What an order has found while it read.
    damage: Option<Error>,
}

impl Base {
    pub fn new(checkpoint: Arc<Checkpoint>) -> Self {
        let stamps = checkpoint.opened();
        Self { checkpoint, digests: HashMap::new(), stamps, damage: None }
    }

    /// Hands a reader of a parameter, of which this rank has `rows`, to `use_reader`, which must read each of them once.
    /// What is other than the first time is noted; it does not end the order, for other ranks may wait for this one.
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
        // A file that was cut short is the better reason, and the only one at the first time.
        if let Err(cut) = self.checkpoint.stamps() {
            self.damage = Some(cut);
        }
        Ok(())
    }

    /// # Errors
    /// `DataLoss` if something that was read since the last call was not what was loaded.
    pub fn settle(&mut self) -> Result<()> {
        self.damage.take().map_or(Ok(()), Err)
    }

    /// Compares everything with what was loaded, unless the files' times say that nobody was there.
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

    /// Opens the files again that have the paths now.
    ///
    /// # Errors
    /// `DataLoss` if they cannot be the same.
    pub fn reopen(&mut self) -> Result<()> {
        self.checkpoint = Arc::new(self.checkpoint.reopened()?);
        self.stamps.clear();
        Ok(())
    }
}

/// Reads one parameter, from several threads at once, and digests what it has read.
pub(super) struct Reader<'a> {
    checkpoint: &'a Checkpoint,
    name: &'a str,
    digest: AtomicU64,
}

impl Reader<'_> {
    /// Gives values as they are stored to `store`.
    pub fn rows(&self, slice: &Slice, store: &mut dyn FnMut(WeightRows<'_>)) {
        let read = self.checkpoint.read(self.name, slice, |stored| store(stored.as_rows()));
        self.note(slice, read);
    }

    /// Writes values in float32 of serving precision.
    pub fn values(&self, slice: &Slice, dtype: WeightDtype, values: &mut [f32]) {
        let read = self.checkpoint.read_f32(self.name, slice, dtype, values);
        self.note(slice, read);
    }

    /// Digests the rows of what was read, which are in the core's cache now. Last: what changes before that is noticed,
    /// and what changes later was not used.
    fn note(&self, slice: &Slice, read: Result<()>) {
        match read.and_then(|()| self.checkpoint.digest(self.name, slice.rows.clone())) {
            Ok(digest) => {
                self.digest.fetch_add(digest, Ordering::Relaxed);
            }
            // The file has noted it.
            Err(Error::DataLoss(_)) => {}
            Err(error) => panic!("a read that was checked: {error}"),
        }
    }
}

impl RankWeights {
    /// Before an order: whether what it reads of the checkpoint is what was loaded.
    ///
    /// # Errors
    /// `DataLoss` naming a file.
    pub fn check(&mut self, ops: &Ops, order: &WeightOrder) -> Result<()> {
        let touched = |by: &Adapter, name: &str| by.touches(name);
        let reads = |name: &str| match order {
            WeightOrder::Load { .. } => true,
            WeightOrder::Merge { before, after } => touched(before, name) || touched(after, name),
            _ => false,
        };
        let bases = &mut self.bases;
        if bases.base.digests.keys().any(|name| reads(name) && !bases.replaced.contains(name)) {
            bases.base.verify(ops)?;
        }
        Ok(())
    }

    /// After [`RankWeights::check`] has failed: opens the checkpoint's files again.
    ///
    /// # Errors
    /// `DataLoss` if they cannot be the same.
    pub fn reopen(&mut self) -> Result<()> {
        self.bases.base.reopen()
    }
}
