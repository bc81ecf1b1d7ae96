//! Who may call what, and through which TLS: tokens and certificates, read from files and read again when they change.

mod access;
mod dates;
mod files;
mod reload;
mod tls;
mod tokens;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

pub(super) use access::{Access, Caller};
pub(super) use tls::{Protocol, Tls};

use tokio::sync::watch;

use crate::error::{Error, Result};
use files::Named;
use reload::{Look, Watched};
use tls::{TlsConfigs, read_tls};
use tokens::Tokens;

/// How the server is protected.
#[derive(Clone, Debug, Default)]
pub struct SecurityConfig {
    /// The certificate of the server; without it there is no TLS.
    pub tls: Option<TlsFiles>,
    /// The file of tokens and their roles; without it everybody may do everything.
    pub auth_token_file: Option<PathBuf>,
    /// Whether to listen beyond this machine without tokens.
    pub insecure: bool,
    /// Host names by which clients may reach the HTTP port, beside IP addresses and localhost.
    pub allow_host: Vec<String>,
}

/// Files of TLS, in PEM.
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// The server's certificate, followed by those between it and its authority.
    pub cert: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
    /// Authorities, by one of which every client must have a certificate; None asks for none.
    pub client_ca: Option<PathBuf>,
}

/// The protection as it was read, and what reads it again.
pub(super) struct Security {
    pub(super) access: Access,
    tls: Option<watch::Receiver<Arc<TlsConfigs>>>,
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
        let tls = match &config.tls {
            Some(TlsFiles { cert, key, client_ca }) => {
                let mut files = vec![Named::new("--tls-cert", cert), Named::new("--tls-key", key)];
                files.extend(client_ca.iter().map(|path| Named::new("--tls-client-ca", path)));
                let configs = Watched::new("the certificates are", files, read_tls)?;
                let current = configs.subscribe();
                watched.push(Box::new(configs));
                Some(current)
            }
            None => None,
        };
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
        Ok(Self { access: Access::new(tokens), tls, has_tokens, insecure: config.insecure, watched })
    }

    /// The TLS of the door that speaks `protocol`; None without a certificate.
    pub(super) fn tls(&self, protocol: Protocol) -> Option<Tls> {
        self.tls.clone().map(|configs| Tls::new(configs, protocol))
    }

    /// Checks that the server may listen on an address, which `host` has given.
    ///
    /// # Errors
    /// `Config` if other machines can reach it and nobody is asked for a token.
    pub(super) fn check_address(&self, host: &str, address: IpAddr) -> Result<()> {
        if address.to_canonical().is_loopback() {
            return Ok(());
        }
        if self.has_tokens {
            if self.tls.is_none() {
                tracing::warn!("--host {host}: tokens and samples travel unencrypted; give --tls-cert and --tls-key");
            }
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
