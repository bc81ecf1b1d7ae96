//! Client deadlines. tonic applies `grpc-timeout` only until the response starts, and answers CANCELLED. Here a
//! deadline covers the whole stream and gives DEADLINE_EXCEEDED.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

use super::status::to_status;
use crate::error::{Error, shown};
use crate::server::calls::{Deadline, exceeded};
use crate::server::gate::Gate;

/// How much earlier than tonic's own timer for the same deadline a call is ended, so that the status is ours.
const HEAD_START: Duration = Duration::from_millis(2);

/// An interceptor that reads the deadline of a call before its message is received (INVALID_ARGUMENT if it is
/// malformed).
pub(in crate::server) fn note_call(gate: &Gate) -> impl Fn(Request<()>) -> Result<Request<()>, Status> + Clone + use<> {
    let gate = gate.clone();
    move |mut request| {
        let timeout = timeout(request.metadata())?;
        if timeout.is_some_and(|timeout| timeout <= HEAD_START) {
            return Err(to_status(exceeded()));
        }
        let at = timeout.map(|timeout| Instant::now() + (timeout - HEAD_START));
        request.extensions_mut().insert(Deadline::new(at, &gate));
        Ok(request)
    }
}

/// The time in the `grpc-timeout` header: at most eight digits and a unit.
fn timeout(metadata: &MetadataMap) -> Result<Option<Duration>, Status> {
    let Some(header) = metadata.get("grpc-timeout") else { return Ok(None) };
    let invalid = || {
        let header = shown(&format!("{header:?}"), 100);
        Status::invalid_argument(format!("grpc-timeout: {header} is not up to 8 digits and a unit"))
    };
    let text = header.to_str().map_err(|_| invalid())?;
    let (digits, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(invalid)?;
    if digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(invalid());
    }
    let value: u64 = digits.parse().map_err(|_| invalid())?;
    let timeout = match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return Err(invalid()),
    };
    Ok(Some(timeout))
}

/// The deadline that [`note_call`] has found.
pub(super) fn deadline_of<T>(request: &Request<T>) -> Deadline {
    request.extensions().get().cloned().unwrap_or_default()
}

/// The answer of a call with one message: the result of `work`, which must be there by the deadline.
pub(super) async fn answer<T>(
    deadline: Deadline,
    work: impl Future<Output = Result<T, Error>>,
) -> tonic::Result<Response<T>> {
    let result = deadline.clone().limit(work).await.inspect_err(|error| deadline.note(error));
    result.map(Response::new).map_err(to_status)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(header: &str) -> Option<Duration> {
        let mut metadata = MetadataMap::new();
        metadata.insert("grpc-timeout", header.parse().expect("a header value"));
        timeout(&metadata).ok().map(|t| t.expect("there is a header"))
    }

    #[test]
    fn the_header_is_read_in_every_unit_and_refused_otherwise() {
        assert_eq!(check("2H"), Some(Duration::from_secs(7200)));
        assert_eq!(check("3M"), Some(Duration::from_secs(180)));
        assert_eq!(check("99999999S"), Some(Duration::from_secs(99_999_999)));
        assert_eq!(check("250m"), Some(Duration::from_millis(250)));
        assert_eq!(check("7u"), Some(Duration::from_micros(7)));
        assert_eq!(check("9n"), Some(Duration::from_nanos(9)));
        for wrong in ["", "S", "5", "5x", "-1S", "+1S", "123456789S", "1 S"] {
            assert_eq!(check(wrong), None, "{wrong:?}");
        }
        assert!(matches!(timeout(&MetadataMap::new()), Ok(None)));
    }
}
