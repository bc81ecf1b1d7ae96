//! Certificates and keys, made into configurations of TLS.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::{RootCertStore, ServerConfig};
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::files::Named;
use crate::error::{Error, Result};

/// The TLS of one port, with the certificates as they were read last. Cheap to clone.
#[derive(Clone)]
pub(in crate::server) struct Tls {
    pub(super) config: watch::Receiver<Arc<ServerConfig>>,
    /// The protocol inside TLS, which both sides must agree on: `h2` or `http/1.1`.
    pub(super) protocol: &'static str,
}

impl Tls {
    /// Does the handshake of a new connection.
    pub(in crate::server) fn acceptor(&self) -> TlsAcceptor {
        let mut config = ServerConfig::clone(&self.config.borrow());
        config.alpn_protocols = vec![self.protocol.into()];
        Arc::new(config).into()
    }
}

/// Reads certificate and key and, if there is a third file, the authorities of clients' certificates.
pub(super) fn read_tls(files: &[Named]) -> Result<ServerConfig> {
    let [cert_file, key_file, client_ca @ ..] = files else { unreachable!("there are a certificate and a key") };
    let chain = certificates(cert_file)?;
    warn_if_not_valid(cert_file, &chain[0]);
    key_file.warn_if_open();
    let key = PrivateKeyDer::from_pem_slice(&key_file.read()?)
        .map_err(|_| key_file.wrong("has no private key in PEM, or an encrypted one; give it without a passphrase"))?;
    let provider = Arc::new(default_provider());
    let builder = ServerConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|e| Error::Internal(format!("TLS: {e}")))?;
    let builder = match client_ca.first() {
        None => builder.with_no_client_auth(),
        Some(file) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(file)? {
                let unusable = |e| file.wrong(format_args!("has a certificate that cannot be used: {e}"));
                roots.add(certificate).map_err(unusable)?;
            }
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider).build();
            builder.with_client_cert_verifier(verifier.map_err(|e| file.wrong(e))?)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => {
            key_file.wrong(format_args!("does not belong to the certificate in {cert_file}"))
        }
        rustls::Error::InvalidCertificate(why) => {
            cert_file.wrong(format_args!("its first certificate is damaged: {why:?}"))
        }
        error => key_file.wrong(format_args!("cannot be used: {error}")),
    })?;
    // Nothing is resumed: each connection is verified in whole, by the files as they are then. Connections live long.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    Ok(config)
}

/// The certificates of a PEM file, at least one.
fn certificates(file: &Named) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = file.read()?;
    let found: Vec<_> = CertificateDer::pem_slice_iter(&bytes)
        .collect::<std::result::Result<_, _>>()
        .map_err(|e| file.wrong(format_args!("is not PEM: {e}")))?;
    if found.is_empty() {
        return Err(file.wrong("has no certificate in PEM"));
    }
    Ok(found)
}

/// The first and the last second in which a certificate is valid, since 1970; None if it cannot be read.
fn validity(certificate: &[u8]) -> Option<(i64, i64)> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let validity = certificate.validity();
    Some((validity.not_before.timestamp(), validity.not_after.timestamp()))
}

/// Warns of a certificate that clients will reject because of its dates. It is served all the same: the clock may be
/// wrong, and the next certificate may be put in place while the server runs.
fn warn_if_not_valid(file: &Named, certificate: &CertificateDer<'_>) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() as i64);
    match validity(certificate) {
        Some((_, last)) if last < now => {
            tracing::warn!("{file}: the certificate has expired {} ago; clients will refuse it", span(now - last));
        }
        Some((first, _)) if first > now => {
            tracing::warn!("{file}: the certificate becomes valid in {} only", span(first - now));
        }
        _ => {}
    }
}

/// A time in seconds, for the log.
fn span(seconds: i64) -> String {
    match seconds {
        0..7_200 => format!("{} minutes", seconds / 60),
        7_200..172_800 => format!("{} hours", seconds / 3_600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    /// Writes `text` to a file of its own for each flag, and reads them.
    fn refusal(cert: &str, key: &str, client_ca: Option<&str>) -> String {
        let dir = tempfile::tempdir().unwrap();
        let mut files = Vec::new();
        for (flag, text) in [("--tls-cert", Some(cert)), ("--tls-key", Some(key)), ("--tls-client-ca", client_ca)] {
            if let Some(text) = text {
                std::fs::write(dir.path().join(flag), text).unwrap();
                files.push(Named::new(flag, &dir.path().join(flag)));
            }
        }
        read_tls(&files).err().map_or_else(String::new, |error| error.to_string())
    }

    #[test]
    fn files_that_are_wrong_are_named_with_what_is_wrong() {
        let made = || {
            let key = KeyPair::generate().unwrap();
            let cert = CertificateParams::new(vec!["localhost".into()]).unwrap().self_signed(&key).unwrap();
            (cert.pem(), key.serialize_pem())
        };
        let ((cert, key), (other_cert, other_key)) = (made(), made());
        assert_eq!(refusal(&cert, &key, None), "");
        assert_eq!(refusal(&format!("{cert}{other_cert}"), &format!("{cert}{key}"), Some(&other_cert)), "");
        let damaged = "-----BEGIN CERTIFICATE-----\nMAAwAA==\n-----END CERTIFICATE-----\n";
        let encrypted = "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMAA=\n-----END ENCRYPTED PRIVATE KEY-----\n";
        let no_key = "-----BEGIN PRIVATE KEY-----\nMAA=\n-----END PRIVATE KEY-----\n";
        for (cert, key, client_ca, start, part) in [
            ("nonsense", &*key, None, "--tls-cert ", "has no certificate in PEM"),
            ("-----BEGIN CERTIFICATE-----\nMII", &key, None, "--tls-cert ", "is not PEM"),
            (damaged, &key, None, "--tls-cert ", "is damaged"),
            (&key, &cert, None, "--tls-cert ", "has no certificate"),
            (&cert, "", None, "--tls-key ", "has no private key in PEM"),
            (&cert, encrypted, None, "--tls-key ", "encrypted"),
            (&cert, no_key, None, "--tls-key ", "cannot be used"),
            (&cert, &other_key, None, "--tls-key ", "does not belong to the certificate in --tls-cert /"),
            (&cert, &key, Some(""), "--tls-client-ca ", "has no certificate"),
            (&cert, &key, Some(damaged), "--tls-client-ca ", "cannot be used"),
        ] {
            let said = refusal(cert, key, client_ca);
            assert!(said.starts_with(start) && said.contains(part), "{part:?} is missing in {said:?}");
        }
    }

    #[test]
    fn spans_are_for_people() {
        assert_eq!([90, 7_200, 86_400 * 3].map(span), ["1 minutes", "2 hours", "3 days"]);
    }

    #[test]
    fn a_certificate_says_when_it_is_valid() {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::new(vec!["localhost".into()]).unwrap();
        params.not_before = rcgen::date_time_ymd(2001, 2, 3);
        params.not_after = rcgen::date_time_ymd(2055, 6, 7);
        let certificate = params.self_signed(&key).unwrap();
        assert_eq!(validity(certificate.der()), Some((981_158_400, 2_695_939_200)));
        assert_eq!(validity(&certificate.der()[..100]), None);
    }
}
