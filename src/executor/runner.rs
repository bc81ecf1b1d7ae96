//! One rank's model: the forward pass of a step, and on rank 0 the sampling of its tasks.

use std::collections::HashSet;

use rollout_kernels::{Deferred, KvCache, Ops, Padding, Routing};
use tracing::trace_span;

use super::adapters::ResidentAdapters;
use super::head::{Head, add_hidden, policy_of};
use super::input::{FlatBatch, PlanView, forced_experts};
use super::weights::RankWeights;
use super::{MemoryKind, Released, WeightOrder};
use crate::comm::Communicator;
use crate::error::Result;
use crate::model::config::ExpertsConfig;
use crate::model::{
    AdapterDeltas, ForwardContext, PlacedEmbeddings, TowerShape, TowerWorkspace, Workspace, WorkspaceShape, routing,
};
use crate::types::{LogitsRow, PictureEncode, PlanSequence, StepOutput, StepPlan};
use crate::weights::ShadowShard;

/// One rank of the model: operators, weights, KV cache, workspace, and its end of the communicator.
pub struct ModelRunner {
    ops: Ops,
    comm: Box<dyn Communicator>,
    pub(super) weights: RankWeights,
    adapters: ResidentAdapters,
    kv: Vec<KvCache>,
    workspace_shape: WorkspaceShape,
    /// `None` while it is released.
    workspace: Option<Workspace>,
    /// `None` while it is released, and for a model without experts.
    routing: Option<Routing>,
    /// `None` for a model of text alone.
    tower_shape: Option<TowerShape>,
    /// `None` while it is released, and for a model of text alone.
    tower: Option<TowerWorkspace>,
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
        (workspace_shape, tower_shape): (WorkspaceShape, Option<TowerShape>),
        block_size: usize,
        uses_graphs: bool,
    ) -> Result<Self> {
        kv.iter_mut().try_for_each(KvCache::restore)?;
        let workspace = Some(Workspace::new(&workspace_shape)?);
        let routing = routing(&workspace_shape)?;
        let tower = tower_shape.as_ref().map(TowerWorkspace::new).transpose()?;
        let comm = join()?;
        comm.restore()?;
        Ok(Self {
            comm,
            ops,
            weights,
            adapters: ResidentAdapters::new(workspace_shape.build.clone()),
            kv,
            workspace,
            routing,
            workspace_shape,
            tower_shape,
            tower,
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
        for cache in &mut self.kv {
            self.ops.copy_blocks(cache, &plan.copies)?;
        }
        if let Some(encode) = &plan.encode {
            self.encode(encode)?;
        }
        if !plan.sequences.iter().any(PlanSequence::runs_base) {
            return self.compute(plan, false);
        }
        let of = |base| {
            let sequences = plan.sequences.iter().filter(|sequence| sequence.runs_base() == base);
            StepPlan { sequences: sequences.cloned().collect(), ..StepPlan::default() }
        };
        let serving = self.compute(&of(false), false)?;
        self.weights.exchange_base()?;
        let base = self.compute(&of(true), true);
        self.weights.exchange_base()?;
        Ok(interleave(plan, serving, base?))
    }

    /// Computes the sequences of a plan, all under the weights that the model has now: the base if `is_base`.
    fn compute(&mut self, plan: &StepPlan, is_base: bool) -> Result<StepOutput> {
        if plan.sequences.is_empty() {
            return Ok(StepOutput::default());
        }
        let prepare = trace_span!("prepare").entered();
        let config = &self.workspace_shape.config;
        self.batch.fill(plan, self.block_size, config.rotary_axes());
        let forbidden = config.vision.as_ref().map_or(&[][..], |vision| &vision.forbidden_tokens);
        let view = PlanView::new(plan, forbidden);
        let embeddings = self.placed_embeddings(plan)?;
        let format = config.experts.as_ref().map(ExpertsConfig::routing_format);
        let forced = format.as_ref().map_or_else(Vec::new, |format| forced_experts(plan, format));
        let step = match self.padding(plan) {
            Some(padding) => self.ops.prepare_padded(self.batch.step(&view), padding)?,
            None => self.ops.prepare(self.batch.step(&view))?,
        };
        let row_adapters = self.batch.row_adapters(step.rows());
        let adapters = self.adapters.of_rows(&row_adapters);
        let context = ForwardContext {
            ops: &self.ops,
            comm: &*self.comm,
            step: &step,
            adapters: adapters.as_ref().map(|a| a as &dyn AdapterDeltas),
            workspace: self.workspace.as_ref().expect("a step has its workspace"),
            embeddings: &embeddings,
            forced: &forced,
        };
        // A graph computes the logits of all rows, padding included.
        let is_in_graph = self.ops.samples_in_graph(&step);
        let head = Head { context, resident: &self.adapters };
        drop(prepare);

        self.ops.capture_or_replay(&step, &*self.comm, || {
            let decoder = &self.weights.model().decoder;
            decoder.forward(&context, &mut self.kv, self.routing.as_mut())?;
            if is_in_graph { head.answer_in_graph(decoder, &row_adapters) } else { Ok(()) }
        })?;
        let wanted: Vec<&LogitsRow> = plan.sequences.iter().flat_map(|s| &s.logits).collect();
        let answers = match is_in_graph {
            true => head.answered_in_graph(wanted.len())?,
            false => head.answer(&mut self.weights, is_base, &wanted, &self.batch.logits_adapters())?,
        };
        let hidden = head.hidden_states(&wanted)?;
        let kept = self.kept_experts(plan.num_tokens())?;
        let mut output = answers.read(&wanted)?;
        add_hidden(&wanted, &hidden, config.hidden_size, &mut output);
        if let Some((kept, format)) = kept.zip(format) {
            format.write(&kept.read()?, &mut output.routing);
        }
        Ok(output)
    }

    /// Starts to bring the experts of a step's rows to the host, on the rank that returns them.
    fn kept_experts(&self, rows: usize) -> Result<Option<Deferred<'_, Vec<u16>>>> {
        match &self.routing {
            Some(routing) if routing.shape().kept_layers > 0 && self.comm.rank() == 0 => {
                Ok(Some(self.ops.kept_experts(routing, rows)?))
            }
            _ => Ok(None),
        }
    }

    /// Runs blocks of the vision tower over a picture.
    ///
    /// # Panics
    /// If the model has no tower, or its memory is released.
    fn encode(&mut self, encode: &PictureEncode) -> Result<()> {
        let _span = trace_span!("encode", blocks = encode.blocks.len()).entered();
        let tower = self.weights.model().tower.as_ref().expect("a model that takes images has a tower");
        let workspace = self.tower.as_mut().expect("an encode has its workspace");
        tower.encode(&self.ops, &*self.comm, workspace, encode)
    }

    /// The embeddings of a plan's images, and the rows of its batch that they belong to.
    fn placed_embeddings(&self, plan: &StepPlan) -> Result<Vec<PlacedEmbeddings>> {
        let mut placed = Vec::new();
        let mut first_row = 0;
        for sequence in &plan.sequences {
            for images in &sequence.embeddings {
                let buffer = self.tower.as_ref().expect("embeddings have their buffer").embeddings();
                let first = (first_row + images.offset) as u32;
                placed.push(PlacedEmbeddings {
                    embeddings: buffer.narrow(0, images.rows.start, images.rows.len())?,
                    rows: (first..first + images.rows.len() as u32).collect(),
                });
            }
            first_row += sequence.tokens.len();
        }
        Ok(placed)
    }

    /// How a step may be padded for a CUDA graph, or `None` if it cannot be one: in a graph every sequence has one row,
    /// no row is an image's, forced to experts, run by the base or compared with another policy's, and all rows have
    /// the same adapter or none, which is the graph's variant. The same on all ranks.
    fn padding(&self, plan: &StepPlan) -> Option<Padding> {
        let has_one_row_each =
            !plan.is_empty() && plan.sequences.iter().all(|s| s.tokens.len() == 1 && s.embeddings.is_empty());
        let has_one_adapter = self.batch.adapters.windows(2).all(|rows| rows[0] == rows[1]);
        let WorkspaceShape { config, max_batch_tokens, .. } = &self.workspace_shape;
        let is_compared = plan.sequences.iter().flat_map(|s| &s.logits).any(|row| policy_of(row).is_some());
        let is_free = !plan.has_forced_experts() && !plan.sequences.iter().any(PlanSequence::runs_base) && !is_compared;
        (self.uses_graphs && has_one_row_each && has_one_adapter && is_free).then(|| Padding {
            most_rows: *max_batch_tokens,
            vocabulary: config.vocab_size,
            variant: self.batch.adapters.last().copied().flatten(),
        })
    }

    /// See [`RankWeights::check`] and [`ResidentAdapters::check`].
    pub fn check(&mut self, order: &WeightOrder) -> Result<()> {
        match order {
            WeightOrder::AddAdapter { adapter, .. } => ResidentAdapters::check(&self.weights.shapes().decoder, adapter),
            _ => self.weights.check(&self.ops, &*self.comm, order),
        }
    }

    /// See [`RankWeights::prepare`].
    pub fn prepare(&mut self, order: &WeightOrder) -> Result<()> {
        self.weights.prepare(&self.ops, &*self.comm, order)
    }

    /// Changes the weights or the resident adapters.
    pub fn write(&mut self, order: &WeightOrder) -> Result<()> {
        self.ops.drop_graphs();
        match order {
            WeightOrder::AddAdapter { generation, adapter } => {
                self.adapters.add(&self.weights.shapes().decoder, *generation, adapter)
            }
            WeightOrder::RemoveAdapter { generation } => {
                self.adapters.remove(*generation);
                Ok(())
            }
            _ => self.weights.write(&self.ops, &*self.comm, order),
        }
    }

    /// See [`RankWeights::exchange`].
    pub fn exchange(&mut self, shards: Vec<ShadowShard>, kept: &HashSet<String>) -> Result<Vec<ShadowShard>> {
        self.ops.drop_graphs();
        self.weights.exchange(shards, kept)
    }

    /// Gives memory back to the system; see [`RankWeights::release`].
    pub fn release(&mut self, memory: MemoryKind, host_bytes: u64) -> Result<Released> {
        self.ops.drop_graphs();
        match memory {
            MemoryKind::KvCache => self.kv.iter_mut().for_each(KvCache::release),
            MemoryKind::Workspace => {
                self.workspace = None;
                self.routing = None;
                self.tower = None;
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
                self.routing = routing(&self.workspace_shape)?;
                self.tower = self.tower_shape.as_ref().map(TowerWorkspace::new).transpose()?;
                self.comm.restore()?;
                self.adapters.restore_buffers(&self.weights.shapes().decoder)?;
            }
            MemoryKind::Weights | MemoryKind::WeightsAndBase => self.weights.restore()?,
        }
        Ok(())
    }
}

/// The answers of a plan, in its order, from those of its sequences that run the serving weights and of those that run
/// the base.
fn interleave(plan: &StepPlan, mut serving: StepOutput, mut base: StepOutput) -> StepOutput {
    let mut failed = std::mem::take(&mut serving.failed);
    failed.append(&mut base.failed);
    let row_bytes = (serving.routing.len() + base.routing.len()) / plan.num_tokens();
    let mut parts = [serving, base].map(|output| (output.tokens.into_iter(), output.routing.into_iter()));
    let mut output = StepOutput { failed, ..StepOutput::default() };
    for sequence in &plan.sequences {
        let (tokens, routing) = &mut parts[usize::from(sequence.runs_base())];
        let tasks = sequence.logits.iter().map(|row| row.tasks.len()).sum();
        output.tokens.extend(tokens.by_ref().take(tasks));
        output.routing.extend(routing.by_ref().take(row_bytes * sequence.tokens.len()));
    }
    output
}
