//! One rank's model: the forward pass of a step, and on rank 0 the sampling of its tasks.

use std::iter::repeat_n;
use std::ops::Range;

use rollout_kernels::{AllReduceMin, KvCache, Ops, Padding, Sampled, SampledTokens};
use tracing::trace_span;

use super::adapters::ResidentAdapters;
use super::adapters::{FlatBatch, PlanView};
use super::weights::RankWeights;
use super::{MemoryKind, Released, WeightOrder};
use crate::comm::Communicator;
use crate::error::{Error, Result, panic_message};
use crate::model::{AdapterDeltas, ForwardContext, LOGITS_ROWS, Workspace, WorkspaceShape};
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
    /// Whether the device may capture steps as CUDA graphs and replay them.
    uses_graphs: bool,
    batch: FlatBatch,
}

impl ModelRunner {
    /// Calls `join` last, because a rank that has joined waits for the others when it is dropped.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has not as much memory as the KV cache and the workspace take; and those of
    /// `join`.
    pub fn new(
        ops: Ops,
        join: impl FnOnce() -> Result<Box<dyn Communicator>>,
        weights: RankWeights,
        mut kv: Vec<KvCache>,
        workspace_shape: WorkspaceShape,
        block_size: usize,
        uses_graphs: bool,
    ) -> Result<Self> {
        kv.iter_mut().try_for_each(KvCache::restore)?;
        let workspace = Some(Workspace::new(&workspace_shape)?);
        let comm = join()?;
        comm.restore()?;
        Ok(Self {
            comm,
            ops,
            weights,
            adapters: ResidentAdapters::new(workspace_shape.build.clone()),
            kv,
            workspace,
            workspace_shape,
            block_size,
            uses_graphs,
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
        let step = match self.can_replay(plan) {
            true => self.ops.prepare_padded(self.batch.step(&view), self.padding())?,
            false => self.ops.prepare(self.batch.step(&view))?,
        };
        // Padding rows use the adapter of the step's own rows.
        let adapter = self.batch.adapters.last().copied().flatten();
        let padded = repeat_n(adapter, step.rows() - self.batch.adapters.len());
        let adapters = self.adapters.of_rows(self.batch.adapters.iter().copied().chain(padded));
        let context = ForwardContext {
            ops: &self.ops,
            comm: &*self.comm,
            step: &step,
            adapters: adapters.as_ref().map(|a| a as &dyn AdapterDeltas),
            workspace,
        };
        drop(prepare);
        let samples_in_graph = self.ops.samples_in_graph(&step);
        let is_first = self.comm.rank() == 0;
        let all_reduce_min = |mine| self.comm.all_reduce_min(mine);
        let ranks: Option<AllReduceMin<'_>> = if self.comm.world() > 1 { Some(&all_reduce_min) } else { None };
        self.ops.capture_or_replay(&step, ranks, || {
            model.forward(&context, &mut self.kv)?;
            for rows in parts(if samples_in_graph { step.rows() } else { 0 }) {
                let adapters = self.adapters.of_rows(repeat_n(adapter, rows.len()));
                let adapters = adapters.as_ref().map(|a| a as &dyn AdapterDeltas);
                let logits = model.logits(&ForwardContext { adapters, ..context }, rows.clone())?;
                if is_first {
                    self.ops.sample_in_graph(&logits, &step, rows)?;
                }
            }
            Ok::<_, Error>(())
        })?;
        let wanted: Vec<&LogitsRow> = plan.sequences.iter().flat_map(|s| &s.logits).collect();
        let mut sampled = Vec::new();
        if samples_in_graph && is_first {
            sampled.push((0..wanted.len(), self.ops.sampled(&step)?));
        }
        for rows in parts(if samples_in_graph { 0 } else { wanted.len() }) {
            let of_rows = self.batch.logits[rows.clone()].iter().map(|row| self.batch.adapters[row.row as usize]);
            let adapters = self.adapters.of_rows(of_rows);
            let adapters = adapters.as_ref().map(|a| a as &dyn AdapterDeltas);
            let logits = model.logits(&ForwardContext { adapters, ..context }, rows.clone())?;
            if is_first {
                sampled.push((rows.clone(), self.ops.sample(&logits, &step, rows)?));
            }
        }
        let mut output = StepOutput { tokens: Vec::with_capacity(plan.tasks().count()), failed: Vec::new() };
        for (rows, sampled) in sampled {
            collect(sampled, &wanted[rows], &mut output)?;
        }
        Ok(output)
    }

    /// Whether a CUDA graph can run the step: every sequence has one row, and all rows have the same adapter or none.
    /// The same on all ranks.
    fn can_replay(&self, plan: &StepPlan) -> bool {
        self.uses_graphs
            && !plan.is_empty()
            && plan.sequences.iter().all(|s| s.tokens.len() == 1)
            && self.batch.adapters.windows(2).all(|rows| rows[0] == rows[1])
    }

    /// How such a step may be padded. Its adapter is the variant of its graph.
    fn padding(&self) -> Padding {
        let WorkspaceShape { config, max_batch_tokens, .. } = &self.workspace_shape;
        let variant = self.batch.adapters.last().copied().flatten();
        Padding { most_rows: *max_batch_tokens, vocabulary: config.vocab_size, variant }
    }

    /// See [`RankWeights::check`].
    pub fn check(&mut self, order: &WeightOrder) -> Result<()> {
        self.weights.check(&self.ops, &*self.comm, order)
    }

    /// See [`RankWeights::prepare`].
    pub fn prepare(&mut self, order: &WeightOrder) -> Result<()> {
        self.weights.prepare(&self.ops, &*self.comm, order)
    }

    /// See [`RankWeights::reopen`].
    pub fn reopen(&mut self) -> Result<()> {
        self.weights.reopen()
    }

    /// Changes the weights or the resident adapters.
    pub fn write(&mut self, order: &WeightOrder) -> Result<()> {
        self.ops.drop_graphs();
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
        self.ops.drop_graphs();
        self.weights.exchange(shards)
    }

    /// See [`RankWeights::read`].
    pub fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>> {
        self.weights.read(spec, rows)
    }

    /// Gives memory back to the system; see [`RankWeights::release`].
    pub fn release(&mut self, memory: MemoryKind, host_bytes: u64) -> Result<Released> {
        self.ops.drop_graphs();
        match memory {
            MemoryKind::KvCache => self.kv.iter_mut().for_each(KvCache::release),
            MemoryKind::Workspace => {
                self.workspace = None;
                self.batch = FlatBatch::default();
                self.adapters.release_buffers();
                self.ops.release();
                self.comm.release();
            }
            MemoryKind::Weights | MemoryKind::WeightsAndBase => {
                // A push while the KV cache sleeps has left memory that its operators reuse.
                if self.workspace.is_none() {
                    self.ops.release();
                    self.comm.release();
                }
                return self.weights.release(memory == MemoryKind::Weights, host_bytes);
            }
        }
        Ok(Released { offloaded: self.workspace_shape.build.device.offloaded_bytes(), ..Released::default() })
    }

    /// Takes released memory again; its content is unspecified.
    ///
    /// # Errors
    /// `ResourceExhausted` if the device has not as much.
    pub fn restore(&mut self, memory: MemoryKind) -> Result<()> {
        match memory {
            MemoryKind::KvCache => self.kv.iter_mut().try_for_each(KvCache::restore)?,
            MemoryKind::Workspace => {
                self.workspace = Some(Workspace::new(&self.workspace_shape)?);
                self.comm.restore()?;
                self.adapters.restore_buffers(self.weights.shapes())?;
            }
            MemoryKind::Weights | MemoryKind::WeightsAndBase => self.weights.restore()?,
        }
        Ok(())
    }
}

/// The rows of logits in parts that fit into the buffers.
fn parts(rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(LOGITS_ROWS).map(move |first| first..rows.min(first + LOGITS_ROWS))
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
