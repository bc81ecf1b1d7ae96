//! The update that is open, and what updates leave for the next one.

use std::time::{Duration, Instant};

use super::command::{OpenUpdate, UpdateBegin};
use super::core::{AwakeBytes, EngineCore};
use super::drain::Drains;
use crate::executor::Executor;
use crate::memory::MemoryUse;
use crate::types::WeightVersion;

/// An open update: its header, from `BeginUpdate` until it is applied, refused or rolled back.
pub(super) struct Transaction {
    id: u64,
    begin: UpdateBegin,
    /// Whether tensors are written over the weights that serve, instead of beside them.
    in_place: bool,
    /// Whether its commit has come and waits for requests to end.
    committed: bool,
    opened: Instant,
}

impl Transaction {
    pub fn begin(&self) -> &UpdateBegin {
        &self.begin
    }

    pub fn id(&self) -> u64 {
        self.id
    }

    pub fn is_in_place(&self) -> bool {
        self.in_place
    }

    /// Whether the client that sends it is gone.
    pub fn is_cancelled(&self) -> bool {
        self.begin.cancel.is_cancelled()
    }

    /// What clients are told of it at the time `now`.
    pub fn facts(&self, now: Instant) -> OpenUpdate {
        let UpdateBegin { peer, kind, adapter, new_version, activity, .. } = &self.begin;
        let open_for = now.saturating_duration_since(self.opened);
        OpenUpdate {
            id: self.id,
            peer: peer.clone(),
            kind: *kind,
            adapter: adapter.as_ref().map(|target| target.name.clone()),
            new_version: *new_version,
            open_for,
            idle_for: if self.committed { Duration::ZERO } else { activity.idle().min(open_for) },
            committed: self.committed,
        }
    }

    /// The header, for what happens after the transaction has ended.
    pub fn into_begin(self) -> UpdateBegin {
        self.begin
    }
}

/// All updates of the engine: at most one is open, the others have ended.
pub(super) struct Updates {
    /// What must fit into the ledger beside an update once everything wakes.
    pub(super) awake: AwakeBytes,
    open: Option<Transaction>,
    begun: u64,
    applied: u64,
}

impl Updates {
    pub fn new(awake: AwakeBytes) -> Self {
        Self { awake, open: None, begun: 0, applied: 0 }
    }

    /// Opens an update at the time `opened`, and returns its number, which no other update has.
    ///
    /// # Panics
    /// If one is open.
    pub fn open(&mut self, begin: UpdateBegin, in_place: bool, opened: Instant) -> u64 {
        assert!(self.open.is_none(), "two updates are open");
        self.begun += 1;
        let id = self.begun;
        self.open = Some(Transaction { id, begin, in_place, committed: false, opened });
        id
    }

    pub fn opened(&self) -> Option<&Transaction> {
        self.open.as_ref()
    }

    /// The open update if it is number `id` and its commit has not come.
    pub fn uncommitted(&self, id: u64) -> Option<&Transaction> {
        self.opened().filter(|open| open.id == id && !open.committed)
    }

    /// The open update's version after it, if it is given with the commit.
    ///
    /// # Panics
    /// If none is open.
    pub fn name_version(&mut self, version: Option<WeightVersion>) {
        let begin = &mut self.open.as_mut().expect("a commit is of an open update").begin;
        begin.new_version = version.or(begin.new_version);
    }

    /// The open update's commit has come, and waits for requests to end.
    ///
    /// # Panics
    /// If none is open.
    pub fn note_commit(&mut self) {
        self.open.as_mut().expect("a commit is of an open update").committed = true;
    }

    /// Ends the open update if there is one and, where `id` is given, it is that one.
    pub fn end(&mut self, id: Option<u64>) -> Option<Transaction> {
        self.open.take_if(|open| id.is_none_or(|id| id == open.id))
    }

    pub fn count_applied(&mut self) {
        self.applied += 1;
    }

    /// Updates applied since the start.
    pub fn applied(&self) -> u64 {
        self.applied
    }

    /// The number of the open update, or 0.
    pub fn open_number(&self) -> u64 {
        self.opened().map_or(0, Transaction::id)
    }

    /// Asserts that a commit waits exactly if the open update says so, and that memory is reserved for no other update.
    pub fn check_integrity<X: Executor>(&self, core: &EngineCore<X>, drains: &Drains) {
        let committed = self.open.as_ref().is_some_and(|open| open.committed);
        assert_eq!(drains.num_commits(), usize::from(committed), "commits among the drains");
        let staged = core.budget.reserved(MemoryUse::UpdateStaging);
        assert!(staged == 0 || self.open.is_some(), "{staged} bytes are reserved for no update");
    }
}
