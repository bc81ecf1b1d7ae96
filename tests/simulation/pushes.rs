//! Senders of pushes: header, parts, commit, each message when the world gives them a turn.

use std::sync::Arc;

use rollout_server::clock::Clock;
use rollout_server::engine::{
    Activity, AdapterTarget, CancelFlag, Command, RunningPolicy, UpdateReply, UpdateSender, UpdateTicket,
};
use rollout_server::error::Result;
use rollout_server::weights::{ReceiveMode, StagingBytes, Tensors, UpdateHeader, UpdateKind, WeightUpdate};

use super::book::{Note, PushFacts};
use super::catalog::{PARAMETERS, PUSHED_ADAPTERS};
use super::faults::Fault;
use super::world::World;

/// How far a push has come.
enum Progress {
    /// Its header was sent.
    Begun,
    /// It has a ticket. So many parts were written in place.
    Open {
        mode: ReceiveMode,
        parts: usize,
    },
    /// A part was sent, which is to be written in place as number `parts` of them.
    Writing {
        parts: usize,
    },
    /// Its commit was sent.
    Committed,
    Ended,
}

pub struct Push {
    facts: PushFacts,
    /// Index of what it brings, among those of its kind in the catalog.
    index: usize,
    progress: Progress,
    cancel: CancelFlag,
    /// Its number, once it has a ticket.
    update: Option<u64>,
    is_broken: bool,
}

impl Push {
    pub fn end(&mut self) {
        self.progress = Progress::Ended;
    }

    pub fn has_ended(&self) -> bool {
        matches!(self.progress, Progress::Ended)
    }
}

impl World {
    /// Sends the header of a push.
    pub fn begin_push(&mut self) {
        let kind = self.dice.pick(&[UpdateKind::Lora, UpdateKind::Lora, UpdateKind::Full, UpdateKind::Delta]);
        let is_resident = kind == UpdateKind::Lora && self.dice.coin();
        let resident = is_resident.then(|| self.dice.below(self.habits.names));
        let (index, content, touches) = self.pick_content(kind, is_resident);
        let running = self.dice.pick(&[
            RunningPolicy::Keep,
            RunningPolicy::Keep,
            RunningPolicy::Recompute,
            RunningPolicy::Wait,
            RunningPolicy::Abort,
        ]);
        let force = self.dice.one_in(6);
        let facts = PushFacts { kind, content, touches, running, force, resident };
        let version = self.book.lock().unwrap().known.version;
        let new_version = self.pick_version(version);
        let expected_version = match kind {
            UpdateKind::Delta => Some(version),
            _ => self.dice.maybe(6, |dice| version + dice.below(2) as u64),
        };
        let (number, cancel) = (self.pushes.len(), CancelFlag::default());
        let book = self.book.clone();
        let staging = self.dice.pick(&[10, 50, 200]);
        let shadow = if kind == UpdateKind::Full { 120 } else { 0 };
        let staging = StagingBytes { staged: staging + shadow, shadow, in_place: self.dice.pick(&[10, 60]) };
        let header = Arc::new(UpdateHeader {
            adapter: resident.map(|name| AdapterTarget {
                name: name.to_string(),
                expected_generation: None,
                evicts: false,
            }),
            expected_version,
            new_version: new_version.filter(|_| resident.is_none()),
            force_version: force,
            running,
            in_place: self.dice.coin(),
            ..UpdateHeader::new(kind)
        });
        let sender = UpdateSender {
            peer: "10.0.0.7:4711".into(),
            cancel: cancel.clone(),
            activity: Activity::by(Clock::Virtual(self.clock.clone())),
            ended: Box::new(move |_| book.lock().unwrap().notes.push(Note::PushEnded(number))),
        };
        let is_sent = self.call(
            "BeginUpdate",
            &cancel,
            |reply| Command::BeginUpdate { header, staging, sender, reply },
            move |book, ticket: Result<UpdateTicket>| {
                if ticket.as_ref().is_ok_and(|ticket| matches!(ticket.mode, ReceiveMode::Pack(_))) {
                    book.device.shadow = facts.content;
                }
                book.notes.push(Note::Ticket(number, ticket));
            },
        );
        let progress = if is_sent { Progress::Begun } else { Progress::Ended };
        self.pushes.push(Push { facts, index, progress, cancel, update: None, is_broken: false });
    }

    fn pick_content(&mut self, kind: UpdateKind, is_resident: bool) -> (usize, u32, [bool; PARAMETERS]) {
        match kind {
            UpdateKind::Lora => {
                // The last one merges nothing: the base alone.
                let index = self.dice.below(PUSHED_ADAPTERS + usize::from(!is_resident));
                let content = self.catalog.pushed(index).map_or(0, |_| index as u32 + 1);
                (index, content, [false; PARAMETERS])
            }
            UpdateKind::Full => {
                let index = self.dice.below(self.catalog.tensors.len());
                (index, self.catalog.full_id(index), [true; PARAMETERS])
            }
            UpdateKind::Delta => {
                let index = self.dice.below(self.catalog.deltas.len());
                let (content, touches) = self.catalog.delta(&self.catalog.deltas[index].0);
                (index, content, touches)
            }
        }
    }

    /// A version for a new policy: the next one, one further on, one that is not above the present one, or none.
    pub fn pick_version(&mut self, version: u64) -> Option<u64> {
        match self.dice.below(6) {
            0 => Some(version),
            1 => Some(version.saturating_sub(1)),
            2 => Some(version + 1 + self.dice.below(3) as u64),
            _ => None,
        }
    }

    pub fn take_ticket(&mut self, push: usize, ticket: Result<UpdateTicket>) {
        let push = &mut self.pushes[push];
        match ticket {
            Err(_) => push.end(),
            Ok(UpdateTicket { id, mode }) => {
                push.update = Some(id);
                push.progress = Progress::Open { mode, parts: 0 };
            }
        }
    }

    /// The sender of a push sends its next message, or vanishes.
    pub fn advance_push(&mut self) {
        let newest = self.pushes.len().saturating_sub(3);
        let open: Vec<usize> = (newest..self.pushes.len()).filter(|&at| !self.pushes[at].has_ended()).collect();
        if open.is_empty() {
            return self.begin_push();
        }
        let at = self.dice.pick(&open);
        if self.dice.one_in(self.habits.faults) && !self.pushes[at].is_broken {
            return self.cut_push(at);
        }
        let push = &mut self.pushes[at];
        let Progress::Open { mode, parts } = &mut push.progress else { return };
        if matches!(mode, ReceiveMode::InPlace) && *parts < PARAMETERS {
            let part = *parts;
            push.progress = Progress::Writing { parts: part + 1 };
            return self.write_part(at, part);
        }
        self.commit_push(at);
    }

    /// The sender vanishes, or the server ends its stream because of what it has sent.
    fn cut_push(&mut self, at: usize) {
        let fault = if self.dice.one_in(3) { Fault::WrongDigest } else { Fault::PushCut };
        self.count(fault);
        self.pushes[at].cancel.cancel();
        self.pushes[at].is_broken = true;
        if self.dice.coin() {
            self.pushes[at].end();
        }
        self.look();
    }

    fn write_part(&mut self, at: usize, part: usize) {
        let push = &self.pushes[at];
        let (cancel, update) = (push.cancel.clone(), push.update.unwrap_or(0));
        let all = &self.catalog.tensors;
        let tensors = all[push.index % all.len()][part].clone();
        self.call(
            "WritePart",
            &cancel,
            |reply| Command::WritePart { update, tensors, reply },
            move |book, written: Result<()>| {
                book.note_part(&written);
                book.notes.push(Note::PartWritten(at, written.is_ok()));
            },
        );
    }

    /// The sender goes on when a part is written, and the server ends its push if it cannot be.
    pub fn note_part_written(&mut self, at: usize, is_written: bool) {
        let push = &mut self.pushes[at];
        let Progress::Writing { parts } = push.progress else { return };
        if is_written {
            push.progress = Progress::Open { mode: ReceiveMode::InPlace, parts };
            return;
        }
        self.give_up(at);
    }

    /// The server ends a push that the engine does not take.
    fn give_up(&mut self, at: usize) {
        let push = &mut self.pushes[at];
        push.cancel.cancel();
        push.end();
        self.look();
    }

    fn commit_push(&mut self, at: usize) {
        let push = &mut self.pushes[at];
        let Progress::Open { mode, .. } = std::mem::replace(&mut push.progress, Progress::Committed) else { return };
        let content = match push.facts.kind {
            UpdateKind::Lora => {
                let adapter = self.catalog.pushed(push.index).cloned();
                WeightUpdate::Lora(adapter.unwrap_or_default())
            }
            UpdateKind::Delta => WeightUpdate::Delta(self.catalog.deltas[push.index].0.clone()),
            UpdateKind::Full => match mode {
                ReceiveMode::Pack(shadow) => WeightUpdate::Packed(shadow),
                _ => WeightUpdate::Full(Arc::new(Tensors::default())),
            },
        };
        let again = self.dice.one_in(self.habits.faults);
        if !self.send_commit(at, content) {
            // The queue is full, and the server ends the push.
            return self.give_up(at);
        }
        if again {
            // Of a push that is committed already, or has ended.
            self.count(Fault::Twice);
            self.send_commit(at, WeightUpdate::Lora(Arc::default()));
        }
    }

    fn send_commit(&mut self, at: usize, content: WeightUpdate) -> bool {
        let push = &self.pushes[at];
        let (facts, cancel, update) = (push.facts, push.cancel.clone(), push.update.unwrap_or(0));
        self.call(
            "CommitUpdate",
            &cancel,
            |reply| Command::CommitUpdate { update, content, tower: None, new_version: None, reply },
            move |book, reply: Result<UpdateReply>| {
                book.note_commit(facts, &reply);
                book.notes.push(Note::PushEnded(at));
            },
        )
    }

    /// A message of a push that has ended, or has not begun.
    pub fn send_late(&mut self) {
        self.count(Fault::Late);
        let Some(at) = self.pushes.len().checked_sub(1 + self.dice.below(4)) else { return };
        let is_open =
            matches!(self.pushes[at].progress, Progress::Open { .. } | Progress::Writing { .. } | Progress::Begun);
        match self.dice.below(3) {
            0 => self.cancel_update(self.pushes[at].update),
            1 if !is_open => self.write_part(at, 0),
            _ if !is_open => {
                self.send_commit(at, WeightUpdate::Lora(Arc::default()));
            }
            _ => {}
        }
    }
}
