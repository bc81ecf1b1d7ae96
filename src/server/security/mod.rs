//! Who may call what, and through which TLS: tokens and certificates, read from files and read again when they change.

mod access;
mod files;
mod tls;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

pub(super) use access::{Access, Caller, Role};
pub(super) use tls::Tls;

use rustls::ServerConfig;
use tokio::sync::watch;

use crate::error::{Error, Result};
use access::Tokens;
use files::{Named, WatchedFiles};
use tls::read_tls;

/// How the server is protected.
#[derive(Clone, Debug, Default)]
pub struct SecurityConfig {
    /// The certificate of the server; without it there is no TLS.
    pub tls: Option<TlsFiles>,
    /// The file of tokens and their roles; without it every client may do everything.
    pub auth_token_file: Option<PathBuf>,
    /// Tokens with the role control, in place of a file.
    pub api_keys: Vec<String>,
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
    /// Authorities, one of which must have issued every client's certificate; None requires no certificate.
    pub client_ca: Option<PathBuf>,
}

/// The protection as it was read, and what reads it again.
pub(super) struct Security {
    pub(super) access: Access,
    tls: Option<watch::Receiver<Arc<ServerConfig>>>,
    insecure: bool,
    watched: Vec<WatchedFiles>,
}

impl Security {
    /// Reads the files.
    ///
    /// # Errors
    /// `Config` with the file and the reason.
    pub(super) fn load(config: &SecurityConfig) -> Result<Self> {
        let mut watched = Vec::new();
        let tls = config.tls.as_ref().map(|TlsFiles { cert, key, client_ca }| {
            let mut files = vec![Named::new("--tls-cert", cert), Named::new("--tls-key", key)];
            files.extend(client_ca.iter().map(|path| Named::new("--tls-client-ca", path)));
            files::load(&mut watched, "the certificates are", files, read_tls)
        });
        let tls = tls.transpose()?;
        let tokens = config.auth_token_file.as_ref().map(|path| {
            files::load(&mut watched, "the tokens are", vec![Named::new("--auth-token-file", path)], read_tokens)
        });
        let tokens = match tokens.transpose()? {
            None if !config.api_keys.is_empty() => Some(watch::channel(Arc::new(api_keys(&config.api_keys)?)).1),
            tokens => tokens,
        };
        Ok(Self { access: Access::new(tokens), tls, insecure: config.insecure, watched })
    }

    /// The TLS of the port that speaks `protocol`, `h2` or `http/1.1`; None without a certificate.
    pub(super) fn tls(&self, protocol: &'static str) -> Option<Tls> {
        self.tls.clone().map(|config| Tls { config, protocol })
    }

    /// Checks that the server may listen on an address, which the flag `host` has given.
    ///
    /// # Errors
    /// `Config` if other machines can reach it and no token is required.
    pub(super) fn check_address(&self, host: &str, address: IpAddr) -> Result<()> {
        if address.to_canonical().is_loopback() {
            return Ok(());
        }
        if self.access.tokens.is_some() {
            if self.tls.is_none() {
                tracing::warn!("--host {host}: tokens and samples travel unencrypted; give --tls-cert and --tls-key");
            }
            return Ok(());
        }
        if self.insecure {
            tracing::warn!("--insecure with --host {host}: every client that reaches it can use and change the model");
            return Ok(());
        }
        Err(Error::Config(format!(
            "--host {host} can be reached from other machines, and every client there could use and change the model: \
             give --auth-token-file, or --host 127.0.0.1, or say --insecure if that is meant (docs/security.md)"
        )))
    }

    /// Reads the files again as they change, for as long as the returned future is polled.
    pub(super) fn keep_current(&mut self) -> impl Future<Output = ()> + Send + use<> {
        let watched = std::mem::take(&mut self.watched);
        async move {
            if !watched.is_empty() {
                let Err(error) = files::watch(watched).await;
                tracing::error!("changes of tokens and certificates are not noticed any more: {error}");
            }
        }
    }
}

fn api_keys(keys: &[String]) -> Result<Tokens> {
    let lines: String = keys.iter().map(|key| format!("control {key}\n")).collect();
    Tokens::parse(lines.as_bytes())
        .map_err(|why| Error::Config(format!("--api-key: {}", why.replacen("line", "key", 1))))
}

fn read_tokens(files: &[Named]) -> Result<Tokens> {
    let [file] = files else { unreachable!("there is one token file") };
    file.warn_if_open();
    Tokens::parse(&file.read()?).map_err(|why| file.wrong(why))
}
