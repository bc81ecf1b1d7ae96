//! The flags of resident adapters.

use std::path::PathBuf;

use clap::Args;

use super::LoraModule;
use crate::error::{Error, Result};

/// How many adapters may be resident, and which ones the server reads itself.
#[derive(Clone, Debug, Args)]
pub struct AdapterFlags {
    /// Maximum resident adapters, which stay unmerged beside the weights.
    #[arg(
        long,
        help_heading = "Weights and adapters",
        env = "ROLLOUT_MAX_ADAPTERS",
        default_value_t = 0,
        value_name = "N"
    )]
    pub max_adapters: usize,

    /// Existing directory of adapters: a request that names one which is not resident loads DIR/NAME, in place of the
    /// least recently used one if all of --max-adapters are resident.
    #[arg(long, help_heading = "Weights and adapters", env = "ROLLOUT_ADAPTERS_DIR", value_name = "DIR")]
    pub adapters_dir: Option<PathBuf>,

    /// Adapters to load at the start, each NAME=DIRECTORY; each takes one of --max-adapters.
    #[arg(
        long,
        help_heading = "Weights and adapters",
        env = "ROLLOUT_LORA_MODULES",
        num_args = 1..,
        value_name = "NAME=DIR"
    )]
    pub lora_modules: Vec<LoraModule>,

    /// Maximum rank of a resident adapter.
    #[arg(
        long,
        help_heading = "Weights and adapters",
        env = "ROLLOUT_MAX_LORA_RANK",
        default_value_t = 16,
        value_name = "R"
    )]
    pub max_lora_rank: usize,
}

impl AdapterFlags {
    /// # Errors
    /// `Config` with the flag, its value and the allowed values.
    pub(super) fn check(&self) -> Result<()> {
        let fail = |flag: &str, value: &dyn std::fmt::Display, want: &str| {
            Err(Error::Config(format!("--{flag} {value}: must be {want}")))
        };
        let modules = self.lora_modules.len();
        if self.max_adapters > 1024 {
            return fail("max-adapters", &self.max_adapters, "at most 1024");
        }
        if modules > self.max_adapters {
            let want = format!("at least {modules}, the number of --lora-modules");
            return fail("max-adapters", &self.max_adapters, &want);
        }
        if !(1..=1024).contains(&self.max_lora_rank) {
            return fail("max-lora-rank", &self.max_lora_rank, "from 1 to 1024");
        }
        let Some(dir) = &self.adapters_dir else { return Ok(()) };
        if !dir.is_dir() {
            return fail("adapters-dir", &dir.display(), "an existing directory, below which requests name adapters");
        }
        if modules >= self.max_adapters {
            let want =
                format!("at least {}: the {modules} of --lora-modules leave --adapters-dir no slot", modules + 1);
            return fail("max-adapters", &self.max_adapters, &want);
        }
        Ok(())
    }
}
