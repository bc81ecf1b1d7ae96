//! The book of a run: the device, what clients know of the policies, and what has happened since the world last looked.
//! The executor and the closures that take answers and events write into it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use rollout_server::engine::{
    ChecksumReply, DrainMode, Event, LifecycleStatus, RunningPolicy, SleepLevel, UpdateReply, UpdateTicket, WakeTags,
};
use rollout_server::error::Result;
use rollout_server::types::WeightVersion;
use rollout_server::weights::{Adapter, UpdateKind};

use super::catalog::{Catalog, ContentId, PARAMETERS};
use super::executor::Device;
use super::faults::Tally;
use super::policy::{Policy, checksum, fingerprint};

/// Something that has reached a client.
pub enum Note {
    /// An event of a request.
    Event(usize, Event),
    /// A request's responder is gone.
    ResponderGone(usize),
    /// A call was answered.
    Answered(usize),
    /// The reply to a call was dropped.
    ReplyDropped(usize),
    /// The answer to the header of a push.
    Ticket(usize, Result<UpdateTicket>),
    /// Whether a part of a push was written in place.
    PartWritten(usize, bool),
    /// A push has ended: it was applied, refused or called off.
    PushEnded(usize),
}

/// What a push brings, and how.
#[derive(Clone, Copy, Debug)]
pub struct PushFacts {
    pub kind: UpdateKind,
    pub content: ContentId,
    /// DELTA: the parameters that it touches.
    pub touches: [bool; PARAMETERS],
    pub running: RunningPolicy,
    pub force: bool,
    /// The name of a resident adapter.
    pub resident: Option<usize>,
}

/// What clients can tell of the policies from the answers that they got.
pub struct Known {
    pub policy: Policy,
    values: [u64; PARAMETERS],
    weights: u64,
    pub version: WeightVersion,
    /// How often the version has changed.
    pub changes: u64,
    /// Whether it has ever been lowered, which takes force or a lost policy.
    pub was_lowered: bool,
    /// Whether there is no policy.
    pub is_lost: bool,
    /// Version and number of every policy under which a step has run.
    pub served: HashSet<(WeightVersion, u32)>,
    /// Name and content of each generation of a resident adapter.
    pub adapters: HashMap<u64, (usize, ContentId)>,
}

pub struct Book {
    catalog: Arc<Catalog>,
    pub device: Device,
    pub known: Known,
    pub notes: Vec<Note>,
    pub faults: Tally,
    pub steps: u64,
    /// Whether a Sleep or Pause that waits for requests was answered, and nothing that lets them run again since.
    pub is_drained: bool,
    /// Whether a Sleep or Pause may have kept requests.
    keeps_requests: bool,
    /// Names of adapters that the engine has asked to be read.
    pub reads: VecDeque<usize>,
    /// What has gone wrong where a panic would be caught.
    pub violations: Vec<String>,
}

impl Book {
    pub fn new(catalog: Arc<Catalog>, device: Device) -> Self {
        let known = Known {
            policy: Policy::CHECKPOINT,
            values: Policy::CHECKPOINT.base,
            weights: fingerprint(Policy::CHECKPOINT.base),
            version: 0,
            changes: 0,
            was_lowered: false,
            is_lost: false,
            served: HashSet::new(),
            adapters: HashMap::new(),
        };
        let (notes, faults, violations) = (Vec::new(), Tally::default(), Vec::new());
        let (steps, reads) = (0, VecDeque::new());
        Self {
            catalog,
            device,
            known,
            notes,
            faults,
            steps,
            is_drained: false,
            keeps_requests: false,
            reads,
            violations,
        }
    }

    /// A step begins: what runs must be what clients know to serve.
    pub fn note_launch(&mut self) {
        self.steps += 1;
        assert!(!self.known.is_lost, "a step runs, and clients know of no policy");
        assert_eq!(self.device.fingerprint(), self.known.weights, "a step runs with other weights than clients know");
        self.known.served.insert((self.known.version, self.device.number()));
    }

    fn serve(&mut self, policy: Policy) {
        self.known.policy = policy;
        self.known.values = policy.values(&self.catalog);
        self.known.weights = fingerprint(self.known.values);
    }

    fn note_version(&mut self, version: WeightVersion, may_sink: bool) {
        let before = self.known.version;
        if version <= before {
            self.known.was_lowered = true;
            if !may_sink {
                self.violations.push(format!("version {version} follows {before} without force"));
            }
        }
        self.known.changes += 1;
        self.known.version = version;
    }

    /// An order was answered: if the checkpoint changed meanwhile, the policy is lost.
    pub fn note_answer(&mut self) {
        if std::mem::take(&mut self.device.was_damaged) {
            self.serve(Policy::CHECKPOINT);
            self.known.is_lost = true;
        }
    }

    pub fn note_part(&mut self, written: &Result<()>) {
        self.note_answer();
        self.known.is_lost |= written.is_ok();
    }

    pub fn note_commit(&mut self, facts: PushFacts, reply: &Result<UpdateReply>) {
        self.note_answer();
        let Ok(reply) = reply else { return };
        if let Some(name) = facts.resident {
            let generation = reply.adapter_generation.expect("a resident adapter has a generation");
            let before = self.known.adapters.insert(generation, (name, facts.content));
            assert!(before.is_none(), "generation {generation} is used twice");
            return;
        }
        let mut policy = if self.known.is_lost { Policy::CHECKPOINT } else { self.known.policy };
        match facts.kind {
            UpdateKind::Lora => policy.merged = facts.content,
            UpdateKind::Full => policy.replace(facts.content),
            UpdateKind::Delta => policy.patch((facts.content, facts.touches), &self.catalog),
        }
        self.serve(policy);
        self.note_version(reply.weight_version, facts.force || self.known.is_lost);
        self.known.is_lost = false;
        match facts.running {
            RunningPolicy::Recompute if !reply.pending => self.device.note_fresh(),
            RunningPolicy::Wait => self.device.note_drained(),
            _ => {}
        }
    }

    /// An adapter becomes resident. If it was read because a request names it, its push is not answered to a client.
    pub fn note_added(&mut self, generation: u64, adapter: &Arc<Adapter>) {
        let content = self.catalog.adapter_id(adapter);
        if let Some(name) = self.catalog.name_of(content) {
            self.known.adapters.insert(generation, (name, content));
        }
    }

    pub fn note_set_version(&mut self, version: WeightVersion, force: bool, answer: &Result<()>) {
        if answer.is_ok() {
            self.note_version(version, force);
        }
    }

    /// A Sleep or Pause is answered. A Pause that waits does not wait for requests that an earlier one keeps.
    pub fn note_rest(&mut self, mode: DrainMode, is_done: bool) {
        match mode {
            _ if !is_done => {}
            DrainMode::Keep => self.keeps_requests = true,
            DrainMode::Abort => self.keeps_requests = false,
            DrainMode::Wait => self.is_drained = !self.keeps_requests,
        }
    }

    /// A Wake or Resume is answered.
    pub fn note_resume(&mut self, is_running: bool) {
        self.is_drained = false;
        self.keeps_requests &= !is_running;
    }

    pub fn note_sleep(&mut self, level: SleepLevel, is_asleep: bool) {
        if is_asleep && level == SleepLevel::Two {
            assert!(!self.device.has_adapters(), "adapters are resident after a sleep at level 2");
            self.serve(Policy::CHECKPOINT);
            self.known.is_lost = true;
        }
    }

    pub fn note_wake(&mut self, tags: WakeTags, reload: bool, answer: &Result<LifecycleStatus>) {
        self.note_answer();
        self.note_resume(matches!(answer, Ok(LifecycleStatus::Running)));
        if answer.is_ok() && reload && tags.weights && self.known.is_lost {
            self.serve(Policy::CHECKPOINT);
            self.note_version(0, true);
            self.known.is_lost = false;
        }
    }

    /// A checksum must be of one policy, the one that serves when it is answered.
    pub fn note_checksum(&mut self, reply: &Result<ChecksumReply>) {
        let Ok(reply) = reply else { return };
        let known = &self.known;
        let of = |name: &str| checksum(known.values[self.catalog.parameter(name)]);
        let is_right = reply.parameters.iter().all(|(name, digest)| *digest == of(name));
        if known.is_lost || reply.weight_version != known.version || !is_right {
            self.violations.push(format!("a checksum of version {} is of other weights", reply.weight_version));
        }
    }
}
