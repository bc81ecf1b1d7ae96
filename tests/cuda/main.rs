//! Whole engines on a CUDA device, a card or the emulator: `make cuda-test`, `make gpu-check`.
//!
//! Calls are counted, failures are planted and memory is measured for the whole process, so a test either shares the
//! driver with others or has it for itself. The emulator reads its settings once: tests of other settings, and those
//! whose engines end the process, run this binary again as a child.

#[path = "../common/mod.rs"]
mod common;
#[path = "../../kernels/src/cpu/testing/require.rs"]
mod require;

mod broadcast;
mod ceiling;
mod emulator;
mod engines;
mod failures;
#[cfg(feature = "flash-attn")]
mod flash;
mod graphs;
mod images;
mod kept_base;
mod large;
mod memory;
mod ranks;
mod routing;
mod settings;
mod transport;

use std::process::{Command, Stdio};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

static DRIVER: RwLock<()> = RwLock::new(());

/// Held by a test whose engines may run beside those of other tests.
fn share_driver() -> RwLockReadGuard<'static, ()> {
    DRIVER.read().unwrap_or_else(PoisonError::into_inner)
}

/// Held by a test that counts calls, lets them fail, measures memory, or has groups of ranks: NCCL may hang where a
/// device has operations of two groups under way.
fn own_driver() -> RwLockWriteGuard<'static, ()> {
    DRIVER.write().unwrap_or_else(PoisonError::into_inner)
}

/// This binary again, to run the one test with this path, such as `graphs::a_step_is_launched_at_once`.
fn child(test: &str) -> Command {
    let mut child = Command::new(std::env::current_exe().expect("the path of this binary"));
    child.args(["--exact", test, "--include-ignored", "--nocapture"]).stdin(Stdio::null());
    child
}
