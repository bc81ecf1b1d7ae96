//! The update that is open, and what updates leave for the next one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::command::{UpdateSender, UpdateStatus};
use super::core::{AwakeBytes, EngineCore};
use super::drain::Drains;
use crate::executor::Executor;
use crate::memory::MemoryUse;
use crate::types::WeightVersion;
use crate::weights::UpdateHeader;

/// An open update, from `BeginUpdate` until it is applied, refused or rolled back.
pub(super) struct OpenUpdate {
    pub id: u64,
    pub header: Arc<UpdateHeader>,
    pub sender: UpdateSender,
    /// Whether tensors are written over the weights that serve, instead of beside them.
    pub in_place: bool,
    /// Whether its commit has come and waits for requests to end.
    committed: bool,
    opened: Instant,
}

impl OpenUpdate {
    /// Whether the client that sends it is gone.
    pub fn is_cancelled(&self) -> bool {
        self.sender.cancel.is_cancelled()
    }

    /// Its status at the time `now`.
    pub fn status(&self, now: Instant) -> UpdateStatus {
        let open_for = now.saturating_duration_since(self.opened);
        UpdateStatus {
            id: self.id,
            header: self.header.clone(),
            peer: self.sender.peer.clone(),
            open_for,
            idle_for: if self.committed { Duration::ZERO } else { self.sender.activity.idle().min(open_for) },
            committed: self.committed,
        }
    }
}

/// All updates of the engine: at most one is open, the others have ended.
pub(super) struct Updates {
    /// Memory that must fit into the ledger beside an update once everything wakes.
    pub(super) awake: AwakeBytes,
    open: Option<OpenUpdate>,
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
    pub fn open(&mut self, header: Arc<UpdateHeader>, sender: UpdateSender, in_place: bool, opened: Instant) -> u64 {
        assert!(self.open.is_none(), "two updates are open");
        self.begun += 1;
        let id = self.begun;
        self.open = Some(OpenUpdate { id, header, sender, in_place, committed: false, opened });
        id
    }

    pub fn opened(&self) -> Option<&OpenUpdate> {
        self.open.as_ref()
    }

    /// The open update if it is number `id` and its commit has not come.
    pub fn uncommitted(&self, id: u64) -> Option<&OpenUpdate> {
        self.opened().filter(|open| open.id == id && !open.committed)
    }

    /// The open update's version after it, if it is given with the commit.
    ///
    /// # Panics
    /// If none is open.
    pub fn name_version(&mut self, version: Option<WeightVersion>) {
        let open = self.open.as_mut().expect("a commit is of an open update");
        if version.is_some() {
            Arc::make_mut(&mut open.header).new_version = version;
        }
    }

    /// The open update's commit has come, and waits for requests to end.
    ///
    /// # Panics
    /// If none is open.
    pub fn note_commit(&mut self) {
        self.open.as_mut().expect("a commit is of an open update").committed = true;
    }

    /// Ends the open update if there is one and, where `id` is given, it is that one.
    pub fn end(&mut self, id: Option<u64>) -> Option<OpenUpdate> {
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
        self.opened().map_or(0, |open| open.id)
    }

    /// Asserts that a commit waits exactly if the open update says so, and that memory is reserved for no other update.
    pub fn check_integrity<X: Executor>(&self, core: &EngineCore<X>, drains: &Drains) {
        let committed = self.open.as_ref().is_some_and(|open| open.committed);
        assert_eq!(drains.num_commits(), usize::from(committed), "commits among the drains");
        let staged = core.budget.reserved(MemoryUse::UpdateStaging);
        assert!(staged == 0 || self.open.is_some(), "{staged} bytes are reserved for no update");
    }
}
