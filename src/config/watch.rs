//! The flags that say what counts as hanging.

use clap::Args;

use crate::error::{Error, Result};

/// A day: whatever takes longer hangs.
const MOST_SECONDS: u64 = 86_400;

/// When a server that makes no progress says so.
#[derive(Clone, Copy, Debug, Args)]
pub struct WatchLimits {
    /// Seconds without progress in a step, an order or a push, after which every thread's stack is logged; 0 is never.
    #[arg(
        long,
        help_heading = "Observability",
        env = "ROLLOUT_WATCHDOG_SECONDS",
        default_value_t = 60,
        value_name = "SECONDS"
    )]
    pub watchdog_seconds: u64,

    /// Seconds after which GET /liveness answers 503 if the engine has not answered.
    #[arg(
        long,
        help_heading = "Observability",
        env = "ROLLOUT_LIVENESS_SECONDS",
        default_value_t = 30,
        value_name = "SECONDS"
    )]
    pub liveness_seconds: u64,
}

impl WatchLimits {
    /// # Errors
    /// `Config` with the flag, its value and the allowed values.
    pub(super) fn check(&self) -> Result<()> {
        let fail = |flag: &str, seconds: u64, want: &str| {
            Err(Error::Config(format!("--{flag} {seconds}: must be {want} {MOST_SECONDS}")))
        };
        if self.watchdog_seconds > MOST_SECONDS {
            return fail("watchdog-seconds", self.watchdog_seconds, "at most");
        }
        if !(1..=MOST_SECONDS).contains(&self.liveness_seconds) {
            return fail("liveness-seconds", self.liveness_seconds, "from 1 to");
        }
        Ok(())
    }
}
