//! The questions that the device answers itself, and what it says.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::super::context::Context;
use super::super::download::{Download, DownloadPool};
use super::super::launch::{Launch, grid};
use super::super::module::Module;
use super::super::scratch::DeviceScratch;
use super::super::staging::Staging;
use super::super::tensor::TensorRows;
use crate::cpu::logits::VOCAB_BLOCK;
use crate::cpu::{certain_logprob, logprob};
use crate::sampling::{SamplingTask, TaskReturns, TokenLogprobs, uniform};

/// Blocks of the vocabulary of which a kernel has two values each in its 48 KiB of shared memory.
pub(super) const MAX_BLOCKS: usize = 5632;
/// Threads of a block of each kernel, and blocks of the vocabulary of one of `summarise`.
pub(super) const THREADS: u32 = 256;
pub(super) const BLOCKS_AT_ONCE: usize = 32;
/// Stands for no target.
const NO_TARGET: u32 = u32::MAX;

/// Words of the structures of `cu/sampling.cu`.
const ROW_WORDS: usize = 3;
const TASK_WORDS: usize = 12;
const ANSWER_WORDS: usize = 10;
/// Scales of a row with one task, at most: that of the raw distribution and its own.
const OWN_SCALES: usize = 2;

/// The kernels.
pub(super) struct DeviceSampler {
    context: Arc<Context>,
    summarise: CudaFunction,
    answer: CudaFunction,
    /// Answers, then the maxima and sums of blocks.
    scratch: DeviceScratch,
    answers: DownloadPool<u32>,
}

/// Rows and their tasks as the kernels read them.
#[derive(Default)]
pub(in crate::cuda) struct TaskBatch {
    tasks: Vec<u32>,
    rows: Vec<u32>,
    scales: Vec<f32>,
    count: usize,
}

impl TaskBatch {
    /// Whether the device answers a task on a row of `vocab` logits.
    pub fn take(task: &SamplingTask<'_>, vocab: usize) -> bool {
        let is_plain = !task.edits() && !task.lists_tokens() && task.returns == TaskReturns::default();
        is_plain && vocab.div_ceil(VOCAB_BLOCK) <= MAX_BLOCKS
    }

    /// One question to each of `rows` rows; those behind the tasks' get the last one's. `None` if the device does not
    /// answer all of them.
    pub fn one_of_each(tasks: &[SamplingTask<'_>], rows: usize, vocab: usize) -> Option<Self> {
        if tasks.is_empty() || !tasks.iter().all(|task| Self::take(task, vocab)) {
            return None;
        }
        let mut questions = Self::default();
        for row in 0..rows {
            questions.push(row, &tasks[row.min(tasks.len() - 1)..][..1], vocab);
            questions.scales.resize(OWN_SCALES * (row + 1), 1.0);
        }
        Some(questions)
    }

    pub fn counts(&self) -> TaskCounts {
        TaskCounts { tasks: self.count, rows: self.rows.len() / ROW_WORDS, scales: self.scales.len() }
    }

    /// As the kernels read them: tasks, which are aligned as float64 is, rows, scales.
    pub fn words(&self) -> impl Iterator<Item = u32> {
        let Self { tasks, rows, scales, .. } = self;
        tasks.iter().chain(rows).copied().chain(scales.iter().map(|x| x.to_bits()))
    }

    /// Adds the tasks of row `row` of the logits.
    pub fn push(&mut self, row: usize, tasks: &[SamplingTask<'_>], vocab: usize) {
        let (index, first_scale) = (self.rows.len() / ROW_WORDS, self.scales.len());
        self.scales.push(1.0);
        for task in tasks {
            let is_greedy = task.temperature == 0.0;
            let scale = if is_greedy { 1.0 } else { task.scale() };
            let known = self.scales[first_scale..].iter().position(|known| *known == scale);
            let place = first_scale + known.unwrap_or(self.scales.len() - first_scale);
            if known.is_none() {
                self.scales.push(scale);
            }
            let top_k = if task.top_k_applies(vocab) { task.top_k } else { 0 };
            let is_filtered = u32::from(task.filters(vocab));
            let target = task.target.unwrap_or(NO_TARGET);
            self.tasks.extend([index as u32, place as u32, target, u32::from(is_greedy), top_k, is_filtered]);
            let min_p = if task.min_p > 0.0 { task.min_p_depth() } else { f64::NEG_INFINITY };
            let uniform = if task.target.is_some() { 0.0 } else { uniform(task.seed, task.output_index) };
            self.tasks.extend([f64::from(task.top_p), min_p, uniform].into_iter().flat_map(words));
        }
        self.count += tasks.len();
        self.rows.extend([row, first_scale, self.scales.len() - first_scale].map(|x| x as u32));
    }
}

/// How many there are of what questions consist of.
#[derive(Clone, Copy)]
pub(in crate::cuda) struct TaskCounts {
    tasks: usize,
    rows: usize,
    scales: usize,
}

/// Addresses of questions, and of what they are answered with.
struct TaskAddresses {
    tasks: u64,
    rows: u64,
    scales: u64,
    answers: u64,
    maxima: u64,
    sums: u64,
}

/// The address of the word so many places behind that at `first`.
pub(super) fn word(first: u64, index: usize) -> u64 {
    first + (index * size_of::<u32>()) as u64
}

fn words(x: f64) -> [u32; 2] {
    [x.to_bits() as u32, (x.to_bits() >> 32) as u32]
}

impl DeviceSampler {
    /// Takes the kernels from the module that `cu/sampling.cu` is.
    pub fn load(context: &Arc<Context>, module: &Module) -> Result<Self> {
        Ok(Self {
            summarise: module.function("summarise_logits")?,
            answer: module.function("answer_tasks")?,
            scratch: DeviceScratch::new(context),
            answers: DownloadPool::new(&context.stream),
            context: context.clone(),
        })
    }

    /// Starts to answer the questions, about these rows; `None` if there are none.
    pub fn start(
        &self,
        staging: &Staging,
        logits: TensorRows,
        questions: &TaskBatch,
    ) -> Result<Option<Download<'_, u32>>> {
        let counts = questions.counts();
        if counts.tasks == 0 {
            return Ok(None);
        }
        let words: Vec<u32> = questions.words().collect();
        let asked = self.context.upload(staging, &words)?;
        let places = self.places(asked.pointer, counts, logits.width)?;
        self.launch(&places, logits, 0..counts.rows, 0..counts.tasks)?;
        self.land(counts, &places).map(Some)
    }

    /// Answers the questions of these rows, one of each, which are at an address with those of other rows.
    pub fn answer(&self, asked: u64, counts: TaskCounts, logits: TensorRows, rows: Range<usize>) -> Result<()> {
        assert!(rows.len() <= logits.rows && rows.end <= counts.rows, "{rows:?} of {}: {logits:?}", counts.rows);
        let places = self.places(asked, counts, logits.width)?;
        // The rows' numbers are those of the step.
        let before = (rows.start * logits.stride * size_of::<f32>()) as u64;
        let logits = TensorRows { pointer: logits.pointer.wrapping_sub(before), ..logits };
        self.launch(&places, logits, rows.clone(), rows)
    }

    /// Starts to copy the answers to the first `wanted` questions that [`DeviceSampler::answer`] has answered.
    pub fn answered(&self, asked: u64, counts: TaskCounts, vocab: usize, wanted: usize) -> Result<Download<'_, u32>> {
        self.land(TaskCounts { tasks: wanted, ..counts }, &self.places(asked, counts, vocab)?)
    }

    /// Where everything is, for questions at this address.
    fn places(&self, tasks: u64, counts: TaskCounts, vocab: usize) -> Result<TaskAddresses> {
        let blocks = vocab.div_ceil(VOCAB_BLOCK);
        let rows = word(tasks, counts.tasks * TASK_WORDS);
        let scales = word(rows, counts.rows * ROW_WORDS);
        let needed = counts.tasks * ANSWER_WORDS + (counts.rows + counts.scales) * blocks;
        let answers = self.scratch.take(needed * size_of::<u32>())?;
        let maxima = word(answers, counts.tasks * ANSWER_WORDS);
        Ok(TaskAddresses { tasks, rows, scales, answers, maxima, sums: word(maxima, counts.rows * blocks) })
    }

    /// Starts the kernels, for some of the rows and their tasks.
    fn launch(
        &self,
        places: &TaskAddresses,
        logits: TensorRows,
        rows: Range<usize>,
        tasks: Range<usize>,
    ) -> Result<()> {
        let TaskAddresses { answers, maxima, sums, scales, .. } = *places;
        let blocks = logits.width.div_ceil(VOCAB_BLOCK);
        let mut launch = Launch::of(&self.context.stream, &self.summarise);
        launch.pointer(word(maxima, rows.start * blocks)).pointer(sums).rows(logits).int(logits.width);
        launch.pointer(word(places.rows, rows.start * ROW_WORDS)).pointer(scales);
        // SAFETY: the parameters are those of the kernel, and the memory has their sizes.
        unsafe { launch.start(grid((blocks.div_ceil(BLOCKS_AT_ONCE) as u32, rows.len() as u32, 1), THREADS, 0))? };
        let mut launch = Launch::of(&self.context.stream, &self.answer);
        launch.pointer(word(answers, tasks.start * ANSWER_WORDS)).pointer(word(places.tasks, tasks.start * TASK_WORDS));
        launch.pointer(places.rows).pointer(scales).pointer(maxima).pointer(sums).rows(logits).int(logits.width);
        // SAFETY: as above.
        unsafe { launch.start(grid((tasks.len() as u32, 1, 1), THREADS, (2 * blocks * size_of::<u32>()) as u32)) }
    }

    fn land(&self, counts: TaskCounts, places: &TaskAddresses) -> Result<Download<'_, u32>> {
        let len = counts.tasks * ANSWER_WORDS;
        let mut landing = self.answers.take(len)?;
        // SAFETY: the answers are of this length, and read when they have been copied.
        landing.places(len).try_for_each(|to| unsafe { self.answers.copy(places.answers, to) })?;
        landing.record()?;
        Ok(landing)
    }

    /// Gives the memory that is reused back.
    pub fn release(&self) {
        self.scratch.release();
        self.answers.release();
    }
}

/// Reads the answers in the order of their tasks.
pub(super) struct Answers<'a>(std::slice::ChunksExact<'a, u32>);

impl<'a> Answers<'a> {
    pub fn new(words: &'a [u32]) -> Self {
        Self(words.chunks_exact(ANSWER_WORDS))
    }

    /// The answer to the next task.
    pub fn next(&mut self, task: &SamplingTask<'_>) -> TokenLogprobs {
        let words = self.0.next().expect("an answer to each task");
        let &[token, choice, is_kept, logit, max, _, raw_low, raw_high, low, high] = words else {
            unreachable!("the words of an answer")
        };
        let [logit, max] = [logit, max].map(f32::from_bits);
        let [raw_total, total] = [(raw_low, raw_high), (low, high)]
            .map(|(low, high)| f64::from_bits(u64::from(high) << 32 | u64::from(low)));
        let broken = raw_total.is_nan();
        let processed = if broken || !max.is_finite() || task.temperature == 0.0 {
            certain_logprob(token == choice, broken)
        } else if is_kept != 0 {
            logprob(logit, max, task.temperature, total)
        } else {
            f32::NEG_INFINITY
        };
        let raw = logprob(logit, max, 1.0, raw_total);
        TokenLogprobs { token, raw, processed, top: Vec::new(), rank: 0, returned: None }
    }
}
