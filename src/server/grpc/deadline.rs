//! Client deadlines. tonic reads `grpc-timeout` too, but only for the time until the response starts, and answers
//! CANCELLED; here a deadline covers the whole stream and gives DEADLINE_EXCEEDED.

use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Request, Status};

use crate::error::Error;
use crate::server::convert::to_status;

/// Ends a call this much before tonic's own timer for the same deadline, so that ours gives the status.
const HEAD_START: Duration = Duration::from_millis(2);

/// When a call must have ended; part of a request's extensions.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Deadline(Option<Instant>);

/// Reads the deadline as the request arrives, before its message is received and decoded.
///
/// # Errors
/// INVALID_ARGUMENT if the header cannot be read.
pub(in crate::server) fn note_deadline(mut request: Request<()>) -> Result<Request<()>, Status> {
    let deadline = Deadline(timeout(request.metadata())?.map(|t| Instant::now() + t.saturating_sub(HEAD_START)));
    request.extensions_mut().insert(deadline);
    Ok(request)
}

/// The `grpc-timeout` header: at most eight digits and a unit.
fn timeout(metadata: &MetadataMap) -> Result<Option<Duration>, Status> {
    let Some(header) = metadata.get("grpc-timeout") else { return Ok(None) };
    let invalid = || Status::invalid_argument(format!("grpc-timeout: {header:?} is not up to 8 digits and a unit"));
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

impl Deadline {
    pub(super) fn of<T>(request: &Request<T>) -> Self {
        request.extensions().get().copied().unwrap_or_default()
    }

    /// Waits for the deadline; for ever if there is none.
    pub(super) async fn passed(self) {
        match self.0 {
            Some(at) => tokio::time::sleep_until(at).await,
            None => std::future::pending().await,
        }
    }

    /// The result of `work`, or DEADLINE_EXCEEDED, in which case `work` is dropped.
    pub(super) async fn limit<T>(self, work: impl Future<Output = Result<T, Error>>) -> Result<T, Status> {
        tokio::select! {
            biased;
            result = work => result.map_err(to_status),
            () = self.passed() => Err(exceeded()),
        }
    }
}

pub(super) fn exceeded() -> Status {
    Status::deadline_exceeded("the deadline passed before the work was done; its work is aborted")
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
