//! GGUF files: mapped, de-quantised tensor by tensor, seen under Hugging Face names and in Hugging Face row order.

use std::collections::{BTreeMap, HashMap};
use std::io::Cursor;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use candle_core::quantized::GgmlDType;
use candle_core::quantized::ggml_file::qtensor_from_ggml;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};
use candle_core::{Device, Tensor};
use half::{bf16, f16};

use super::gguf_config;
use super::mapped::MappedFile;
use super::shard::{Slice, matrix_shape};
use super::tensor::{Element, TensorData, select, slice_of_bytes};
use crate::error::{Error, Result};

/// Divisors of the rotary frequencies: how GGUF files carry Llama 3's rope scaling.
const ROPE_DIVISORS: &str = "rope_freqs.weight";

/// De-quantised at a time: fits the second-level cache.
const CHUNK_ELEMENTS: usize = 64 * 1024;

/// Metadata of a GGUF file by key, for example `tokenizer.ggml.tokens`.
pub type GgufMetadata = HashMap<String, Value>;

#[derive(Debug)]
struct Entry {
    dtype: GgmlDType,
    shape: Vec<usize>,
    /// In the file.
    bytes: Range<usize>,
    /// Rows of one head if the file has the rows of each head in the order of interleaved rotary embedding.
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
    /// # Errors
    /// `Config`, naming the file: not GGUF, truncated, one part of several, or an unsupported architecture.
    pub fn open(path: &Path) -> Result<Self> {
        let file = MappedFile::open(path)?;
        let fail = |what: String| Error::Config(format!("{}: {what}", path.display()));
        let content = Content::read(&mut Cursor::new(file.bytes()))
            .map_err(|e| fail(format!("not a whole GGUF file ({e}); download it again")))?;
        let (entries, config) = read_layout(&content, file.bytes()).map_err(fail)?;
        Ok(Self { file, metadata: Arc::new(content.metadata), config, entries })
    }

    /// What `config.json` would say about this model.
    pub fn config(&self) -> &serde_json::Value {
        &self.config
    }

    /// The file's metadata, which has the tokenizer and the chat template.
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

    /// `slice` must be inside the tensor.
    pub(super) fn read(&self, name: &str, slice: &Slice) -> Option<Result<TensorData<'_>>> {
        let entry = self.entries.get(name)?;
        let bytes = &self.file.bytes()[entry.bytes.clone()];
        Some(match entry.dtype {
            GgmlDType::F32 => Ok(entry.floats::<f32>(bytes, slice)),
            GgmlDType::F16 => Ok(entry.floats::<f16>(bytes, slice)),
            GgmlDType::BF16 => Ok(entry.floats::<bf16>(bytes, slice)),
            _ => entry
                .dequantized(bytes, slice)
                .map_err(|e| Error::Config(format!("{}: cannot de-quantise {name}: {e}", self.file.path().display()))),
        })
    }

    pub(super) fn release(&self, name: &str) {
        if let Some(entry) = self.entries.get(name) {
            self.file.release(entry.bytes.clone());
        }
    }
}

impl Entry {
    fn floats<'a, T: Element>(&self, bytes: &'a [u8], slice: &Slice) -> TensorData<'a> {
        let (_, cols) = matrix_shape(&self.shape);
        let Some(head_dim) = self.interleaved_head_dim else { return T::data(slice_of_bytes(bytes, cols, slice)) };
        let heads = whole_heads(&slice.rows, head_dim);
        let matrix = slice_of_bytes::<T>(bytes, cols, &Slice { rows: heads.clone(), cols: 0..cols });
        let rows = slice.rows.clone().map(|row| interleaved_row(row, head_dim) - heads.start);
        T::data(select(&matrix, cols, rows, slice).into())
    }

    /// De-quantises the rows of the slice (of whole heads, if interleaved) and no others, few at a time: beside the
    /// result there is never more than [`CHUNK_ELEMENTS`], or one row or head.
    fn dequantized(&self, bytes: &[u8], slice: &Slice) -> candle_core::Result<TensorData<'static>> {
        let (_, cols) = matrix_shape(&self.shape);
        let head_dim = self.interleaved_head_dim.unwrap_or(1);
        let chunk_rows = (CHUNK_ELEMENTS / cols.max(1) / head_dim).max(1) * head_dim;
        let mut values = Vec::with_capacity(slice.len());
        let mut rows = slice.rows.clone();
        while !rows.is_empty() {
            let wanted = rows.start..rows.end.min(rows.start / head_dim * head_dim + chunk_rows);
            let stored = whole_heads(&wanted, head_dim);
            let tensor = self.dequantized_rows(bytes, &stored, cols)?;
            let (storage, _) = tensor.storage_and_layout();
            let candle_core::Storage::Cpu(storage) = &*storage else { unreachable!("made on the CPU") };
            for row in wanted.clone() {
                let row = self.interleaved_head_dim.map_or(row, |d| interleaved_row(row, d)) - stored.start;
                values.extend_from_slice(&storage.as_slice::<f32>()?[row * cols..(row + 1) * cols][slice.cols.clone()]);
            }
            rows.start = wanted.end;
        }
        Ok(TensorData::F32(values.into()))
    }

    /// `[rows, cols]`, contiguous.
    fn dequantized_rows(&self, bytes: &[u8], rows: &Range<usize>, cols: usize) -> candle_core::Result<Tensor> {
        let row_bytes = cols / self.dtype.block_size() * self.dtype.type_size();
        let bytes = &bytes[rows.start * row_bytes..rows.end * row_bytes];
        // candle casts the bytes to blocks of half-precision scales and bytes.
        if bytes.as_ptr().align_offset(align_of::<f16>()) != 0 {
            candle_core::bail!("the tensor starts at an odd address");
        }
        qtensor_from_ggml(self.dtype, bytes, vec![rows.len(), cols], &Device::Cpu)?.dequantize(&Device::Cpu)
    }
}

/// Rows of all heads that `rows` touches.
fn whole_heads(rows: &Range<usize>, head_dim: usize) -> Range<usize> {
    rows.start / head_dim * head_dim..rows.end.div_ceil(head_dim) * head_dim
}

/// Where llama.cpp's converter has put row `row` of a query or key projection: within each head, the two halves that
/// Hugging Face's rotary embedding pairs (`i` with `i + head_dim / 2`) are interleaved (`2 i` with `2 i + 1`).
fn interleaved_row(row: usize, head_dim: usize) -> usize {
    let (head, in_head) = (row / head_dim, row % head_dim);
    let (half, pair) = (in_head / (head_dim / 2), in_head % (head_dim / 2));
    head * head_dim + 2 * pair + half
}

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
    // In order of name, so that a broken file gives the same error each time.
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

/// Bytes of a tensor in the file; its numbers come from the file and may be anything.
fn stored_range(
    name: &str,
    info: &TensorInfo,
    data: u64,
    file_len: usize,
) -> std::result::Result<Range<usize>, String> {
    let block = info.ggml_dtype.block_size();
    let dims = info.shape.dims();
    if !dims.last().copied().unwrap_or(1).is_multiple_of(block) {
        return Err(format!("rows of {name} {dims:?} are no whole number of {:?} blocks", info.ggml_dtype));
    }
    let elements = dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let len = elements.and_then(|n| (n / block).checked_mul(info.ggml_dtype.type_size()));
    let start = data.checked_add(info.offset).and_then(|s| usize::try_from(s).ok());
    match start.zip(len).and_then(|(start, len)| Some(start..start.checked_add(len)?)) {
        Some(range) if range.end <= file_len => Ok(range),
        _ => Err(format!("the file ends before its tensor {name} does; download it again")),
    }
}
