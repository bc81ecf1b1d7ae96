//! Tensors whose bytes are those of an earlier version with the changes of a delta store, byte by byte.

use std::collections::{HashMap, HashSet};
use std::io::Read;
use std::ops::Range;
use std::sync::Arc;

use twox_hash::XxHash3_128;

use super::Sources;
use super::delta_store::{ByteEncoding, DeltaTensor, StoredChanges, StoredDelta, WholeVersion};
use super::file::refuse;
use super::source_file::{ComputedBytes, PIECE_BYTES, SourceFile};
use crate::error::{Error, Result};
use crate::weights::parameters::{ParamSpec, Parameters, matrix_shape, resolve};
use crate::weights::update::{TensorBuffer, TensorEntry};

/// Bytes of the weights that are read at once from those that serve: each read waits for the end of a step.
const SERVING_BYTES: usize = 16 << 20;
/// The largest window of a zstd frame, which the decoder allocates. Level 1, which slime uses, needs 512 KiB.
const MAX_WINDOW_LOG: u32 = 23;
/// Most tensors that are computed at a time: as many as threads read a push.
const COMPUTED_AT_ONCE: u64 = 4;
/// Bytes of the number of changed bytes, and of a changed byte with its position.
const COUNT_BYTES: usize = 4;
const CHANGED_BYTES: usize = 5;

/// The weights that serve.
pub trait ServingWeights: std::fmt::Debug + Send + Sync {
    /// Bytes of rows of a parameter, row-major, little-endian, in the dtype in which it serves.
    ///
    /// # Errors
    /// `FailedPrecondition` if there are none.
    fn read(&self, parameter: &str, rows: Range<usize>) -> Result<Vec<u8>>;
}

/// All tensors of a version, of which some are patched.
pub(in crate::weights::push) struct PatchedVersion {
    pub whole: WholeVersion,
    /// Most bytes that computing the tensors takes.
    pub staging: u64,
}

/// A tensor of an earlier version, with the changes since then.
#[derive(Debug)]
struct PatchedTensor {
    name: String,
    bytes: usize,
    base: Base,
    patches: Vec<Patch>,
}

/// Where the tensor of the earlier version is.
#[derive(Debug)]
enum Base {
    /// In a file, from this offset on.
    File(Arc<SourceFile>, u64),
    Serving {
        weights: Arc<dyn ServingWeights>,
        rows: usize,
        row_bytes: usize,
    },
}

/// The changes of one version.
#[derive(Debug)]
struct Patch {
    file: Arc<SourceFile>,
    offset: u64,
    bytes: usize,
    encoding: ByteEncoding,
    /// Bytes that it decompresses to.
    raw: usize,
    /// Digest of the tensor with the changes.
    digest: [u8; 16],
}

/// Applies the deltas of a chain, which are of bytes, to the version before them: a whole one, or the one that serves.
///
/// # Errors
/// `InvalidArgument` naming the file of a delta that is of elements, or of a tensor that the version before does not
/// have or that has another size.
pub(in crate::weights::push) fn patched(
    base: Option<WholeVersion>,
    deltas: Vec<StoredDelta>,
    parameters: &Parameters,
    sources: &Sources,
) -> Result<PatchedVersion> {
    let (mut tensors, mut charge) = match base {
        Some(WholeVersion { tensors, files, charge }) => {
            let pairs = tensors.into_iter().zip(files);
            (pairs.map(|(entry, file)| (PatchedTensor::of_file(&entry, file), entry)).collect(), charge)
        }
        None => (of_serving(parameters, sources)?, sources.traffic.charge(0)?),
    };
    let index: HashMap<String, usize> =
        tensors.iter().enumerate().map(|(i, (_, entry))| (entry.name.clone(), i)).collect();
    for StoredDelta { tensors: changed, charge: declared, .. } in deltas {
        charge.grow_always(declared.bytes());
        let mut touched = HashSet::new();
        for change in changed {
            let name = &change.entry.name;
            let place = match (index.get(name), resolve(name, parameters)) {
                (Some(place), _) => Some(*place),
                // The model ignores it, or it has another name here.
                (None, Some(mapping)) if mapping.parts.is_empty() => continue,
                (None, Some(mapping)) if mapping.parts.len() == 1 => index.get(&mapping.parts[0].parameter).copied(),
                _ => None,
            };
            let Some(place) = place else {
                let file = change.file.name();
                return Err(refuse(format!("{file}: tensor {name:?} is not in the version that it changes")));
            };
            // Else it is another name of a tensor that this delta has changed.
            if touched.insert(place) {
                tensors[place].0.add(change)?;
            }
        }
    }
    let staging = tensors.iter().map(|(tensor, _)| tensor.staging()).max().unwrap_or(0);
    let (mut entries, mut files) = (Vec::new(), Vec::new());
    for (tensor, entry) in tensors {
        let (file, offset) = tensor.into_file();
        entries.push(TensorEntry { offset, ..entry });
        files.push(file);
    }
    let whole = WholeVersion { tensors: entries, files, charge };
    Ok(PatchedVersion { whole, staging: staging.saturating_mul(COMPUTED_AT_ONCE) })
}

/// All parameters of the policy that serves.
fn of_serving(parameters: &Parameters, sources: &Sources) -> Result<Vec<(PatchedTensor, TensorEntry)>> {
    let weights = sources.serving.clone();
    let weights = weights.ok_or_else(|| refuse("this server cannot read the weights that serve"))?;
    let tensor = |spec: &ParamSpec| {
        let (name, dtype, shape) = (spec.name.clone(), spec.dtype(parameters.dtype()), spec.shape.clone());
        let (rows, columns) = matrix_shape(&shape);
        let base = Base::Serving { weights: weights.clone(), rows, row_bytes: columns * dtype.size() };
        let patched =
            PatchedTensor { name: name.clone(), bytes: rows * columns * dtype.size(), base, patches: Vec::new() };
        (patched, TensorEntry { name, dtype, shape, digest: None, payload: None, offset: 0, allocation: None })
    };
    Ok(parameters.iter().map(tensor).collect())
}

impl PatchedTensor {
    fn of_file(entry: &TensorEntry, file: Arc<SourceFile>) -> Self {
        let bytes = entry.shape.iter().product::<usize>() * entry.dtype.size();
        Self { name: entry.name.clone(), bytes, base: Base::File(file, entry.offset), patches: Vec::new() }
    }

    /// Adds the changes of a later version.
    fn add(&mut self, change: DeltaTensor) -> Result<()> {
        let DeltaTensor { entry: TensorEntry { name, payload, digest, offset, .. }, file, changes } = change;
        let fail = |what: &str| refuse(format!("{}: tensor {name:?}: {what}", file.name()));
        let (StoredChanges::Bytes(encoding, raw), Some((_, bytes)), Some(digest)) = (changes, payload, digest) else {
            return Err(fail("has changes of elements, and other versions that are needed have changes of bytes"));
        };
        let most = self.bytes as u64;
        let fits = match encoding {
            ByteEncoding::Xor => raw == most,
            ByteEncoding::Overwrite => {
                raw <= (COUNT_BYTES as u64).saturating_add(most.saturating_mul(CHANGED_BYTES as u64))
            }
        };
        if !fits {
            return Err(fail(&format!(
                "has changes of {raw} bytes, and it has {most} bytes in the version before; save a whole version, or \
                 serve in the dtype of the checkpoint"
            )));
        }
        let (bytes, raw) = (bytes as usize, raw as usize);
        self.patches.push(Patch { file, offset, bytes, encoding, raw, digest });
        Ok(())
    }

    /// Most bytes that computing it takes.
    fn staging(&self) -> u64 {
        let patches = self.patches.iter().map(|patch| match patch.encoding {
            ByteEncoding::Xor => patch.bytes as u64 + (1 << MAX_WINDOW_LOG),
            ByteEncoding::Overwrite => (patch.bytes + patch.raw) as u64,
        });
        match (patches.max(), &self.base) {
            (None, Base::File(..)) => 0,
            (patches, _) => (self.bytes + SERVING_BYTES) as u64 + patches.unwrap_or(0),
        }
    }

    /// The file that the tensor is read from, and its offset there.
    fn into_file(self) -> (Arc<SourceFile>, u64) {
        match self.base {
            Base::File(file, offset) if self.patches.is_empty() => (file, offset),
            base => {
                let (name, bytes) = (self.name.clone(), self.bytes as u64);
                (Arc::new(SourceFile::computed(&name, bytes, Box::new(Self { base, ..self }))), 0)
            }
        }
    }
}

impl ComputedBytes for PatchedTensor {
    fn compute(&self) -> Result<TensorBuffer> {
        let mut tensor = TensorBuffer::zeroed(self.bytes)?;
        match &self.base {
            Base::File(file, offset) => file.read(&self.name, *offset, &mut tensor)?,
            Base::Serving { weights, rows, row_bytes } => {
                let step = (SERVING_BYTES / row_bytes.max(&1)).max(1);
                for first in (0..*rows).step_by(step) {
                    let piece = weights.read(&self.name, first..(first + step).min(*rows))?;
                    tensor[first * row_bytes..][..piece.len()].copy_from_slice(&piece);
                }
            }
        }
        self.patches.iter().try_for_each(|patch| patch.apply(&self.name, &mut tensor))?;
        Ok(tensor)
    }
}

impl Patch {
    fn apply(&self, name: &str, tensor: &mut [u8]) -> Result<()> {
        let lost = |what: &str| Error::DataLoss(format!("{}: tensor {name:?}: {what}", self.file.name()));
        let mut payload = TensorBuffer::zeroed(self.bytes)?;
        self.file.read(name, self.offset, &mut payload)?;
        match self.encoding {
            ByteEncoding::Xor => xor(&payload, tensor).map_err(|e| lost(&format!("does not decompress: {e}")))?,
            ByteEncoding::Overwrite => {
                let mut raw = TensorBuffer::zeroed(self.raw)?;
                let bytes = zstd::bulk::decompress_to_buffer(&payload, &mut raw);
                let bytes = bytes.map_err(|e| lost(&format!("does not decompress: {e}")))?;
                overwrite(&raw[..bytes], tensor).map_err(lost)?;
            }
        }
        if XxHash3_128::oneshot(tensor).to_be_bytes() != self.digest {
            return Err(lost(
                "with these changes its XXH3-128 is not the one that was saved: the file is damaged, or the version \
                 before is another one than that which the trainer had",
            ));
        }
        Ok(())
    }
}

/// Combines a tensor with as many decompressed bytes.
fn xor(payload: &[u8], tensor: &mut [u8]) -> std::io::Result<()> {
    let mut decoder = zstd::stream::read::Decoder::with_buffer(payload)?.single_frame();
    decoder.window_log_max(MAX_WINDOW_LOG)?;
    let mut scratch = vec![0; PIECE_BYTES];
    for piece in tensor.chunks_mut(PIECE_BYTES) {
        let scratch = &mut scratch[..piece.len()];
        decoder.read_exact(scratch)?;
        piece.iter_mut().zip(scratch).for_each(|(byte, change)| *byte ^= *change);
    }
    Ok(())
}

/// Sets the bytes at positions: their number, the positions, and the bytes.
fn overwrite(raw: &[u8], tensor: &mut [u8]) -> std::result::Result<(), &'static str> {
    const MALFORMED: &str = "does not have as many positions and bytes as it says";
    let (count, rest) = raw.split_first_chunk::<COUNT_BYTES>().ok_or(MALFORMED)?;
    let count = u32::from_le_bytes(*count) as usize;
    if rest.len() != count.saturating_mul(CHANGED_BYTES) {
        return Err(MALFORMED);
    }
    let (positions, bytes) = rest.split_at(count * size_of::<u32>());
    for (position, byte) in positions.as_chunks().0.iter().zip(bytes) {
        let position = u32::from_le_bytes(*position) as usize;
        *tensor.get_mut(position).ok_or("has a position outside of the tensor")? = *byte;
    }
    Ok(())
}
