//! Middleware of all routes: counts the request, keeps web pages from using the server through the browser of a user
//! who can reach it, turns a panic into 500, and checks the token before the body is received. Tokens do not make the
//! check of origins unnecessary: a proxy such as `rollout sidecar` may add one to every request.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{HOST, HeaderMap, HeaderValue, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;

use super::{HttpError, HttpResult};
use crate::error::{Error, Result, shown};
use crate::observe::Observer;
use crate::server::security::{Access, Role};
use crate::server::state::Panics;

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
    /// Whether all requests that name another host are rejected.
    only_these: bool,
}

impl AllowedHosts {
    pub(in crate::server) fn new(names: Vec<String>, only_these: bool) -> Self {
        Self { names: names.into(), only_these }
    }

    /// # Errors
    /// `PermissionDenied` if the request names a host that is not allowed, or would change something and comes from a
    /// page of another origin.
    fn check(&self, request: &Request) -> Result<()> {
        let headers = request.headers();
        if self.only_these {
            // A target with a host of its own takes the place of the header.
            let target = request.uri().authority().map(|authority| authority.as_str().to_owned());
            let mut hosts = target.into_iter().chain(headers.get_all(HOST).iter().map(text));
            if let Some(host) = hosts.find(|host| !self.allows(host)) {
                return Err(Error::PermissionDenied(format!(
                    "host {:?} is not allowed: use an IP address or localhost, or start the server with --allow-host \
                     NAME if the name is yours (docs/security.md)",
                    shown(&host, SHOWN_BYTES)
                )));
            }
        }
        // These change nothing, and only pages of the same origin can read their answers.
        if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
            return Ok(());
        }
        let Some(origin) = self.foreign_origin(headers) else { return Ok(()) };
        Err(Error::PermissionDenied(format!(
            "requests from pages of {:?} are not allowed: open the server's own page by its IP address, or start the \
             server with --allow-host NAME if the name is yours (docs/security.md)",
            shown(&origin, SHOWN_BYTES)
        )))
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
        headers.get_all(ORIGIN).iter().map(text).find(|origin| is_own(origin) != Some(true))
    }

    /// Whether `authority`, a host with any port or none, can only lead here.
    fn allows(&self, authority: &str) -> bool {
        let Ok(authority) = authority.parse::<Authority>() else { return false };
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        let is_named = |name: &str| name.eq_ignore_ascii_case(host);
        host.parse::<IpAddr>().is_ok() || is_named("localhost") || self.names.iter().any(|name| is_named(name))
    }
}

/// Rejects requests that web pages of other origins make. Browsers send those without a JSON body unasked.
pub(super) async fn check_origin(
    State(hosts): State<AllowedHosts>,
    request: Request,
    next: Next,
) -> HttpResult<Response> {
    hosts.check(&request)?;
    Ok(next.run(request).await)
}

/// The tenant that a request names, as the field `tenant` of gRPC.
const TENANT_HEADER: &str = "x-tenant";

/// Checks that a request's token has the role, before the body is received. Inserts the caller into the extensions.
pub(super) async fn authenticate(
    State((access, role)): State<(Access, Role)>,
    mut request: Request,
    next: Next,
) -> HttpResult<Response> {
    let mut caller = access.check(request.headers(), role, request.uri().path())?;
    if let Some(named) = request.headers().get(TENANT_HEADER) {
        let named = named.to_str().map_err(|_| Error::invalid(TENANT_HEADER, "is not printable ASCII"))?;
        caller.tenant = caller.tenant_of(named)?;
    }
    request.extensions_mut().insert(caller);
    Ok(next.run(request).await)
}

/// Turns a panic in a handler into 500 for that request alone.
pub(super) async fn catch_panic(State(panics): State<Panics>, request: Request, next: Next) -> HttpResult<Response> {
    Ok(panics.catch_future(next.run(request)).await?)
}

/// Counts a request by its route and the class of its status, and records its error.
pub(super) async fn count_request(State(observer): State<Observer>, request: Request, next: Next) -> Response {
    // The client chooses paths without a route and unknown methods, so these are not counted by name.
    let route = request.extensions().get::<MatchedPath>().cloned();
    let known = ["GET", "HEAD", "POST", "DELETE"];
    let method = known.into_iter().find(|known| request.method() == *known).unwrap_or("other");
    let response = next.run(request).await;
    let (handler, status) = (route.as_ref().map_or("none", MatchedPath::as_str), response.status());
    let class = ["1xx", "2xx", "3xx", "4xx", "5xx"][usize::from(status.as_u16() / 100 - 1).min(4)];
    observer.metrics.http_calls.count([handler, method, class]);
    // Requests of strangers are not errors of the server's clients.
    let is_stranger = route.is_none() || [StatusCode::UNAUTHORIZED, StatusCode::METHOD_NOT_ALLOWED].contains(&status);
    if let Some(error) = response.extensions().get::<HttpError>().filter(|_| !is_stranger) {
        observer.journal.refusal(error.kind, &error.message, None);
    }
    response
}

fn text(value: &HeaderValue) -> String {
    String::from_utf8_lossy(value.as_bytes()).into_owned()
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
            // A name that resolves to this server.
            &[("host", "evil.example:8000"), ("origin", "http://evil.example:8000")],
            &[("host", "localhost.evil.example"), ("origin", "http://localhost.evil.example")],
            &[("host", "127.0.0.1.evil.example"), ("origin", "http://127.0.0.1.evil.example")],
        ] {
            assert!(is_foreign(&open(), headers), "{headers:?}");
        }
    }

    #[test]
    fn a_host_that_an_attacker_may_own_is_rejected_for_every_method() {
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
