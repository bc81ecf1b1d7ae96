//! Computes masks on a separate thread, so that the engine's thread can run the other samples meanwhile.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

use super::{GrammarError, GrammarState};
use crate::types::{RequestKey, SampleKey, TokenId, WeightVersion};

/// Most masks that the thread has at once, so that it has work while the engine steps. All others wait in the queue,
/// where requests take turns: a request waits for these and one mask of each other request at most.
const MOST_AHEAD: usize = 4;

/// A mask to compute that is too expensive for the engine's thread, or that the step has no time left for.
#[derive(Debug)]
pub struct MaskJob {
    pub sample: SampleKey,
    /// The sample's tokens. The mask follows the last one.
    pub outputs: Vec<TokenId>,
    /// The sample's state before its last token.
    pub state: Box<GrammarState>,
    wanted: Weak<()>,
}

impl MaskJob {
    /// Returns the job and its token: once the token is dropped, the queue drops the job.
    pub fn new(sample: SampleKey, outputs: Vec<TokenId>, state: Box<GrammarState>) -> (Self, Arc<()>) {
        let token = Arc::new(());
        (Self { sample, outputs, state, wanted: Arc::downgrade(&token) }, token)
    }

    /// Computes the mask.
    pub fn run(mut self) -> MaskDone {
        let advanced = self.state.advance(&self.outputs);
        MaskDone { sample: self.sample, state: self.state, advanced }
    }
}

/// A computed mask.
#[derive(Debug)]
pub struct MaskDone {
    pub sample: SampleKey,
    pub state: Box<GrammarState>,
    /// Number of bytes by which the grammar grew.
    pub advanced: Result<usize, GrammarError>,
}

/// A job, or its result, with the version of the policy that sampled its last token.
type Versioned<T> = (T, WeightVersion);

/// The channels to the thread and back. A job that is no longer needed returns as `None`.
type MaskThread = (Sender<Versioned<MaskJob>>, Receiver<Versioned<Option<MaskDone>>>);

/// The jobs that wait or run. A sample has at most one job, so the scheduler's limits bound their number.
#[derive(Default)]
pub struct MaskQueue {
    waiting: VecDeque<(RequestKey, VecDeque<Versioned<MaskJob>>)>,
    num_ahead: usize,
    /// Masks that the engine's thread computed because no other thread could be started.
    computed: Vec<Versioned<MaskDone>>,
    /// Started with the first job.
    thread: Option<MaskThread>,
}

impl MaskQueue {
    pub fn is_empty(&self) -> bool {
        self.num_ahead == 0 && self.waiting.is_empty() && self.computed.is_empty()
    }

    /// Adds a job for a token that the policy `version` sampled. If no thread can be started, the job runs at once.
    pub fn push(&mut self, job: MaskJob, version: WeightVersion) {
        if self.thread.is_none() {
            match start() {
                Ok(thread) => self.thread = Some(thread),
                Err(error) => {
                    tracing::warn!("no thread for masks can be started: {error}");
                    return self.computed.push((job.run(), version));
                }
            }
        }
        let request = job.sample.group.request;
        match self.waiting.iter_mut().find(|(key, _)| *key == request) {
            Some((_, jobs)) => jobs.push_back((job, version)),
            None => self.waiting.push_back((request, VecDeque::from([(job, version)]))),
        }
        self.hand_over();
    }

    /// The masks that were computed since the last call. If there are none, waits for one, at most for `longest`.
    pub fn take(&mut self, longest: Duration) -> Vec<Versioned<MaskDone>> {
        let mut computed = std::mem::take(&mut self.computed);
        let Some((_, results)) = &self.thread else { return computed };
        let mut taken: Vec<_> = results.try_iter().collect();
        if computed.is_empty() && taken.is_empty() && self.num_ahead > 0 && !longest.is_zero() {
            taken.extend(results.recv_timeout(longest));
        }
        self.num_ahead -= taken.len();
        self.hand_over();
        computed.extend(taken.into_iter().filter_map(|(done, version)| Some((done?, version))));
        computed
    }

    fn hand_over(&mut self) {
        let Some((jobs, _)) = &self.thread else { return };
        while self.num_ahead < MOST_AHEAD {
            let Some((request, mut next)) = self.waiting.pop_front() else { return };
            let job = next.pop_front().expect("a request in the queue has a job");
            if !next.is_empty() {
                self.waiting.push_back((request, next));
            }
            if job.0.wanted.strong_count() > 0 {
                jobs.send(job).expect("the thread ends after the queue");
                self.num_ahead += 1;
            }
        }
    }
}

/// Starts the thread. It ends when the queue is dropped, after the mask that it is computing.
fn start() -> std::io::Result<MaskThread> {
    let (to_thread, jobs) = channel::<Versioned<MaskJob>>();
    let (results, from_thread) = channel();
    let work = move || {
        for (job, version) in jobs {
            let done = (job.wanted.strong_count() > 0).then(|| job.run());
            if results.send((done, version)).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("masks".into()).spawn(work)?;
    Ok((to_thread, from_thread))
}
