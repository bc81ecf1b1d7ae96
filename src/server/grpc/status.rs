//! Maps errors to gRPC statuses.

use tonic::{Code, Status};

use crate::error::{Error, shown};

/// Longest message of a status in bytes. It travels in a header, percent-encoded to three times its length at worst,
/// and clients accept headers of 8 KiB; with a longer one they would see a broken stream instead of the status.
const MAX_MESSAGE_BYTES: usize = 2048;

/// The status for an error. Its code is chosen by what the caller can do, its message is the error's own text.
pub(super) fn to_status(error: Error) -> Status {
    let code = match &error {
        Error::InvalidArgument { .. } => Code::InvalidArgument,
        Error::ResourceExhausted(_) => Code::ResourceExhausted,
        Error::FailedPrecondition(_) => Code::FailedPrecondition,
        Error::VersionConflict(_) | Error::Aborted(_) => Code::Aborted,
        Error::NotFound(_) => Code::NotFound,
        Error::AlreadyExists(_) => Code::AlreadyExists,
        Error::DataLoss(_) => Code::DataLoss,
        Error::DeadlineExceeded(_) => Code::DeadlineExceeded,
        Error::Unauthenticated(_) => Code::Unauthenticated,
        Error::PermissionDenied(_) => Code::PermissionDenied,
        Error::Unavailable(_) => Code::Unavailable,
        // A Config error ends the start, so one in a running server is a bug.
        Error::Config(_) | Error::Internal(_) => Code::Internal,
    };
    let message = shown(&error.to_string(), MAX_MESSAGE_BYTES);
    match code {
        Code::Internal => tracing::error!(error = message, "request failed"),
        _ => tracing::debug!(?code, error = message, "call refused"),
    }
    Status::new(code, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_fits_into_a_header_whatever_is_in_it() {
        for part in ["a", "\n", "\u{1f980}"] {
            let status = to_status(Error::NotFound(part.repeat(1 << 20)));
            assert!(status.message().len() < MAX_MESSAGE_BYTES + 40, "{part:?}: {} bytes", status.message().len());
            assert!(!status.message().contains(char::is_control));
            let headers = status.into_http::<()>();
            let bytes: usize = headers.headers().iter().map(|(k, v)| k.as_str().len() + v.len() + 32).sum();
            assert!(bytes < 8 << 10, "{part:?}: {bytes} bytes of headers");
        }
    }
}
