//! The tensor-parallel ranks: a thread for each. All of them get the same orders in the same sequence.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::{Executor, MemoryKind, ModelRunner, Released, WeightOrder};
use rollout_kernels::Devices;

use crate::error::{Error, Result};
use crate::types::{StepOutput, StepPlan};
use crate::weights::{ParamSpec, ShadowShard, ShadowWeights, Slice};

/// Exit status after a rank has failed: EX_SOFTWARE of sysexits.h, an internal error.
const RANK_FAILED: i32 = 70;

/// A message to a rank's thread.
enum Order {
    /// A step, which rank 0 answers through the channel of steps.
    Step(Arc<StepPlan>),
    /// A task between steps, which every rank answers with its number.
    Task { task: Task, answer: Sender<(usize, Result<Answer>)> },
}

/// A task of a rank between steps; see [`Executor`].
enum Task {
    Check(WeightOrder),
    Reopen,
    Prepare(WeightOrder),
    Write(WeightOrder),
    Shadow,
    Exchange(Vec<ShadowShard>),
    Read { spec: Arc<ParamSpec>, rows: Range<usize> },
    Release { memory: MemoryKind, host_bytes: u64 },
    Restore(MemoryKind),
    Discard(Vec<ShadowShard>),
}

/// The result of a [`Task`].
enum Answer {
    Done,
    Read(Vec<u8>),
    Released(Released),
    Storage(Vec<ShadowShard>),
}

/// The rank threads. Dropping ends them.
pub struct Ranks {
    orders: Vec<Sender<Order>>,
    steps: Receiver<StepOutput>,
    threads: Vec<JoinHandle<()>>,
    devices: Devices,
}

impl Ranks {
    /// Starts a thread for each of `makers`, which builds its rank on that thread. All are built at the same time, and
    /// all are ready when this returns.
    ///
    /// # Errors
    /// The first error of a maker.
    pub fn start<F>(devices: Devices, makers: impl Iterator<Item = F>) -> Result<Self>
    where
        F: FnOnce() -> Result<ModelRunner> + Send + 'static,
    {
        // The channel is unbounded, but the engine launches one step at a time.
        let (answer, steps) = channel();
        let (ready, built) = channel();
        let (mut orders, mut threads) = (Vec::new(), Vec::new());
        for (rank, make) in makers.enumerate() {
            let (sender, receiver) = channel();
            let (ready, answer) = (ready.clone(), answer.clone());
            let body = move || match end_process_on_panic(rank, make) {
                Ok(mut runner) => {
                    let _ = ready.send(Ok(()));
                    // After a panic nobody drops the runner: its communicator would wait for ranks that wait for it.
                    end_process_on_panic(rank, || serve(rank, &mut runner, &receiver, &answer));
                }
                Err(e) => {
                    let _ = ready.send(Err(e));
                }
            };
            let thread = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(body);
            threads.push(thread.map_err(|e| Error::Internal(format!("rank {rank}'s thread did not start: {e}")))?);
            orders.push(sender);
        }
        for _ in 0..threads.len() {
            built.recv().map_err(|_| Error::Internal("a rank ended while it was built".into()))??;
        }
        Ok(Self { orders, steps, threads, devices })
    }

    /// Sends every rank its order.
    fn give(&self, mut order: impl FnMut() -> Order) -> Result<()> {
        for (rank, orders) in self.orders.iter().enumerate() {
            orders.send(order()).map_err(|_| Error::Internal(format!("rank {rank} has ended")))?;
        }
        Ok(())
    }

    /// Has every rank carry out its task. The answers are in the order of the ranks.
    fn perform(&self, mut task: impl FnMut() -> Task) -> Result<Vec<Answer>> {
        let (answer, answers) = channel();
        self.give(|| Order::Task { task: task(), answer: answer.clone() })?;
        drop(answer);
        let mut all: Vec<(usize, Result<Answer>)> = answers.iter().collect();
        if all.len() < self.orders.len() {
            return Err(Error::Internal("a rank has ended".into()));
        }
        all.sort_by_key(|(rank, _)| *rank);
        all.into_iter().map(|(_, answer)| answer).collect()
    }

    /// As [`Ranks::perform`]; also measures the bytes that the devices have back after it.
    fn measured(&self, task: impl FnMut() -> Task) -> Result<(u64, Vec<Answer>)> {
        let before = self.used_bytes();
        let answers = self.perform(task)?;
        Ok((before.saturating_sub(self.used_bytes()), answers))
    }
}

/// Shadow weights made of the storage that the ranks answered with.
fn storage(answers: Vec<Answer>) -> ShadowWeights {
    let shards = |answer| match answer {
        Answer::Storage(shards) => Some(shards),
        _ => None,
    };
    ShadowWeights::new(answers.into_iter().filter_map(shards).collect())
}

impl Executor for Ranks {
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()> {
        self.give(|| Order::Step(plan.clone()))
    }

    fn collect(&mut self) -> Result<StepOutput> {
        self.steps.recv().map_err(|_| Error::Internal("the ranks have ended".into()))
    }

    fn check(&mut self, order: &WeightOrder) -> Result<()> {
        let check = || Task::Check(order.clone());
        let damage = match self.perform(check) {
            Err(Error::DataLoss(damage)) => damage,
            checked => return checked.map(|_| ()),
        };
        // Somebody may have put the right files back at the old paths: those are other inodes, so they are opened anew.
        match self.perform(|| Task::Reopen).and_then(|_| self.perform(check)) {
            Err(Error::DataLoss(_)) => Err(Error::DataLoss(damage)),
            again => again.map(|_| ()),
        }
    }

    fn write(&mut self, order: WeightOrder) -> Result<()> {
        // A rank that lacked memory in the middle would leave the others waiting for its part of what they exchange.
        self.perform(|| Task::Prepare(order.clone()))?;
        self.perform(|| Task::Write(order.clone())).map(|_| ())
    }

    fn shadow_weights(&mut self) -> Result<ShadowWeights> {
        self.perform(|| Task::Shadow).map(storage)
    }

    fn exchange(&mut self, shadow: ShadowWeights) -> Result<ShadowWeights> {
        let mut shards = shadow.into_ranks().into_iter();
        self.perform(|| Task::Exchange(shards.next().unwrap_or_default())).map(storage)
    }

    fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>> {
        let shared = Arc::new(spec.clone());
        let answers = self.perform(|| Task::Read { spec: shared.clone(), rows: rows.clone() })?;
        let part = |answer| match answer {
            Answer::Read(bytes) => bytes,
            _ => Vec::new(),
        };
        gather(spec, &rows, &answers.into_iter().map(part).collect::<Vec<_>>())
    }

    fn release(&mut self, memory: MemoryKind, host_bytes: u64) -> Result<Released> {
        // Ranks hold the same, but for what cannot be divided.
        let host_bytes = host_bytes / self.orders.len() as u64;
        let (freed, answers) = self.measured(|| Task::Release { memory, host_bytes })?;
        let mut released = Released { freed, ..Released::default() };
        for answer in answers {
            if let Answer::Released(Released { kept, offloaded, .. }) = answer {
                released.kept += kept;
                released.offloaded += offloaded;
            }
        }
        Ok(released)
    }

    fn restore(&mut self, memory: MemoryKind) -> Result<()> {
        self.perform(|| Task::Restore(memory)).map(|_| ())
    }

    fn discard(&mut self, shadow: ShadowWeights) -> Result<u64> {
        let mut shards = shadow.into_ranks().into_iter();
        let (freed, _) = self.measured(|| Task::Discard(shards.next().unwrap_or_default()))?;
        Ok(freed)
    }

    fn used_bytes(&self) -> u64 {
        self.devices.trim();
        self.devices.used_bytes()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.orders.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(rank: usize, runner: &mut ModelRunner, orders: &Receiver<Order>, steps: &Sender<StepOutput>) {
    while let Ok(order) = orders.recv() {
        // An error in a step is a panic, because a rank that stops half way leaves the others in a collective for ever.
        let heard = match order {
            Order::Step(plan) => {
                let output = runner.run(&plan).unwrap_or_else(|e| panic!("rank {rank} failed in a step: {e}"));
                rank != 0 || steps.send(output).is_ok()
            }
            Order::Task { task, answer } => {
                // After a panic nobody hears that the channel is closed before the process ends.
                let answer = ManuallyDrop::new(answer);
                let done = match perform(runner, task) {
                    Err(e) if !matches!(e, Error::ResourceExhausted(_) | Error::DataLoss(_)) => {
                        panic!("rank {rank} failed: {e}")
                    }
                    done => done,
                };
                ManuallyDrop::into_inner(answer).send((rank, done)).is_ok()
            }
        };
        if !heard {
            return;
        }
    }
}

/// Carries out `task` and drops it, so that the memory it holds is free before anybody hears that it is done.
fn perform(runner: &mut ModelRunner, task: Task) -> Result<Answer> {
    match task {
        Task::Check(order) => runner.check(&order)?,
        Task::Reopen => runner.reopen()?,
        Task::Prepare(order) => runner.prepare(&order)?,
        Task::Write(order) => runner.write(&order)?,
        Task::Shadow => return runner.shadow_shards().map(Answer::Storage),
        Task::Exchange(shards) => return runner.exchange(shards).map(Answer::Storage),
        Task::Read { spec, rows } => return runner.read(&spec, rows).map(Answer::Read),
        Task::Release { memory, host_bytes } => return runner.release(memory, host_bytes).map(Answer::Released),
        Task::Restore(memory) => runner.restore(memory)?,
        Task::Discard(shards) => drop(shards),
    }
    Ok(Answer::Done)
}

/// Puts whole rows of a parameter together from the parts of the ranks, some of which may be empty.
fn gather(spec: &ParamSpec, rows: &Range<usize>, parts: &[Vec<u8>]) -> Result<Vec<u8>> {
    let whole = Slice::whole(&spec.shape);
    let mut gathered = vec![0; parts.iter().map(Vec::len).sum()];
    let row_bytes = gathered.len() / rows.len().max(1);
    for (rank, part) in parts.iter().enumerate().filter(|(_, part)| !part.is_empty()) {
        let slice = spec.slice(rank, parts.len())?;
        let first_row = slice.rows.start.max(rows.start) - rows.start;
        let column_bytes = |column: usize| column * row_bytes / whole.cols.len();
        let columns = column_bytes(slice.cols.start)..column_bytes(slice.cols.end);
        for (row, part) in gathered.chunks_exact_mut(row_bytes).skip(first_row).zip(part.chunks_exact(columns.len())) {
            row[columns.clone()].copy_from_slice(part);
        }
    }
    Ok(gathered)
}

/// Runs a part of a rank's thread, and ends the process if it panics: the other ranks would wait for the dead one
/// forever. The values that `body` borrows are not dropped then: a device that has failed would log an error for each.
#[expect(clippy::exit, reason = "a rank that has failed leaves a step half done, which all requests use")]
fn end_process_on_panic<T>(rank: usize, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        tracing::error!("rank {rank} has failed (its message is above); the server ends");
        std::process::exit(RANK_FAILED)
    })
}
