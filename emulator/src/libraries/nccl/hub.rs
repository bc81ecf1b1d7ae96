//! The hub of a communicator's ranks. It is in the process that made the communicator's id.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};

use super::super::number::ElementType;

/// Sums and the like, by their `ncclRedOp_t`.
const PRODUCT: u8 = 1;
const MAX: u8 = 2;
const MIN: u8 = 3;
const AVERAGE: u8 = 4;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CollectiveKind {
    AllReduce,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
}

/// A collective, as all ranks must call it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Collective {
    pub kind: CollectiveKind,
    /// Elements of what a rank gives or, where the sum is scattered, gets.
    pub count: u64,
    pub ty: ElementType,
    pub op: u8,
    pub root: u32,
    /// How many collectives the rank has called before it, those that were captured too.
    pub index: u64,
    /// Whether a graph has launched it.
    pub is_captured: bool,
}

/// The reason why a rank gets no result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CollectiveError {
    /// It has aborted the call itself.
    Aborted,
    /// The ranks do not call the same: the real library hangs, or mixes up data.
    Disagreement,
}

#[derive(Default)]
struct State {
    joined: usize,
    /// Each rank's call and data for the current collective.
    given: Vec<Option<(Collective, Vec<u8>)>>,
    /// Each rank's result of the last collective.
    results: Vec<Option<Result<Vec<u8>, CollectiveError>>>,
    /// Messages from one rank to another that were not received yet.
    mail: HashMap<(usize, usize), VecDeque<Vec<u8>>>,
    aborted: Vec<bool>,
    /// A rank's process has ended.
    lost: bool,
}

pub struct Hub {
    pub ranks: usize,
    state: Mutex<State>,
    change: Condvar,
}

impl Collective {
    /// How calls differ that must be the same.
    fn disagreement(calls: &[Self]) -> &'static str {
        let all_are = |same: fn(&Self, &Self) -> bool| calls.iter().all(|call| same(call, &calls[0]));
        if !all_are(|a, b| a.is_captured == b.is_captured) {
            "some ranks launch a graph that has it, others do not"
        } else if all_are(|a, b| Self { index: 0, ..*a } == Self { index: 0, ..*b }) {
            "ranks launch graphs of different captures, or some have captured collectives and others have not"
        } else {
            "ranks call different ones"
        }
    }

    /// Bytes that `rank` of `ranks` gives.
    pub fn input_bytes(&self, rank: usize, ranks: usize) -> usize {
        let bytes = self.count as usize * self.ty.bytes();
        match self.kind {
            CollectiveKind::ReduceScatter => bytes * ranks,
            CollectiveKind::Broadcast if self.root as usize != rank => 0,
            _ => bytes,
        }
    }

    /// The results of all ranks for these inputs.
    fn results(&self, inputs: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let (ranks, root) = (inputs.len(), self.root as usize);
        match self.kind {
            CollectiveKind::Broadcast => vec![inputs[root].clone(); ranks],
            CollectiveKind::AllGather => vec![inputs.concat(); ranks],
            CollectiveKind::AllReduce => vec![self.reduce(inputs); ranks],
            CollectiveKind::Reduce => {
                let mut results = vec![Vec::new(); ranks];
                results[root] = self.reduce(inputs);
                results
            }
            CollectiveKind::ReduceScatter => {
                let all = self.reduce(inputs);
                all.chunks(all.len().div_ceil(ranks).max(1)).map(<[u8]>::to_vec).collect()
            }
        }
    }

    /// Element by element, in the order of the ranks, rounded to float32 at each step unless the type is wider.
    fn reduce(&self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut out = vec![0; inputs[0].len()];
        let round = |x: f64| if self.ty == ElementType::F64 { x } else { f64::from(x as f32) };
        let whole = !matches!(self.ty, ElementType::F16 | ElementType::Bf16 | ElementType::F32 | ElementType::F64);
        for at in (0..out.len()).step_by(self.ty.bytes()) {
            let values = inputs.iter().map(|input| self.ty.get(&input[at..]));
            let combine = |a: f64, b: f64| match self.op {
                PRODUCT => a * b,
                MAX => a.max(b),
                MIN => a.min(b),
                _ if whole => a + b,
                _ => round(a + b),
            };
            let all = values.reduce(combine).unwrap_or_default();
            let all = if self.op == AVERAGE { all / inputs.len() as f64 } else { all };
            self.ty.set(&mut out[at..], all);
        }
        out
    }
}

impl Hub {
    pub fn new(ranks: usize) -> Arc<Self> {
        let state = State {
            given: (0..ranks).map(|_| None).collect(),
            results: (0..ranks).map(|_| None).collect(),
            aborted: vec![false; ranks],
            ..State::default()
        };
        Arc::new(Self { ranks, state: Mutex::new(state), change: Condvar::new() })
    }

    pub fn join(&self) {
        self.state.lock().unwrap().joined += 1;
        self.change.notify_all();
    }

    /// Waits until all ranks have joined.
    pub fn wait_for_all(&self, rank: usize) -> Result<(), CollectiveError> {
        let mut state = self.state.lock().unwrap();
        while state.joined < self.ranks {
            if state.aborted[rank] {
                return Err(CollectiveError::Aborted);
            }
            state = self.change.wait(state).unwrap();
        }
        Ok(())
    }

    /// Comes to a collective, waits for the others, and gives what the rank gets.
    pub fn collective(&self, rank: usize, call: Collective, input: Vec<u8>) -> Result<Vec<u8>, CollectiveError> {
        let mut state = self.state.lock().unwrap();
        state.given[rank] = Some((call, input));
        if state.given.iter().all(Option::is_some) {
            let (calls, inputs): (Vec<_>, Vec<_>) = state.given.iter_mut().filter_map(Option::take).unzip();
            if calls.iter().all(|other| *other == call) {
                let results = call.results(&inputs);
                state.results = results.into_iter().map(|result| Some(Ok(result))).collect();
            } else {
                let what = Collective::disagreement(&calls);
                eprintln!("emulator: the ranks of a communicator disagree about a collective: {what}: {calls:?}");
                state.results = vec![Some(Err(CollectiveError::Disagreement)); self.ranks];
            }
            self.change.notify_all();
        }
        loop {
            if let Some(result) = state.results[rank].take() {
                return result;
            }
            if state.aborted[rank] {
                return Err(CollectiveError::Aborted);
            }
            state = self.change.wait(state).unwrap();
        }
    }

    /// Leaves a message for another rank.
    pub fn send(&self, rank: usize, to: usize, data: Vec<u8>) {
        self.state.lock().unwrap().mail.entry((rank, to)).or_default().push_back(data);
        self.change.notify_all();
    }

    /// Waits for a message from another rank.
    pub fn receive(&self, rank: usize, from: usize) -> Result<Vec<u8>, CollectiveError> {
        let mut state = self.state.lock().unwrap();
        loop {
            if let Some(data) = state.mail.get_mut(&(from, rank)).and_then(VecDeque::pop_front) {
                return Ok(data);
            }
            if state.aborted[rank] {
                return Err(CollectiveError::Aborted);
            }
            state = self.change.wait(state).unwrap();
        }
    }

    /// Ends what a rank waits for. The others wait on, as they do in NCCL.
    pub fn abort(&self, rank: usize) {
        self.state.lock().unwrap().aborted[rank] = true;
        self.change.notify_all();
    }

    /// Notes that the process of a rank has ended.
    pub fn lose(&self, rank: usize) {
        self.state.lock().unwrap().lost = true;
        self.abort(rank);
    }

    /// Whether a rank's process has ended.
    pub fn has_lost(&self) -> bool {
        self.state.lock().unwrap().lost
    }
}
