//! One rank's work: the forward pass of a step, and on the first rank the answers to its questions.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::Tensor;
use rollout_kernels::cpu::Isa;
use rollout_kernels::{KvCache, Ops, with_f32};
use tracing::trace_span;

use super::adapters::ResidentAdapters;
use super::input::FlatBatch;
use super::weights::RankWeights;
use super::{Memory, WeightOrder, sampler};
use crate::comm::Communicator;
use crate::error::{Result, panic_message};
use crate::model::{Additions, LOGITS_ROWS, Workspace, WorkspaceShape};
use crate::types::{LogitsRow, StepOutput, StepPlan, TokenLogprobs};
use crate::weights::{ParamSpec, ShadowShard};

/// A rank: its operators, weights, KV cache, buffers and its end of the communication.
pub struct ModelRunner {
    ops: Ops,
    comm: Box<dyn Communicator>,
    weights: RankWeights,
    adapters: ResidentAdapters,
    kv: Vec<KvCache>,
    kv_is_released: bool,
    workspace_shape: WorkspaceShape,
    /// None while it is released.
    workspace: Option<Workspace>,
    block_size: usize,
    batch: FlatBatch,
    /// One for each thread.
    answerers: Vec<Answerer>,
}

impl ModelRunner {
    pub fn new(
        ops: Ops,
        comm: Box<dyn Communicator>,
        weights: RankWeights,
        kv: Vec<KvCache>,
        workspace_shape: WorkspaceShape,
        block_size: usize,
    ) -> Result<Self> {
        Ok(Self {
            ops,
            comm,
            weights,
            adapters: ResidentAdapters::new(workspace_shape.build),
            kv,
            kv_is_released: false,
            workspace: Some(Workspace::new(&workspace_shape)?),
            workspace_shape,
            block_size,
            batch: FlatBatch::default(),
            answerers: Vec::new(),
        })
    }

    /// Runs `plan`. Every rank computes; the first one's output answers the tasks, the others' is empty.
    ///
    /// # Panics
    /// If memory that it needs is released.
    pub fn run(&mut self, plan: &StepPlan) -> Result<StepOutput> {
        assert!(!self.kv_is_released, "a step without a KV cache");
        let _rank = match plan.is_decode() {
            true => trace_span!("decode on rank", rank = self.comm.rank()).entered(),
            false => trace_span!("prefill on rank", rank = self.comm.rank()).entered(),
        };
        let workspace = self.workspace.as_ref().expect("a step has its workspace");
        let model = self.weights.decoder();
        for cache in &mut self.kv {
            self.ops.copy_blocks(cache, &plan.copies);
        }
        let prepare = trace_span!("prepare").entered();
        self.batch.fill(plan, self.block_size);
        let sequences = FlatBatch::attention(plan);
        let adapters = self.adapters.of_rows(self.batch.adapters.iter().copied());
        let input = self.batch.input(&sequences, adapters.as_ref().map(|a| a as &dyn Additions));
        drop(prepare);
        model.forward(&self.ops, &*self.comm, &input, &mut self.kv, workspace)?;
        let rows: Vec<&LogitsRow> = plan.sequences.iter().flat_map(|s| &s.logits).collect();
        let mut output = StepOutput { tokens: Vec::with_capacity(plan.tasks().count()), failed: Vec::new() };
        for (rows_at_once, rows) in self.batch.logits_rows.chunks(LOGITS_ROWS).zip(rows.chunks(LOGITS_ROWS)) {
            let adapters = self.adapters.of_rows(rows_at_once.iter().map(|&row| self.batch.adapters[row as usize]));
            let additions = adapters.as_ref().map(|a| a as &dyn Additions);
            let logits = model.logits(&self.ops, &*self.comm, rows_at_once, workspace, additions)?;
            if self.comm.rank() == 0 {
                answer(&self.ops, &mut self.answerers, &logits, rows, &mut output)?;
            }
        }
        Ok(output)
    }

    /// See [`RankWeights::check`].
    pub fn check(&mut self, order: &WeightOrder) -> Result<()> {
        self.weights.check(&self.ops, order)
    }

    /// See [`RankWeights::reopen`].
    pub fn reopen(&mut self) -> Result<()> {
        self.weights.reopen()
    }

    /// Changes the weights or the resident adapters.
    pub fn write(&mut self, order: &WeightOrder) -> Result<()> {
        match order {
            WeightOrder::AddAdapter { generation, adapter } => {
                self.adapters.add(self.weights.shapes(), *generation, adapter)
            }
            WeightOrder::RemoveAdapter { generation } => {
                self.adapters.remove(*generation);
                Ok(())
            }
            _ => self.weights.write(&self.ops, &*self.comm, order),
        }
    }

    /// See [`RankWeights::shadow_shards`].
    pub fn shadow_shards(&mut self) -> Result<Vec<ShadowShard>> {
        self.weights.shadow_shards()
    }

    /// See [`RankWeights::exchange`].
    pub fn exchange(&mut self, shards: Vec<ShadowShard>) -> Result<Vec<ShadowShard>> {
        self.weights.exchange(shards)
    }

    /// This rank's part of rows of a parameter; see [`RankWeights::read`].
    pub fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>> {
        self.weights.read(spec, rows)
    }

    /// Gives memory back to the system; the bytes of weights that stay, as [`RankWeights::release`] says.
    pub fn release(&mut self, memory: Memory) -> Result<u64> {
        match memory {
            Memory::KvCache => {
                self.kv.iter_mut().for_each(KvCache::release);
                self.kv_is_released = true;
            }
            Memory::Workspace => {
                self.workspace = None;
                self.batch = FlatBatch::default();
                self.answerers = Vec::new();
                self.adapters.release_buffers();
                self.ops.release();
            }
            Memory::Weights => return self.weights.release(true),
            Memory::WeightsAndBase => return self.weights.release(false),
        }
        Ok(0)
    }

    /// Takes released memory again. Pages of the KV cache and of weights come from the system as they are written.
    pub fn restore(&mut self, memory: Memory) -> Result<()> {
        match memory {
            Memory::KvCache => self.kv_is_released = false,
            Memory::Workspace => {
                self.workspace = Some(Workspace::new(&self.workspace_shape)?);
                self.adapters.take_buffers(self.weights.shapes())?;
            }
            Memory::Weights | Memory::WeightsAndBase => {}
        }
        Ok(())
    }
}

/// One thread's part of the answers to rows of logits.
struct Answerer {
    rows: Range<usize>,
    scratch: sampler::Scratch,
    output: StepOutput,
}

impl Answerer {
    fn new(isa: Isa) -> Self {
        Self { rows: 0..0, scratch: sampler::Scratch::new(isa), output: StepOutput::default() }
    }

    /// Answers the tasks of a row. A panic costs the row's request and nothing else: the answers only read the logits,
    /// and the scratch, which may be half written, is made anew.
    fn answer(&mut self, logits: &[f32], row: &LogitsRow) {
        let Self { scratch, output, .. } = self;
        let answered = output.tokens.len();
        let result = catch_unwind(AssertUnwindSafe(|| {
            sampler::answer_row(logits, &row.tasks, scratch, &mut output.tokens);
        }));
        if let Err(panic) = result {
            output.tokens.resize(answered + row.tasks.len(), TokenLogprobs::NONE);
            let request = row.tasks[0].sample.group.request;
            output.failed.push((request, panic_message(&*panic)));
            scratch.reset();
        }
    }
}

/// Answers the tasks of each row of `logits` (`[rows, vocabulary]`) in order at the end of `out`, rows shared evenly
/// among the threads.
fn answer(
    ops: &Ops,
    answerers: &mut Vec<Answerer>,
    logits: &Tensor,
    rows: &[&LogitsRow],
    out: &mut StepOutput,
) -> Result<()> {
    let (vocab, threads) = (logits.dim(1)?, ops.threads());
    let _sampling = trace_span!("sampling").entered();
    answerers.resize_with(threads, || Answerer::new(ops.isa()));
    for (i, answerer) in answerers.iter_mut().enumerate() {
        answerer.rows = rows.len() * i / threads..rows.len() * (i + 1) / threads;
    }
    with_f32(logits, |logits| {
        ops.for_each(answerers, |answerer| {
            let own = answerer.rows.clone();
            let logits = logits[own.start * vocab..].chunks_exact(vocab);
            logits.zip(&rows[own]).for_each(|(logits, row)| answerer.answer(logits, row));
        });
    })?;
    for answerer in answerers {
        out.tokens.append(&mut answerer.output.tokens);
        out.failed.append(&mut answerer.output.failed);
    }
    Ok(())
}
