//! Tokens and log-probabilities from logits.
//!
//! The device answers rows whose tasks edit no logits and list no likely tokens. The logits of the others are copied to
//! the host. Either way the bits are those of the CPU.

mod divergences;
mod on_device;

use std::ops::Range;
use std::sync::Arc;

use candle_core::Result;
use candle_core::cuda_backend::WrapErr;

pub(super) use self::divergences::DIVERGENCE_BYTES;
use self::divergences::DivergenceKernels;
use self::on_device::{Answers, DeviceSampler};
pub(super) use self::on_device::{TaskBatch, TaskCounts};
use super::context::Context;
use super::download::{Download, DownloadPool};
use super::module::{Module, fat_binary};
use super::staging::Staging;
use super::tensor::TensorRows;
use crate::cpu::{Isa, LogitsTasks, Samplers, ThreadPool};
use crate::deferred::Deferred;
use crate::divergence::{Divergences, LogitsPair};
use crate::sampling::{SampledTokens, SamplingTask};
use crate::step::RowTasks;

/// How many calls may have logits on the way to the host. A further one waits for its own, so that a long prompt
/// cannot pin memory without bound.
const COPIES: usize = 2;

/// Bytes of the host that logits are copied to at most, where `bytes` of them are sampled at once: one call more than
/// [`COPIES`] waits for its own.
pub(super) fn max_download_bytes(bytes: usize) -> u64 {
    let each = if bytes == 0 { 0 } else { bytes.next_power_of_two() };
    (each * (COPIES + 1)) as u64
}

/// Answers tasks; the answers are those of the CPU for the same logits.
pub(super) struct Sampler {
    context: Arc<Context>,
    on_device: DeviceSampler,
    on_host: Samplers,
    divergences: DivergenceKernels,
    logits: DownloadPool<f32>,
}

impl Sampler {
    pub fn load(context: &Arc<Context>) -> Result<Self> {
        let module = Module::load(context.stream.context(), fat_binary!("sampling"))?;
        Ok(Self {
            on_device: DeviceSampler::load(context, &module)?,
            on_host: Samplers::new(Isa::detect()),
            divergences: DivergenceKernels::load(context, &module)?,
            logits: DownloadPool::new(&context.stream),
            context: context.clone(),
        })
    }

    /// Starts to answer the tasks of `wanted`, whose logits are the rows of `logits`. The host answers the tasks that
    /// the device does not support, when the answers are read.
    pub fn sample<'a>(
        &'a self,
        host: &'a ThreadPool,
        staging: &Staging,
        logits: TensorRows,
        wanted: &'a [RowTasks],
        tasks: &'a [SamplingTask<'a>],
    ) -> Result<Deferred<'a, SampledTokens>> {
        self.context.stream.context().bind_to_thread().w()?;
        let wanted: Vec<_> = wanted.iter().map(|wanted| &tasks[wanted.tasks.clone()]).collect();
        let (mut questions, mut host_rows) = (TaskBatch::default(), Vec::new());
        for (row, tasks) in wanted.iter().enumerate() {
            if tasks.iter().all(|task| TaskBatch::take(task, logits.width)) {
                questions.push(row, tasks, logits.width);
            } else {
                host_rows.push(row);
            }
        }
        let in_time = host_rows.is_empty() || self.logits.lent() < COPIES;
        let answers = self.on_device.start(staging, logits, &questions)?;
        let landed = if host_rows.is_empty() { None } else { Some(self.land(logits, &host_rows)?) };
        let read = move || {
            let of_host = match landed {
                Some(landed) => {
                    let rows = landed.read()?.chunks_exact(logits.width).zip(&host_rows);
                    let questions: Vec<LogitsTasks<'_>> = rows.map(|(logits, row)| (logits, wanted[*row])).collect();
                    self.on_host.answer(host, &questions)
                }
                None => SampledTokens::default(),
            };
            let answers = answers.as_ref().map_or(Ok(&[][..]), Download::read)?;
            Ok(merged(&wanted, &host_rows, of_host, Answers::new(answers)))
        };
        if in_time {
            return Ok(Deferred::new(read));
        }
        let sampled = read()?;
        Ok(Deferred::ready(sampled))
    }

    /// Starts to compute the divergences of pairs of rows.
    pub fn divergences<'a>(
        &'a self,
        staging: &Staging,
        logits: TensorRows,
        pairs: &[LogitsPair],
    ) -> Result<Deferred<'a, Vec<Divergences>>> {
        self.context.stream.context().bind_to_thread().w()?;
        self.divergences.start(staging, logits, pairs)
    }

    /// Answers the tasks of these rows of a step, one of each, by questions at an address.
    pub fn answer(&self, asked: u64, counts: TaskCounts, logits: TensorRows, rows: Range<usize>) -> Result<()> {
        self.on_device.answer(asked, counts, logits, rows)
    }

    /// The answers to `tasks`, which [`Sampler::answer`] has answered.
    pub fn answered<'a>(
        &'a self,
        asked: u64,
        counts: TaskCounts,
        vocab: usize,
        tasks: &'a [SamplingTask<'a>],
    ) -> Result<Deferred<'a, SampledTokens>> {
        let answers = self.on_device.answered(asked, counts, vocab, tasks.len())?;
        Ok(Deferred::new(move || {
            let mut answers = Answers::new(answers.read()?);
            let tokens = tasks.iter().map(|task| answers.next(task)).collect();
            Ok(SampledTokens { tokens, failed: Vec::new() })
        }))
    }

    /// Starts to copy these rows to the host.
    fn land(&self, logits: TensorRows, rows: &[usize]) -> Result<Download<'_, f32>> {
        let mut landing = self.logits.take(rows.len() * logits.width)?;
        for (row, to) in rows.iter().zip(landing.places(logits.width)) {
            let from = logits.pointer + (row * logits.stride * size_of::<f32>()) as u64;
            // SAFETY: the rows are in the device's memory, and the landing is read when the copies have been made.
            unsafe { self.logits.copy(from, to)? };
        }
        landing.record()?;
        Ok(landing)
    }

    /// Gives the memory that samplers reuse back.
    pub fn release(&self) {
        self.on_device.release();
        self.on_host.release();
        self.divergences.release();
        self.logits.release();
    }
}

/// The answers to all tasks in their order, of which the host has answered those of `host_rows`.
fn merged(
    wanted: &[&[SamplingTask<'_>]],
    host_rows: &[usize],
    of_host: SampledTokens,
    mut of_device: Answers<'_>,
) -> SampledTokens {
    let SampledTokens { tokens, failed } = of_host;
    let (mut of_host, mut rows) = (tokens.into_iter(), host_rows.iter().peekable());
    let mut tokens = Vec::with_capacity(wanted.iter().map(|tasks| tasks.len()).sum());
    for (row, tasks) in wanted.iter().enumerate() {
        if rows.next_if(|host_row| **host_row == row).is_some() {
            tokens.extend(of_host.by_ref().take(tasks.len()));
        } else {
            tokens.extend(tasks.iter().map(|task| of_device.next(task)));
        }
    }
    SampledTokens { tokens, failed: failed.into_iter().map(|(i, panic)| (host_rows[i], panic)).collect() }
}
