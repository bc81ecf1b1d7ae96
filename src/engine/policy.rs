//! The policy that serves: its version, and what lies over the checkpoint.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::types::WeightVersion;
use crate::weights::Adapter;

/// The policy that serves, or that will serve when the weights wake: a base with at most one adapter merged into it.
pub(super) struct Policy {
    version: WeightVersion,
    /// Counts policies. A trainer may use a version twice, but an epoch is never used twice.
    epoch: u64,
    merged: Arc<Adapter>,
    /// Parameters whose base values are no longer the checkpoint's.
    replaced: BTreeSet<String>,
}

impl Policy {
    /// The checkpoint that the server starts with.
    pub fn checkpoint() -> Self {
        Self { version: 0, epoch: 0, merged: Arc::new(Adapter::none()), replaced: BTreeSet::new() }
    }

    /// The version that the trainer gave the policy; 0 for the checkpoint.
    pub fn version(&self) -> WeightVersion {
        self.version
    }

    /// Number of policies before this one. KV of this policy is found in the prefix cache by it.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The adapter that is merged into the base; [`Adapter::none`] if there is none.
    pub fn merged(&self) -> Arc<Adapter> {
        self.merged.clone()
    }

    /// Whether the base value of a parameter was pushed, so that the checkpoint cannot give it again.
    pub fn is_replaced(&self, parameter: &str) -> bool {
        self.replaced.contains(parameter)
    }

    /// Whether [`Policy::is_replaced`] holds for any parameter.
    pub fn has_replaced(&self) -> bool {
        !self.replaced.is_empty()
    }

    /// The same policy has another version from now on.
    pub fn rename(&mut self, version: WeightVersion) {
        self.version = version;
    }

    /// Another policy begins: the weights, or what will be loaded into them, are now those of `version`.
    pub fn advance(&mut self, version: WeightVersion) {
        self.version = version;
        self.epoch += 1;
    }

    /// The adapter that is merged from now on, in place of any other.
    pub fn merge(&mut self, adapter: Arc<Adapter>) {
        self.merged = adapter;
    }

    /// Base values of these parameters have been pushed.
    pub fn replace(&mut self, parameters: impl Iterator<Item = String>) {
        self.replaced.extend(parameters);
    }

    /// What serves becomes the base: nothing is merged into it any more.
    pub fn forget_merged(&mut self) {
        self.merged = Arc::new(Adapter::none());
    }

    /// The base becomes the checkpoint again, with nothing merged. Version and epoch stay until [`Policy::advance`].
    pub fn reset(&mut self) {
        self.replaced.clear();
        self.forget_merged();
    }
}
