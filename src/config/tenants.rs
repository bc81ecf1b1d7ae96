//! The flags of quotas of tenants.

use clap::Args;

use crate::error::{Error, Result};

/// The quotas of each tenant.
#[derive(Clone, Debug, Args)]
pub struct TenantFlags {
    /// Maximum samples of a tenant in one step; further ones wait.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_TENANT_MAX_RUNNING", value_name = "N")]
    pub tenant_max_running: Option<usize>,

    /// Maximum share of the KV cache that a tenant's samples hold, from 0 to 1; further ones wait.
    #[arg(long, help_heading = "Serving", env = "ROLLOUT_TENANT_KV_SHARE", value_name = "SHARE")]
    pub tenant_kv_share: Option<f64>,

    /// Maximum resident adapters of a tenant; further ones are rejected with RESOURCE_EXHAUSTED.
    #[arg(long, help_heading = "Weights and adapters", env = "ROLLOUT_TENANT_MAX_ADAPTERS", value_name = "N")]
    pub tenant_max_adapters: Option<usize>,
}

impl TenantFlags {
    /// # Errors
    /// `Config` with the flag, its value and the allowed values.
    pub(super) fn check(&self) -> Result<()> {
        if self.tenant_max_running == Some(0) {
            return Err(Error::Config("--tenant-max-running 0: must be at least 1".into()));
        }
        match self.tenant_kv_share {
            Some(share) if !(share > 0.0 && share <= 1.0) => {
                Err(Error::Config(format!("--tenant-kv-share {share}: must be above 0 and at most 1")))
            }
            _ => Ok(()),
        }
    }
}
