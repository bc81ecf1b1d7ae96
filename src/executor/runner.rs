//! One rank's work: the forward pass of a step, and on the first rank the answers to its questions.

use candle_core::Tensor;
use rollout_kernels::{KvCache, Ops, with_f32};

use super::input::FlatBatch;
use super::sampler;
use crate::comm::Communicator;
use crate::error::Result;
use crate::model::{Decoder, LOGITS_ROWS, Workspace};
use crate::types::{LogitsTask, StepOutput, StepPlan, TokenLogprobs};

/// A rank: its operators, weights, KV cache, buffers and its end of the communication.
pub struct ModelRunner {
    ops: Ops,
    comm: Box<dyn Communicator>,
    model: Decoder,
    kv: Vec<KvCache>,
    workspace: Workspace,
    block_size: usize,
    batch: FlatBatch,
    scratch: Vec<sampler::Scratch>,
}

impl ModelRunner {
    pub fn new(
        ops: Ops,
        comm: Box<dyn Communicator>,
        model: Decoder,
        kv: Vec<KvCache>,
        workspace: Workspace,
        block_size: usize,
    ) -> Self {
        Self { ops, comm, model, kv, workspace, block_size, batch: FlatBatch::default(), scratch: Vec::new() }
    }

    /// Runs `plan`. Every rank computes; the first one's output answers the tasks, the others' is empty.
    pub fn run(&mut self, plan: &StepPlan) -> Result<StepOutput> {
        for cache in &mut self.kv {
            self.ops.copy_blocks(cache, &plan.copies);
        }
        self.batch.fill(plan, self.block_size);
        let sequences = FlatBatch::attention(plan);
        let input = self.batch.input(&sequences);
        self.model.forward(&self.ops, &*self.comm, &input, &mut self.kv, &self.workspace)?;
        let rows: Vec<&[LogitsTask]> =
            plan.sequences.iter().flat_map(|s| &s.logits).map(|row| row.tasks.as_slice()).collect();
        let mut output = StepOutput::default();
        for (rows_at_once, tasks) in self.batch.logits_rows.chunks(LOGITS_ROWS).zip(rows.chunks(LOGITS_ROWS)) {
            let logits = self.model.logits(&self.ops, &*self.comm, rows_at_once, &self.workspace)?;
            if self.comm.rank() == 0 {
                answer(&self.ops, &mut self.scratch, &logits, tasks, &mut output.tokens)?;
            }
        }
        Ok(output)
    }
}

/// What one thread answers, and with what.
struct Share<'a> {
    first_row: usize,
    tasks: &'a [&'a [LogitsTask]],
    scratch: &'a mut sampler::Scratch,
    answers: Vec<TokenLogprobs>,
}

/// Answers the tasks of each row of `logits` (`[rows, vocabulary]`) in order at the end of `out`, rows shared evenly
/// among the threads.
fn answer(
    ops: &Ops,
    scratch: &mut Vec<sampler::Scratch>,
    logits: &Tensor,
    tasks: &[&[LogitsTask]],
    out: &mut Vec<TokenLogprobs>,
) -> Result<()> {
    let vocab = logits.dim(1)?;
    let per_share = tasks.len().div_ceil(ops.threads());
    scratch.resize_with(ops.threads(), Default::default);
    let mut shares: Vec<_> = tasks
        .chunks(per_share)
        .zip(scratch)
        .enumerate()
        .map(|(i, (tasks, scratch))| Share { first_row: i * per_share, tasks, scratch, answers: Vec::new() })
        .collect();
    with_f32(logits, |logits| {
        ops.for_each(&mut shares, |share| {
            let rows = logits[share.first_row * vocab..].chunks_exact(vocab);
            for (row, tasks) in rows.zip(share.tasks) {
                sampler::answer_row(row, tasks, share.scratch, &mut share.answers);
            }
        });
    })?;
    out.extend(shares.into_iter().flat_map(|share| share.answers));
    Ok(())
}
