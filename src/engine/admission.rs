//! Admission: accepts, holds or rejects requests, and ends them when their clients ask for it. Backpressure: suspends
//! accepted requests whose readers lag.

use std::sync::Arc;

use super::adapters::{Adapters, LoadOutcome};
use super::command::{AbortReply, AbortTarget};
use super::core::{Ending, EngineCore, shutting_down};
use super::request::{GenerateCommand, RequestList, ValidRequest, reference_field};
use super::request_state::RequestState;
use super::requests::Requests;
use crate::cache::CacheSalt;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::memory::{Level, human_bytes};
use crate::text::Tokenizer;
use crate::types::{Owner, PolicyWeights, RequestKey};

/// The requests that wait to be accepted: while nothing steps, while a drain waits for the accepted ones to end, for a
/// newer policy, or for an adapter to be loaded.
pub(super) struct Admission {
    held: Requests,
    /// The key of the last request.
    last_key: u64,
    /// Makes the text of samples, for replies and for stop strings; `None` for a model without a tokenizer.
    tokenizer: Option<Arc<Tokenizer>>,
}

impl Admission {
    pub fn new(tokenizer: Option<Arc<Tokenizer>>) -> Self {
        Self { held: Requests::default(), last_key: 0, tokenizer }
    }

    pub fn num_held(&self) -> usize {
        self.held.len()
    }

    /// Accepts a new request, holds it, or rejects it. No request is accepted if `holds_all`. If `is_closed`, a request
    /// that does not wait for Resume is rejected.
    pub fn receive<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        adapters: &mut Adapters,
        holds_all: bool,
        is_closed: bool,
        command: GenerateCommand,
    ) {
        let mut request = RequestState::new(command, core.metrics());
        if is_closed && !request.waits_for_resume() {
            return request
                .fail(Error::Unavailable("generation is paused; send the request again after /resume".into()));
        }
        if let Err(error) = self.check_new(core, &request) {
            return request.fail(error);
        }
        self.last_key += 1;
        let key = RequestKey(self.last_key);
        if holds_all || must_wait(core, adapters, &request) {
            return self.held.insert(key, request);
        }
        self.accept(core, adapters, key, request);
    }

    /// Checks the conditions that a request must meet when it arrives.
    fn check_new<X: Executor>(&self, core: &EngineCore<X>, request: &RequestState) -> Result<()> {
        core.check_serving()?;
        core.state.check_request()?;
        let id = request.id();
        if self.held.find(id).or_else(|| core.requests.find(id)).is_some() {
            return Err(Error::AlreadyExists(format!("request_id: {id:?} is running already")));
        }
        let held = self.held.iter().map(|request| request.request().num_queued()).sum();
        core.scheduler.check_room(request.request().num_queued(), held)
    }

    /// Accepts the held requests that no longer have to wait, in the order of arrival, and brings on the load that
    /// others wait for.
    ///
    /// # Errors
    /// If the executor fails.
    pub fn accept_held<X: Executor>(&mut self, core: &mut EngineCore<X>, adapters: &mut Adapters) -> Result<()> {
        loop {
            for key in self.held.keys(|_, request| !must_wait(core, adapters, request)) {
                let request = self.held.remove(key).expect("its key was just found");
                self.accept(core, adapters, key, request);
            }
            let first = self.held.keys(|_, request| lacks_adapter(core, adapters, request)).into_iter().next();
            if let Some((key, request)) = first.and_then(|key| Some((key, self.held.get(key)?))) {
                if let Err(error) = adapters.check_slots(request) {
                    self.reject(key, error);
                    continue;
                }
                adapters.begin_load(request);
            }
            if !self.place_adapter(core, adapters, first)? {
                return Ok(());
            }
        }
    }

    /// Gives the adapter that was loaded a slot, if there is one. `first` is the oldest request that waits for an
    /// adapter. Returns whether other requests may be accepted now, or another adapter may be loaded.
    fn place_adapter<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        adapters: &mut Adapters,
        first: Option<RequestKey>,
    ) -> Result<bool> {
        if !adapters.is_loading() {
            return Ok(false);
        }
        let first = first.and_then(|key| self.held.get(key));
        let wanted: Vec<_> = self.held.iter().filter(|request| !wants_newer(core, request)).collect();
        let is_wanted = |name: &str| wanted.iter().any(|request| request.field_of(name).is_some());
        match adapters.place(core, first, is_wanted)? {
            LoadOutcome::Waiting => Ok(false),
            LoadOutcome::Ended => Ok(true),
            LoadOutcome::Failed(name, error) => {
                self.reject_lacking(core, adapters, &name, &error);
                Ok(true)
            }
        }
    }

    /// Rejects the requests that wait for the adapter of this name, which cannot be loaded.
    pub fn reject_lacking<X: Executor>(
        &mut self,
        core: &EngineCore<X>,
        adapters: &Adapters,
        name: &str,
        error: &Error,
    ) {
        if adapters.has(name) {
            return;
        }
        let waits = |request: &RequestState| !wants_newer(core, request) && request.field_of(name).is_some();
        for key in self.held.keys(|_, request| waits(request)) {
            let field = self.held.get(key).and_then(|request| request.field_of(name)).unwrap_or_default();
            self.reject(key, adapters.load_error(core, &field, name, error));
        }
    }

    /// Gives a request to the scheduler, or rejects it.
    fn accept<X: Executor>(
        &self,
        core: &mut EngineCore<X>,
        adapters: &mut Adapters,
        key: RequestKey,
        mut request: RequestState,
    ) {
        let accepted = check_policy(core, adapters, request.request()).and_then(|(weights, references)| {
            let salt = CacheSalt { epoch: core.policy.epoch(), weights };
            let groups = request.accept(key, salt, references, self.tokenizer.as_ref());
            core.scheduler.add(&request.client.tenant, groups)
        });
        match accepted {
            Ok(()) => core.requests.insert(key, request),
            Err(error) => request.fail(error),
        }
    }

    /// Ends held requests whose clients are gone or whose time is up.
    pub fn drop_cancelled<X: Executor>(&mut self, core: &mut EngineCore<X>) {
        for key in self.held.keys(|_, request| request.cancel().is_expired()) {
            // It ends like an accepted request, with samples that have no tokens.
            let mut request = self.held.remove(key).expect("its key was just found");
            let salt = CacheSalt { epoch: core.policy.epoch(), weights: PolicyWeights::Serving };
            request.accept(key, salt, Vec::new(), self.tokenizer.as_ref());
            core.close(key, request, Ending::Aborted);
        }
        for key in self.held.keys(|_, request| request.cancel().is_cancelled()) {
            self.reject(key, Error::Aborted("the client is gone".into()));
        }
    }

    /// Ends accepted and held requests by their ids; with an owner, only that owner's.
    pub fn abort<X: Executor>(
        &mut self,
        core: &mut EngineCore<X>,
        target: AbortTarget,
        owner: Option<Owner>,
    ) -> AbortReply {
        let ids = match target {
            AbortTarget::Requests(ids) => ids,
            AbortTarget::All => core.requests.ids_for(owner).chain(self.held.ids_for(owner)).collect(),
        };
        let (aborted, unknown) = ids.into_iter().partition(|id| {
            if let Some(key) = core.requests.find_for(id, owner) {
                core.end(key, Ending::Aborted);
                return true;
            }
            let held = self.held.find_for(id, owner);
            let why = "aborted while it waited, before anything was computed";
            held.into_iter().for_each(|key| self.reject(key, Error::Aborted(why.into())));
            held.is_some()
        });
        AbortReply { aborted, unknown }
    }

    /// Rejects all held requests because the server is shutting down.
    pub fn reject_held(&mut self) {
        self.held.keys(|_, _| true).into_iter().for_each(|key| self.reject(key, shutting_down()));
    }

    fn reject(&mut self, key: RequestKey, error: Error) {
        if let Some(mut request) = self.held.remove(key) {
            request.fail(error);
        }
    }

    /// At most `most` of the requests that have not ended: first the accepted ones, then the held ones, the oldest of
    /// each first.
    pub fn list<X: Executor>(&self, core: &EngineCore<X>, most: usize) -> RequestList {
        let now = core.clock.now();
        let all = core.requests.iter().chain(self.held.iter());
        RequestList {
            total: core.requests.len() + self.held.len(),
            oldest: all.take(most).map(|request| request.status(now)).collect(),
        }
    }

    /// Asserts that no request is held without need.
    pub fn check_integrity<X: Executor>(&self, core: &EngineCore<X>, adapters: &Adapters, holds_all: bool) {
        self.held.check_integrity();
        let startable = self.held.keys(|_, request| !must_wait(core, adapters, request));
        assert!(holds_all || startable.is_empty(), "held requests may start: {startable:?}");
        let lacking = self.held.keys(|_, request| lacks_adapter(core, adapters, request));
        assert!(holds_all || lacking.is_empty() || adapters.is_loading(), "no adapter is loaded for {lacking:?}");
    }
}

/// Whether the request has to wait although the engine steps.
fn must_wait<X: Executor>(core: &EngineCore<X>, adapters: &Adapters, request: &RequestState) -> bool {
    wants_newer(core, request) || lacks_adapter(core, adapters, request)
}

/// Whether the request waits for an adapter to be loaded. One that does not take the serving policy is rejected before.
fn lacks_adapter<X: Executor>(core: &EngineCore<X>, adapters: &Adapters, request: &RequestState) -> bool {
    !wants_newer(core, request)
        && !request.insists_on_other_than(core.policy.version())
        && adapters.lacking(request).is_some()
}

/// Whether the request asks for a newer policy than the serving one. A request that asks for exactly one version does
/// not wait: its version is checked when it is accepted.
fn wants_newer<X: Executor>(core: &EngineCore<X>, request: &RequestState) -> bool {
    let ValidRequest { if_weight_version, min_weight_version, .. } = request.request();
    if_weight_version.is_none() && min_weight_version.is_some_and(|version| version > core.policy.version())
}

/// Checks that the request allows the serving policy, and returns the weights that it samples with and those of its
/// references.
fn check_policy<X: Executor>(
    core: &EngineCore<X>,
    adapters: &mut Adapters,
    request: &ValidRequest,
) -> Result<(PolicyWeights, Vec<PolicyWeights>)> {
    let have = core.policy.version();
    if let Some(wanted) = request.if_weight_version.filter(|&wanted| wanted != have) {
        return Err(Error::VersionConflict(format!(
            "if_weight_version: {wanted} is not the policy that serves; that is version {have}"
        )));
    }
    let mut find = |field: &str, name: &Option<String>| {
        let generation = name.as_deref().map(|name| adapters.find_for_use(core, field, name)).transpose()?;
        Ok(PolicyWeights::with_adapter(generation))
    };
    let weights = find("adapter", &request.adapter)?;
    let references = request.policies.references.iter().enumerate();
    let references = references.map(|(i, name)| find(&reference_field(i), name));
    Ok((weights, references.collect::<Result<_>>()?))
}

/// Suspends the accepted requests whose readers lag, and resumes those whose readers have caught up. If memory for
/// requests is tight, only the oldest request whose reader keeps up runs, so that it can finish and free its memory. If
/// all readers lag, the request that holds the most bytes is ended.
///
/// Every suspended request is resumed eventually: at least one request runs while any reader keeps up, and a lagging
/// reader wakes the engine when it has caught up.
pub(super) fn suspend_laggards<X: Executor>(core: &mut EngineCore<X>) {
    if core.traffic.level() == Level::Full {
        end_largest(core);
    }
    if core.traffic.level() == Level::Free {
        // This runs at every step and mostly has nothing to change.
        for key in core.requests.keys(|_, request| request.lags() != request.is_suspended()) {
            let is_suspended = core.requests.get(key).is_some_and(RequestState::is_suspended);
            set_suspended(core, key, !is_suspended);
        }
        return;
    }
    let mut one_runs = false;
    for key in core.requests.keys(|_, _| true) {
        let suspend = one_runs || core.requests.get(key).is_some_and(RequestState::lags);
        one_runs |= !suspend;
        set_suspended(core, key, suspend);
    }
}

/// Suspends or resumes a request, unless it already is suspended or running.
fn set_suspended<X: Executor>(core: &mut EngineCore<X>, key: RequestKey, suspend: bool) {
    let Some(request) = core.requests.get_mut(key) else { return };
    if suspend == request.is_suspended() {
        return;
    }
    request.note_suspended(suspend);
    match suspend {
        true => core.scheduler.suspend(key),
        false => core.scheduler.resume(key),
    }
}

/// Ends the accepted request that holds the most bytes.
fn end_largest<X: Executor>(core: &mut EngineCore<X>) {
    let bytes = |key| core.requests.get(key).map_or(0, RequestState::bytes);
    let Some((bytes, key)) = core.requests.keys(|_, _| true).into_iter().map(|key| (bytes(key), key)).max() else {
        return;
    };
    core.reject(
        key,
        Error::ResourceExhausted(format!(
            "requests and replies under way hold all of --request-bytes {}, and this request more than any other, {}; \
             ask for fewer samples or top_logprobs at once, or raise --request-bytes",
            human_bytes(core.traffic.limit()),
            human_bytes(bytes),
        )),
    );
}
