//! GGUF files: mapped, de-quantised row by row, with Hugging Face's names and order of rows.

use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use rollout_kernels::StorageDtype;
use rollout_kernels::host::dequantise;

use super::digest::digest_of_rows;
use super::gguf_config;
use super::mapped::MappedFile;
use crate::error::{Error, Result};
use crate::weights::parameters::{Slice, matrix_shape, slice_of_bytes};

/// The tensor with divisors of the rotary frequencies, by which GGUF files carry Llama 3's rope scaling.
const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// The metadata of a GGUF file, by key, for example `tokenizer.ggml.tokens`.
pub type GgufMetadata = HashMap<String, Value>;

/// A tensor in the file.
#[derive(Clone, Debug)]
struct Entry {
    dtype: GgmlDType,
    shape: Vec<usize>,
    /// Where the tensor's bytes are in the file.
    bytes: Range<usize>,
    /// How many rows a head has, if the file has the rows of each head in the order of interleaved rotary embedding.
    interleaved_head_dim: Option<usize>,
}

/// A mapped GGUF file.
#[derive(Debug)]
pub struct GgufCheckpoint {
    file: MappedFile,
    metadata: Arc<GgufMetadata>,
    config: serde_json::Value,
    entries: BTreeMap<String, Entry>,
}

impl GgufCheckpoint {
    /// Opens a GGUF file and reads its header.
    ///
    /// # Errors
    /// `Config`, naming the file: not GGUF, truncated, one part of several, or an unsupported architecture.
    pub fn open(path: &Path) -> Result<Self> {
        let file = MappedFile::open(path)?;
        let fail = |what: String| Error::Config(format!("{}: {what}", path.display()));
        let read = |bytes: &[u8]| {
            let content = Content::read(&mut Cursor::new(bytes))
                .map_err(|e| format!("not a whole GGUF file ({e}); download it again"))?;
            let (entries, config) = read_layout(&content, bytes)?;
            Ok((content.metadata, entries, config))
        };
        let (metadata, entries, config) = file.read(0..file.bytes(), read)?.map_err(fail)?;
        Ok(Self { file, metadata: Arc::new(metadata), config, entries })
    }

    /// The model's configuration in the form of Hugging Face's `config.json`.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// The metadata of the file, in which the tokenizer and the chat template are.
    pub fn metadata(&self) -> &Arc<GgufMetadata> {
        &self.metadata
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub(super) fn shape(&self, name: &str) -> Option<&[usize]> {
        self.entries.get(name).map(|e| e.shape.as_slice())
    }

    pub(super) fn stored_bytes(&self, name: &str) -> Option<usize> {
        self.entries.get(name).map(|e| e.bytes.len())
    }

    /// Writes the values of a slice, which must be inside the tensor, to `out`: in float32, rounded to `dtype`.
    pub(super) fn read_f32(
        &self,
        name: &str,
        slice: &Slice,
        dtype: StorageDtype,
        out: &mut [f32],
    ) -> Option<Result<()>> {
        let entry = self.entries.get(name)?;
        Some(self.file.read(entry.bytes.clone(), |bytes| entry.read_f32(bytes, slice, dtype, out)))
    }

    /// The digest of some rows of a tensor: [`digest_of_rows`]. `rows` are in Hugging Face's order, and must be inside
    /// the tensor.
    pub(super) fn digest(&self, name: &str, rows: Range<usize>) -> Option<Result<u64>> {
        let entry = self.entries.get(name)?;
        let row_bytes = entry.row_bytes();
        let Some(head_dim) = entry.interleaved_head_dim else {
            let part = entry.bytes.start + rows.start * row_bytes..entry.bytes.start + rows.end * row_bytes;
            return Some(self.file.read(part, |bytes| digest_of_rows(bytes, row_bytes, rows)));
        };
        let digest = |bytes: &[u8]| {
            let digest = |row: usize| {
                let stored = interleaved_row(row, head_dim) * row_bytes;
                digest_of_rows(&bytes[stored..stored + row_bytes], row_bytes, row..row + 1)
            };
            rows.map(digest).fold(0, u64::wrapping_add)
        };
        Some(self.file.read(entry.bytes.clone(), digest))
    }

    pub(super) fn file(&self) -> &MappedFile {
        &self.file
    }

    /// The same tensors in the file that has this one's path now.
    ///
    /// # Errors
    /// As for [`MappedFile::reopened`].
    pub(super) fn reopened(&self) -> Result<Self> {
        let Self { file, metadata, config, entries } = self;
        let (metadata, config, entries) = (metadata.clone(), config.clone(), entries.clone());
        Ok(Self { file: file.reopened()?, metadata, config, entries })
    }

    pub(super) fn release(&self, name: &str) {
        if let Some(entry) = self.entries.get(name) {
            self.file.release(entry.bytes.clone());
        }
    }
}

impl Entry {
    fn row_bytes(&self) -> usize {
        let (_, cols) = matrix_shape(&self.shape);
        cols / self.dtype.block_size() * self.dtype.type_size()
    }

    /// De-quantises a slice row by row from `bytes`, those of the whole tensor. Rows of whole blocks go straight to
    /// `out`; where the slice cuts a block, they are de-quantised in whole blocks and copied.
    fn read_f32(&self, bytes: &[u8], slice: &Slice, dtype: StorageDtype, out: &mut [f32]) {
        assert_eq!(out.len(), slice.len(), "values of the slice");
        if slice.is_empty() {
            return;
        }
        let row_bytes = self.row_bytes();
        let (block, block_bytes) = (self.dtype.block_size(), self.dtype.type_size());
        let blocks = slice.cols.start / block..slice.cols.end.div_ceil(block);
        let first = slice.cols.start - blocks.start * block;
        let is_cut = blocks.len() * block != slice.cols.len();
        let mut whole = vec![0.0; if is_cut { blocks.len() * block } else { 0 }];
        for (row, out) in slice.rows.clone().zip(out.chunks_exact_mut(slice.cols.len())) {
            let row = self.interleaved_head_dim.map_or(row, |d| interleaved_row(row, d));
            let row = &bytes[row * row_bytes..];
            let stored = &row[blocks.start * block_bytes..blocks.end * block_bytes];
            if is_cut {
                dequantise(self.dtype, stored, dtype, &mut whole);
                out.copy_from_slice(&whole[first..first + out.len()]);
            } else {
                dequantise(self.dtype, stored, dtype, out);
            }
        }
    }
}

/// The row of the file at which llama.cpp's converter has put row `row` of a query or key projection. Within each head
/// it interleaves the two halves that Hugging Face's rotary embedding pairs: row `i` with row `i + head_dim / 2` become
/// rows `2 i` and `2 i + 1`.
fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let (head, in_head) = (row / head_dim, row % head_dim);
    let (half, pair) = (in_head / (head_dim / 2), in_head % (head_dim / 2));
    head * head_dim + 2 * pair + half
}

/// The tensors of a GGUF file by their Hugging Face names, and the model's configuration.
fn read_layout(
    content: &Content,
    file: &[u8],
) -> std::result::Result<(BTreeMap<String, Entry>, serde_json::Value), String> {
    let divisors = match content.tensor_infos.get(ROPE_DIVISORS) {
        Some(info) if info.ggml_dtype == GgmlDType::F32 => {
            let bytes = &file[stored_range(ROPE_DIVISORS, info, content.tensor_data_offset, file.len())?];
            Some(slice_of_bytes::<f32>(bytes, 1, &Slice::whole(&[info.shape.elem_count()])).into_owned())
        }
        Some(info) => return Err(format!("{ROPE_DIVISORS} is stored as {:?}, not F32", info.ggml_dtype)),
        None => None,
    };
    let config = gguf_config::config(content, divisors.as_deref())?;
    let mut entries = BTreeMap::new();
    // In the order of their names, so that a broken file gives the same error each time.
    for (name, info) in content.tensor_infos.iter().collect::<BTreeMap<_, _>>() {
        let bytes = stored_range(name, info, content.tensor_data_offset, file.len())?;
        let Some(parameter) = gguf_config::parameter(name) else { continue };
        let shape = info.shape.dims().to_vec();
        let interleaved_head_dim = (config.interleaved && parameter.is_rotated).then_some(config.head_dim);
        if interleaved_head_dim.is_some_and(|d| d < 2 || d % 2 != 0 || !matrix_shape(&shape).0.is_multiple_of(d)) {
            return Err(format!("{name} of shape {shape:?} has no heads of {} rows", config.head_dim));
        }
        entries.insert(parameter.hf_name, Entry { dtype: info.ggml_dtype, shape, bytes, interleaved_head_dim });
    }
    Ok((entries, config.json))
}

/// Where the bytes of a tensor are in the file. The numbers come from the file, and may be anything.
fn stored_range(
    name: &str,
    info: &TensorInfo,
    data: u64,
    file_len: usize,
) -> std::result::Result<Range<usize>, String> {
    let block = info.ggml_dtype.block_size();
    let dims = info.shape.dims();
    // A vector is a column, so that a quantised one, which no converter writes, is refused as well.
    let cols = dims.iter().skip(1).try_fold(1usize, |n, &d| n.checked_mul(d));
    let Some(cols) = cols.filter(|cols| cols.is_multiple_of(block)) else {
        return Err(format!("rows of {name} {dims:?} are no whole number of {:?} blocks", info.ggml_dtype));
    };
    let blocks = dims.first().copied().unwrap_or(1).checked_mul(cols / block);
    let len = blocks.and_then(|n| n.checked_mul(info.ggml_dtype.type_size()));
    let start = data.checked_add(info.offset).and_then(|s| usize::try_from(s).ok());
    match start.zip(len).and_then(|(start, len)| Some(start..start.checked_add(len)?)) {
        Some(range) if range.end <= file_len => Ok(range),
        _ => Err(format!("the file ends before its tensor {name} does; download it again")),
    }
}
