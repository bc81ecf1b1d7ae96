//! Adapters that requests name before they are resident. The server reads them, one at a time, while the requests are
//! held; here they get a slot.
//!
//! The oldest request that lacks an adapter decides which one is read next, so that requests get their slots in the
//! order of their arrival and a request with several adapters gets all of them. Only adapters that were loaded in this
//! way leave their slots for others: they can be read again.

use std::collections::BTreeSet;

use super::{Adapters, Origin};
use crate::engine::command::{AdapterStatus, ReadAdapter};
use crate::engine::core::{EngineCore, Failure};
use crate::engine::request_state::RequestState;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::types::Tenant;

/// The load under way.
pub(super) struct AdapterLoad {
    name: String,
    /// That of the request for which it is read.
    tenant: Tenant,
    /// `None` while it is read; afterwards it waits for a slot.
    read: Option<ReadAdapter>,
}

/// Numbers of loads since the start.
#[derive(Default)]
pub(in crate::engine) struct LoadCounts {
    pub loaded: u64,
    pub failed: u64,
    /// Adapters that have left their slots for others.
    pub evicted: u64,
}

/// The state of the load under way.
pub(in crate::engine) enum LoadOutcome {
    /// It waits for its files, or for a slot.
    Waiting,
    /// There is none, or it has ended: the adapter is resident, or no request needs it.
    Ended,
    /// The adapter of this name cannot become resident.
    Failed(String, Error),
}

impl Adapters {
    pub fn load_counts(&self) -> &LoadCounts {
        &self.counts
    }

    /// Whether an adapter is being read, or waits for a slot.
    pub fn is_loading(&self) -> bool {
        self.load.is_some()
    }

    /// The first adapter that `request` names, that is not resident, and that the server can read for it.
    pub fn lacking<'r>(&self, request: &'r RequestState) -> Option<&'r str> {
        request.adapter_reader()?;
        request.adapter_names().find(|name| self.named(name).is_none())
    }

    /// Checks that the adapters that `request` names can be resident together.
    ///
    /// # Errors
    /// `ResourceExhausted` if they cannot, beside those that stay in their slots.
    pub fn check_slots(&self, request: &RequestState) -> Result<()> {
        let names: BTreeSet<&str> = request.adapter_names().collect();
        let stays = |status: &AdapterStatus| !status.retired && !status.on_demand && !names.contains(&*status.name);
        let staying = self.resident.iter().filter(|resident| stays(&resident.status)).count();
        let lacking = names.iter().filter(|name| self.named(name).is_none()).count();
        let is_own = |status: &AdapterStatus| stays(status) && status.tenant == request.client.tenant;
        let own = self.resident.iter().filter(|resident| is_own(&resident.status)).count();
        if let Some(most) = self.max_of_tenant.filter(|most| lacking > 0 && lacking + own > *most) {
            return Err(Error::ResourceExhausted(format!(
                "adapter: the request needs {lacking} more of --tenant-max-adapters {most}, and the tenant {:?} has {own} \
                 that were pushed or loaded by name; remove some of these first",
                request.client.tenant.as_str()
            )));
        }
        if names.len() + staying <= self.max_adapters {
            return Ok(());
        }
        Err(Error::ResourceExhausted(format!(
            "adapter: the request needs {} of the slots of --max-adapters {}, and adapters that were pushed or loaded \
             by name have {staying}; remove some of these first",
            names.len(),
            self.max_adapters
        )))
    }

    /// Begins to read an adapter that `request` lacks, unless a load is under way.
    pub fn begin_load(&mut self, request: &RequestState) {
        if let (None, Some(name), Some(read)) = (&self.load, self.lacking(request), request.adapter_reader()) {
            self.load = Some(AdapterLoad { name: name.to_owned(), tenant: request.client.tenant.clone(), read: None });
            read(name);
        }
    }

    /// Takes what the server has read. Returns the error that the load has ended with, if it has.
    pub fn take_read(&mut self, name: &str, read: Result<ReadAdapter>) -> Option<Error> {
        let load = self.load.as_mut().filter(|load| load.name == name && load.read.is_none())?;
        match read {
            Ok(read) => {
                load.read = Some(read);
                None
            }
            Err(error) => {
                self.load = None;
                self.count_failed(name, &error);
                Some(error)
            }
        }
    }

    /// Drops an adapter that was read while nothing steps, if no request is held that may wait for it.
    pub fn drop_unwanted(&mut self, held: usize) {
        self.load.take_if(|load| held == 0 && load.read.is_some());
    }

    /// Gives the adapter that was read a slot, if there is one. `first` is the oldest request that lacks an adapter,
    /// and `is_wanted` says whether any request lacks the one of this name.
    ///
    /// # Errors
    /// If the executor fails.
    pub fn place<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        first: Option<&RequestState>,
        is_wanted: impl Fn(&str) -> bool,
    ) -> Result<LoadOutcome> {
        let Some(AdapterLoad { name, tenant, read }) = self.load.take() else { return Ok(LoadOutcome::Ended) };
        let Some(read) = read else {
            self.load = Some(AdapterLoad { name, tenant, read });
            return Ok(LoadOutcome::Waiting);
        };
        if self.named(&name).is_some() || core.check_serving().is_err() {
            return Ok(LoadOutcome::Ended);
        }
        if let Err(error) = self.check_adapter(&read.adapter) {
            self.count_failed(&name, &error);
            return Ok(LoadOutcome::Failed(name, error));
        }
        let used: BTreeSet<&str> = first.iter().flat_map(|request| request.adapter_names()).collect();
        let is_full = self.quota_of(&tenant, &name).is_some();
        let may_leave = |status: &AdapterStatus| {
            status.on_demand && !used.contains(&*status.name) && (!is_full || status.tenant == tenant)
        };
        let Some(evicted) = self.find_slot(core, &name, &tenant, may_leave) else {
            if is_wanted(&name) {
                self.free_slot(may_leave);
                self.load = Some(AdapterLoad { name, tenant, read: Some(read) });
                return Ok(LoadOutcome::Waiting);
            }
            return Ok(LoadOutcome::Ended);
        };
        let origin = Origin { tenant, directory: Some(read.directory), on_demand: true };
        match self.put(core, &name, &read.adapter, evicted, origin) {
            Ok(_) => {
                self.counts.loaded += 1;
                tracing::info!(adapter = name, bytes = read.adapter.bytes(), "loaded for a request that names it");
                Ok(LoadOutcome::Ended)
            }
            Err(Failure::Refused(error)) => {
                self.count_failed(&name, &error);
                Ok(LoadOutcome::Failed(name, error))
            }
            Err(Failure::Fatal(error)) => Err(error),
        }
    }

    /// Retires the least recently used adapter of those that may leave their slots, all of which are in use: new
    /// requests for it wait behind those that are waiting, so that its slot becomes free. One at a time.
    fn free_slot(&mut self, may_leave: impl Fn(&AdapterStatus) -> bool) {
        if self.resident.iter().any(|resident| resident.status.retired) {
            return;
        }
        let leaving = self.resident.iter_mut().map(|resident| &mut resident.status).filter(|status| may_leave(status));
        if let Some(status) = leaving.min_by_key(|status| status.last_use) {
            status.retired = true;
            self.counts.evicted += 1;
            tracing::info!(adapter = status.name, "its slot is needed: it leaves when its requests have ended");
        }
    }

    fn count_failed(&mut self, name: &str, error: &Error) {
        self.counts.failed += 1;
        tracing::info!(adapter = name, "cannot be loaded for the requests that name it: {error}");
    }

    /// The error of a request whose `field` names an adapter that could not be loaded.
    pub fn load_error<X: Executor>(&self, core: &EngineCore<X>, field: &str, name: &str, error: &Error) -> Error {
        let cannot = |why: &str| format!("{field}: {name:?} cannot be loaded: {why}");
        match error {
            Error::NotFound(why) => Error::NotFound(format!("{}; {why}", self.not_resident(core, field, name))),
            Error::InvalidArgument { field: inner, message } => {
                Error::invalid(field, format!("{name:?} cannot be loaded: {inner}: {message}"))
            }
            Error::ResourceExhausted(why) => Error::ResourceExhausted(cannot(why)),
            Error::DataLoss(why) => Error::DataLoss(cannot(why)),
            other => other.clone(),
        }
    }
}
