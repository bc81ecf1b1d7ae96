//! The requests that have not ended, in a list of their arrival.

use std::collections::{BTreeMap, HashMap};

use super::request_state::RequestState;
use crate::types::{Owner, RequestKey};

/// Requests in the order of their arrival, which is the order of their keys.
#[derive(Default)]
pub(super) struct Requests {
    requests: BTreeMap<RequestKey, RequestState>,
    keys: HashMap<String, RequestKey>,
}

impl Requests {
    pub fn insert(&mut self, key: RequestKey, request: RequestState) {
        self.keys.insert(request.id().into(), key);
        self.requests.insert(key, request);
    }

    pub fn remove(&mut self, key: RequestKey) -> Option<RequestState> {
        let request = self.requests.remove(&key)?;
        self.keys.remove(request.id());
        Some(request)
    }

    pub fn find(&self, id: &str) -> Option<RequestKey> {
        self.keys.get(id).copied()
    }

    /// The request with this id, if `caller` may end it.
    pub fn find_for(&self, id: &str, caller: Option<Owner>) -> Option<RequestKey> {
        self.find(id).filter(|key| may_end(caller, &self.requests[key]))
    }

    /// Ids of the requests that `caller` may end, the oldest first.
    pub fn ids_for(&self, caller: Option<Owner>) -> impl Iterator<Item = String> {
        self.iter().filter(move |request| may_end(caller, request)).map(|request| request.id().to_owned())
    }

    pub fn get(&self, key: RequestKey) -> Option<&RequestState> {
        self.requests.get(&key)
    }

    pub fn get_mut(&mut self, key: RequestKey) -> Option<&mut RequestState> {
        self.requests.get_mut(&key)
    }

    /// All requests, the oldest first.
    pub fn iter(&self) -> impl Iterator<Item = &RequestState> {
        self.requests.values()
    }

    /// Keys of the requests for which `which` is true, the oldest first.
    pub fn keys(&self, which: impl Fn(RequestKey, &RequestState) -> bool) -> Vec<RequestKey> {
        self.requests.iter().filter(|(key, request)| which(**key, request)).map(|(key, _)| *key).collect()
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Asserts that each request can be found by its id.
    pub fn check_integrity(&self) {
        assert_eq!(self.keys.len(), self.requests.len(), "ids of requests");
        for (key, request) in &self.requests {
            assert_eq!(self.find(request.id()), Some(*key), "the request with the id {:?}", request.id());
        }
    }
}

/// Whether `caller` may end a request; a caller of `None` may end all.
fn may_end(caller: Option<Owner>, request: &RequestState) -> bool {
    caller.is_none() || caller == request.owner()
}
