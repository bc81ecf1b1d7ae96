//! One tensor of a push: its declaration, and the part of it that has come.

use std::ops::Range;
use std::sync::Arc;

use rollout_kernels::Digested;

use super::transport::SourceFile;
use super::transport::source_file::PIECE_BYTES;
use super::transport::stream::{PartialTensor, RowStream, overlaps};
use super::verify::{Digest, Verifier, verify};
use crate::error::{Error, Result};
use crate::weights::parameters::{Dtype, ParameterMapping, matrix_shape};
use crate::weights::update::{PushedRows, RowLayout, TensorBuffer, TensorEntry};

/// Takes the rows of a tensor, each once and in order, with the parameters that the tensor brings.
pub(super) type TensorSink<'a> = dyn FnMut(&ParameterMapping, PushedRows<'_>) + 'a;

/// A declared tensor that fits the model, and the part of it that has come. Either the tensor is kept
/// ([`PushedTensor::gather`], [`PushedTensor::read`]), or its rows are passed on ([`PushedTensor::stream`],
/// [`PushedTensor::stream_file`], [`PushedTensor::take_digested`]).
pub(super) struct PushedTensor {
    pub entry: TensorEntry,
    /// The parameters that the tensor brings; empty for LORA, where the adapter's configuration decides.
    pub mapping: ParameterMapping,
    /// Bytes of the tensor as transported.
    pub bytes: usize,
    /// The file that the tensor is read from; `None` if it comes in chunks.
    file: Option<Arc<SourceFile>>,
    received: Received,
}

enum Received {
    /// Nothing has come, and no memory is taken.
    Untouched,
    /// The tensor comes in pieces, and is kept.
    PartialTensor(Box<PartialTensor>),
    /// The tensor comes in pieces, and its rows are passed on.
    Streaming(Box<RowStream>),
    /// The tensor is whole, verified and kept.
    Verified { digest: Digest, buffer: TensorBuffer },
    /// The tensor was whole and verified. Its bytes were passed on, or taken.
    Taken { digest: Digest },
}

impl PushedTensor {
    pub fn new(entry: TensorEntry, mapping: ParameterMapping, bytes: usize) -> Self {
        Self { entry, mapping, bytes, file: None, received: Received::Untouched }
    }

    /// Sets the file that the tensor is read from.
    ///
    /// # Errors
    /// As for [`SourceFile::check`].
    pub fn set_file(&mut self, file: Option<Arc<SourceFile>>) -> Result<()> {
        if let Some(file) = &file {
            file.check(self.name(), self.entry.offset, self.bytes)?;
        }
        self.file = file;
        Ok(())
    }

    pub fn file(&self) -> Option<&SourceFile> {
        self.file.as_deref()
    }

    pub fn name(&self) -> &str {
        &self.entry.name
    }

    /// How the bytes of the tensor are rows of the parameters that it brings.
    pub fn layout(&self) -> RowLayout {
        let columns = match self.mapping.columns {
            0 => matrix_shape(&self.entry.shape).1,
            columns => columns,
        };
        RowLayout { dtype: self.entry.dtype, columns }
    }

    /// The dtype of the values that the bytes are; `None` for the payload of a DELTA.
    fn value_dtype(&self) -> Option<Dtype> {
        self.entry.payload.is_none().then_some(self.entry.dtype)
    }

    pub fn is_untouched(&self) -> bool {
        matches!(self.received, Received::Untouched)
    }

    /// How many bytes of the tensor have come.
    pub fn received(&self) -> usize {
        match &self.received {
            Received::Untouched => 0,
            Received::PartialTensor(gathering) => gathering.received(),
            Received::Streaming(stream) => stream.done + stream.early_bytes,
            Received::Verified { .. } | Received::Taken { .. } => self.bytes,
        }
    }

    /// Bytes of a tensor that is passed on which are kept until those in front of them have come.
    pub fn early_bytes(&self) -> u64 {
        if let Received::Streaming(stream) = &self.received { stream.early_bytes as u64 } else { 0 }
    }

    /// The digest of a tensor that is whole and verified.
    pub fn digest(&self) -> Option<Digest> {
        match &self.received {
            Received::Verified { digest, .. } | Received::Taken { digest } => Some(*digest),
            _ => None,
        }
    }

    /// The verified bytes of a tensor that is kept, unless they were taken.
    pub fn verified(&self) -> Option<&TensorBuffer> {
        if let Received::Verified { buffer, .. } = &self.received { Some(buffer) } else { None }
    }

    /// Takes the verified bytes of a tensor that is kept; `None` if they were taken before.
    pub fn take(&mut self) -> Option<TensorBuffer> {
        let Received::Verified { digest, buffer } = &mut self.received else { return None };
        let (digest, buffer) = (*digest, std::mem::take(buffer));
        self.received = Received::Taken { digest };
        Some(buffer)
    }

    /// Keeps bytes of the tensor. True if the tensor is whole and verified with them.
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes are outside the tensor, have come before, or leave too many gaps; as for
    /// [`verify`] if the tensor is whole with them.
    pub fn gather(&mut self, offset: u64, data: &[u8]) -> Result<bool> {
        let piece = self.check_inside(offset, data)?;
        if data.is_empty() {
            return Ok(false);
        }
        if self.is_untouched() {
            self.received = Received::PartialTensor(Box::new(PartialTensor::new(self.bytes, self.value_dtype())?));
        }
        let Received::PartialTensor(gathering) = &mut self.received else { return Err(overlaps(self.name(), &piece)) };
        if !gathering.take(&self.entry.name, piece, data)? {
            return Ok(false);
        }
        let (verifier, buffer) = gathering.finish();
        self.received = Received::Verified { digest: verifier.verify(&self.entry)?, buffer };
        Ok(true)
    }

    /// Reads the whole tensor from its file, verifies and keeps it.
    ///
    /// # Errors
    /// `DataLoss` if the file has become too short; as for [`verify`].
    pub fn read(&mut self) -> Result<()> {
        let file = self.file.as_ref().expect("the tensor comes from a file");
        let computed = file.compute()?;
        let is_read = computed.is_none();
        let mut buffer = computed.map_or_else(|| TensorBuffer::zeroed(self.bytes), Ok)?;
        let mut verifier = Verifier::new(self.value_dtype());
        let mut done = 0;
        for piece in buffer.chunks_mut(PIECE_BYTES) {
            if is_read {
                file.read(self.name(), self.entry.offset + done as u64, piece)?;
            }
            verifier.hash(piece);
            verifier.check_values(done / self.entry.dtype.size(), piece);
            done += piece.len();
        }
        self.received = Received::Verified { digest: verifier.verify(&self.entry)?, buffer };
        Ok(())
    }

    /// Passes the rows that are whole with these bytes on to `sink`, and verifies the tensor with its last bytes. Bytes
    /// that come before those in front of them are kept, if they are at most `most_early`.
    ///
    /// # Errors
    /// As for [`PushedTensor::gather`]; `ResourceExhausted` if the bytes come too early and are more than `most_early`.
    pub fn stream(&mut self, offset: u64, data: &[u8], most_early: u64, sink: &mut TensorSink<'_>) -> Result<()> {
        let piece = self.check_inside(offset, data)?;
        if data.is_empty() {
            return Ok(());
        }
        if self.is_untouched() {
            self.received = Received::Streaming(Box::new(RowStream::new(self.layout())));
        }
        let Received::Streaming(stream) = &mut self.received else { return Err(overlaps(self.name(), &piece)) };
        let mapping = &self.mapping;
        stream.take(&self.entry.name, piece, data, most_early, &mut |rows| sink(mapping, rows))?;
        if stream.done == self.bytes {
            self.received = Received::Taken { digest: stream.verifier.verify(&self.entry)? };
        }
        Ok(())
    }

    /// Passes the rows of the whole tensor from its file on to `sink`, and verifies it. `scratch` is memory for the
    /// bytes of a file that is not mapped.
    ///
    /// # Errors
    /// As for [`PushedTensor::read`].
    pub fn stream_file(&mut self, scratch: &mut Vec<u8>, sink: &mut TensorSink<'_>) -> Result<()> {
        let file = self.file.as_ref().expect("the tensor comes from a file");
        let mut stream = RowStream::new(self.layout());
        let most = file.read_bytes(stream.piece_rows() * self.layout().row_bytes());
        let computed = file.compute()?;
        while stream.done < self.bytes {
            let (start, bytes) = (stream.done, most.min(self.bytes - stream.done));
            let mut take = |bytes: &[u8]| stream.take_next(bytes, &mut |rows| sink(&self.mapping, rows));
            match &computed {
                Some(computed) => take(&computed[start..start + bytes]),
                None => file.with(self.name(), (self.entry.offset + start as u64, bytes), scratch, take)?,
            }
        }
        self.received = Received::Taken { digest: stream.verifier.verify(&self.entry)? };
        Ok(())
    }

    /// Notes that the whole tensor was passed on and digested where it lies.
    ///
    /// # Errors
    /// As for [`verify`].
    pub fn take_digested(&mut self, digested: &Digested) -> Result<()> {
        self.received = Received::Taken { digest: verify(&self.entry, digested)? };
        Ok(())
    }

    /// The bytes of the tensor that `data` is, if it is inside.
    fn check_inside(&self, offset: u64, data: &[u8]) -> Result<Range<usize>> {
        let (name, bytes) = (self.name(), self.bytes);
        let end = offset.saturating_add(data.len() as u64);
        if end > bytes as u64 {
            let what = format!("tensor {name:?}: bytes {offset}..{end} are outside its {bytes} bytes");
            return Err(Error::invalid("chunk", what));
        }
        // No truncation: both are at most the tensor's bytes.
        Ok(offset as usize..end as usize)
    }
}
