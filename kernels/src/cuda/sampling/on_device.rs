//! The questions that the device answers itself, and what it says.

use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::cudarc::driver::CudaFunction;

use super::super::context::Context;
use super::super::launch::{Launch, grid};
use super::super::module::{Module, fat_binary};
use super::super::scratch::Scratch;
use super::super::staging::Staging;
use super::super::tensor::Rows;
use super::landing::{Landing, Landings};
use crate::cpu::logits::VOCAB_BLOCK;
use crate::cpu::{certain_logprob, logprob};
use crate::sampling::{SamplingTask, TokenLogprobs, uniform};

/// Blocks of the vocabulary of which a kernel has two values each in its 48 KiB of shared memory.
const MAX_BLOCKS: usize = 5632;
/// Threads of a block of each kernel, and blocks of the vocabulary of one of `summarise`.
const THREADS: u32 = 256;
const BLOCKS_AT_ONCE: usize = 32;
/// Stands for no target.
const NO_TARGET: u32 = u32::MAX;

/// Words of the structures of `cu/sampling.cu`.
const ROW_WORDS: usize = 3;
const ANSWER_WORDS: usize = 10;

/// The kernels.
pub(super) struct DeviceSampler {
    context: Arc<Context>,
    summarise: CudaFunction,
    answer: CudaFunction,
    /// Answers, then the maxima and sums of blocks.
    scratch: Scratch,
    answers: Landings<u32>,
}

/// Rows and their tasks as the kernels read them.
#[derive(Default)]
pub(super) struct Questions {
    tasks: Vec<u32>,
    rows: Vec<u32>,
    scales: Vec<f32>,
    count: usize,
}

impl Questions {
    /// Whether the device answers a task on a row of `vocab` logits.
    pub fn take(task: &SamplingTask<'_>, vocab: usize) -> bool {
        !task.edits() && task.top_logprobs == 0 && vocab.div_ceil(VOCAB_BLOCK) <= MAX_BLOCKS
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

fn words(x: f64) -> [u32; 2] {
    [x.to_bits() as u32, (x.to_bits() >> 32) as u32]
}

impl DeviceSampler {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("sampling"))?;
        Ok(Self {
            summarise: module.function("summarise_logits")?,
            answer: module.function("answer_tasks")?,
            scratch: Scratch::new(context),
            answers: Landings::new(&context.stream),
            context: context.clone(),
        })
    }

    /// Starts to answer the questions, about these rows; `None` if there are none.
    pub fn start(&self, staging: &Staging, logits: Rows, questions: &Questions) -> Result<Option<Landing<'_, u32>>> {
        let Questions { tasks, rows, scales, count } = questions;
        let (word, blocks) = (size_of::<u32>(), logits.width.div_ceil(VOCAB_BLOCK));
        if *count == 0 {
            return Ok(None);
        }
        let mut landing = self.answers.take(count * ANSWER_WORDS)?;
        let row_count = rows.len() / ROW_WORDS;
        let asked: Vec<u32> =
            [&tasks[..], rows].concat().into_iter().chain(scales.iter().map(|x| x.to_bits())).collect();
        let asked = self.context.upload(staging, &asked)?;
        let rows = asked.pointer + (tasks.len() * word) as u64;
        let scale_values = rows + (row_count * ROW_WORDS * word) as u64;
        let answers = self.scratch.take((count * ANSWER_WORDS + (row_count + scales.len()) * blocks) * word)?;
        let maxima = answers + (count * ANSWER_WORDS * word) as u64;
        let sums = maxima + (row_count * blocks * word) as u64;
        let mut launch = Launch::of(&self.context.stream, &self.summarise);
        launch.pointer(maxima).pointer(sums).rows(logits).int(logits.width).pointer(rows).pointer(scale_values);
        // SAFETY: the parameters are those of the kernel, and the memory has their sizes.
        unsafe { launch.start(grid((blocks.div_ceil(BLOCKS_AT_ONCE) as u32, row_count as u32, 1), THREADS, 0))? };
        let mut launch = Launch::of(&self.context.stream, &self.answer);
        launch.pointer(answers).pointer(asked.pointer).pointer(rows).pointer(scale_values);
        launch.pointer(maxima).pointer(sums).rows(logits).int(logits.width);
        // SAFETY: as above.
        unsafe { launch.start(grid((*count as u32, 1, 1), THREADS, (2 * blocks * word) as u32))? };
        // SAFETY: the answers are of this length, and read when they have been copied.
        landing.places(count * ANSWER_WORDS).try_for_each(|to| unsafe { self.answers.copy(answers, to) })?;
        landing.record()?;
        Ok(Some(landing))
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
        TokenLogprobs { token, raw: logprob(logit, max, 1.0, raw_total), processed, top: Vec::new(), rank: 0 }
    }
}
