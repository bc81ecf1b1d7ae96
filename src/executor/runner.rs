//! One rank at work: the forward pass of a step, and on rank 0 the sampling of its tasks.

use std::ops::Range;

use rollout_kernels::{KvCache, Ops, Sampled, SampledTokens};
use tracing::trace_span;

use super::adapters::ResidentAdapters;
use super::input::{FlatBatch, PlanView};
use super::weights::RankWeights;
use super::{Memory, WeightOrder};
use crate::comm::Communicator;
use crate::error::{Result, panic_message};
use crate::model::{Additions, Input, LOGITS_ROWS, Workspace, WorkspaceShape};
use crate::types::{LogitsRow, StepOutput, StepPlan};
use crate::weights::{ParamSpec, ShadowShard};

/// One rank of the model: operators, weights, KV cache, workspace, and its end of the communicator.
pub struct ModelRunner {
    ops: Ops,
    comm: Box<dyn Communicator>,
    weights: RankWeights,
    adapters: ResidentAdapters,
    kv: Vec<KvCache>,
    workspace_shape: WorkspaceShape,
    /// `None` while it is released.
    workspace: Option<Workspace>,
    block_size: usize,
    batch: FlatBatch,
}

impl ModelRunner {
    /// # Errors
    /// `ResourceExhausted` if the device has not as much memory as the KV cache and the workspace take.
    pub fn new(
        ops: Ops,
        comm: Box<dyn Communicator>,
        weights: RankWeights,
        mut kv: Vec<KvCache>,
        workspace_shape: WorkspaceShape,
        block_size: usize,
    ) -> Result<Self> {
        kv.iter_mut().try_for_each(KvCache::restore)?;
        Ok(Self {
            ops,
            comm,
            weights,
            adapters: ResidentAdapters::new(workspace_shape.build.clone()),
            kv,
            workspace: Some(Workspace::new(&workspace_shape)?),
            workspace_shape,
            block_size,
            batch: FlatBatch::default(),
        })
    }

    /// Runs one step. Every rank computes; the output of rank 0 answers the plan's tasks, that of the others is empty.
    ///
    /// # Panics
    /// If memory that it needs is released.
    pub fn run(&mut self, plan: &StepPlan) -> Result<StepOutput> {
        let _rank = match plan.is_decode() {
            true => trace_span!("decode on rank", rank = self.comm.rank()).entered(),
            false => trace_span!("prefill on rank", rank = self.comm.rank()).entered(),
        };
        let workspace = self.workspace.as_ref().expect("a step has its workspace");
        let model = self.weights.decoder();
        for cache in &mut self.kv {
            self.ops.copy_blocks(cache, &plan.copies)?;
        }
        let prepare = trace_span!("prepare").entered();
        self.batch.fill(plan, self.block_size);
        let view = PlanView::new(plan);
        let step = self.ops.prepare(self.batch.step(&view))?;
        let adapters = self.adapters.of_rows(self.batch.adapters.iter().copied());
        let input = Input { step: &step, additions: adapters.as_ref().map(|a| a as &dyn Additions) };
        drop(prepare);
        model.forward(&self.ops, &*self.comm, input, &mut self.kv, workspace)?;
        let wanted: Vec<&LogitsRow> = plan.sequences.iter().flat_map(|s| &s.logits).collect();
        let mut sampled = Vec::new();
        for first in (0..wanted.len()).step_by(LOGITS_ROWS) {
            let rows = first..wanted.len().min(first + LOGITS_ROWS);
            let of_rows = self.batch.logits[rows.clone()].iter().map(|row| self.batch.adapters[row.row as usize]);
            let adapters = self.adapters.of_rows(of_rows);
            let additions = adapters.as_ref().map(|a| a as &dyn Additions);
            let logits = model.logits(&self.ops, &*self.comm, &step, rows.clone(), workspace, additions)?;
            if self.comm.rank() == 0 {
                sampled.push((rows.clone(), self.ops.sample(&logits, &step, rows)?));
            }
        }
        let mut output = StepOutput { tokens: Vec::with_capacity(plan.tasks().count()), failed: Vec::new() };
        for (rows, sampled) in sampled {
            collect(sampled, &wanted[rows], &mut output)?;
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

    /// See [`RankWeights::read`].
    pub fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>> {
        self.weights.read(spec, rows)
    }

    /// Gives memory back to the system. Returns the bytes of weights that stay; see [`RankWeights::release`].
    pub fn release(&mut self, memory: Memory) -> Result<u64> {
        match memory {
            Memory::KvCache => self.kv.iter_mut().for_each(KvCache::release),
            Memory::Workspace => {
                self.workspace = None;
                self.batch = FlatBatch::default();
                self.adapters.release_buffers();
                self.ops.release();
            }
            Memory::Weights => return self.weights.release(true),
            Memory::WeightsAndBase => return self.weights.release(false),
        }
        Ok(0)
    }

    /// Takes released memory again; its content is unspecified.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has not as much.
    pub fn restore(&mut self, memory: Memory) -> Result<()> {
        match memory {
            Memory::KvCache => self.kv.iter_mut().try_for_each(KvCache::restore)?,
            Memory::Workspace => {
                self.workspace = Some(Workspace::new(&self.workspace_shape)?);
                self.adapters.take_buffers(self.weights.shapes())?;
            }
            Memory::Weights | Memory::WeightsAndBase => self.weights.restore()?,
        }
        Ok(())
    }
}

/// Waits for the answers to `rows` of the plan and appends them to `output`.
fn collect(sampled: Sampled<'_>, rows: &[&LogitsRow], output: &mut StepOutput) -> Result<()> {
    let SampledTokens { tokens, failed } = sampled.read()?;
    output.tokens.extend(tokens);
    let failures =
        failed.iter().map(|(row, panic)| (rows[*row].tasks[0].sample.group.request, panic_message(&**panic)));
    output.failed.extend(failures);
    Ok(())
}
