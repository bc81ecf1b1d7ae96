//! Names of the tenants of a server.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Most bytes of a tenant's name.
const MAX_TENANT_BYTES: usize = 64;

/// The name of a tenant: the user of a server whose requests share one part of it. Requests of no named tenant have the
/// empty name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(Arc<str>);

impl Tenant {
    /// # Errors
    /// `InvalidArgument` for this field, if the name is too long or has other characters than printable ASCII.
    pub fn parse(name: &str, field: &str) -> Result<Self> {
        if name.len() > MAX_TENANT_BYTES {
            let message = format!("has {} bytes; a name has at most {MAX_TENANT_BYTES}", name.len());
            return Err(Error::invalid(field, message));
        }
        if !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(Error::invalid(field, "has other characters than printable ASCII without spaces"));
        }
        Ok(Self(name.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for Tenant {
    fn default() -> Self {
        Self("".into())
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_printable() {
        for name in ["", "a", "team-7/alice@example.org", &"x".repeat(64)] {
            assert_eq!(Tenant::parse(name, "tenant").expect("a name").as_str(), name);
        }
        for (name, part) in [(&*"x".repeat(65), "has 65 bytes"), ("a b", "characters"), ("\u{e9}", "characters")] {
            let refused = Tenant::parse(name, "tenant").expect_err("no name").to_string();
            assert!(refused.contains("tenant") && refused.contains(part), "{refused}");
        }
    }
}
