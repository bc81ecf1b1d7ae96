//! The page that shows the state of the server, and its files. They hold no data: the browser fetches that from
//! `/events`, with a token where the server requires one.

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, X_CONTENT_TYPE_OPTIONS,
};
use axum::response::{IntoResponse, Response};

use crate::server::http::{HttpError, HttpResult};

/// Nothing but what this server sends is loaded, run or asked: no other host, and no script inside of the page.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";

/// The files beside the page: name, type and text.
const FILES: &[(&str, &str, &str)] = &[
    ("page.css", CSS, include_str!("page.css")),
    ("main.js", SCRIPT, include_str!("main.js")),
    ("feed.js", SCRIPT, include_str!("feed.js")),
    ("timeline.js", SCRIPT, include_str!("timeline.js")),
    ("latencies.js", SCRIPT, include_str!("latencies.js")),
    ("panels.js", SCRIPT, include_str!("panels.js")),
    ("format.js", SCRIPT, include_str!("format.js")),
];

/// The status page: live state of the server, for browsers.
#[utoipa::path(get, path = "/", responses((status = 200, content_type = "text/html", body = String)))]
pub(super) async fn page() -> Response {
    file(HTML, include_str!("page.html"))
}

/// A file of the page.
#[utoipa::path(get, path = "/page/{file}", params(("file" = String, Path, description = "name of the file")), responses(
    (status = 200, description = "the file", content_type = "text/javascript", body = String),
    (status = 404, description = "no such file"),
))]
pub(super) async fn part(name: Result<Path<String>, PathRejection>) -> HttpResult<Response> {
    let Path(name) = name.map_err(|_| HttpError::no_route())?;
    let (_, kind, text) = FILES.iter().find(|file| file.0 == name).ok_or_else(HttpError::no_route)?;
    Ok(file(kind, text))
}

/// A file of the page. A browser requests it each time, so that a newer server's page never runs with older files.
fn file(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (CONTENT_TYPE, kind),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-cache"),
    ];
    (headers, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts that would take what a client has chosen for HTML, or load something from elsewhere.
    const BANNED: &[&str] =
        &["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "https://", "@import", "url("];

    #[test]
    fn files_are_short_and_take_nothing_for_html() {
        for (name, _, text) in FILES.iter().chain(&[("page.html", HTML, include_str!("page.html"))]) {
            assert!(text.lines().count() <= 500, "{name}: files fit a head");
            for banned in BANNED {
                assert!(!text.contains(banned), "{name} has {banned}");
            }
        }
    }
}
