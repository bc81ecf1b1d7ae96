//! Bodies of requests: counted as they arrive, limited, and parsed from JSON with the path of whatever is wrong.

use std::fmt::Write as _;

use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use bytes::{Bytes, BytesMut};
use serde::de::DeserializeOwned;
use tokio_stream::StreamExt as _;

use super::Door;
use super::error::HttpError;
use super::weight::parsed_bytes;
use crate::error::{Error, Result, shown};
use crate::memory::{Charge, Traffic};
use crate::server::calls::{PATIENCE, Pace};
use crate::server::security::Caller;

/// Largest body in bytes: that of gRPC's messages, and room for token ids written as decimal numbers.
const MAX_BODY_BYTES: usize = 128 << 20;
/// Larger bodies are parsed on the blocking pool, because that takes about a millisecond.
const INLINE_BYTES: usize = 64 << 10;
/// Header that names the members of a body that were ignored.
const IGNORED: HeaderName = HeaderName::from_static("x-ignored-members");
/// Most members that [`IGNORED`] names.
const MAX_IGNORED: usize = 16;
/// Longest path of a member in an answer, in bytes.
const MAX_IGNORED_BYTES: usize = 128;

/// The JSON body of a request, parsed.
pub(super) struct JsonBody<T> {
    pub(super) value: T,
    /// Size of the body in bytes, as it came.
    pub(super) bytes: usize,
    /// Covers the parsed value.
    pub(super) charge: Charge,
    pub(super) ignored: Ignored,
    /// Who sends it.
    pub(super) caller: Caller,
}

/// Paths of members that no route knows, and which have had no effect.
#[derive(Default)]
pub(super) struct Ignored {
    names: Vec<String>,
    /// Number of those that are not among `names`.
    others: usize,
}

impl Ignored {
    pub(super) fn add(&mut self, name: &str) {
        if self.names.len() < MAX_IGNORED {
            self.names.push(shown(name, MAX_IGNORED_BYTES));
        } else {
            self.others += 1;
        }
    }

    /// The answer, with a header that names the ignored members, if there are any.
    pub(super) fn name_in(&self, answer: impl IntoResponse) -> Response {
        let mut response = answer.into_response();
        if let Some(value) = self.header() {
            response.headers_mut().insert(IGNORED, value);
        }
        response
    }

    fn header(&self) -> Option<HeaderValue> {
        if self.names.is_empty() {
            return None;
        }
        let mut text = String::new();
        for path in &self.names {
            let separator = if text.is_empty() { "" } else { ", " };
            // Writing to a string cannot fail.
            let _ = write!(text, "{separator}{}", path.escape_default());
        }
        if self.others > 0 {
            let _ = write!(text, ", and {} more", self.others);
        }
        HeaderValue::from_str(&text).ok()
    }
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<Door> for JsonBody<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, door: &Door) -> std::result::Result<Self, HttpError> {
        check_content_type(request.headers())?;
        let traffic = door.gate.traffic()?;
        let length = announced_bytes(request.headers())?;
        let caller = request.extensions().get().copied().unwrap_or_default();
        let (body, charge) = gather(request.into_body(), length, &traffic).await?;
        if body.len() <= INLINE_BYTES {
            return Ok(parse(&body, charge, caller)?);
        }
        let parsed = tokio::task::spawn_blocking(move || parse(&body, charge, caller)).await;
        Ok(parsed.unwrap_or_else(|e| Err(Error::Internal(format!("parsing the body failed: {e}"))))?)
    }
}

/// Refuses bodies that do not say they are JSON. A page of another site can make a browser send a form or plain text
/// here, but not JSON.
fn check_content_type(headers: &HeaderMap) -> std::result::Result<(), HttpError> {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = given.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("content-type: {:?} is not application/json", shown(given, 100));
    Err(HttpError::new(StatusCode::BAD_REQUEST, "BadRequestError", None, &message))
}

/// The length of the body that the headers announce.
fn announced_bytes(headers: &HeaderMap) -> std::result::Result<Option<usize>, HttpError> {
    let length = headers.get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    match length {
        Some(length) if length > MAX_BODY_BYTES => Err(too_large(length)),
        length => Ok(length),
    }
}

fn too_large(bytes: usize) -> HttpError {
    let message = format!("the body has {bytes} bytes and may have {MAX_BODY_BYTES}; split the request");
    HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, "PayloadTooLargeError", None, &message)
}

/// Collects a body. Its bytes are counted before they are kept.
async fn gather(
    body: Body,
    length: Option<usize>,
    traffic: &Traffic,
) -> std::result::Result<(Bytes, Charge), HttpError> {
    let (mut charge, mut pace) = (traffic.charge_always(0), Pace::new(PATIENCE));
    let (mut frames, mut gathered) = (body.into_data_stream(), BytesMut::new());
    loop {
        tokio::select! {
            biased;
            frame = frames.next() => match frame {
                Some(Ok(frame)) => {
                    if gathered.len() + frame.len() > MAX_BODY_BYTES {
                        return Err(too_large(gathered.len() + frame.len()));
                    }
                    // Twice, because a buffer that grows is copied into one of up to twice its size.
                    charge.grow(2 * frame.len() as u64)?;
                    gathered.extend_from_slice(&frame);
                }
                // The connection has broken, or its chunks are none.
                Some(Err(error)) => return Err(Error::invalid("body", format!("broke off: {error}")).into()),
                None => break,
            },
            in_time = pace.check(gathered.len(), length) => in_time?,
        }
    }
    Ok((gathered.freeze(), charge))
}

/// Parses `body`. What that takes is counted before it is done.
///
/// # Errors
/// `InvalidArgument` with the path of the member that is wrong; `ResourceExhausted`.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8], mut charge: Charge, caller: Caller) -> Result<JsonBody<T>> {
    // Serde would also read an object's members from a list, in the order in which the type has them.
    if body.trim_ascii_start().first() == Some(&b'[') {
        return Err(Error::invalid("body", "is a list and must be an object"));
    }
    charge.grow(parsed_bytes(body))?;
    let mut ignored = Ignored::default();
    // A member that may be null has a step of its own in the path.
    let mut note = |path: serde_ignored::Path<'_>| ignored.add(&path.to_string().replace(".?", ""));
    let mut track = serde_path_to_error::Track::new();
    let mut json = serde_json::Deserializer::from_slice(body);
    let value = serde_ignored::deserialize(serde_path_to_error::Deserializer::new(&mut json, &mut track), &mut note);
    let path = || match track.path().to_string() {
        path if path == "." || path.contains('?') => "body".to_owned(),
        path => shown(&path, MAX_IGNORED_BYTES),
    };
    let value: T = value.map_err(|error| Error::invalid(path(), error.to_string()))?;
    json.end().map_err(|error| Error::invalid("body", error.to_string()))?;
    // The parsed value stays, the text goes.
    charge.shrink(2 * body.len() as u64);
    Ok(JsonBody { value, bytes: body.len(), charge, ignored, caller })
}

#[cfg(test)]
mod tests;
