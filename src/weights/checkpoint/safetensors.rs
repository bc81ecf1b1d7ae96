//! The safetensors of a Hugging Face directory: one `model.safetensors`, or shards with their index. The files are
//! mapped.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::Path;

use safetensors::SafeTensors;

use super::digest::digest_of_rows;
use super::mapped::MappedFile;
use super::{is_there, unreadable};
use crate::error::{Error, Result};
use crate::weights::parameters::{
    Dtype, HeadCounts, Slice, TensorData, matrix_shape, stored_parameters, tensor_of_bytes,
};

/// The file of a model that is not sharded.
pub(super) const SINGLE: &str = "model.safetensors";
/// The index of a model's shards.
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// The files in which older models have their weights or the index of these.
const PICKLED: [&str; 2] = ["pytorch_model.bin", "pytorch_model.bin.index.json"];

/// A tensor in one of the files.
#[derive(Clone, Debug)]
struct Entry {
    /// The index of the file.
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Where the tensor's bytes are in the file.
    bytes: Range<usize>,
}

/// Mapped safetensors files, and where each tensor is in them.
#[derive(Debug)]
pub struct SafetensorsCheckpoint {
    files: Vec<MappedFile>,
    entries: BTreeMap<String, Entry>,
}

/// The content of `model.safetensors.index.json`.
#[derive(serde::Deserialize)]
struct Index {
    /// The file name of a tensor's shard, by the tensor's name.
    weight_map: BTreeMap<String, String>,
}

impl Entry {
    /// The parameters of a tensor of this name: one, or several that are stored one below the other.
    fn parameters(self, name: &str, counts: HeadCounts) -> Vec<(String, Self)> {
        let mut parts = stored_parameters(name, counts);
        if parts.len() == 1 {
            return vec![(parts.remove(0).0, self)];
        }
        let rows = self.shape.first().copied().unwrap_or(0);
        let shares: usize = parts.iter().map(|(_, share)| share).sum();
        if shares == 0 || !rows.is_multiple_of(shares) {
            return vec![(name.to_string(), self)];
        }
        let mut end = self.bytes.start;
        let part = |(name, share): (String, usize)| {
            let (start, shape) = (end, [&[rows / shares * share], &self.shape[1..]].concat());
            end += self.bytes.len() / shares * share;
            (name, Self { shape, bytes: start..end, ..self.clone() })
        };
        parts.into_iter().map(part).collect()
    }
}

impl SafetensorsCheckpoint {
    /// Opens `model.safetensors`, or all shards that `model.safetensors.index.json` names. The tensors have the names
    /// that they have in the files.
    ///
    /// # Errors
    /// `Config`, naming the file: neither of the two is there, a bad index, a missing or truncated shard, an element
    /// type that is not a float of 16 or 32 bits.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut checkpoint = Self { files: Vec::new(), entries: BTreeMap::new() };
        if is_there(&dir.join(SINGLE))? {
            checkpoint.add_file(&dir.join(SINGLE))?;
            return Ok(checkpoint);
        }
        let path = dir.join(INDEX);
        if !is_there(&path)? {
            return Err(no_weights(dir));
        }
        let index = read_index(&path)?;
        for shard in index.weight_map.values().collect::<BTreeSet<_>>() {
            let shard = dir.join(shard);
            if !is_there(&shard)? {
                let (shard, index) = (shard.display(), path.display());
                return Err(Error::Config(format!(
                    "shard {shard} is missing, but {index} names it; download it again"
                )));
            }
            checkpoint.add_file(&shard)?;
        }
        for (name, shard) in &index.weight_map {
            if !checkpoint.entries.contains_key(name) {
                return Err(Error::Config(format!("{} says that {shard} has {name}; it has not", path.display())));
            }
        }
        Ok(checkpoint)
    }

    /// The tensors by the names of the model's parameters, fused ones divided into their projections.
    ///
    /// # Errors
    /// `Config` if a parameter is there under two names.
    pub(super) fn of_parameters(self, counts: HeadCounts) -> Result<Self> {
        let mut entries = BTreeMap::new();
        for (name, entry) in self.entries {
            for (parameter, entry) in entry.parameters(&name, counts) {
                if entries.insert(parameter, entry).is_some() {
                    return Err(Error::Config(format!("the checkpoint has {name} and the same under another name")));
                }
            }
        }
        Ok(Self { entries, ..self })
    }

    fn add_file(&mut self, path: &Path) -> Result<()> {
        let fail = |what: String| Error::Config(format!("{}: {what}", path.display()));
        let file = MappedFile::open(path)?;
        let (header, metadata) = file
            .read(0..file.bytes(), |bytes| SafeTensors::read_metadata(bytes))?
            .map_err(|e| fail(format!("not a whole safetensors file ({e}); download it again")))?;
        let data_start = size_of::<u64>() + header;
        for (name, info) in metadata.tensors() {
            let dtype = match info.dtype {
                safetensors::Dtype::F32 => Dtype::F32,
                safetensors::Dtype::F16 => Dtype::F16,
                safetensors::Dtype::BF16 => Dtype::Bf16,
                other => {
                    return Err(fail(format!(
                        "{name} is stored as {other:?}; supported are F32, F16 and BF16 (quantised models: use GGUF)"
                    )));
                }
            };
            let (start, end) = info.data_offsets;
            let bytes = data_start + start..data_start + end;
            let entry = Entry { file: self.files.len(), dtype, shape: info.shape.clone(), bytes };
            if self.entries.insert(name.clone(), entry).is_some() {
                return Err(fail(format!("{name} is there twice, perhaps in another shard")));
            }
        }
        self.files.push(file);
        Ok(())
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

    /// Calls `use_values` with the values of a slice, which must be inside the tensor.
    pub(super) fn read<T>(
        &self,
        name: &str,
        slice: &Slice,
        use_values: impl FnOnce(TensorData<'_>) -> T,
    ) -> Option<Result<T>> {
        let entry = self.entries.get(name)?;
        let (_, cols) = matrix_shape(&entry.shape);
        let use_bytes = |bytes: &[u8]| use_values(tensor_of_bytes(entry.dtype, bytes, cols, slice));
        Some(self.files[entry.file].read(entry.bytes.clone(), use_bytes))
    }

    /// The digest of some rows, which must be inside the tensor: [`digest_of_rows`].
    pub(super) fn digest(&self, name: &str, rows: Range<usize>) -> Option<Result<u64>> {
        let entry = self.entries.get(name)?;
        let (_, cols) = matrix_shape(&entry.shape);
        let row_bytes = cols * entry.dtype.size();
        let part = entry.bytes.start + rows.start * row_bytes..entry.bytes.start + rows.end * row_bytes;
        Some(self.files[entry.file].read(part, |bytes| digest_of_rows(bytes, row_bytes, rows)))
    }

    /// The file that a tensor is in.
    pub(super) fn file(&self, name: &str) -> Option<&MappedFile> {
        self.entries.get(name).map(|entry| &self.files[entry.file])
    }

    pub(super) fn files(&self) -> &[MappedFile] {
        &self.files
    }

    /// The same tensors in the files that have the paths now.
    ///
    /// # Errors
    /// As for [`MappedFile::reopened`].
    pub(super) fn reopened(&self) -> Result<Self> {
        let files = self.files.iter().map(MappedFile::reopened).collect::<Result<_>>()?;
        Ok(Self { files, entries: self.entries.clone() })
    }

    pub(super) fn release(&self, name: &str) {
        if let Some(entry) = self.entries.get(name) {
            self.files[entry.file].release(entry.bytes.clone());
        }
    }
}

/// Whether the weights of a model with these files are in `.bin` files only.
pub(super) fn is_pickled(has: impl Fn(&str) -> bool) -> bool {
    PICKLED.into_iter().any(&has) && !has(SINGLE) && !has(INDEX)
}

/// The error for a directory without safetensors.
fn no_weights(dir: &Path) -> Error {
    let is_pickled = is_pickled(|file| dir.join(file).exists());
    let dir = dir.display();
    Error::Config(match is_pickled {
        true => format!(
            "{dir} has its weights in pytorch_model*.bin only, which are not supported; convert them to safetensors: \
             python3 -c 'from transformers import AutoModelForCausalLM as Model; \
             Model.from_pretrained(\"{dir}\", torch_dtype=\"auto\", trust_remote_code=True)\
             .save_pretrained(\"{dir}\", safe_serialization=True)'"
        ),
        false => {
            format!("{dir} has neither {SINGLE} nor {INDEX}; give a directory with safetensors weights or a .gguf file")
        }
    })
}

fn read_index(path: &Path) -> Result<Index> {
    let fail = |e: String| Error::Config(format!("{}: {e}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| unreadable(path, &e))?;
    let index: Index = serde_json::from_str(&text).map_err(|e| fail(format!("not a safetensors index: {e}")))?;
    for shard in index.weight_map.values() {
        // A name with a path in it could point out of the model's directory.
        if Path::new(shard).file_name() != Some(shard.as_ref()) {
            return Err(fail(format!("shard {shard:?} is not a plain file name")));
        }
    }
    Ok(index)
}
