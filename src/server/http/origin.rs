//! Keeps web pages from using the server through the browser of a user who can reach it. Tokens do not make this
//! unnecessary: what stands in front of the server, such as `rollout sidecar`, may add one to every request.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{HOST, HeaderMap, HeaderValue, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::HttpError;
use crate::error::shown;

const FETCH_SITE: &str = "sec-fetch-site";
/// Longest host or origin in a message, in bytes.
const SHOWN_BYTES: usize = 100;

/// The names by which browsers may reach the HTTP port, beside IP addresses and localhost.
///
/// The owner of any other name can make it resolve to this server after a browser has loaded their page (DNS
/// rebinding). The browser then takes the server for that page's own origin, and lets the page read its answers.
#[derive(Clone)]
pub(in crate::server) struct AllowedHosts {
    names: Arc<[String]>,
    /// Whether requests that name another host are refused, whatever they ask for.
    only_these: bool,
}

impl AllowedHosts {
    pub(in crate::server) fn new(names: Vec<String>, only_these: bool) -> Self {
        Self { names: names.into(), only_these }
    }

    /// # Errors
    /// 403 if the request names a host that is not allowed, or would change something and comes from a page of another
    /// origin.
    fn check(&self, request: &Request) -> Result<(), HttpError> {
        let headers = request.headers();
        if self.only_these {
            // A target with a host of its own takes the place of the header.
            let target = request.uri().authority().map(|authority| authority.as_str().to_owned());
            let mut hosts = target.into_iter().chain(headers.get_all(HOST).iter().map(text));
            if let Some(host) = hosts.find(|host| !self.allows(host)) {
                return Err(wrong_host(&host));
            }
        }
        // These change nothing, and only pages of the same origin can read their answers.
        if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
            return Ok(());
        }
        self.foreign_origin(headers).map_or(Ok(()), |origin| Err(wrong_origin(&origin)))
    }

    /// The origin of the page that has made the request, unless it is a page of this server. Programs send none.
    fn foreign_origin(&self, headers: &HeaderMap) -> Option<String> {
        if headers.get_all(FETCH_SITE).iter().any(|site| site != "same-origin" && site != "none") {
            return Some(headers.get(ORIGIN).map_or_else(|| "another site".into(), text));
        }
        let is_own = |origin: &str| {
            let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))?;
            let host = headers.get(HOST)?.to_str().ok()?;
            Some(authority.eq_ignore_ascii_case(host) && self.allows(authority))
        };
        let origins = headers.get_all(ORIGIN).iter().map(text);
        origins.into_iter().find(|origin| is_own(origin) != Some(true))
    }

    /// Whether `authority`, a host with any port or none, can lead nowhere but here.
    fn allows(&self, authority: &str) -> bool {
        let Ok(authority) = authority.parse::<Authority>() else { return false };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let is_named = |name: &str| name.eq_ignore_ascii_case(host);
        host.parse::<IpAddr>().is_ok() || is_named("localhost") || self.names.iter().any(|name| is_named(name))
    }
}

/// Refuses requests that web pages of other origins make. Browsers send those without a JSON body unasked.
pub(super) async fn guard(State(hosts): State<AllowedHosts>, request: Request, next: Next) -> Response {
    match hosts.check(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
}

fn wrong_host(host: &str) -> HttpError {
    refusal(&format!(
        "host {:?} is not allowed: use an IP address or localhost, or start the server with --allow-host NAME if the \
         name is yours (docs/security.md)",
        shown(host, SHOWN_BYTES)
    ))
}

fn wrong_origin(origin: &str) -> HttpError {
    refusal(&format!(
        "requests from pages of {:?} are not allowed: open the server's own page by its IP address, or start the server \
         with --allow-host NAME if the name is yours (docs/security.md)",
        shown(origin, SHOWN_BYTES)
    ))
}

fn refusal(message: &str) -> HttpError {
    HttpError::new(StatusCode::FORBIDDEN, "PermissionDeniedError", None, message)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn is_refused(hosts: &AllowedHosts, method: Method, uri: &str, headers: &[(&str, &str)]) -> bool {
        let mut request = Request::builder().method(method).uri(uri);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        hosts.check(&request.body(Body::empty()).expect("a request")).is_err()
    }

    fn is_foreign(hosts: &AllowedHosts, headers: &[(&str, &str)]) -> bool {
        is_refused(hosts, Method::POST, "/", headers)
    }

    fn open() -> AllowedHosts {
        AllowedHosts::new(Vec::new(), false)
    }

    #[test]
    fn programs_and_own_pages_are_let_in() {
        for headers in [
            &[][..],
            &[("host", "gpu-box:8000")],
            &[("host", "localhost:8000"), ("origin", "http://localhost:8000"), ("sec-fetch-site", "same-origin")],
            &[("host", "127.0.0.1:8000"), ("origin", "http://127.0.0.1:8000")],
            &[("host", "[::1]:8000"), ("origin", "http://[::1]:8000")],
            &[("host", "LOCALHOST"), ("origin", "https://localhost")],
            &[("host", "localhost:8000"), ("sec-fetch-site", "none")],
        ] {
            assert!(!is_foreign(&open(), headers), "{headers:?}");
        }
    }

    #[test]
    fn pages_of_other_origins_are_refused() {
        for headers in [
            &[("host", "localhost:8000"), ("origin", "http://evil.example")][..],
            &[("host", "localhost:8000"), ("origin", "http://localhost:3000")],
            &[("host", "localhost:8000"), ("origin", "null")],
            &[("host", "localhost:8000"), ("origin", "")],
            &[("host", "localhost:8000"), ("origin", "http://localhost:8000@evil.example")],
            &[("host", "localhost:8000"), ("origin", "ftp://localhost:8000")],
            &[("host", "localhost:8000"), ("sec-fetch-site", "cross-site")],
            &[("host", "localhost:8000"), ("sec-fetch-site", "same-site")],
            &[("origin", "http://localhost:8000")],
            &[("host", "localhost:1"), ("origin", "http://localhost:1"), ("origin", "http://evil.example")],
            // A name that was made to lead here.
            &[("host", "evil.example:8000"), ("origin", "http://evil.example:8000")],
            &[("host", "localhost.evil.example"), ("origin", "http://localhost.evil.example")],
            &[("host", "127.0.0.1.evil.example"), ("origin", "http://127.0.0.1.evil.example")],
        ] {
            assert!(is_foreign(&open(), headers), "{headers:?}");
        }
    }

    #[test]
    fn a_host_that_anybody_may_own_is_refused_for_every_method() {
        let hosts = AllowedHosts::new(vec!["gpu-box".into()], true);
        let methods = [Method::GET, Method::HEAD, Method::OPTIONS, Method::POST, Method::DELETE];
        for method in methods {
            for host in ["127.0.0.1", "127.0.0.1:8000", "[::1]:8000", "localhost:8000", "LocalHost", "GPU-box:1"] {
                assert!(!is_refused(&hosts, method.clone(), "/", &[("host", host)]), "{method} {host}");
            }
            for host in ["evil.example", "evil.example:8000", "gpu-box.evil.example", "127.1", "2130706433", "", "a b"]
            {
                assert!(is_refused(&hosts, method.clone(), "/", &[("host", host)]), "{method} {host}");
                assert!(!is_refused(&open(), method.clone(), "/", &[("host", host)]), "{method} {host}");
            }
            assert!(!is_refused(&hosts, method.clone(), "/", &[]), "HTTP/1.0 has no host");
            let two = [("host", "localhost"), ("host", "evil.example")];
            assert!(is_refused(&hosts, method.clone(), "/", &two));
            let own = [("host", "localhost")];
            assert!(!is_refused(&hosts, method.clone(), "http://localhost:8000/events", &own));
            assert!(is_refused(&hosts, method, "http://evil.example/events", &own));
        }
    }

    #[test]
    fn pages_of_an_allowed_name_are_own_pages() {
        let page = [("host", "gpu-box:8000"), ("origin", "http://gpu-box:8000"), ("sec-fetch-site", "same-origin")];
        for only_these in [false, true] {
            assert!(!is_foreign(&AllowedHosts::new(vec!["gpu-box".into()], only_these), &page));
            let other_port = [("host", "gpu-box:8000"), ("origin", "http://gpu-box:3000")];
            assert!(is_foreign(&AllowedHosts::new(vec!["gpu-box".into()], only_these), &other_port));
        }
        assert!(is_foreign(&open(), &page));
    }
}
