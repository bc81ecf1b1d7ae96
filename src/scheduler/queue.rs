//! The queue of groups that have not been admitted: in order within a request, in turn between requests.

use std::collections::{HashMap, HashSet, VecDeque};

use super::Group;
use crate::types::RequestKey;

/// A round robin over requests, so that a thousand prompts of one request do not delay the single prompt of another
/// that came later. [`SchedulerConfig::max_queued_samples`] limits its length.
///
/// [`SchedulerConfig::max_queued_samples`]: super::SchedulerConfig::max_queued_samples
#[derive(Debug, Default)]
pub(super) struct AdmissionQueue {
    /// Groups of each request, in order. No entry is empty.
    requests: HashMap<RequestKey, VecDeque<Group>>,
    /// Each request of `requests` that is not suspended, once. The front has the next turn.
    turns: VecDeque<RequestKey>,
    suspended: HashSet<RequestKey>,
    num_samples: usize,
}

impl AdmissionQueue {
    pub fn push(&mut self, group: Group) {
        self.queue_of(&group).push_back(group);
    }

    /// Adds a group before the others of its request.
    pub fn push_front(&mut self, group: Group) {
        self.queue_of(&group).push_front(group);
    }

    /// The queue that takes this group, which is counted.
    fn queue_of(&mut self, group: &Group) -> &mut VecDeque<Group> {
        let request = group.key.request;
        self.num_samples += group.num_samples();
        let queue = self.requests.entry(request).or_default();
        if queue.is_empty() {
            self.turns.push_back(request);
        }
        queue
    }

    /// Takes the next group. Its request has its next turn after all others.
    pub fn pop(&mut self) -> Option<Group> {
        let request = self.turns.pop_front()?;
        let queue = self.requests.get_mut(&request).expect("a request with a turn has a queue");
        let group = queue.pop_front().expect("a request with a turn has a group");
        if queue.is_empty() {
            self.requests.remove(&request);
        } else {
            self.turns.push_back(request);
        }
        self.num_samples -= group.num_samples();
        Some(group)
    }

    /// Gives the request no turn until [`AdmissionQueue::resume`].
    pub fn suspend(&mut self, request: RequestKey) {
        if self.requests.contains_key(&request) && self.suspended.insert(request) {
            self.turns.retain(|&turn| turn != request);
        }
    }

    /// Gives a suspended request turns again, the first one after all others.
    pub fn resume(&mut self, request: RequestKey) {
        if self.suspended.remove(&request) {
            self.turns.push_back(request);
        }
    }

    /// Removes all groups of a request and returns them.
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

    /// Whether [`AdmissionQueue::pop`] has nothing to take; suspended requests may still have groups.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub fn num_samples(&self) -> usize {
        self.num_samples
    }
}
