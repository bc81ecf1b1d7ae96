//! The effect of pushes of tensors: FULL, DELTA, and versions of delta stores.

use std::collections::HashSet;
use std::sync::Arc;

use super::core::{Attempt, EngineCore, Failure};
use crate::error::Error;
use crate::executor::{Executor, WeightOrder};
use crate::weights::{Adapter, Delta, ShadowWeights, StoredUpdate, Tensors, WeightUpdate};

/// Applies a push of tensors.
pub(super) fn apply_tensors<X: Executor>(core: &mut EngineCore<X>, content: WeightUpdate) -> Attempt<()> {
    match content {
        WeightUpdate::Full(tensors) => apply_full(core, tensors),
        WeightUpdate::Packed(shadow) => apply_packed(core, shadow),
        WeightUpdate::Delta(delta) => apply_delta(core, delta),
        WeightUpdate::Lora(_) | WeightUpdate::Stored(_) => unreachable!("applied by functions of their own"),
    }
}

/// Applies a version of a delta store, with all deltas between it and what it is based on.
pub(super) fn apply_stored<X: Executor>(core: &mut EngineCore<X>, stored: StoredUpdate) -> Attempt<()> {
    let StoredUpdate { base, deltas, version } = stored;
    base.map_or(Ok(()), |base| apply_tensors(core, *base))?;
    deltas.into_iter().try_for_each(|delta| apply_delta(core, delta))?;
    core.policy.note_stored(version);
    Ok(())
}

/// Replaces all parameters by tensors, of which some may have been written before.
fn apply_full<X: Executor>(core: &mut EngineCore<X>, tensors: Arc<Tensors>) -> Attempt<()> {
    core.order(WeightOrder::Replace { tensors }).map_err(Failure::or_fatal)?;
    replace_all_but(core, &HashSet::new());
    Ok(())
}

/// Exchanges the weights for shadow weights that hold the new policy. The storage of the old weights is kept for
/// the next FULL push, unless its memory had been released: finding fresh pages costs more than writing to them.
fn apply_packed<X: Executor>(core: &mut EngineCore<X>, shadow: ShadowWeights) -> Attempt<()> {
    let kept = shadow.kept().clone();
    restore_kept(core, &kept)?;
    let had_memory = core.state.has_policy();
    let replaced = core.executor.exchange(shadow).map_err(Failure::Fatal)?;
    core.spare = had_memory.then_some(replaced);
    replace_all_but(core, &kept);
    Ok(())
}

/// Gives the parameters that a FULL push keeps their base, without the adapter that is merged into them.
fn restore_kept<X: Executor>(core: &mut EngineCore<X>, kept: &HashSet<String>) -> Attempt<()> {
    let merged = core.policy.merged();
    // Buffers keep their values.
    let keeps_weights = kept.iter().any(|name| core.parameters.get(name).is_some_and(|spec| !spec.is_buffer));
    if keeps_weights && !core.state.has_policy() {
        let why = "keep_missing: the weights are missing, so there are none to keep; push every parameter";
        return Err(Failure::Refused(Error::FailedPrecondition(why.into())));
    }
    if !merged.parameters().any(|name| kept.contains(name)) {
        return Ok(());
    }
    let order = WeightOrder::Merge { before: merged, after: Arc::new(Adapter::none()) };
    core.check_order(&order)?;
    core.order(order)?;
    forget_merged(core);
    Ok(())
}

/// Notes that every parameter of the base was pushed except for those that are `kept`, and that nothing is merged.
fn replace_all_but<X: Executor>(core: &mut EngineCore<X>, kept: &HashSet<String>) {
    core.policy.replace_all_but(kept);
    forget_merged(core);
}

/// Changes parameters of the policy that serves. The adapter that was merged into it becomes part of the base.
fn apply_delta<X: Executor>(core: &mut EngineCore<X>, delta: Arc<Delta>) -> Attempt<()> {
    let merged = core.policy.merged();
    let order = WeightOrder::Patch { delta: delta.clone(), merged: merged.clone() };
    core.order(order).map_err(Failure::or_fatal)?;
    core.policy.replace(delta.names().chain(merged.parameters()));
    forget_merged(core);
    Ok(())
}

/// Notes that the base serves, with nothing merged into it.
fn forget_merged<X: Executor>(core: &mut EngineCore<X>) {
    core.policy.forget_merged();
    core.free_merged();
}
