//! Updates as transactions: begun, perhaps written in place, then committed or rolled back.
//!
//! Until its commit an update touches nothing but the ledger, so an update that is cancelled has changed nothing. The
//! exception is a FULL push that is written in place: from its first write on the weights are missing, until it or
//! another complete push is committed.

use std::sync::Arc;

use super::adapters::Adapters;
use super::command::{RunningPolicy, UpdateReply, UpdateSender, UpdateStatus, UpdateTicket};
use super::core::{Attempt, EngineCore, Failure, answer};
use super::drain::{Commit, Drain, Drains};
use super::lifecycle::State;
use super::open_update::{OpenUpdate, Updates};
use super::policy::TowerChange;
use super::replace::{apply_stored, apply_tensors};
use crate::error::{Error, Result};
use crate::executor::{Executor, WeightOrder};
use crate::memory::{MemoryBudget, MemoryUse};
use crate::observe::PushKind;
use crate::types::WeightVersion;
use crate::weights::{
    Adapter, DeltaStore, ReceiveMode, ShadowWeights, Source, StagingBytes, StoredUpdate, Tensors, UpdateHeader,
    UpdateKind, WeightUpdate, is_of_tower,
};

/// The kind of push, as the lifecycle distinguishes them.
fn push_kind(header: &UpdateHeader) -> PushKind {
    match header.kind {
        UpdateKind::Lora if header.adapter.is_some() => PushKind::Adapter,
        UpdateKind::Lora => PushKind::Lora,
        UpdateKind::Full => PushKind::Full,
        UpdateKind::Delta => PushKind::Delta,
    }
}

impl Updates {
    /// Opens an update if it could be applied now, and reserves the memory that it takes while it is received.
    pub fn begin<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        adapters: &Adapters,
        drains: &Drains,
        header: Arc<UpdateHeader>,
        staging: StagingBytes,
        sender: UpdateSender,
    ) -> Result<UpdateTicket> {
        core.check_serving()?;
        if let Some(open) = self.opened() {
            let UpdateStatus { peer, open_for, idle_for, .. } = open.status(core.clock.now());
            return Err(Error::VersionConflict(format!(
                "another update is under way (from {peer}, since {:.1} s, idle for {:.1} s); try again when it has \
                 ended, or end it with CancelUpdate",
                open_for.as_secs_f64(),
                idle_for.as_secs_f64()
            )));
        }
        if drains.has_sleep() {
            let why = "the server is about to sleep; push when it is asleep or awake again";
            return Err(Error::FailedPrecondition(why.into()));
        }
        check_header(core, adapters, &header)?;
        core.telemetry.reserve_push();
        let spare = core.take_spare();
        let in_place = reserve_staging(core, &header, staging)?;
        let mode = match spare {
            _ if in_place => ReceiveMode::InPlace,
            _ if header.kind != UpdateKind::Full => ReceiveMode::Stage,
            Some(spare) => ReceiveMode::Pack(spare),
            None => ReceiveMode::Pack(shadow_weights(core)?),
        };
        let id = self.open(header, sender, in_place, core.clock.now());
        Ok(UpdateTicket { id, mode })
    }

    /// The open update if its number is `id`, its client is still there and its commit has not come.
    fn open_update<X: Executor>(&self, core: &EngineCore<X>, id: u64) -> Result<&OpenUpdate> {
        core.check_serving()?;
        self.uncommitted(id).ok_or_else(|| {
            Error::FailedPrecondition(format!("update {id} is not open: it has ended, or its client is gone"))
        })
    }

    /// Writes tensors of a FULL push in place. The first write destroys the policy, so requests that stood still end.
    pub fn write_part<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        update: u64,
        tensors: Arc<Tensors>,
    ) -> Attempt<()> {
        if !self.open_update(core, update).map_err(Failure::Refused)?.in_place {
            let why = "this update is staged, not written in place; send everything with the commit";
            return Err(Failure::Refused(Error::FailedPrecondition(why.into())));
        }
        let next = core.state.written_in_part().map_err(Failure::Refused)?;
        core.telemetry.apply_push(update);
        core.policy.replace(tensors.names());
        core.order(WeightOrder::Replace { tensors }).map_err(Failure::or_fatal)?;
        if core.state.has_policy() {
            core.abort_accepted(|_, _| true);
        }
        core.state = next;
        Ok(())
    }

    /// Checks the commit of the open update, and returns whether it waits for the accepted requests to end.
    pub fn commit<X: Executor>(
        &mut self,
        core: &EngineCore<X>,
        update: u64,
        new_version: Option<WeightVersion>,
    ) -> Result<bool> {
        let header = &self.open_update(core, update)?.header;
        let waits = header.adapter.is_none() && header.running == RunningPolicy::Wait && core.must_drain();
        self.name_version(new_version);
        if waits {
            self.note_commit();
        }
        Ok(waits)
    }

    /// Ends the open update: it is applied, or refused if that is not possible any more.
    pub fn finish_commit<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        adapters: &mut Adapters,
        Commit { content, tower, reply }: Commit,
    ) -> Result<()> {
        core.telemetry.apply_push(self.open_number());
        let open = self.end(None).expect("a commit is of an open update");
        let attempt = self.apply(core, adapters, &open.header, content, tower);
        core.budget.free(MemoryUse::UpdateStaging);
        if core.spare.is_some()
            && core.budget.set(MemoryUse::SpareWeights, core.budget.reserved(MemoryUse::Weights)).is_err()
        {
            core.spare = None;
        }
        answer(reply, attempt)
    }

    /// Forgets the open update, if there is one. If it has written in place, the weights stay missing.
    pub fn roll_back<X: Executor>(&mut self, core: &mut EngineCore<X>) {
        if self.end(None).is_some() {
            core.budget.free(MemoryUse::UpdateStaging);
        }
    }

    /// Ends the open update, if its number is `update` or no number is given. Its sender, or the caller of its commit,
    /// gets the reason.
    pub fn cancel<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        drains: &mut Drains,
        update: Option<u64>,
    ) -> Option<UpdateStatus> {
        let open = self.end(update)?;
        core.budget.free(MemoryUse::UpdateStaging);
        let status = open.status(core.clock.now());
        let left = if core.state.has_policy() { "nothing has changed" } else { "the weights are still missing" };
        let error = Error::Aborted(format!("the update was ended by CancelUpdate; {left}"));
        drains.refuse(&error, Drain::is_commit);
        (open.sender.ended)(error);
        Some(status)
    }

    /// Carries an update out, if it still can be.
    fn apply<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        adapters: &mut Adapters,
        header: &UpdateHeader,
        content: WeightUpdate,
        tower: Option<[u8; 16]>,
    ) -> Attempt<UpdateReply> {
        let started = core.clock.now();
        check_header(core, adapters, header).map_err(Failure::Refused)?;
        let adapter_generation = match (content, &header.adapter) {
            (WeightUpdate::Lora(adapter), Some(target)) => {
                let directory = match &header.source {
                    Source::Directory(path) => Some(path.clone()),
                    _ => None,
                };
                Some(adapters.add(core, target, &header.tenant, &adapter, directory)?)
            }
            (_, Some(_)) => {
                let error = Error::invalid("adapter", "only a LORA can stay resident");
                return Err(Failure::Refused(error));
            }
            (content, None) => {
                let version = new_version(core, header).map_err(Failure::Refused)?;
                let tower = tower_change(core, &content, tower);
                match content {
                    WeightUpdate::Lora(adapter) => self.apply_lora(core, adapter)?,
                    WeightUpdate::Stored(stored) => apply_stored(core, stored)?,
                    content => apply_tensors(core, content)?,
                }
                core.state = core.state.complete();
                core.change_policy(version, header.running, tower);
                None
            }
        };
        self.count_applied();
        core.telemetry.note_version(core.policy.version());
        Ok(UpdateReply {
            weight_version: core.policy.version(),
            pause: core.clock.since(started),
            pending: header.adapter.is_none() && !core.state.weights_awake(),
            adapter_generation,
        })
    }

    /// Merges an adapter into the base, in place of the one that was merged before: now, or with the load when the
    /// weights wake. Where the weights are missing, the checkpoint becomes the base again, even if some of it has been
    /// overwritten.
    fn apply_lora<X: Executor>(&self, core: &mut EngineCore<X>, after: Arc<Adapter>) -> Attempt<()> {
        let before = core.policy.merged();
        if let Some(name) = after.parameters().find(|name| self.awake.kept_base > 0 && is_of_tower(name)) {
            let message = "--keep-base keeps no embeddings of the base's vision tower; leave it out of the adapter";
            return Err(Failure::Refused(Error::invalid(name, message)));
        }
        if core.state.weights_awake() && !core.state.has_policy() {
            let ledger = self.ledger_with(core, &after, 0).map_err(Failure::Refused)?;
            let order = WeightOrder::Load { adapter: after.clone() };
            core.check_order(&order)?;
            if core.policy.has_replaced() {
                core.reset_base()?;
            }
            core.order(order)?;
            core.budget = ledger;
        } else {
            // While one adapter replaces the other, base parameters that either touches are copied.
            let either = before.parameters().chain(after.parameters().filter(|name| !before.touches(name)));
            let most = replaced_bytes(core, either).map_err(Failure::Refused)?;
            let copies = replaced_bytes(core, after.parameters()).map_err(Failure::Refused)?;
            core.budget.clone().set(MemoryUse::BaseCopies, most).map_err(Failure::Refused)?;
            let ledger = self.ledger_with(core, &after, copies).map_err(Failure::Refused)?;
            if core.state.weights_awake() {
                let order = WeightOrder::Merge { before: before.clone(), after: after.clone() };
                core.check_order(&order)?;
                let merged = core.order(order);
                if let Err(Failure::Refused(Error::ResourceExhausted(_))) = merged {
                    let back = WeightOrder::Merge { before: after, after: before };
                    core.order(back).map_err(Failure::or_fatal)?;
                    return merged;
                }
                merged?;
            }
            core.budget = ledger;
        }
        core.policy.merge(after);
        Ok(())
    }

    /// The ledger after the update: memory for receiving it is free, the merged adapter and the copies of base
    /// parameters below it are reserved.
    fn ledger_with<X: Executor>(
        &self,
        core: &EngineCore<X>,
        merged: &Adapter,
        base_copies: u64,
    ) -> Result<MemoryBudget> {
        let mut ledger = core.budget.clone();
        ledger.free(MemoryUse::UpdateStaging);
        ledger.set(MemoryUse::MergedAdapter, merged.bytes())?;
        ledger.set(MemoryUse::BaseCopies, base_copies)?;
        self.check_wake(ledger.clone())?;
        Ok(ledger)
    }

    /// Checks that what sleeps can still wake beside what `ledger` holds.
    fn check_wake(&self, mut ledger: MemoryBudget) -> Result<()> {
        self.awake.reserve(&mut ledger).map_err(|error| match error {
            Error::ResourceExhausted(why) => Error::ResourceExhausted(format!(
                "with this update the server could not wake: {why}; push a smaller adapter, or wake first"
            )),
            other => other,
        })
    }
}

/// Makes shadow weights that a FULL push is packed into. If that fails, the memory reserved for the push is free
/// again.
fn shadow_weights<X: Executor>(core: &mut EngineCore<X>) -> Result<ShadowWeights> {
    core.executor.shadow_weights().inspect_err(|_| {
        core.budget.free(MemoryUse::UpdateStaging);
    })
}

/// Checks what must hold when an update begins, and again when it is applied.
fn check_header<X: Executor>(core: &EngineCore<X>, adapters: &Adapters, header: &UpdateHeader) -> Result<()> {
    let have = core.policy.version();
    let store = if let Source::DeltaStore(store) = &header.source { Some(store) } else { None };
    if let Some(DeltaStore { path, serving: Some(serving), .. }) = store
        && core.stored() != Some(*serving)
    {
        let version = serving.version;
        let what = format!("the policy was version {version} of {path} when the push began, and is another one now");
        return Err(Error::VersionConflict(what));
    }
    match header.expected_version {
        None if header.kind == UpdateKind::Delta && store.is_none() => {
            return Err(Error::invalid("expected_version", "a DELTA must name the version that it changes"));
        }
        Some(expected) if expected != have => {
            return Err(Error::VersionConflict(format!(
                "expected_version: {expected} is not the policy that serves; that is version {have}"
            )));
        }
        _ => {}
    }
    core.state.check_push(push_kind(header))?;
    if let Some(target) = &header.adapter {
        return adapters.check_target(core, target, &header.tenant).map(|_| ());
    }
    new_version(core, header)?;
    if header.running == RunningPolicy::Wait && core.is_frozen() {
        return Err(Error::FailedPrecondition(format!(
            "running: {} requests stand still and cannot end before the update; call Resume first, or push with \
             KEEP, RECOMPUTE or ABORT",
            core.requests.len()
        )));
    }
    Ok(())
}

/// The version of the policy after the update.
fn new_version<X: Executor>(core: &EngineCore<X>, header: &UpdateHeader) -> Result<WeightVersion> {
    match header.new_version {
        Some(version) => check_version(core, version, header.force_version).map(|()| version),
        None => core.policy.version().checked_add(1).ok_or_else(|| {
            Error::invalid("new_version", format!("must be given: there is none after {}", core.policy.version()))
        }),
    }
}

/// Checks that the policy's version does not go back or repeat, unless `force` says that it may. Where there is no
/// policy there is no version to stay above, and a trainer brings back the policy that a sleep has dropped.
fn check_version<X: Executor>(core: &EngineCore<X>, version: WeightVersion, force: bool) -> Result<()> {
    let have = core.policy.version();
    if version > have || force || !core.state.has_policy() {
        return Ok(());
    }
    Err(Error::FailedPrecondition(format!(
        "new_version: {version} is not above {have}, the version of the policy that serves; give a higher one, or set \
         force_version if it is meant, as where a trainer begins again beside a running server"
    )))
}

/// Reserves the memory that an update takes while it is received. Returns whether it is to be written in place.
fn reserve_staging<X: Executor>(
    core: &mut EngineCore<X>,
    header: &UpdateHeader,
    staging: StagingBytes,
) -> Result<bool> {
    let of_host = staging.staged - staging.shadow;
    let reserved = core.budget.set_parts(MemoryUse::UpdateStaging, staging.shadow, of_host);
    let Err(error) = reserved else { return Ok(false) };
    let at_rest = core.state != State::Running && core.state.weights_awake();
    let in_place = header.in_place && header.kind == UpdateKind::Full && at_rest;
    let (result, of_host) = match in_place {
        true => (core.budget.set(MemoryUse::UpdateStaging, staging.in_place), staging.in_place),
        false => (Err(error), of_host),
    };
    let is_host_short =
        core.budget.host_report().is_some() && of_host > core.budget.remaining_for(MemoryUse::UpdateStaging);
    let instead = match (is_host_short, matches!(header.source, Source::Broadcast(_))) {
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

/// The effect of an update on the vision tower. `pushed` is the digest of the values that it brings for it.
fn tower_change<X: Executor>(core: &EngineCore<X>, content: &WeightUpdate, pushed: Option<[u8; 16]>) -> TowerChange {
    let touches_tower = |adapter: &Adapter| adapter.parameters().any(is_of_tower);
    let may_change = match content {
        WeightUpdate::Full(_) | WeightUpdate::Packed(_) => match pushed {
            Some(digest) => return TowerChange::Pushed(digest),
            // The tower keeps its base.
            None => touches_tower(&core.policy.merged()),
        },
        // Without a policy, the checkpoint becomes the base.
        WeightUpdate::Lora(adapter) => {
            !core.state.has_policy() || touches_tower(&core.policy.merged()) || touches_tower(adapter)
        }
        WeightUpdate::Delta(delta) => delta.names().any(is_of_tower),
        WeightUpdate::Stored(StoredUpdate { base, deltas, .. }) => {
            let is_changed = deltas.iter().any(|delta| delta.names().any(is_of_tower));
            match base {
                Some(base) if !is_changed => return tower_change(core, base, pushed),
                base => base.is_some() || is_changed,
            }
        }
    };
    if may_change { TowerChange::Unknown } else { TowerChange::None }
}

/// Gives the policy another version. Its weights, and the KV that was computed with them, stay.
pub(super) fn set_version<X: Executor>(core: &mut EngineCore<X>, version: WeightVersion, force: bool) -> Result<()> {
    core.check_serving()?;
    if !core.state.has_policy() {
        let why = "the weights are missing, so there is no policy to name; push a complete one with its version";
        return Err(Error::FailedPrecondition(why.into()));
    }
    check_version(core, version, force)?;
    core.policy.rename(version);
    core.reject_queued_for_others(version);
    Ok(())
}

/// Bytes, on all ranks together, of those of the parameters `names` whose base was pushed.
fn replaced_bytes<'n, X: Executor>(core: &EngineCore<X>, names: impl Iterator<Item = &'n str>) -> Result<u64> {
    let replaced = names.filter(|name| core.policy.is_replaced(name)).filter_map(|name| core.parameters.get(name));
    replaced.map(|spec| core.parameters.bytes_on_ranks(spec)).sum()
}
