//! All requests that have arrived and not ended, by their key and by the id that their client gave them.

use std::collections::{BTreeMap, HashMap};

use super::GenerateCommand;
use super::request::Request;
use crate::types::{Owner, RequestKey};

/// The accepted and the held requests. Keys are given in the order of arrival.
#[derive(Default)]
pub(super) struct Requests {
    /// Requests whose groups the scheduler has.
    accepted: HashMap<RequestKey, Request>,
    /// Requests that wait to be accepted, in the order of arrival.
    held: BTreeMap<RequestKey, GenerateCommand>,
    /// Key and owner of every request, accepted or held, by its id.
    keys: HashMap<String, (RequestKey, Option<Owner>)>,
    /// The last key that was given.
    last_key: u64,
}

impl Requests {
    pub fn next_key(&mut self) -> RequestKey {
        self.last_key += 1;
        RequestKey(self.last_key)
    }

    pub fn accept(&mut self, key: RequestKey, request: Request) {
        self.keys.insert(request.id().into(), (key, request.owner()));
        self.accepted.insert(key, request);
    }

    pub fn hold(&mut self, key: RequestKey, command: GenerateCommand) {
        self.keys.insert(command.request_id.clone(), (key, command.owner));
        self.held.insert(key, command);
    }

    pub fn find(&self, id: &str) -> Option<RequestKey> {
        self.keys.get(id).map(|(key, _)| *key)
    }

    /// The request with this id, if `owner` is its owner or None.
    pub fn find_for(&self, id: &str, owner: Option<Owner>) -> Option<RequestKey> {
        self.keys.get(id).filter(|(_, theirs)| may_end(owner, *theirs)).map(|(key, _)| *key)
    }

    /// Ids of the requests of `owner`, or of all if it is None, in no particular order.
    pub fn ids_for(&self, owner: Option<Owner>) -> Vec<String> {
        let chosen = self.keys.iter().filter(|(_, (_, theirs))| may_end(owner, *theirs));
        chosen.map(|(id, _)| id.clone()).collect()
    }

    pub fn get(&self, key: RequestKey) -> Option<&Request> {
        self.accepted.get(&key)
    }

    pub fn get_mut(&mut self, key: RequestKey) -> Option<&mut Request> {
        self.accepted.get_mut(&key)
    }

    pub fn remove_accepted(&mut self, key: RequestKey) -> Option<Request> {
        let request = self.accepted.remove(&key)?;
        self.keys.remove(request.id());
        Some(request)
    }

    pub fn remove_held(&mut self, key: RequestKey) -> Option<GenerateCommand> {
        let command = self.held.remove(&key)?;
        self.keys.remove(&command.request_id);
        Some(command)
    }

    /// Keys of the accepted requests for which `which` is true, the oldest first.
    pub fn accepted_keys(&self, which: impl Fn(RequestKey, &Request) -> bool) -> Vec<RequestKey> {
        let chosen = self.accepted.iter().filter(|(key, request)| which(**key, request));
        let mut keys: Vec<_> = chosen.map(|(key, _)| *key).collect();
        keys.sort_unstable();
        keys
    }

    /// Keys of the held requests for which `which` is true, in the order of arrival.
    pub fn held_keys(&self, which: impl Fn(&GenerateCommand) -> bool) -> Vec<RequestKey> {
        self.held.iter().filter(|(_, command)| which(command)).map(|(key, _)| *key).collect()
    }

    /// The held requests in the order of arrival.
    pub fn held(&self) -> impl Iterator<Item = &GenerateCommand> {
        self.held.values()
    }

    /// Asserts that each request can be found by its id.
    pub fn check_integrity(&self) {
        assert_eq!(self.keys.len(), self.accepted.len() + self.held.len(), "ids of requests");
        let accepted = self.accepted.iter().map(|(key, request)| (key, request.id(), request.owner()));
        let held = self.held.iter().map(|(key, command)| (key, &command.request_id[..], command.owner));
        for (key, id, owner) in accepted.chain(held) {
            assert_eq!(self.keys.get(id), Some(&(*key, owner)), "the request with the id {id:?}");
        }
    }

    pub fn num_accepted(&self) -> usize {
        self.accepted.len()
    }

    pub fn num_held(&self) -> usize {
        self.held.len()
    }

    /// Number of samples that the held requests count for in the queue.
    pub fn num_held_samples(&self) -> usize {
        self.held.values().map(GenerateCommand::num_samples).sum()
    }
}

/// Whether `caller` may end a request of `owner`; None as a caller may end all.
fn may_end(caller: Option<Owner>, owner: Option<Owner>) -> bool {
    caller.is_none() || caller == owner
}
