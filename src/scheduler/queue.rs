//! The queue of groups that have not been admitted: in order within a request, in turn between the requests of a
//! tenant.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use super::Group;
use super::tenants::TenantId;
use crate::types::RequestKey;

/// A round robin over the requests of each tenant, so that a thousand prompts of one request do not delay the single
/// prompt of another that came later. [`SchedulerConfig::max_queued_samples`] limits its length.
///
/// [`SchedulerConfig::max_queued_samples`]: super::SchedulerConfig::max_queued_samples
#[derive(Debug, Default)]
pub(super) struct AdmissionQueue {
    /// No entry is empty.
    requests: HashMap<RequestKey, QueuedRequest>,
    /// Each request of `requests` that is not suspended, once, by tenant. The front has the tenant's next turn. No
    /// entry is empty.
    turns: BTreeMap<TenantId, VecDeque<RequestKey>>,
    suspended: HashSet<RequestKey>,
    num_samples: usize,
}

#[derive(Debug)]
struct QueuedRequest {
    tenant: TenantId,
    /// In order.
    groups: VecDeque<Group>,
}

impl AdmissionQueue {
    pub fn push(&mut self, tenant: TenantId, group: Group) {
        self.queue_of(tenant, &group).push_back(group);
    }

    /// Adds a group before the others of its request.
    pub fn push_front(&mut self, tenant: TenantId, group: Group) {
        self.queue_of(tenant, &group).push_front(group);
    }

    /// The queue that takes this group, which is counted.
    fn queue_of(&mut self, tenant: TenantId, group: &Group) -> &mut VecDeque<Group> {
        let request = group.key.request;
        self.num_samples += group.num_samples();
        let new = || QueuedRequest { tenant, groups: VecDeque::new() };
        let queued = self.requests.entry(request).or_insert_with(new);
        if queued.groups.is_empty() {
            self.turns.entry(tenant).or_default().push_back(request);
        }
        &mut queued.groups
    }

    /// Takes the next group of a tenant. Its request has its next turn after all others of the tenant.
    pub fn pop(&mut self, tenant: TenantId) -> Option<Group> {
        let request = self.turns.get_mut(&tenant)?.pop_front()?;
        let queued = self.requests.get_mut(&request).expect("a request with a turn has a queue");
        let group = queued.groups.pop_front().expect("a request with a turn has a group");
        if queued.groups.is_empty() {
            self.requests.remove(&request);
        } else {
            self.turns.entry(tenant).or_default().push_back(request);
        }
        self.forget_without_turns(tenant);
        self.num_samples -= group.num_samples();
        Some(group)
    }

    /// The group that [`AdmissionQueue::pop`] takes next.
    pub fn front(&self, tenant: TenantId) -> Option<&Group> {
        self.requests[self.turns.get(&tenant)?.front()?].groups.front()
    }

    /// Gives the request no turn until [`AdmissionQueue::resume`].
    pub fn suspend(&mut self, request: RequestKey) {
        if self.requests.contains_key(&request) && self.suspended.insert(request) {
            self.drop_turn(request);
        }
    }

    /// Gives a suspended request turns again, the first one after all others of its tenant.
    pub fn resume(&mut self, request: RequestKey) {
        if self.suspended.remove(&request) {
            let tenant = self.requests[&request].tenant;
            self.turns.entry(tenant).or_default().push_back(request);
        }
    }

    /// Removes all groups of a request and returns them.
    pub fn remove(&mut self, request: RequestKey) -> VecDeque<Group> {
        if !self.suspended.remove(&request) {
            self.drop_turn(request);
        }
        let Some(queued) = self.requests.remove(&request) else { return VecDeque::new() };
        self.num_samples -= queued.groups.iter().map(Group::num_samples).sum::<usize>();
        queued.groups
    }

    fn drop_turn(&mut self, request: RequestKey) {
        let Some(QueuedRequest { tenant, .. }) = self.requests.get(&request) else { return };
        let tenant = *tenant;
        self.turns.entry(tenant).or_default().retain(|&turn| turn != request);
        self.forget_without_turns(tenant);
    }

    fn forget_without_turns(&mut self, tenant: TenantId) {
        if self.turns.get(&tenant).is_some_and(VecDeque::is_empty) {
            self.turns.remove(&tenant);
        }
    }

    pub fn groups_mut(&mut self) -> impl Iterator<Item = &mut Group> {
        self.requests.values_mut().flat_map(|queued| &mut queued.groups)
    }

    /// The tenant of a request that has groups.
    pub fn tenant_of(&self, request: RequestKey) -> Option<TenantId> {
        self.requests.get(&request).map(|queued| queued.tenant)
    }

    /// The tenant and the samples of each group.
    pub fn samples_by_tenant(&self) -> impl Iterator<Item = (TenantId, usize)> {
        let of = |queued: &QueuedRequest| (queued.tenant, queued.groups.iter().map(Group::num_samples).sum());
        self.requests.values().map(of)
    }

    /// Whether [`AdmissionQueue::pop`] has a group of the tenant; suspended requests may still have some if not.
    pub fn has_turn(&self, tenant: TenantId) -> bool {
        self.turns.contains_key(&tenant)
    }

    /// Whether [`AdmissionQueue::pop`] has nothing to take; suspended requests may still have groups.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    pub fn num_samples(&self) -> usize {
        self.num_samples
    }
}
