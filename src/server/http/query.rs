//! The query of a route that takes its arguments there and reads no body, as vLLM's control routes do.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use http_body::Body as _;
use tokio::time::timeout;

use super::{AppState, HttpError, HttpResult, Ignored};
use crate::error::shown;

/// Longest value that an error repeats, in bytes.
const MAX_SHOWN_BYTES: usize = 100;
/// A body of up to so many bytes is received, so that its connection can be used again.
const DISCARDED_BYTES: usize = 16 << 10;
/// Longest time that a call waits for a body that is not read.
const DISCARD: Duration = Duration::from_secs(1);

/// The arguments of a query, in their order.
#[derive(Debug, Default)]
pub(super) struct Query {
    pairs: Vec<(String, String)>,
    /// Whether a body came with it, which is not read.
    has_body: bool,
}

impl FromRequest<AppState> for Query {
    type Rejection = HttpError;

    async fn from_request(request: Request, _: &AppState) -> HttpResult<Self> {
        let (parts, body) = request.into_parts();
        let has_body = !body.is_end_stream();
        if has_body {
            // After a body that is too long or too slow, the connection closes with the answer.
            let _ = timeout(DISCARD, to_bytes(body, DISCARDED_BYTES)).await;
        }
        let pairs = axum::extract::Query::try_from_uri(&parts.uri);
        let axum::extract::Query(pairs) = pairs.map_err(|e| HttpError::invalid("query", &e.body_text()))?;
        Ok(Self { pairs, has_body })
    }
}

impl Query {
    /// All values of an argument.
    pub(super) fn all<'a>(&'a self, name: &str) -> impl Iterator<Item = &'a str> {
        self.pairs.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// The value of an argument that is one of `choices`; the first choice if it is absent. If it is repeated, the last
    /// one counts. 400 with the argument's name if it has another value.
    pub(super) fn choice<T: Copy>(&self, name: &str, choices: &[(&str, T)]) -> HttpResult<T> {
        let Some(given) = self.all(name).last() else { return Ok(choices[0].1) };
        let found = choices.iter().find(|(text, _)| *text == given);
        let texts = || choices.iter().map(|(text, _)| *text).collect::<Vec<_>>().join(", ");
        found.map(|(_, value)| *value).ok_or_else(|| wrong(name, given, &format!("one of {}", texts())))
    }

    /// The same for an argument that is true or false.
    pub(super) fn flag(&self, name: &str, default: bool) -> HttpResult<bool> {
        let Some(given) = self.all(name).last() else { return Ok(default) };
        match given.to_ascii_lowercase().as_str() {
            "true" | "1" | "yes" | "on" => Ok(true),
            "false" | "0" | "no" | "off" => Ok(false),
            _ => Err(wrong(name, given, "true or false")),
        }
    }

    /// The parts of the request that have no effect: arguments other than `known`, and a body.
    pub(super) fn ignored(&self, known: &[&str]) -> Ignored {
        let names: BTreeSet<_> = self.pairs.iter().map(|(key, _)| key.as_str()).collect();
        let mut ignored = Ignored::default();
        for name in names.into_iter().filter(|name| !known.contains(name)) {
            ignored.add(&format!("query.{name}"));
        }
        if self.has_body {
            ignored.add("body");
        }
        ignored
    }
}

/// The error of an argument whose value is not as `expected`.
fn wrong(name: &str, given: &str, expected: &str) -> HttpError {
    let message = format!("{:?} is not {expected}", shown(given, MAX_SHOWN_BYTES));
    HttpError::invalid(format!("query.{name}"), &message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn query(text: &str) -> Query {
        let uri = format!("/pause?{text}").parse().expect("a path");
        let axum::extract::Query(pairs) = axum::extract::Query::try_from_uri(&uri).expect("pairs");
        Query { pairs, has_body: false }
    }

    #[test]
    fn arguments_are_read_as_fastapi_reads_them() {
        let modes = [("abort", 1), ("wait", 2)];
        assert_eq!(query("").choice("mode", &modes).expect("the default"), 1);
        assert_eq!(query("mode=abort&mode=wait").choice("mode", &modes).expect("the last"), 2);
        assert!(query("mode=WAIT").choice("mode", &modes).is_err());
        assert!(query("mode=").choice("mode", &modes).is_err());
        for (text, value) in [("True", true), ("1", true), ("on", true), ("FALSE", false), ("0", false), ("no", false)]
        {
            assert_eq!(query(&format!("f={text}")).flag("f", !value).expect("a flag"), value, "{text}");
        }
        assert!(query("f=2").flag("f", true).is_err() && query("f").flag("f", true).is_err());
        let tags = query("tags=a&tags=b%26c&tags=");
        assert_eq!(tags.all("tags").collect::<Vec<_>>(), ["a", "b&c", ""]);
    }
}
