//! The serving policy: its version, and its changes to the checkpoint.

use std::collections::HashSet;
use std::sync::Arc;

use crate::types::WeightVersion;
use crate::weights::{Adapter, Replaced, StoredVersion};

/// The serving policy, or the one that will serve when the weights wake: a base with at most one adapter merged into
/// it.
pub(super) struct Policy {
    version: WeightVersion,
    /// Counts policies. A trainer may use a version twice, but an epoch is never used twice.
    epoch: u64,
    merged: Arc<Adapter>,
    /// Parameters whose base values are no longer the checkpoint's.
    replaced: Replaced,
    /// Digest of the vision tower's values, if they are those of a FULL push.
    tower: Option<[u8; 16]>,
    /// The version of a delta store that the base is.
    stored: Option<StoredVersion>,
}

/// The effect of an update on the vision tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TowerChange {
    None,
    /// Its values are replaced by values of this digest.
    Pushed([u8; 16]),
    /// Some of its values may be others.
    Unknown,
}

impl Policy {
    /// The checkpoint that the server starts with.
    pub fn checkpoint() -> Self {
        let (merged, stored) = (Arc::new(Adapter::none()), Some(StoredVersion::CHECKPOINT));
        Self { version: 0, epoch: 0, merged, replaced: Replaced::default(), tower: None, stored }
    }

    /// The version that the trainer gave the policy; 0 for the checkpoint.
    pub fn version(&self) -> WeightVersion {
        self.version
    }

    /// Number of policies before this one. The prefix cache finds KV of this policy by it.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The adapter that is merged into the base; [`Adapter::none`] if there is none.
    pub fn merged(&self) -> Arc<Adapter> {
        self.merged.clone()
    }

    /// Whether the base value of a parameter was pushed, so that the checkpoint cannot restore it.
    pub fn is_replaced(&self, parameter: &str) -> bool {
        self.replaced.contains(parameter)
    }

    /// Whether [`Policy::is_replaced`] holds for any parameter.
    pub fn has_replaced(&self) -> bool {
        !self.replaced.is_empty()
    }

    /// The delta store version that is serving; `None` if the policy did not come from a store.
    pub fn stored(&self) -> Option<StoredVersion> {
        self.stored.filter(|_| self.merged.parameters().next().is_none())
    }

    /// Notes that the base is this version of a delta store.
    pub fn note_stored(&mut self, version: StoredVersion) {
        self.stored = Some(version);
    }

    /// Changes the version of the same policy.
    pub fn rename(&mut self, version: WeightVersion) {
        self.version = version;
    }

    /// Begins another policy: the weights, now or once they are loaded, are those of `version`.
    pub fn advance(&mut self, version: WeightVersion) {
        self.version = version;
        self.epoch += 1;
    }

    /// Notes the effect of an update on the vision tower. Returns whether its values may be others than before.
    pub fn change_tower(&mut self, change: TowerChange) -> bool {
        let before = self.tower;
        self.tower = match change {
            TowerChange::None => return false,
            TowerChange::Pushed(digest) => Some(digest),
            TowerChange::Unknown => None,
        };
        self.tower.is_none() || self.tower != before
    }

    /// Sets the merged adapter, which replaces any other.
    pub fn merge(&mut self, adapter: Arc<Adapter>) {
        self.merged = adapter;
    }

    /// Notes that base values of these parameters were pushed.
    pub fn replace<'n>(&mut self, parameters: impl Iterator<Item = &'n str>) {
        parameters.for_each(|parameter| self.replaced.insert(parameter));
        self.stored = None;
    }

    /// Notes that base values of all parameters but those that are `kept` were pushed.
    pub fn replace_all_but(&mut self, kept: &HashSet<String>) {
        self.replaced.insert_all_but(kept);
        self.stored = None;
    }

    /// Makes the serving weights the base, with nothing merged into it.
    pub fn forget_merged(&mut self) {
        self.merged = Arc::new(Adapter::none());
    }

    /// Makes the checkpoint the base again, with nothing merged. Version and epoch stay until [`Policy::advance`].
    pub fn reset(&mut self) {
        self.replaced.clear();
        self.stored = Some(StoredVersion::CHECKPOINT);
        self.forget_merged();
    }
}
