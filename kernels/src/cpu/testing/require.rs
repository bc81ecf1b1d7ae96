//! Tests that need more than every machine has. Such a test is left out where that is missing, and the binary's last
//! line counts those. Where the variable is set that `left_out` names, it fails instead.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Ends the running test unless it can run here.
macro_rules! require {
    ($can_run:expr) => {
        if !$can_run {
            return;
        }
    };
}
pub(crate) use require;

/// The tests that were left out, with the last reason.
static LEFT_OUT: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// Counts the running test as left out because of `why`, and returns false. `scripts/gpu_check.py` reads the line.
///
/// # Panics
/// If the environment has `variable`.
#[expect(clippy::disallowed_methods, reason = "`cargo test` hands a test no arguments that its harness lacks")]
pub fn left_out(variable: &str, why: &str) -> bool {
    assert!(std::env::var_os(variable).is_none(), "{variable} is set, but {why}");
    println!("left out: {why}");
    let mut all = LEFT_OUT.lock().unwrap_or_else(PoisonError::into_inner);
    if all.is_empty() {
        // SAFETY: the function may be called at the end of the process: it takes no lock that is held then.
        unsafe { libc::atexit(count) };
    }
    all.insert(std::thread::current().name().unwrap_or_default().into(), why.into());
    false
}

/// Says at the end of the process how many tests were left out.
extern "C" fn count() {
    let all = LEFT_OUT.lock().unwrap_or_else(PoisonError::into_inner);
    let tests: Vec<_> = all.iter().map(|(test, why)| format!("{test} ({why})")).collect();
    eprintln!("{} left out: {}", tests.len(), tests.join(", "));
}
