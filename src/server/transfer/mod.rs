//! Pushes of a trainer that broadcasts its weights to the devices, as vLLM's weight transfer engine takes them: the
//! trainer makes a group with all ranks, and then drives each push by several calls, which are one transaction here.
//!
//! One task has the group and the push that is open; the calls are its orders, which it carries out one after the
//! other. Whatever goes wrong, nothing of the push has happened. The trainer does not see errors while it broadcasts,
//! and what it broadcasts comes in turn: so a push that is refused is received to its end all the same, and where that
//! is not possible the group is left, so that the next push never gets the bytes of this one.

mod layout;
mod session;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use super::calls::engine_gone;
use super::gate::Gate;
use crate::comm::{RankRange, Rendezvous};
use crate::error::Result;
use crate::types::WeightVersion;
use session::Link;

pub(super) use layout::{Announced, Packing, dtype};

/// Orders that wait for those before them.
const QUEUE: usize = 4;

/// An order of a trainer.
enum Order {
    /// Make a group with these, in place of the one there may be.
    Join(Rendezvous, RankRange, Packing),
    /// Leave the group.
    Leave,
    /// Begin a push of the trainer with this address.
    Begin(String),
    /// Receive some tensors of the push, from the group with this number.
    Receive(u64, Announced),
    /// Leave the group with this number, because a call to receive was refused for this reason, and nobody knows what
    /// is broadcast.
    Lose(u64, String),
    /// Verify the push, and let the policy have this version; the next one if none is given.
    Finish(Option<WeightVersion>),
}

/// An order, and who waits for it.
type Call = (Order, Waiter);

/// Who waits for an order to be carried out.
struct Waiter(oneshot::Sender<Result<()>>);

impl Waiter {
    fn answer(self, result: Result<()>) {
        // Fails if the caller is gone.
        let _ = self.0.send(result);
    }

    /// Returns once nobody waits any more.
    async fn gone(&mut self) {
        self.0.closed().await;
    }
}

/// The way to the task that carries out a trainer's orders. It ends when all of these are gone.
#[derive(Clone)]
pub(super) struct Transfers {
    calls: mpsc::Sender<Call>,
    groups: Groups,
}

/// How many groups were made: the number of the last one. A call that came before it is of a trainer that has left.
#[derive(Clone, Default)]
struct Groups(Arc<AtomicU64>);

impl Groups {
    fn last(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    fn add(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Transfers {
    /// Starts the task.
    pub(super) fn start(gate: &Gate) -> Self {
        let (calls, orders) = mpsc::channel(QUEUE);
        let groups = Groups::default();
        tokio::spawn(Link::new(gate.clone(), orders, groups.clone()).run());
        Self { calls, groups }
    }

    /// Makes a group with a trainer; waits until all its ranks have joined. A group that there was is left.
    ///
    /// # Errors
    /// As for [`Trainers::join`](crate::comm::Trainers::join).
    pub(super) async fn join(&self, meeting: Rendezvous, places: RankRange, packing: Packing) -> Result<()> {
        self.order(Order::Join(meeting, places, packing)).await
    }

    /// Leaves the group, if there is one, and drops the push that is open.
    ///
    /// # Errors
    /// `Unavailable` if the server ends.
    pub(super) async fn leave(&self) -> Result<()> {
        self.order(Order::Leave).await
    }

    /// Begins a push of the trainer with the address `peer`.
    ///
    /// # Errors
    /// `FailedPrecondition` without a group, or if a push of the trainer is open; those of the engine.
    pub(super) async fn begin(&self, peer: String) -> Result<()> {
        self.order(Order::Begin(peer)).await
    }

    /// Takes note of a call that announces tensors, before it is read: the trainer broadcasts them beside it, whether
    /// it is understood or not.
    pub(super) fn announcement(&self) -> Announcement {
        Announcement { transfers: Some(self.clone()), group: self.groups.last(), runtime: Handle::current() }
    }

    /// Ends the push that is open: the engine applies it, or refuses it as a whole.
    ///
    /// # Errors
    /// `FailedPrecondition` without a push; what is wrong with it.
    pub(super) async fn finish(&self, version: Option<WeightVersion>) -> Result<()> {
        self.order(Order::Finish(version)).await
    }

    async fn order(&self, order: Order) -> Result<()> {
        let (waiter, answer) = oneshot::channel();
        self.calls.send((order, Waiter(waiter))).await.map_err(|_| engine_gone())?;
        answer.await.map_err(|_| engine_gone())?
    }
}

/// A call that announces tensors. If it is dropped before its order was carried out, because its connection broke, the
/// group that there was when it came is left.
pub(super) struct Announcement {
    /// None once its order was carried out.
    transfers: Option<Transfers>,
    /// Number of the group that broadcasts them.
    group: u64,
    runtime: Handle,
}

impl Announcement {
    /// Receives these tensors, of the push that is open.
    ///
    /// # Errors
    /// `FailedPrecondition` without a push; what is wrong with the tensors, which ends the push.
    pub(super) async fn receive(mut self, tensors: Announced) -> Result<()> {
        self.order(Order::Receive(self.group, tensors)).await
    }

    /// Leaves the group and drops the push that is open, because the call was refused for the reason `why`.
    ///
    /// # Errors
    /// `Unavailable` if the server ends.
    pub(super) async fn refuse(mut self, why: &str) -> Result<()> {
        self.order(Order::Lose(self.group, why.into())).await
    }

    async fn order(&mut self, order: Order) -> Result<()> {
        let result = self.transfers.as_ref().expect("it gives one order").order(order).await;
        self.transfers = None;
        result
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        if let Some(transfers) = self.transfers.take() {
            let lose = Order::Lose(self.group, "its connection broke".into());
            self.runtime.spawn(async move { transfers.order(lose).await });
        }
    }
}
