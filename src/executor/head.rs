//! The head of the model: logits of rows of a step, the answers to their tasks, and the divergences between rows and
//! those of another policy.

use std::ops::Range;

use candle_core::Tensor;
use rollout_kernels::{Deferred, LogitsPair, SampledTokens};

use super::adapters::ResidentAdapters;
use super::weights::RankWeights;
use crate::error::{Result, panic_message};
use crate::model::{AdapterDeltas, Decoder, ForwardContext, LOGITS_ROWS};
use crate::types::{Divergences, LogitsRow, PolicyRow, StepOutput};

/// The head of the model over rows of a step, after the step's forward pass. Every rank computes; rank 0 answers.
pub(super) struct Head<'a> {
    pub context: ForwardContext<'a>,
    pub resident: &'a ResidentAdapters,
}

/// The answers to a step's tasks, which the device may still be computing. Those of ranks other than 0 are empty.
#[derive(Default)]
pub(super) struct TaskAnswers<'a> {
    /// Rows among those that are wanted, and the answers to their tasks.
    sampled: Vec<(Range<usize>, Deferred<'a, SampledTokens>)>,
    /// The same, and the divergences of those that are compared with another policy's.
    divergences: Vec<(Range<usize>, Deferred<'a, Vec<Divergences>>)>,
}

impl<'a> Head<'a> {
    /// Answers the tasks of all rows of the step as a part of its graph. `adapters` has the adapter of each row.
    pub fn answer_in_graph(&self, decoder: &Decoder, adapters: &[Option<u64>]) -> Result<()> {
        for rows in parts(adapters.len(), LOGITS_ROWS) {
            let logits = self.logits(decoder, rows.clone(), &adapters[rows.clone()])?;
            if self.is_first() {
                self.context.ops.sample_in_graph(&logits, self.context.step, rows)?;
            }
        }
        Ok(())
    }

    /// The answers to the first `wanted` rows that the step's graph has given.
    pub fn answered_in_graph(&self, wanted: usize) -> Result<TaskAnswers<'a>> {
        let mut answers = TaskAnswers::default();
        if self.is_first() {
            answers.sampled.push((0..wanted, self.context.ops.sampled(self.context.step)?));
        }
        Ok(answers)
    }

    /// Answers the tasks of the wanted rows, in chunks that fit into the buffers. `weights` holds the weights of the
    /// step. If `is_base`, it holds the base, and is exchanged for the serving weights while the logits of other
    /// policies are computed. `adapters` has the adapter of each row.
    pub fn answer(
        &self,
        weights: &mut RankWeights,
        is_base: bool,
        wanted: &[&LogitsRow],
        adapters: &[Option<u64>],
    ) -> Result<TaskAnswers<'a>> {
        let ForwardContext { ops, step, workspace, .. } = self.context;
        let mut answers = TaskAnswers::default();
        // The rows of other policies take the other half of the buffer.
        let is_compared = wanted.iter().any(|row| policy_of(row).is_some());
        for rows in parts(wanted.len(), if is_compared { LOGITS_ROWS / 2 } else { LOGITS_ROWS }) {
            let logits = self.logits(&weights.model().decoder, rows.clone(), &adapters[rows.clone()])?;
            if self.is_first() {
                answers.sampled.push((rows.clone(), ops.sample(&logits, step, rows.clone())?));
            }
            let policies: Vec<&PolicyRow> = wanted[rows.clone()].iter().filter_map(|row| policy_of(row)).collect();
            if policies.is_empty() {
                continue;
            }
            if is_base {
                weights.exchange_base()?;
            }
            self.compute_policies(&weights.model().decoder, &policies)?;
            if is_base {
                weights.exchange_base()?;
            }
            if self.is_first() {
                let divergences = ops.divergences(workspace.all_logits(), &pairs(&wanted[rows.clone()]))?;
                answers.divergences.push((rows, divergences));
            }
        }
        Ok(answers)
    }

    /// The final hidden states of the rows that keep them, one after the other.
    pub fn hidden_states(&self, wanted: &[&LogitsRow]) -> Result<Vec<f32>> {
        let ForwardContext { ops, step, workspace, .. } = self.context;
        let rows = step.input().logits.iter().zip(wanted);
        let kept: Vec<u32> = rows.filter(|(_, row)| keeps_hidden(row)).map(|(place, _)| place.row).collect();
        match self.is_first() && !kept.is_empty() {
            true => Ok(ops.read_rows(&workspace.step.normed, &kept)?),
            false => Ok(Vec::new()),
        }
    }

    fn is_first(&self) -> bool {
        self.context.comm.rank() == 0
    }

    /// Logits of rows whose logits the step wants. `adapters` has the adapter of each.
    fn logits(&self, decoder: &Decoder, rows: Range<usize>, adapters: &[Option<u64>]) -> Result<Tensor> {
        let adapters = self.resident.of_rows(adapters);
        let adapters = adapters.as_ref().map(|a| a as &dyn AdapterDeltas);
        decoder.logits(&ForwardContext { adapters, ..self.context }, rows)
    }

    /// Computes the logits of rows of other policies, in the last rows of the buffer.
    fn compute_policies(&self, decoder: &Decoder, policies: &[&PolicyRow]) -> Result<()> {
        let adapters: Vec<Option<u64>> = policies.iter().map(|policy| policy.rows.weights.adapter()).collect();
        let adapters = self.resident.of_rows(&adapters);
        let adapters = adapters.as_ref().map(|a| a as &dyn AdapterDeltas);
        let hidden: Vec<f32> = policies.iter().flat_map(|policy| policy.hidden()).copied().collect();
        decoder.logits_of(&ForwardContext { adapters, ..self.context }, &hidden, policies.len())?;
        Ok(())
    }
}

impl TaskAnswers<'_> {
    /// Waits for the answers to the tasks of the rows that are wanted.
    pub fn read(self, wanted: &[&LogitsRow]) -> Result<StepOutput> {
        let tasks = wanted.iter().map(|row| row.tasks.len()).sum();
        let mut output = StepOutput { tokens: Vec::with_capacity(tasks), ..StepOutput::default() };
        let mut firsts = Vec::new();
        for (rows, sampled) in self.sampled {
            let SampledTokens { tokens, failed } = sampled.read()?;
            let first = output.tokens.len();
            firsts.extend(wanted[rows.clone()].iter().scan(first, |next, row| {
                *next += row.tasks.len();
                Some(*next - row.tasks.len())
            }));
            output.tokens.extend(tokens);
            let request = |row: usize| wanted[rows.start + row].tasks[0].sample.group.request;
            output.failed.extend(failed.iter().map(|(row, panic)| (request(*row), panic_message(&**panic))));
        }
        for (rows, divergences) in self.divergences {
            let compared = rows.filter(|row| policy_of(wanted[*row]).is_some());
            for (row, divergence) in compared.zip(divergences.read()?) {
                output.tokens[firsts[row]].returned.get_or_insert_default().divergences = Some(divergence);
            }
        }
        Ok(output)
    }
}

/// Adds the hidden states of the rows that keep them, each so wide, to the answers to their tasks.
pub(super) fn add_hidden(wanted: &[&LogitsRow], hidden: &[f32], width: usize, output: &mut StepOutput) {
    let (mut hidden, mut answers) = (hidden.chunks_exact(width), output.tokens.iter_mut());
    for row in wanted {
        let hidden = if keeps_hidden(row) { hidden.next() } else { None };
        for (task, answer) in row.tasks.iter().zip(answers.by_ref()) {
            if let Some(hidden) = hidden.filter(|_| task.keeps_hidden) {
                answer.returned.get_or_insert_default().hidden = hidden.to_vec();
            }
        }
    }
}

/// The row of another policy that a row is compared with.
pub(super) fn policy_of(row: &LogitsRow) -> Option<&PolicyRow> {
    row.tasks.first()?.policy.as_ref()
}

fn keeps_hidden(row: &LogitsRow) -> bool {
    row.tasks.iter().any(|task| task.keeps_hidden)
}

/// `0..count` in parts of at most `len`.
fn parts(count: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..count).step_by(len).map(move |first| first..count.min(first + len))
}

/// The rows of the buffer of logits that are compared, where those of other policies are its last ones.
fn pairs(rows: &[&LogitsRow]) -> Vec<LogitsPair> {
    let compared: Vec<_> = rows.iter().enumerate().filter(|(_, row)| policy_of(row).is_some()).collect();
    let first = LOGITS_ROWS - compared.len();
    let pair = |(policy, (reference, row)): (usize, &(usize, &&LogitsRow))| LogitsPair {
        policy,
        reference: *reference,
        temperature: row.tasks[0].params.temperature,
    };
    (first..).zip(&compared).map(pair).collect()
}
