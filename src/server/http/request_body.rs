//! Bodies of requests: counted as they arrive, limited, and parsed from JSON, with the path of a wrong member.
//!
//! A text of a few bytes for each value, such as `["","",…]`, takes many times its size once it is parsed, and a text
//! of token ids hardly more than its size. So the values are counted before they are parsed: no factor on the length
//! serves both. Tests: `test_bodies_that_grow_when_they_are_parsed` and `test_100_bodies_that_never_end` in
//! `clients/python/tests/test_memory_ceiling_http.py`.

use axum::extract::{FromRequest, Request};
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use axum::response::{IntoResponse, Response};
use bytes::BytesMut;
use http_body::Body as _;
use serde::de::DeserializeOwned;

use super::{AppState, HttpError, HttpResult};
use crate::error::{Error, Result, shown};
use crate::memory::Charge;
use crate::server::calls::{STALL_TIMEOUT, receive};
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

/// Bytes for a byte of the text: raw values keep a copy of it.
const TEXT: u64 = 1;
/// Bytes for a byte within strings, beside [`TEXT`]: the string, and a buffer for one that has escapes.
const WITHIN: u64 = 2;
/// Bytes for a byte of the name of a member, beside [`TEXT`]: the name, its place in the path of an error, and the path
/// of a member that nothing reads.
const WITHIN_NAME: u64 = 5;
/// Bytes for an item of a list. A token id takes four, which a growing list takes three times.
const ITEM: u64 = 12;
/// Bytes for the name of a member, with its place in a map.
const NAME: u64 = 64;
/// Bytes for a string or a list: an item of a growing list, memory of its own, and a part of a message.
const VALUE: u64 = 320;
/// Bytes for an object.
const OBJECT: u64 = 1 << 10;

/// The JSON body of a request, parsed.
pub(super) struct JsonBody<T> {
    pub(super) value: T,
    /// Size of the body in bytes, as it came.
    pub(super) bytes: usize,
    /// Covers the parsed value.
    pub(super) charge: Charge,
    pub(super) ignored: Ignored,
    pub(super) caller: Caller,
}

/// The body of a request as it came: JSON, if its headers are right.
pub(super) struct RawBody {
    text: BytesMut,
    /// Covers the text twice, because a buffer that grows is copied into one of up to twice its size.
    charge: Charge,
    caller: Caller,
}

/// Paths of members that the route does not know, and which have no effect.
#[derive(Default)]
pub(super) struct Ignored {
    names: Vec<String>,
    /// Number of those that are not among `names`.
    others: usize,
}

impl Ignored {
    pub(super) fn add(&mut self, name: &str) {
        if self.names.len() < MAX_IGNORED {
            self.names.push(shown(name, MAX_IGNORED_BYTES).escape_default().to_string());
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
        let mut text = self.names.join(", ");
        if self.others > 0 {
            text += &format!(", and {} more", self.others);
        }
        HeaderValue::from_str(&text).ok()
    }
}

impl FromRequest<AppState> for RawBody {
    type Rejection = HttpError;

    async fn from_request(request: Request, app: &AppState) -> HttpResult<Self> {
        check_content_type(request.headers())?;
        let mut charge = app.server.traffic()?.charge_always(0);
        // The length that the headers announce; none for a body in chunks.
        let length = request.body().size_hint().exact().map(|length| length as usize);
        if let Some(length) = length.filter(|length| *length > MAX_BODY_BYTES) {
            return Err(too_large(length));
        }
        let caller = request.extensions().get().cloned().unwrap_or_default();
        let mut text = BytesMut::new();
        // The connection has broken, or its chunks are malformed.
        let broken = |error| Error::invalid("body", format!("broke off: {error}"));
        receive(request.into_body().into_data_stream(), STALL_TIMEOUT, broken, |frame| {
            if text.len() + frame.len() > MAX_BODY_BYTES {
                return Err(too_large(text.len() + frame.len()));
            }
            charge.grow(2 * frame.len() as u64)?;
            text.extend_from_slice(frame);
            Ok((text.len(), length))
        })
        .await?;
        Ok(Self { text, charge, caller })
    }
}

impl RawBody {
    /// The result of `parse`, which is called with the text.
    pub(super) async fn parse<T: Send + 'static>(
        self,
        parse: impl FnOnce(&[u8], Charge, Caller) -> Result<T> + Send + 'static,
    ) -> HttpResult<T> {
        let Self { text, charge, caller } = self;
        if text.len() <= INLINE_BYTES {
            return Ok(parse(&text, charge, caller)?);
        }
        let parsed = tokio::task::spawn_blocking(move || parse(&text, charge, caller)).await;
        Ok(parsed.unwrap_or_else(|e| Err(Error::Internal(format!("parsing the body failed: {e}"))))?)
    }
}

impl<T: DeserializeOwned + Send + 'static> FromRequest<AppState> for JsonBody<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, app: &AppState) -> HttpResult<Self> {
        RawBody::from_request(request, app).await?.parse(parse).await
    }
}

/// Rejects bodies that do not say they are JSON. A page of another site can make a browser send a form or plain text
/// here, but not JSON.
fn check_content_type(headers: &HeaderMap) -> HttpResult<()> {
    let given = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let kind = given.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("content-type: {:?} is not application/json", shown(given, 100));
    Err(HttpError::new(StatusCode::BAD_REQUEST, "BadRequestError", None, &message))
}

fn too_large(bytes: usize) -> HttpError {
    let message = format!("the body has {bytes} bytes and may have {MAX_BODY_BYTES}; split the request");
    HttpError::new(StatusCode::PAYLOAD_TOO_LARGE, "PayloadTooLargeError", None, &message)
}

/// Parses `body`. The memory for that is counted before it is taken.
///
/// # Errors
/// `InvalidArgument` with the path of the wrong member; `ResourceExhausted`.
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

/// Most bytes that parsing `json`, valid or not, and turning it into a message takes beside the text itself.
pub(super) fn parsed_bytes(json: &[u8]) -> u64 {
    let (mut bytes, mut at) = (TEXT * json.len() as u64, 0);
    while let Some(&byte) = json.get(at) {
        at += 1;
        bytes += match byte {
            b',' => ITEM,
            b'[' => VALUE,
            b'{' => OBJECT,
            b'"' => {
                let length = string_bytes(&json[at..]);
                at += length + 1;
                match is_name(json.get(at..)) {
                    true => WITHIN_NAME * length as u64 + NAME,
                    false => WITHIN * length as u64 + VALUE,
                }
            }
            _ => 0,
        };
    }
    bytes
}

/// Number of bytes up to the quote that ends a string, or up to the end.
fn string_bytes(rest: &[u8]) -> usize {
    let mut at = 0;
    loop {
        match rest[at..].iter().position(|byte| matches!(byte, b'"' | b'\\')) {
            Some(found) if rest[at + found] == b'"' => return at + found,
            // The byte after a backslash ends nothing.
            Some(found) => at = (at + found + 2).min(rest.len()),
            None => return rest.len(),
        }
    }
}

/// Whether the string before `rest` is the name of a member.
fn is_name(rest: Option<&[u8]>) -> bool {
    rest.is_some_and(|rest| rest.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b':'))
}

#[cfg(test)]
mod tests;
