//! Updates as transactions: begun, perhaps written in place, then committed or rolled back.
//!
//! Until its commit an update touches nothing but the ledger, so an update that is cancelled has changed nothing. The
//! exception is a FULL push that is written in place: from its first write on the weights are missing, until it or
//! another complete push is committed.

use std::sync::Arc;

use super::command::{OpenUpdate, Reply, RunningPolicy, UpdateBegin, UpdateReply, UpdateTicket};
use super::drain::{AfterDrain, Commit};
use super::lifecycle::{PushKind, State};
use super::transaction::Transaction;
use super::{Attempt, Engine, Failure, Request, answer};
use crate::error::{Error, Result};
use crate::executor::{Executor, WeightOrder};
use crate::memory::{MemoryBudget, MemoryUse};
use crate::scheduler::RunningKv;
use crate::types::WeightVersion;
use crate::weights::{Adapter, Delta, ShadowWeights, Tensors, UpdateKind, WeightUpdate};

impl UpdateBegin {
    /// The kind of push, as the lifecycle distinguishes them.
    fn push(&self) -> PushKind {
        match self.kind {
            UpdateKind::Lora if self.adapter.is_some() => PushKind::Resident,
            UpdateKind::Lora => PushKind::Lora,
            UpdateKind::Full => PushKind::Full,
            UpdateKind::Delta => PushKind::Delta,
        }
    }
}

impl<X: Executor> Engine<X> {
    /// Opens an update if it could be applied now, and reserves the memory that it takes while it is received.
    pub(super) fn begin_update(&mut self, begin: UpdateBegin) -> Result<UpdateTicket> {
        self.check_serving()?;
        self.drop_cancelled();
        if let Some(open) = self.updates.open() {
            let OpenUpdate { peer, open_for, idle_for, .. } = open.facts(self.clock.now());
            return Err(Error::VersionConflict(format!(
                "another update is under way (from {peer}, since {:.1} s, idle for {:.1} s); try again when it has \
                 ended, or end it with CancelUpdate",
                open_for.as_secs_f64(),
                idle_for.as_secs_f64()
            )));
        }
        if self.drains.has_sleep() {
            let why = "the server is about to sleep; push when it is asleep or awake again";
            return Err(Error::FailedPrecondition(why.into()));
        }
        self.check_begin(&begin)?;
        self.watch.reserve_push();
        let spare = self.take_spare();
        let in_place = self.reserve_staging(&begin)?;
        let shadow = match spare {
            _ if begin.kind != UpdateKind::Full || in_place => None,
            None => Some(self.shadow_weights()?),
            spare => spare,
        };
        let id = self.updates.begin(begin, in_place, self.clock.now());
        Ok(UpdateTicket { id, in_place, shadow })
    }

    /// Takes the storage of the weights that a FULL push has replaced, and frees its entry in the ledger.
    pub(super) fn take_spare(&mut self) -> Option<ShadowWeights> {
        self.budget.free(MemoryUse::SpareWeights);
        self.updates.take_spare()
    }

    /// Makes shadow weights that a FULL push is packed into. If that fails, the memory reserved for the push is free
    /// again.
    fn shadow_weights(&mut self) -> Result<ShadowWeights> {
        self.executor.shadow_weights().inspect_err(|_| {
            self.budget.free(MemoryUse::UpdateStaging);
        })
    }

    /// Checks what must hold when an update begins, and again when it is applied.
    fn check_begin(&self, begin: &UpdateBegin) -> Result<()> {
        let have = self.policy.version();
        match begin.expected_version {
            None if begin.kind == UpdateKind::Delta => {
                return Err(Error::invalid("expected_version", "a DELTA must name the version that it changes"));
            }
            Some(expected) if expected != have => {
                return Err(Error::VersionConflict(format!(
                    "expected_version: {expected} is not the policy that serves; that is version {have}"
                )));
            }
            _ => {}
        }
        self.state.check_push(begin.push())?;
        if let Some(target) = &begin.adapter {
            return self.adapters.check_target(target);
        }
        self.new_version(begin)?;
        if begin.running == RunningPolicy::Wait && self.is_frozen() {
            return Err(Error::FailedPrecondition(format!(
                "running: {} requests stand still and cannot end before the update; call Resume first, or push with \
                 KEEP, RECOMPUTE or ABORT",
                self.requests.num_accepted()
            )));
        }
        Ok(())
    }

    /// The version of the policy after the update.
    fn new_version(&self, begin: &UpdateBegin) -> Result<WeightVersion> {
        match begin.new_version {
            Some(version) => self.check_version(version, begin.force_version).map(|()| version),
            None => self.policy.version().checked_add(1).ok_or_else(|| {
                Error::invalid("new_version", format!("must be given: there is none after {}", self.policy.version()))
            }),
        }
    }

    /// Checks that the policy's version does not go back or repeat, unless `force` says that it may. Where there is no
    /// policy there is no version to stay above, and a trainer brings back the policy that a sleep has dropped.
    fn check_version(&self, version: WeightVersion, force: bool) -> Result<()> {
        let have = self.policy.version();
        if version > have || force || !self.state.has_policy() {
            return Ok(());
        }
        Err(Error::FailedPrecondition(format!(
            "new_version: {version} is not above {have}, the version of the policy that serves; give a higher one, or set \
             force_version if it is meant, as where a trainer begins again beside a running server"
        )))
    }

    /// Reserves the memory that an update takes while it is received. Returns whether it is to be written in place.
    fn reserve_staging(&mut self, begin: &UpdateBegin) -> Result<bool> {
        let of_host = begin.staging_bytes - begin.shadow_bytes;
        let reserved = self.budget.set_parts(MemoryUse::UpdateStaging, begin.shadow_bytes, of_host);
        let Err(error) = reserved else { return Ok(false) };
        let at_rest = self.state != State::Running && self.state.weights_awake();
        let in_place = begin.in_place && begin.kind == UpdateKind::Full && at_rest;
        let (result, of_host) = match in_place {
            true => (self.budget.set(MemoryUse::UpdateStaging, begin.in_place_bytes), begin.in_place_bytes),
            false => (Err(error), of_host),
        };
        let is_host_short =
            self.budget.host_report().is_some() && of_host > self.budget.remaining_for(MemoryUse::UpdateStaging);
        let instead = match (is_host_short, begin.is_broadcast) {
            (true, _) => "start the server with a larger --host-memory",
            (false, true) => {
                "sleep with the KV cache first, or POST /init_weight_transfer_engine with a smaller \
                 packed_buffer_size_bytes, or start the server with a larger --staging-bytes"
            }
            (false, false) => {
                "sleep with the KV cache first, or (FULL) pause or sleep and set in_place, or start the server with a \
                 larger --staging-bytes"
            }
        };
        result.map(|()| true).map_err(|error| match error {
            Error::ResourceExhausted(ledger) => Error::ResourceExhausted(format!("{ledger}; {instead}")),
            other => other,
        })
    }

    /// The open update if its number is `id`, its client is still there and its commit has not come.
    fn open_update(&mut self, id: u64) -> Result<&Transaction> {
        self.check_serving()?;
        self.drop_cancelled();
        self.updates.uncommitted(id).ok_or_else(|| {
            Error::FailedPrecondition(format!("update {id} is not open: it has ended, or its client is gone"))
        })
    }

    /// Writes tensors of a FULL push in place. The first write destroys the policy, so requests that stood still end.
    pub(super) fn write_part(&mut self, update: u64, tensors: Arc<Tensors>) -> Attempt<()> {
        if !self.open_update(update).map_err(Failure::Refused)?.is_in_place() {
            let why = "this update is staged, not written in place; send everything with the commit";
            return Err(Failure::Refused(Error::FailedPrecondition(why.into())));
        }
        let next = self.state.written_in_part().map_err(Failure::Refused)?;
        self.watch.apply_push(update);
        self.policy.replace(tensors.names().map(String::from));
        self.order(WeightOrder::Replace { tensors }).map_err(Failure::or_fatal)?;
        if self.state.has_policy() {
            self.abort_accepted(|_, _| true);
        }
        self.state = next;
        Ok(())
    }

    /// Applies the open update: at once, or when the accepted requests have ended.
    pub(super) fn commit_update(
        &mut self,
        update: u64,
        content: WeightUpdate,
        new_version: Option<WeightVersion>,
        reply: Reply<Result<UpdateReply>>,
    ) -> Result<()> {
        let begin = match self.open_update(update) {
            Ok(open) => open.begin(),
            Err(error) => {
                reply(Err(error));
                return Ok(());
            }
        };
        let waits = begin.adapter.is_none() && begin.running == RunningPolicy::Wait;
        let cancel = begin.cancel.clone();
        self.updates.name_version(new_version);
        let commit = Commit { content, reply };
        if waits && self.must_drain() {
            self.updates.note_commit();
            self.drains.push(cancel, AfterDrain::Commit(commit));
            return Ok(());
        }
        self.finish_commit(commit)
    }

    /// Ends the open update: it is applied, or refused if that is not possible any more.
    pub(super) fn finish_commit(&mut self, Commit { content, reply }: Commit) -> Result<()> {
        self.watch.apply_push(self.open_number());
        let open = self.updates.end(None).expect("a commit is of an open update");
        let attempt = self.apply(open.begin(), content);
        self.budget.free(MemoryUse::UpdateStaging);
        if self.updates.has_spare()
            && self.budget.set(MemoryUse::SpareWeights, self.budget.reserved(MemoryUse::Weights)).is_err()
        {
            self.updates.set_spare(None);
        }
        answer(reply, attempt)
    }

    /// Forgets the open update, if there is one. If it has written in place, the weights stay missing.
    pub(super) fn roll_back(&mut self) {
        if self.updates.end(None).is_some() {
            self.budget.free(MemoryUse::UpdateStaging);
        }
    }

    /// Ends the open update, if its number is `update` or no number is given. Its sender, or the caller of its commit,
    /// is told.
    pub(super) fn cancel_update(&mut self, update: Option<u64>) -> Option<OpenUpdate> {
        self.drop_cancelled();
        let open = self.updates.end(update)?;
        self.budget.free(MemoryUse::UpdateStaging);
        let facts = open.facts(self.clock.now());
        let left = if self.state.has_policy() { "nothing has changed" } else { "the weights are still missing" };
        let error = Error::Aborted(format!("the update was ended by CancelUpdate; {left}"));
        self.drains.refuse(&error, |then| matches!(then, AfterDrain::Commit(_)));
        (open.into_begin().ended)(error);
        Some(facts)
    }

    /// Carries an update out, if it still can be.
    fn apply(&mut self, begin: &UpdateBegin, content: WeightUpdate) -> Attempt<UpdateReply> {
        let started = self.clock.now();
        self.check_begin(begin).map_err(Failure::Refused)?;
        let adapter_generation = match (content, &begin.adapter) {
            (WeightUpdate::Lora(adapter), Some(target)) => Some(self.add_adapter(target, adapter)?),
            (_, Some(_)) => {
                let error = Error::invalid("adapter", "only a LORA can stay resident");
                return Err(Failure::Refused(error));
            }
            (content, None) => {
                let version = self.new_version(begin).map_err(Failure::Refused)?;
                match content {
                    WeightUpdate::Lora(adapter) => self.apply_lora(adapter)?,
                    WeightUpdate::Full(tensors) => self.apply_full(tensors)?,
                    WeightUpdate::Packed(shadow) => self.apply_packed(shadow)?,
                    WeightUpdate::Delta(delta) => self.apply_delta(delta)?,
                }
                self.state = self.state.complete();
                self.change_policy(version, begin.running);
                None
            }
        };
        self.updates.count_applied();
        self.watch.note_version(self.policy.version());
        Ok(UpdateReply {
            weight_version: self.policy.version(),
            pause: self.clock.since(started),
            pending: begin.adapter.is_none() && !self.state.weights_awake(),
            adapter_generation,
        })
    }

    /// Merges an adapter into the base, in place of the one that was merged before: now, or with the load when the
    /// weights wake. Where the weights are missing, the checkpoint becomes the base again, even if some of it has been
    /// overwritten.
    fn apply_lora(&mut self, after: Arc<Adapter>) -> Attempt<()> {
        let before = self.policy.merged();
        if self.state.weights_awake() && !self.state.has_policy() {
            let ledger = self.ledger_with(&after, 0).map_err(Failure::Refused)?;
            let order = WeightOrder::Load { adapter: after.clone() };
            self.check_checkpoint(&order)?;
            if self.policy.has_replaced() {
                self.reset_base()?;
            }
            self.order(order)?;
            self.budget = ledger;
        } else {
            let replaced = |name: &str| self.policy.is_replaced(name);
            // While one adapter replaces the other, base parameters that either touches are copied.
            let is_copied_once = |name: &str| replaced(name) && (before.touches(name) || after.touches(name));
            let most = self.bytes_of(is_copied_once).map_err(Failure::Refused)?;
            let copies = self.bytes_of(|name| replaced(name) && after.touches(name)).map_err(Failure::Refused)?;
            self.budget.clone().set(MemoryUse::BaseCopies, most).map_err(Failure::Refused)?;
            let ledger = self.ledger_with(&after, copies).map_err(Failure::Refused)?;
            if self.state.weights_awake() {
                let order = WeightOrder::Merge { before: before.clone(), after: after.clone() };
                self.check_checkpoint(&order)?;
                let merged = self.order(order);
                if let Err(Failure::Refused(Error::ResourceExhausted(_))) = merged {
                    let back = WeightOrder::Merge { before: after, after: before };
                    self.order(back).map_err(Failure::or_fatal)?;
                    return merged;
                }
                merged?;
            }
            self.budget = ledger;
        }
        self.policy.merge(after);
        Ok(())
    }

    /// The ledger after the update: memory for receiving it is free, the merged adapter and the copies of base
    /// parameters below it are reserved.
    fn ledger_with(&self, merged: &Adapter, base_copies: u64) -> Result<MemoryBudget> {
        let mut ledger = self.budget.clone();
        ledger.free(MemoryUse::UpdateStaging);
        ledger.set(MemoryUse::MergedAdapter, merged.bytes())?;
        ledger.set(MemoryUse::BaseCopies, base_copies)?;
        self.check_wake(ledger.clone())?;
        Ok(ledger)
    }

    /// Checks that what sleeps can still wake beside what `ledger` holds.
    fn check_wake(&self, mut ledger: MemoryBudget) -> Result<()> {
        self.awake_bytes.reserve(&mut ledger).map_err(|error| match error {
            Error::ResourceExhausted(why) => Error::ResourceExhausted(format!(
                "with this update the server could not wake: {why}; push a smaller adapter, or wake first"
            )),
            other => other,
        })
    }

    /// Replaces all parameters by tensors, of which some may have been written before.
    fn apply_full(&mut self, tensors: Arc<Tensors>) -> Attempt<()> {
        self.order(WeightOrder::Replace { tensors }).map_err(Failure::or_fatal)?;
        self.replace_all();
        Ok(())
    }

    /// Exchanges the weights for shadow weights that hold the new policy. The storage of the old weights is kept for
    /// the next FULL push, unless its memory had been released: finding fresh pages costs more than writing to them.
    fn apply_packed(&mut self, shadow: ShadowWeights) -> Attempt<()> {
        let had_memory = self.state.has_policy();
        let replaced = self.executor.exchange(shadow).map_err(Failure::Fatal)?;
        self.updates.set_spare(had_memory.then_some(replaced));
        self.replace_all();
        Ok(())
    }

    /// Notes that every parameter of the base was pushed, and that nothing is merged.
    fn replace_all(&mut self) {
        let all = self.parameters.iter().map(|spec| spec.name.clone());
        self.policy.replace(all);
        self.forget_merged();
    }

    /// Changes parameters of the policy that serves. What was merged into it becomes part of the base.
    fn apply_delta(&mut self, delta: Arc<Delta>) -> Attempt<()> {
        let merged = self.policy.merged();
        let order = WeightOrder::Patch { delta: delta.clone(), merged: merged.clone() };
        self.order(order).map_err(Failure::or_fatal)?;
        let changed = delta.names().chain(merged.parameters()).map(String::from);
        self.policy.replace(changed);
        self.forget_merged();
        Ok(())
    }

    /// Notes that what serves is the base, with nothing merged into it.
    fn forget_merged(&mut self) {
        self.policy.forget_merged();
        self.free_merged();
    }

    /// Frees what the ledger holds for a merged adapter.
    pub(super) fn free_merged(&mut self) {
        self.budget.free(MemoryUse::MergedAdapter);
        self.budget.free(MemoryUse::BaseCopies);
    }

    /// Changes the policy to `version`, from the next step on or from when the weights wake. `running` says what
    /// happens to requests that have begun. Requests that have not begun and ask for exactly another version end.
    pub(super) fn change_policy(&mut self, version: WeightVersion, running: RunningPolicy) {
        self.policy.advance(version);
        self.refuse_queued_for_others(version);
        if running == RunningPolicy::Abort {
            let computing = self.scheduler.started_requests();
            let is_queued = |key, request: &Request| !request.has_begun() && !computing.contains(&key);
            self.abort_accepted(|key, request| !is_queued(key, request));
        }
        let kv = if running == RunningPolicy::Recompute { RunningKv::Recompute } else { RunningKv::Keep };
        self.scheduler.change_policy(self.policy.epoch(), kv);
    }

    /// Gives the policy another version. Its weights, and the KV that was computed with them, stay.
    pub(super) fn set_version(&mut self, version: WeightVersion, force: bool) -> Result<()> {
        self.check_serving()?;
        if !self.state.has_policy() {
            let why = "the weights are missing, so there is no policy to name; push a complete one with its version";
            return Err(Error::FailedPrecondition(why.into()));
        }
        self.check_version(version, force)?;
        self.policy.rename(version);
        self.refuse_queued_for_others(version);
        Ok(())
    }

    /// Ends requests that have not begun and ask for exactly another version than `version`.
    fn refuse_queued_for_others(&mut self, version: WeightVersion) {
        let computing = self.scheduler.started_requests();
        let insists = |key, request: &Request| {
            !request.has_begun() && !computing.contains(&key) && request.insists_on_other_than(version)
        };
        for key in self.requests.accepted_keys(insists) {
            let why = format!("if_weight_version: the policy became version {version} before the request could start");
            self.reject(key, Error::VersionConflict(why));
        }
    }

    /// Bytes, on all ranks together, of the parameters for which `which` is true.
    pub(super) fn bytes_of(&self, which: impl Fn(&str) -> bool) -> Result<u64> {
        let chosen = self.parameters.iter().filter(|spec| which(&spec.name));
        chosen.map(|spec| self.parameters.bytes_on_ranks(spec)).sum()
    }
}
