//! A step plan as the device's input: all sequences flattened into the rows of one batch.

use rollout_kernels::{AttentionSequence, NOT_FORCED, RowTasks, SamplingTask, StepInput};

use crate::types::{LogitsTask, PlanSequence, RoutingFormat, StepPlan, TokenId, TokenMask};

/// The rows of one step. It is kept between steps, so that its lists keep their memory.
#[derive(Default)]
pub struct FlatBatch {
    tokens: Vec<u32>,
    /// Rotary positions, `[rows, axes]`.
    positions: Vec<u32>,
    axes: usize,
    slots: Vec<u32>,
    /// Generation of the resident adapter of each row, if it has one.
    pub adapters: Vec<Option<u64>>,
    /// The rows of which logits are wanted, in the plan's order.
    pub logits: Vec<RowTasks>,
}

/// The parts of a batch that are borrowed from its plan.
pub struct PlanView<'a> {
    sequences: Vec<AttentionSequence<'a>>,
    tasks: Vec<SamplingTask<'a>>,
}

impl FlatBatch {
    /// Replaces the rows by those of `plan`. `block_size` is the number of tokens in a KV block. A rotary position has
    /// `axes` axes: 1, which is the token's index, or the 3 of M-RoPE.
    pub fn fill(&mut self, plan: &StepPlan, block_size: usize, axes: usize) {
        self.axes = axes;
        self.tokens.clear();
        self.positions.clear();
        self.slots.clear();
        self.adapters.clear();
        self.logits.clear();
        let mut tasks = 0;
        for sequence in &plan.sequences {
            let first_row = self.tokens.len();
            let end = sequence.start + sequence.tokens.len();
            assert!(sequence.block_table.len() * block_size >= end, "the block table ends before position {end}");
            self.tokens.extend_from_slice(&sequence.tokens);
            self.adapters.resize(self.tokens.len(), sequence.weights.adapter());
            match axes {
                1 => self.positions.extend(sequence.start as u32..end as u32),
                _ => self.positions.extend(sequence.positions().flatten()),
            }
            for index in sequence.start..end {
                let block = sequence.block_table[index / block_size] as usize;
                self.slots.push((block * block_size + index % block_size) as u32);
            }
            for row in &sequence.logits {
                let first_task = tasks;
                tasks += row.tasks.len();
                self.logits.push(RowTasks { row: (first_row + row.offset) as u32, tasks: first_task..tasks });
            }
        }
    }

    /// The adapter of each of a step's `rows`. Only a step with a single adapter has padding rows, which use it too.
    pub fn row_adapters(&self, rows: usize) -> Vec<Option<u64>> {
        let mut adapters = self.adapters.clone();
        adapters.resize(rows, self.adapters.last().copied().flatten());
        adapters
    }

    /// The adapter of each row whose logits are wanted.
    pub fn logits_adapters(&self) -> Vec<Option<u64>> {
        self.logits.iter().map(|wanted| self.adapters[wanted.row as usize]).collect()
    }

    /// The device's input. `view` must be of the plan that the batch was last filled from.
    pub fn step<'a>(&'a self, view: &'a PlanView<'a>) -> StepInput<'a> {
        StepInput {
            tokens: &self.tokens,
            positions: &self.positions,
            axes: self.axes,
            slots: &self.slots,
            sequences: &view.sequences,
            logits: &self.logits,
            tasks: &view.tasks,
        }
    }
}

impl<'a> PlanView<'a> {
    /// `forbidden` are the tokens that no sample may have.
    pub fn new(plan: &'a StepPlan, forbidden: &'a [TokenId]) -> Self {
        let mut first_row = 0;
        let sequence = |sequence: &'a PlanSequence| {
            let rows = sequence.tokens.len();
            first_row += rows;
            AttentionSequence {
                first_row: first_row - rows,
                rows,
                start_position: sequence.start,
                visible: None,
                block_table: &sequence.block_table,
            }
        };
        let sequences = plan.sequences.iter().map(sequence).collect();
        Self { sequences, tasks: plan.sequences.iter().flat_map(|s| sampling_tasks(s, forbidden)).collect() }
    }
}

/// For each layer with experts those that the rows of a plan are forced to, `[rows, top_k]`, or `NOT_FORCED`. Empty if
/// no row is forced.
pub fn forced_experts(plan: &StepPlan, format: &RoutingFormat) -> Vec<Vec<u16>> {
    if !plan.has_forced_experts() {
        return Vec::new();
    }
    let RoutingFormat { layers, top_k, .. } = *format;
    let mut forced = vec![vec![NOT_FORCED; plan.num_tokens() * top_k]; layers];
    let mut first_row = 0;
    for sequence in &plan.sequences {
        if let Some((tokens, rows)) = sequence.forced_experts() {
            let experts: Vec<u16> = format.read(rows).collect();
            let rows = first_row + tokens.start - sequence.start..;
            for (row, experts) in rows.zip(experts.chunks_exact(layers * top_k)) {
                for (layer, experts) in forced.iter_mut().zip(experts.chunks_exact(top_k)) {
                    layer[row * top_k..(row + 1) * top_k].copy_from_slice(experts);
                }
            }
        }
        first_row += sequence.tokens.len();
    }
    forced
}

/// The tasks of a sequence as the device takes them.
fn sampling_tasks<'a>(sequence: &'a PlanSequence, forbidden: &'a [TokenId]) -> impl Iterator<Item = SamplingTask<'a>> {
    sequence.logits.iter().flat_map(move |row| {
        let named = sequence.prompt.row_after(sequence.start + row.offset);
        row.tasks.iter().map(move |task| sampling_task(task, named, forbidden))
    })
}

/// A task of the plan as the device takes it. `named` are the tokens to list beside a scored one, `forbidden` those
/// that no sample may have.
fn sampling_task<'a>(task: &'a LogitsTask, named: &'a [TokenId], forbidden: &'a [TokenId]) -> SamplingTask<'a> {
    let params = &*task.params;
    let (top_logprobs, logprobs_of) = match (task.target, &params.logprob_token_ids[..]) {
        (Some(_), _) => (params.top_logprobs, named),
        (None, []) => (params.top_logprobs, &[][..]),
        // They take the place of the most likely ones.
        (None, named) => (0, named),
    };
    // Tokens that end a sample are banned until it has `min_tokens` tokens.
    let may_stop = task.output_index >= params.min_tokens;
    SamplingTask {
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        repetition_penalty: params.repetition_penalty,
        presence_penalty: params.presence_penalty,
        frequency_penalty: params.frequency_penalty,
        logit_bias: &params.logit_bias,
        allowed: params.allowed_tokens.as_deref(),
        mask: task.mask.as_ref().map(TokenMask::words),
        banned: if may_stop {
            [&[], &[], &task.bad, forbidden]
        } else {
            [&params.eos_token_ids, &params.stop_token_ids, &task.bad, forbidden]
        },
        history: task.history.as_ref().map(|history| (&*history.prompt, &*history.output)),
        seed: task.seed,
        output_index: task.output_index,
        target: task.target.or(task.forced),
        top_logprobs,
        logprobs_of,
        top_of: task.top_of,
        returns: params.returns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ForcedRouting, LogitsRow, PlanSequence, PolicyWeights, Prompt};

    #[test]
    fn rows_follow_the_plan_and_slots_the_block_tables() {
        let logits = |offset| vec![LogitsRow { offset, tasks: Vec::new() }];
        let plan = StepPlan {
            copies: Vec::new(),
            encode: None,
            sequences: vec![
                PlanSequence {
                    start: 3,
                    tokens: vec![7, 8, 9],
                    prompt: Prompt::default(),
                    embeddings: Vec::new(),
                    block_table: vec![5, 2],
                    weights: PolicyWeights::Serving,
                    logits: logits(2),
                },
                PlanSequence {
                    start: 8,
                    tokens: vec![4],
                    prompt: Prompt::default(),
                    embeddings: Vec::new(),
                    block_table: vec![1, 0, 6],
                    weights: PolicyWeights::Adapter(6),
                    logits: logits(0),
                },
            ],
        };
        let mut batch = FlatBatch::default();
        for _ in 0..2 {
            batch.fill(&plan, 4, 1);
        }
        let view = PlanView::new(&plan, &[]);
        let input = batch.step(&view);
        assert_eq!(input.tokens, [7, 8, 9, 4]);
        assert_eq!(input.positions, [3, 4, 5, 8]);
        assert_eq!(input.slots, [23, 8, 9, 24]);
        assert_eq!(batch.adapters, [None, None, None, Some(6)]);
        assert_eq!(batch.logits.iter().map(|wanted| wanted.row).collect::<Vec<_>>(), [2, 3]);
        let second = &input.sequences[1];
        assert_eq!((second.first_row, second.rows, second.start_position), (3, 1, 8));
    }
    #[test]
    fn forced_rows_are_those_of_their_tokens() {
        let format = RoutingFormat { layers: 2, top_k: 2, experts: 8 };
        let sequence = |start, tokens: usize, routing| PlanSequence {
            start,
            tokens: vec![0; tokens],
            prompt: Prompt { routing, ..Prompt::from_tokens(vec![0; 9]) },
            ..PlanSequence::default()
        };
        let routing = |first, rows: &[u8]| Some(ForcedRouting::new(first, format.row_bytes(), rows));
        let free = sequence(2, 1, routing(0, &[0, 1, 2, 3, 4, 5, 6, 7]));
        let plan = StepPlan { sequences: vec![free.clone()], ..StepPlan::default() };
        assert!(forced_experts(&plan, &format).is_empty(), "its rows are of tokens before");
        let plan = StepPlan { sequences: vec![free, sequence(2, 3, routing(3, &[0, 1, 2, 3]))], ..StepPlan::default() };
        let n = NOT_FORCED;
        let layer = |a: u16, b: u16| vec![n, n, n, n, a, b, n, n];
        assert_eq!(forced_experts(&plan, &format), [layer(0, 1), layer(2, 3)]);
    }
}
