//! Keeps pages of other sites from driving the server through the browser of somebody who can reach it. A page cannot
//! send a token that it does not know, so this matters only where nobody is asked for one.

use std::net::IpAddr;

use axum::extract::Request;
use axum::http::header::{HOST, HeaderMap, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::error::HttpError;
use crate::error::shown;

const FETCH_SITE: &str = "sec-fetch-site";

/// Refuses requests that a page of another site has made. Browsers send those that need no body without asking, and
/// name the page's origin in them.
pub(super) async fn guard(request: Request, next: Next) -> Response {
    // These change nothing, and their answers can be read by pages of the same origin alone.
    if matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS) {
        return next.run(request).await;
    }
    match foreign_origin(request.headers()) {
        Some(origin) => refusal(&origin).into_response(),
        None => next.run(request).await,
    }
}

/// The origin of the page that has made the request, if it is not a page of this server.
fn foreign_origin(headers: &HeaderMap) -> Option<String> {
    let text = |value: &axum::http::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    if headers.get_all(FETCH_SITE).iter().any(|site| site != "same-origin" && site != "none") {
        return Some(headers.get(ORIGIN).map_or_else(|| "another site".into(), text));
    }
    let is_own = |origin: &str| {
        let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"))?;
        let host = headers.get(HOST)?.to_str().ok()?;
        Some(authority.eq_ignore_ascii_case(host) && is_fixed(authority))
    };
    let origins = headers.get_all(ORIGIN).iter().map(text);
    origins.into_iter().find(|origin| is_own(origin) != Some(true))
}

/// Whether nobody else can make `authority` lead here: an address, or localhost. Whoever owns another name can let it
/// lead here after their page has been loaded from it.
fn is_fixed(authority: &str) -> bool {
    let Ok(authority) = authority.parse::<Authority>() else { return false };
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    host.parse::<IpAddr>().is_ok() || host.eq_ignore_ascii_case("localhost")
}

fn refusal(origin: &str) -> HttpError {
    let message = format!(
        "a page of {:?} may not use this server; open pages by the server's address, or give the server \
         --auth-token-file",
        shown(origin, 100)
    );
    HttpError::new(StatusCode::FORBIDDEN, "PermissionDeniedError", None, &message)
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderName, HeaderValue};

    use super::*;

    fn is_foreign(headers: &[(&'static str, &'static str)]) -> bool {
        let headers =
            headers.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
        foreign_origin(&headers.collect()).is_some()
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
            assert!(!is_foreign(headers), "{headers:?}");
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
            assert!(is_foreign(headers), "{headers:?}");
        }
    }
}
