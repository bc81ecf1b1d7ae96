//! Groups that have not been admitted: in order within a request, in turn between requests.

use std::collections::{HashMap, HashSet, VecDeque};

use super::Group;
use crate::types::RequestKey;

/// A round robin over requests, so that a thousand prompts of one do not keep back the single prompt of another that
/// came later. Its length is limited by `max_queued_samples`.
#[derive(Debug, Default)]
pub(super) struct AdmissionQueue {
    /// No request has an empty queue.
    requests: HashMap<RequestKey, VecDeque<Group>>,
    /// Every request of `requests` that is not held back once; the front is next.
    turns: VecDeque<RequestKey>,
    suspended: HashSet<RequestKey>,
    num_samples: usize,
}

impl AdmissionQueue {
    pub fn push(&mut self, group: Group) {
        let request = group.key.request;
        self.num_samples += group.num_samples();
        let queue = self.requests.entry(request).or_default();
        if queue.is_empty() {
            self.turns.push_back(request);
        }
        queue.push_back(group);
    }

    /// The next group; its request goes to the end of the line.
    pub fn pop(&mut self) -> Option<Group> {
        let request = self.turns.pop_front()?;
        let queue = self.requests.get_mut(&request).expect("a request in line has a queue");
        let group = queue.pop_front().expect("a request in line has a group");
        if queue.is_empty() {
            self.requests.remove(&request);
        } else {
            self.turns.push_back(request);
        }
        self.num_samples -= group.num_samples();
        Some(group)
    }

    /// The request has no turn until [`AdmissionQueue::resume`].
    pub fn suspend(&mut self, request: RequestKey) {
        if self.requests.contains_key(&request) && self.suspended.insert(request) {
            self.turns.retain(|&turn| turn != request);
        }
    }

    /// The request waits at the end of the line again.
    pub fn resume(&mut self, request: RequestKey) {
        if self.suspended.remove(&request) {
            self.turns.push_back(request);
        }
    }

    /// Takes all groups of a request out.
    pub fn remove(&mut self, request: RequestKey) -> VecDeque<Group> {
        self.suspended.remove(&request);
        let Some(groups) = self.requests.remove(&request) else { return VecDeque::new() };
        self.turns.retain(|&turn| turn != request);
        self.num_samples -= groups.iter().map(Group::num_samples).sum::<usize>();
        groups
    }

    pub fn groups_mut(&mut self) -> impl Iterator<Item = &mut Group> {
        self.requests.values_mut().flatten()
    }

    /// Whether nothing can be popped.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub fn num_samples(&self) -> usize {
        self.num_samples
    }
}
