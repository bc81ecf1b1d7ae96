//! One thread for each tensor-parallel rank. All get the same plans in the same order.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

use super::{Executor, Memory, ModelRunner, WeightOrder};
use crate::error::{Error, Result};
use crate::types::{StepOutput, StepPlan};
use crate::weights::ParamSpec;

/// Exit status after a rank has failed: EX_SOFTWARE of sysexits.h, an internal error.
const RANK_FAILED: i32 = 70;

/// The rank threads. Dropping ends them.
pub struct Ranks {
    plans: Vec<Sender<Arc<StepPlan>>>,
    answers: Receiver<Result<StepOutput>>,
    threads: Vec<JoinHandle<()>>,
}

impl Ranks {
    /// Starts a thread for each of `makers`, which builds its rank there, all at the same time. Returns once all are
    /// built.
    ///
    /// # Errors
    /// The first error of a maker.
    pub fn start<F>(makers: impl Iterator<Item = F>) -> Result<Self>
    where
        F: FnOnce() -> Result<ModelRunner> + Send + 'static,
    {
        // Unbounded, but the engine launches one step at a time.
        let (answer, answers) = channel();
        let (ready, built) = channel();
        let (mut plans, mut threads) = (Vec::new(), Vec::new());
        for (rank, make) in makers.enumerate() {
            let (sender, receiver) = channel();
            let (ready, answer) = (ready.clone(), answer.clone());
            let body = move || {
                end_process_on_panic(rank, || match make() {
                    Ok(runner) => {
                        let _ = ready.send(Ok(()));
                        serve(rank, runner, &receiver, &answer);
                    }
                    Err(e) => {
                        let _ = ready.send(Err(e));
                    }
                })
            };
            let thread = std::thread::Builder::new().name(format!("rank-{rank}")).spawn(body);
            threads.push(thread.map_err(|e| Error::Internal(format!("rank {rank}'s thread did not start: {e}")))?);
            plans.push(sender);
        }
        for _ in 0..threads.len() {
            built.recv().map_err(|_| Error::Internal("a rank ended while it was built".into()))??;
        }
        Ok(Self { plans, answers, threads })
    }
}

impl Executor for Ranks {
    fn launch(&mut self, plan: Arc<StepPlan>) -> Result<()> {
        for (rank, plans) in self.plans.iter().enumerate() {
            plans.send(plan.clone()).map_err(|_| Error::Internal(format!("rank {rank} has ended")))?;
        }
        Ok(())
    }

    fn collect(&mut self) -> Result<StepOutput> {
        self.answers.recv().map_err(|_| Error::Internal("the ranks have ended".into()))?
    }

    fn write(&mut self, _order: WeightOrder) -> Result<()> {
        todo!()
    }

    fn read(&mut self, _spec: &ParamSpec, _rows: Range<usize>) -> Result<Vec<u8>> {
        todo!()
    }

    fn release(&mut self, _memory: Memory) -> Result<()> {
        todo!()
    }

    fn restore(&mut self, _memory: Memory) -> Result<()> {
        todo!()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        self.plans.clear();
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(rank: usize, mut runner: ModelRunner, plans: &Receiver<Arc<StepPlan>>, answers: &Sender<Result<StepOutput>>) {
    while let Ok(plan) = plans.recv() {
        let output = runner.run(&plan);
        // A rank that stops half way would leave the others waiting in a collective for ever.
        if let Err(e) = &output {
            panic!("rank {rank} failed in a step: {e}");
        }
        if rank == 0 && answers.send(output).is_err() {
            return;
        }
    }
}

/// The other ranks would wait for a dead one: better to end with a message than to hang.
fn end_process_on_panic(rank: usize, body: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(body)).is_err() {
        tracing::error!("rank {rank} has failed (its message is above); the server ends");
        std::process::exit(RANK_FAILED);
    }
}
