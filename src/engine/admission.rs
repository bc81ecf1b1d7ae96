//! Requests from their arrival to their end: held, accepted, refused, aborted.

use super::lifecycle::State;
use super::{AbortReply, AbortTarget, Ending, Engine, Event, GenerateCommand, Request, shutting_down};
use crate::cache::CacheSalt;
use crate::error::{Error, Result};
use crate::executor::Executor;
use crate::types::RequestKey;

impl<X: Executor> Engine<X> {
    /// Accepts a new request, holds it, or refuses it.
    pub(super) fn receive(&mut self, command: GenerateCommand) {
        if let Err(error) = self.check_new(&command) {
            return refuse(command, error);
        }
        if self.must_wait(&command) {
            return self.held.push(command);
        }
        self.admit(command);
    }

    fn check_new(&self, command: &GenerateCommand) -> Result<()> {
        self.check_serving()?;
        self.state.check_request()?;
        if self.is_known(&command.request_id) {
            let id = &command.request_id;
            return Err(Error::AlreadyExists(format!("request_id: {id:?} is running already")));
        }
        let held = self.held.iter().map(GenerateCommand::num_samples).sum();
        self.scheduler.check_room(command.num_samples(), held)
    }

    /// Whether no request is accepted now: nothing steps, or something waits for the accepted ones to end.
    fn is_holding(&self) -> bool {
        self.state != State::Running || !self.drains.is_empty()
    }

    fn must_wait(&self, command: &GenerateCommand) -> bool {
        self.is_holding() || self.wants_newer(command)
    }

    /// One that insists on a version does not wait for another.
    fn wants_newer(&self, command: &GenerateCommand) -> bool {
        command.if_weight_version.is_none() && command.min_weight_version.is_some_and(|v| v > self.policy.version)
    }

    /// Accepts those held requests that need not wait any more, in order.
    pub(super) fn admit_held(&mut self) {
        if self.held.is_empty() || self.is_holding() {
            return;
        }
        for command in std::mem::take(&mut self.held) {
            if self.wants_newer(&command) {
                self.held.push(command);
            } else {
                self.admit(command);
            }
        }
    }

    fn admit(&mut self, command: GenerateCommand) {
        let adapter = match self.check_policy(&command) {
            Ok(adapter) => adapter,
            Err(error) => return refuse(command, error),
        };
        let key = RequestKey(self.next_key);
        self.next_key += 1;
        let salt = CacheSalt { epoch: self.policy.epoch, adapter };
        let (request, groups) = Request::new(key, command, salt, self.tokenizer.as_ref());
        match self.scheduler.add(groups) {
            Ok(()) => {
                self.requests.insert(key, request);
                adapter.into_iter().for_each(|generation| self.adapters.lease(generation));
            }
            Err(error) => request.fail(error),
        }
    }

    /// The generation of the adapter that the request names.
    fn check_policy(&self, command: &GenerateCommand) -> Result<Option<u64>> {
        let have = self.policy.version;
        if let Some(wanted) = command.if_weight_version.filter(|&wanted| wanted != have) {
            return Err(Error::VersionConflict(format!(
                "if_weight_version: {wanted} is not the policy that serves; that is version {have}"
            )));
        }
        command.adapter.as_deref().map(|name| self.adapters.find(name)).transpose()
    }

    fn is_known(&self, id: &str) -> bool {
        self.requests.values().any(|r| r.id() == id) || self.held.iter().any(|h| h.request_id == id)
    }

    /// Ends what belongs to clients that are gone.
    pub(super) fn drop_cancelled(&mut self) {
        let gone: Vec<_> = self.requests.iter().filter(|(_, r)| r.is_cancelled()).map(|(key, _)| *key).collect();
        for key in gone {
            self.end(key, Ending::Aborted);
        }
        for held in self.held.extract_if(.., |h| h.cancel.is_cancelled()) {
            refuse(held, Error::Unavailable("the client is gone".into()));
        }
        self.drains.retain(|drain| !drain.cancel.is_cancelled());
        self.adapters.drop_cancelled();
        if self.transaction.as_ref().is_some_and(|transaction| transaction.is_cancelled()) {
            self.roll_back();
        }
    }

    pub(super) fn abort(&mut self, target: AbortTarget) -> AbortReply {
        let ids = match target {
            AbortTarget::Requests(ids) => ids,
            AbortTarget::All => {
                let running = self.requests.values().map(|r| r.id().to_string());
                running.chain(self.held.iter().map(|h| h.request_id.clone())).collect()
            }
        };
        let mut reply = AbortReply::default();
        for id in ids {
            let running = self.requests.iter().find(|(_, r)| r.id() == id).map(|(key, _)| *key);
            let held = self.held.iter().position(|h| h.request_id == id);
            if let Some(key) = running {
                self.end(key, Ending::Aborted);
            } else if let Some(index) = held {
                let held = self.held.remove(index);
                refuse(held, Error::Aborted("aborted while it waited, before anything was computed".into()));
            } else {
                reply.unknown.push(id);
                continue;
            }
            reply.aborted.push(id);
        }
        reply
    }

    pub(super) fn abort_all(&mut self) {
        self.abort(AbortTarget::All);
    }

    /// Aborts all accepted requests, or those of `which`; held ones stay.
    pub(super) fn abort_accepted(&mut self, which: impl Fn(RequestKey, &Request) -> bool) {
        let keys: Vec<_> = self.requests.iter().filter(|(key, r)| which(**key, r)).map(|(key, _)| *key).collect();
        for key in keys {
            self.end(key, Ending::Aborted);
        }
    }

    /// The server ends: all that waits is told so. Requests that run are not waiting.
    pub(super) fn refuse_waiting(&mut self) {
        for held in std::mem::take(&mut self.held) {
            refuse(held, shutting_down());
        }
        for drain in std::mem::take(&mut self.drains) {
            drain.refuse(shutting_down());
        }
        self.adapters.refuse_removals(&shutting_down());
        self.roll_back();
    }

    /// Takes a request out; samples that still run are cut short. Its blocks are free when this returns.
    pub(super) fn end(&mut self, key: RequestKey, ending: Ending) {
        let Some(request) = self.take(key) else { return };
        match ending {
            Ending::Aborted => self.aborted_requests += 1,
            Ending::Finished => self.finished_requests += 1,
        }
        request.end();
    }

    /// Takes a request out that nothing has come of.
    pub(super) fn reject(&mut self, key: RequestKey, error: Error) {
        if let Some(request) = self.take(key) {
            self.aborted_requests += 1;
            request.fail(error);
        }
    }

    fn take(&mut self, key: RequestKey) -> Option<Request> {
        let request = self.requests.remove(&key)?;
        self.scheduler.abort(key);
        request.adapter().into_iter().for_each(|generation| self.adapters.give_back(generation));
        Some(request)
    }
}

fn refuse(mut command: GenerateCommand, error: Error) {
    (command.responder)(Event::Failed(error));
}
