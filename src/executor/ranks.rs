//! The tensor-parallel ranks: a thread for each. All of them get the same jobs in the same order.

use std::mem::ManuallyDrop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use rollout_kernels::Devices;

use super::{Executor, MemoryKind, ModelRunner, Released, WeightOrder};
use crate::error::{Error, Result};
use crate::types::{StepOutput, StepPlan};
use crate::weights::{ParamSpec, ShadowWeights, Slice};

/// Exit status after a rank has failed: EX_SOFTWARE of sysexits.h, an internal error.
const RANK_FAILED: i32 = 70;

/// A job for a rank's thread, which sends its result itself.
type Job = Box<dyn FnOnce(&mut ModelRunner) + Send>;

/// The rank threads. Dropping ends them.
pub struct Ranks {
    /// One channel for each rank.
    jobs: Vec<Sender<Job>>,
    /// The output of each rank in the step that was launched last.
    outputs: Vec<Receiver<StepOutput>>,
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
        let (ready, built) = channel();
        let (mut jobs, mut threads) = (Vec::new(), Vec::new());
        for (rank, make) in makers.enumerate() {
            // Unbounded, but the engine sends one job at a time.
            let (sender, receiver) = channel::<Job>();
            let ready = ready.clone();
            let body = move || match end_process_on_panic(rank, make) {
                Ok(mut runner) => {
                    let _ = ready.send(Ok(()));
                    // After a panic the runner is not dropped: its communicator would wait for ranks that wait for it.
                    end_process_on_panic(rank, || receiver.iter().for_each(|job| job(&mut runner)));
                }
                Err(e) => {
                    let _ = ready.send(Err(e));
                }
            };
            let thread = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(body);
            threads.push(thread.map_err(|e| Error::Internal(format!("rank {rank}'s thread did not start: {e}")))?);
            jobs.push(sender);
        }
        for _ in 0..threads.len() {
            built.recv().map_err(|_| Error::Internal("a rank ended while it was built".into()))??;
        }
        Ok(Self { jobs, outputs: Vec::new(), threads, devices })
    }

    /// Sends a job to every rank. The receivers, in the order of the ranks, get the results.
    fn submit<T, J>(&self, mut job: impl FnMut(usize) -> J) -> Result<Vec<Receiver<T>>>
    where
        T: Send + 'static,
        J: FnOnce(&mut ModelRunner) -> T + Send + 'static,
    {
        let submit = |(rank, jobs): (usize, &Sender<Job>)| {
            let (sender, receiver) = channel();
            let job = job(rank);
            let job: Job = Box::new(move |runner: &mut ModelRunner| send_result(sender, || job(runner)));
            jobs.send(job).map_err(|_| Error::Internal(format!("rank {rank} has ended")))?;
            Ok(receiver)
        };
        self.jobs.iter().enumerate().map(submit).collect()
    }

    /// Runs a job on every rank, and waits for all of them. The results are in the order of the ranks.
    ///
    /// # Errors
    /// The first error of a rank: `ResourceExhausted`, `DataLoss` or `InvalidArgument`. Any other error ends the
    /// process.
    fn on_all<T, J>(&self, mut job: impl FnMut() -> J) -> Result<Vec<T>>
    where
        T: Send + 'static,
        J: FnOnce(&mut ModelRunner) -> Result<T> + Send + 'static,
    {
        let receivers = self.submit(|rank| {
            let job = job();
            move |runner: &mut ModelRunner| match job(runner) {
                Err(e @ (Error::ResourceExhausted(_) | Error::DataLoss(_) | Error::InvalidArgument { .. })) => Err(e),
                result => Ok(result.unwrap_or_else(|e| panic!("rank {rank} failed: {e}"))),
            }
        })?;
        let results: Vec<Result<T>> = receivers.iter().map(|receiver| receive(receiver)?).collect();
        results.into_iter().collect()
    }

    /// As [`Ranks::on_all`]; also measures the bytes of the devices' memory that it frees.
    fn measured<T, J>(&self, job: impl FnMut() -> J) -> Result<(u64, Vec<T>)>
    where
        T: Send + 'static,
        J: FnOnce(&mut ModelRunner) -> Result<T> + Send + 'static,
    {
        let before = self.used_bytes();
        let results = self.on_all(job)?;
        Ok((before.saturating_sub(self.used_bytes()), results))
    }
}

/// Sends the result of `work`. If it panics, the sender is leaked rather than dropped, so that the receiver does not
/// see a closed channel before the process ends.
fn send_result<T>(sender: Sender<T>, work: impl FnOnce() -> T) {
    let sender = ManuallyDrop::new(sender);
    let result = work();
    let _ = ManuallyDrop::into_inner(sender).send(result);
}

fn receive<T>(receiver: &Receiver<T>) -> Result<T> {
    receiver.recv().map_err(|_| Error::Internal("a rank has ended".into()))
}

impl Executor for Ranks {
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()> {
        // An error in a step is a panic: a rank that stops half way leaves the others in a collective forever.
        self.outputs = self.submit(|rank| {
            let plan = Arc::clone(&plan);
            move |runner: &mut ModelRunner| {
                runner.run(&plan).unwrap_or_else(|e| panic!("rank {rank} failed in a step: {e}"))
            }
        })?;
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput> {
        // Rank 0 has the output of all.
        receive(self.outputs.first().expect("a step was launched"))
    }

    fn check(&mut self, order: &WeightOrder) -> Result<()> {
        let check = || {
            let order = order.clone();
            move |runner: &mut ModelRunner| runner.check(&order)
        };
        let damage = match self.on_all(check) {
            Err(Error::DataLoss(damage)) => damage,
            checked => return checked.map(|_| ()),
        };
        // The right files may have been restored at the old paths. Those are other inodes, so they are opened again.
        match self.on_all(|| |runner: &mut ModelRunner| runner.weights.reopen()).and_then(|_| self.on_all(check)) {
            Err(Error::DataLoss(_)) => Err(Error::DataLoss(damage)),
            again => again.map(|_| ()),
        }
    }

    fn write(&mut self, order: WeightOrder) -> Result<()> {
        let order = &order;
        // Prepared on all ranks first: a rank that ran out of memory in the middle would leave the others waiting.
        self.on_all(|| {
            let order = order.clone();
            move |runner: &mut ModelRunner| runner.prepare(&order)
        })?;
        self.on_all(|| {
            let order = order.clone();
            move |runner: &mut ModelRunner| runner.write(&order)
        })?;
        Ok(())
    }

    fn shadow_weights(&mut self) -> Result<ShadowWeights> {
        self.on_all(|| |runner: &mut ModelRunner| runner.weights.shadow_shards()).map(ShadowWeights::new)
    }

    fn exchange(&mut self, shadow: ShadowWeights) -> Result<ShadowWeights> {
        let kept = shadow.kept().clone();
        shadow.with_storage(|ranks| {
            let mut ranks = ranks.into_iter();
            self.on_all(|| {
                let (shards, kept) = (ranks.next().unwrap_or_default(), kept.clone());
                move |runner: &mut ModelRunner| runner.exchange(shards, &kept)
            })
        })
    }

    fn read(&mut self, spec: &ParamSpec, rows: Range<usize>) -> Result<Vec<u8>> {
        let read = || {
            let (spec, rows) = (spec.clone(), rows.clone());
            move |runner: &mut ModelRunner| runner.weights.read(&spec, rows)
        };
        gather(spec, &rows, &self.on_all(read)?)
    }

    fn release(&mut self, memory: MemoryKind, host_bytes: u64) -> Result<Released> {
        // Ranks hold the same, except for parameters that cannot be divided.
        let host_bytes = host_bytes / self.jobs.len() as u64;
        let release = || move |runner: &mut ModelRunner| runner.release(memory, host_bytes);
        let (freed, ranks) = self.measured(release)?;
        let kept = ranks.iter().map(|rank| rank.kept).sum();
        Ok(Released { freed, kept, offloaded: ranks.iter().map(|rank| rank.offloaded).sum() })
    }

    fn restore(&mut self, memory: MemoryKind) -> Result<()> {
        self.on_all(|| move |runner: &mut ModelRunner| runner.restore(memory)).map(|_| ())
    }

    fn discard(&mut self, shadow: ShadowWeights) -> Result<u64> {
        let mut ranks = shadow.into_ranks().into_iter();
        let discard = || {
            let shards = ranks.next().unwrap_or_default();
            move |_: &mut ModelRunner| {
                drop(shards);
                Ok(())
            }
        };
        self.measured(discard).map(|(freed, _)| freed)
    }

    fn used_bytes(&self) -> u64 {
        self.devices.trim();
        self.devices.used_bytes()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.jobs.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
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
