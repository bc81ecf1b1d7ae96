//! Orders to end the server, from signals or from the process itself.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::error::{Error, Result};

/// Orders the server to end, from any thread, also from that of a dying engine. Cheap to clone.
#[derive(Clone)]
pub struct ShutdownHandle(mpsc::UnboundedSender<Order>);

/// Receives the orders, for [`super::serve`].
pub struct ShutdownOrders(mpsc::UnboundedReceiver<Order>);

/// Why the server ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// A signal, or the embedding process, asks the server to end.
    Asked,
    /// The engine has ended, as ordered or by itself, and nothing can be served.
    EngineEnded,
}

/// A channel of orders to end. The first order starts a graceful shutdown; a second one ends the server at once.
pub fn shutdown_channel() -> (ShutdownHandle, ShutdownOrders) {
    // Unbounded, because an order must not wait. Signals are few.
    let (sender, receiver) = mpsc::unbounded_channel();
    (ShutdownHandle(sender), ShutdownOrders(receiver))
}

impl ShutdownHandle {
    pub fn order(&self) {
        self.send(Order::Asked);
    }

    /// Reports to the server that the engine has ended.
    pub fn engine_ended(&self) {
        self.send(Order::EngineEnded);
    }

    fn send(&self, order: Order) {
        // Sending fails only after the end, when there is nothing left to order.
        let _ = self.0.send(order);
    }
}

impl ShutdownOrders {
    /// Waits for the next order; forever if all handles are gone.
    pub(super) async fn next(&mut self) -> Order {
        match self.0.recv().await {
            Some(order) => order,
            None => std::future::pending().await,
        }
    }
}

/// Turns SIGTERM and SIGINT into orders to end, for as long as the runtime lives. Must be called inside a tokio
/// runtime.
///
/// # Errors
/// `Internal` if the handlers cannot be installed.
pub fn watch_signals(handle: ShutdownHandle) -> Result<()> {
    let install = |kind| signal(kind).map_err(|e| Error::Internal(format!("cannot handle signals: {e}")));
    let mut term = install(SignalKind::terminate())?;
    let mut interrupt = install(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                Some(()) = term.recv() => "SIGTERM",
                Some(()) = interrupt.recv() => "SIGINT",
                else => return,
            };
            tracing::info!(signal = name, "ordered to end; another signal ends at once");
            handle.order();
        }
    });
    Ok(())
}
