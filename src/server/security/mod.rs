//! Who may call what: tokens and their roles, read from a file and read again when it changes.

mod access;
mod files;
mod reload;
mod tokens;

use std::net::IpAddr;
use std::path::PathBuf;

pub(super) use access::{Access, Caller};

use crate::error::{Error, Result};
use files::Named;
use reload::{Look, Watched};
use tokens::Tokens;

/// How the server is protected.
#[derive(Clone, Debug, Default)]
pub struct SecurityConfig {
    /// The file of tokens and their roles; without it everybody may do everything.
    pub auth_token_file: Option<PathBuf>,
    /// Whether to listen beyond this machine without tokens.
    pub insecure: bool,
}

/// The protection as it was read, and what reads it again.
pub(super) struct Security {
    pub(super) access: Access,
    has_tokens: bool,
    insecure: bool,
    watched: Vec<Box<dyn Look>>,
}

impl Security {
    /// Reads the files.
    ///
    /// # Errors
    /// `Config` with the file and what is wrong with it.
    pub(super) fn load(config: &SecurityConfig) -> Result<Self> {
        let mut watched: Vec<Box<dyn Look>> = Vec::new();
        let tokens = match &config.auth_token_file {
            Some(path) => {
                let file = Named::new("--auth-token-file", path);
                let tokens = Watched::new("the tokens are", vec![file], read_tokens)?;
                let current = tokens.subscribe();
                watched.push(Box::new(tokens));
                Some(current)
            }
            None => None,
        };
        let has_tokens = tokens.is_some();
        Ok(Self { access: Access::new(tokens), has_tokens, insecure: config.insecure, watched })
    }

    /// Checks that the server may listen on an address, which `host` has given.
    ///
    /// # Errors
    /// `Config` if other machines can reach it and nobody is asked for a token.
    pub(super) fn check_address(&self, host: &str, address: IpAddr) -> Result<()> {
        if address.to_canonical().is_loopback() || self.has_tokens {
            return Ok(());
        }
        if self.insecure {
            tracing::warn!("--insecure with --host {host}: whoever reaches the server can use and change the model");
            return Ok(());
        }
        Err(Error::Config(format!(
            "--host {host} can be reached from other machines, and whoever reaches the server could use and change the \
             model: give --auth-token-file, or --host 127.0.0.1, or say --insecure if that is meant (docs/security.md)"
        )))
    }

    pub(super) fn take_secrets(&mut self) -> Secrets {
        Secrets(std::mem::take(&mut self.watched))
    }
}

/// The files that are read again when they change.
pub(super) struct Secrets(Vec<Box<dyn Look>>);

impl Secrets {
    /// Reads files again as they change, for as long as the future is polled.
    pub(super) async fn keep_current(self) {
        if self.0.is_empty() {
            return;
        }
        let Err(error) = reload::watch(self.0).await;
        tracing::error!("changes of tokens and certificates are not noticed any more: {error}");
    }
}

fn read_tokens(files: &[Named]) -> Result<Tokens> {
    let [file] = files else { unreachable!("there is one token file") };
    file.warn_if_open();
    Tokens::parse(&file.read()?).map_err(|why| file.wrong(&why))
}
