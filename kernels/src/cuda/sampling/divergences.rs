//! The divergences of pairs of rows of logits.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::super::context::Context;
use super::super::download::DownloadPool;
use super::super::launch::{Launch, grid};
use super::super::module::Module;
use super::super::staging::Staging;
use super::super::tensor::TensorRows;
use super::on_device::{BLOCKS_AT_ONCE, MAX_BLOCKS, THREADS, word};
use crate::cpu::logits::VOCAB_BLOCK;
use crate::deferred::Deferred;
use crate::divergence::{Divergences, LogitsPair};

/// Most pairs of one launch, which bounds the memory that it takes.
const PAIRS_AT_ONCE: usize = 32;
/// Most bytes of the device that a launch takes: maxima and sums of both rows of each pair, and the answers.
pub(in crate::cuda) const DIVERGENCE_BYTES: usize = PAIRS_AT_ONCE * 4 * (MAX_BLOCKS + 512) * size_of::<f32>();

/// The kernels.
pub(super) struct DivergenceKernels {
    context: Arc<Context>,
    summarise: CudaFunction,
    divergences: CudaFunction,
    answers: DownloadPool<f64>,
}

impl DivergenceKernels {
    /// Takes the kernels from the module that `cu/sampling.cu` is.
    pub fn load(context: &Arc<Context>, module: &Module) -> Result<Self> {
        Ok(Self {
            context: context.clone(),
            summarise: module.function("summarise_logits")?,
            divergences: module.function("divergences")?,
            answers: DownloadPool::new(&context.stream),
        })
    }

    /// Starts to compute the divergences of these pairs of rows.
    pub fn start<'a>(
        &'a self,
        staging: &Staging,
        logits: TensorRows,
        pairs: &[LogitsPair],
    ) -> Result<Deferred<'a, Vec<Divergences>>> {
        let blocks = logits.width.div_ceil(VOCAB_BLOCK);
        assert!(blocks <= MAX_BLOCKS, "a vocabulary of {}", logits.width);
        let mut landing = self.answers.take(2 * pairs.len())?;
        let places = landing.places(2 * pairs.len()).flat_map(|place| place.chunks_mut(2 * PAIRS_AT_ONCE));
        for (pairs, to) in pairs.chunks(PAIRS_AT_ONCE).zip(places) {
            // Rows as `cu/sampling.cu` has them: row, index of its scale, number of its scales.
            let rows = pairs.iter().flat_map(|pair| [pair.policy, pair.reference]).zip(0..);
            let rows: Vec<u32> = rows.flat_map(|(row, index)| [row as u32, index, 1]).collect();
            let scales = pairs.iter().flat_map(|pair| [pair.scale().to_bits(); 2]);
            let words: Vec<u32> = rows.iter().copied().chain(scales).collect();
            let asked = self.context.upload(staging, &words)?;
            let (count, scales) = (2 * pairs.len(), word(asked.pointer, rows.len()));
            let bytes = count * (size_of::<f64>() + 2 * blocks * size_of::<f32>());
            let memory = self.context.scratch.allocate_for_step(bytes)?;
            let (answers, maxima) = (memory.pointer, memory.pointer + (count * size_of::<f64>()) as u64);
            let sums = word(maxima, count * blocks);
            let mut launch = Launch::of(&self.context.stream, &self.summarise);
            launch.pointer(maxima).pointer(sums).rows(logits).int(logits.width);
            launch.pointer(asked.pointer).pointer(scales);
            // SAFETY: the parameters are those of the kernel, and the memory has their sizes.
            unsafe { launch.start(grid((blocks.div_ceil(BLOCKS_AT_ONCE) as u32, count as u32, 1), THREADS, 0))? };
            let mut launch = Launch::of(&self.context.stream, &self.divergences);
            launch.pointer(answers).pointer(asked.pointer).pointer(scales).pointer(maxima).pointer(sums);
            launch.rows(logits).int(logits.width);
            let shared = (2 * blocks * size_of::<f32>()) as u32;
            // SAFETY: as above.
            unsafe { launch.start(grid((pairs.len() as u32, 1, 1), THREADS, shared))? };
            // SAFETY: the answers are of this length, and read when they have been copied.
            unsafe { self.answers.copy(answers, to)? };
        }
        landing.record()?;
        Ok(Deferred::new(move || {
            let sums = landing.read()?.as_chunks::<2>().0;
            Ok(sums.iter().map(|[kl, reverse_kl]| Divergences::new(*kl, *reverse_kl)).collect())
        }))
    }

    /// Gives the memory that is reused back.
    pub fn release(&self) {
        self.answers.release();
    }
}
