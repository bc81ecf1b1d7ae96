//! Requests from their arrival to their end: held, accepted, refused, aborted.

use super::core::{Ending, shutting_down};
use super::lifecycle::State;
use super::request::Request;
use super::transaction::Transaction;
use super::{AbortReply, AbortTarget, Engine, Event, GenerateCommand, RequestList};
use crate::cache::CacheSalt;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::types::{Owner, RequestKey};

impl<X: Executor> Engine<X> {
    /// Accepts a new request, holds it, or refuses it.
    pub(super) fn receive(&mut self, command: GenerateCommand) {
        if let Err(error) = self.check_new(&command) {
            return self.refuse(command, error);
        }
        let key = self.core.requests.next_key();
        if self.must_wait(&command) {
            return self.core.requests.hold(key, command);
        }
        self.admit(key, command);
    }

    /// Checks what can be checked when a request arrives.
    fn check_new(&self, command: &GenerateCommand) -> Result<()> {
        self.core.check_serving()?;
        self.core.state.check_request()?;
        if self.core.requests.find(&command.request_id).is_some() {
            let id = &command.request_id;
            return Err(Error::AlreadyExists(format!("request_id: {id:?} is running already")));
        }
        self.core.scheduler.check_room(command.num_samples(), self.core.requests.num_held_samples())
    }

    /// Whether no request is accepted now, because nothing steps or a drain waits for the accepted ones to end.
    pub(super) fn is_holding(&self) -> bool {
        self.core.state != State::Running || !self.drains.is_empty()
    }

    fn must_wait(&self, command: &GenerateCommand) -> bool {
        self.is_holding() || self.wants_newer(command)
    }

    /// Whether the request asks for a newer policy than the one that serves. A request that asks for exactly one
    /// version does not wait: it is checked when it is accepted.
    pub(super) fn wants_newer(&self, command: &GenerateCommand) -> bool {
        command.if_weight_version.is_none()
            && command.min_weight_version.is_some_and(|v| v > self.core.policy.version())
    }

    /// Accepts the held requests that need not wait any more, in the order of arrival.
    pub(super) fn admit_held(&mut self) {
        if self.is_holding() {
            return;
        }
        for key in self.core.requests.held_keys(|command| !self.wants_newer(command)) {
            let command = self.core.requests.remove_held(key).expect("its key was just found");
            self.admit(key, command);
        }
    }

    /// Gives a request to the scheduler, or refuses it.
    fn admit(&mut self, key: RequestKey, command: GenerateCommand) {
        let adapter = match self.check_policy(&command) {
            Ok(adapter) => adapter,
            Err(error) => return self.refuse(command, error),
        };
        let salt = CacheSalt { epoch: self.core.policy.epoch(), adapter };
        let (mut request, groups) =
            Request::new(key, command, salt, self.core.tokenizer.as_ref(), &self.core.watch.observer.metrics);
        match self.core.scheduler.add(groups) {
            Ok(()) => {
                self.core.requests.accept(key, request);
            }
            Err(error) => request.fail(error),
        }
    }

    /// Checks that the request asks for the policy that serves, and returns the generation of the adapter it names.
    fn check_policy(&self, command: &GenerateCommand) -> Result<Option<u64>> {
        let have = self.core.policy.version();
        if let Some(wanted) = command.if_weight_version.filter(|&wanted| wanted != have) {
            return Err(Error::VersionConflict(format!(
                "if_weight_version: {wanted} is not the policy that serves; that is version {have}"
            )));
        }
        command.adapter.as_deref().map(|name| self.adapters.find(&self.core, name)).transpose()
    }

    /// Ends requests, drains, checksums and the open update if their clients are gone, and requests whose time is up.
    pub(super) fn drop_cancelled(&mut self) {
        let given_up = self.core.requests.accepted_keys(|_, request| request.is_given_up());
        if !given_up.is_empty() {
            // What the last step has brought them is theirs, and may be their end.
            self.emit();
        }
        for key in given_up {
            self.core.end(key, Ending::Aborted);
        }
        for key in self.core.requests.held_keys(|command| command.cancel.is_expired()) {
            self.end_held(key);
        }
        for key in self.core.requests.held_keys(|command| command.cancel.is_cancelled()) {
            self.refuse_held(key, Error::Aborted("the client is gone".into()));
        }
        // A client may vanish at any time. The update's flag is read once, so that the update and its commit, which may
        // be among the drains, are dropped together.
        let update_is_gone = self.updates.opened().is_some_and(Transaction::is_cancelled);
        self.drains.drop_cancelled(update_is_gone);
        if update_is_gone {
            self.updates.roll_back(&mut self.core);
        }
        self.adapters.drop_cancelled();
        self.checksums.drop_cancelled();
    }

    /// Ends requests by their ids, accepted and held ones; with an owner only that owner's.
    pub(super) fn abort(&mut self, target: AbortTarget, owner: Option<Owner>) -> AbortReply {
        let ids = match target {
            AbortTarget::Requests(ids) => ids,
            AbortTarget::All => self.core.requests.ids_for(owner),
        };
        let (aborted, unknown) = ids.into_iter().partition(|id| match self.core.requests.find_for(id, owner) {
            Some(key) => {
                self.core.end(key, Ending::Aborted);
                let why = "aborted while it waited, before anything was computed";
                self.refuse_held(key, Error::Aborted(why.into()));
                true
            }
            None => false,
        });
        AbortReply { aborted, unknown }
    }

    /// At most so many of the requests that have not ended: the accepted ones, then those that are held, the oldest of
    /// each first.
    pub(super) fn list_requests(&self, most: usize) -> RequestList {
        let now = self.core.clock.now();
        let accepted = self.core.requests.accepted_keys(|_, _| true);
        let running = accepted.iter().filter_map(|key| self.core.requests.get(*key)).map(|request| request.status(now));
        let held = self.core.requests.held().map(|command| command.status(now));
        RequestList {
            total: self.core.requests.num_accepted() + self.core.requests.num_held(),
            oldest: running.chain(held).take(most).collect(),
        }
    }

    pub(super) fn abort_all(&mut self) {
        self.abort(AbortTarget::All, None);
    }

    /// Tells all callers that wait that the server is shutting down. Accepted requests run on.
    pub(super) fn refuse_waiting(&mut self) {
        for key in self.core.requests.held_keys(|_| true) {
            self.refuse_held(key, shutting_down());
        }
        self.drains.refuse(&shutting_down(), |_| true);
        self.adapters.refuse_removals(&shutting_down());
        self.updates.roll_back(&mut self.core);
    }

    /// Ends a held request as one that was accepted, whose samples have no tokens.
    fn end_held(&mut self, key: RequestKey) {
        let Some(command) = self.core.requests.remove_held(key) else { return };
        let salt = CacheSalt { epoch: self.core.policy.epoch(), adapter: None };
        let metrics = &self.core.watch.observer.metrics;
        let (request, _) = Request::new(key, command, salt, self.core.tokenizer.as_ref(), metrics);
        self.core.close(key, request, Ending::Aborted);
    }

    fn refuse_held(&mut self, key: RequestKey, error: Error) {
        if let Some(command) = self.core.requests.remove_held(key) {
            self.refuse(command, error);
        }
    }

    /// Tells the client of a request that is not accepted why.
    fn refuse(&self, mut command: GenerateCommand, error: Error) {
        self.core.watch.observer.metrics.request_failed(&error);
        (command.responder)(Event::Failed(error));
    }
}
