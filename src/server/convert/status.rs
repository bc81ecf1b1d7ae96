//! Errors as gRPC statuses.

use tonic::{Code, Status};

use crate::error::Error;

/// The status a client gets: the error's own text, and the code by what the caller can do about it.
pub(in crate::server) fn to_status(error: Error) -> Status {
    let code = match &error {
        Error::InvalidArgument { .. } => Code::InvalidArgument,
        Error::ResourceExhausted(_) => Code::ResourceExhausted,
        Error::FailedPrecondition(_) => Code::FailedPrecondition,
        Error::VersionConflict(_) | Error::Aborted(_) => Code::Aborted,
        Error::NotFound(_) => Code::NotFound,
        Error::AlreadyExists(_) => Code::AlreadyExists,
        Error::DataLoss(_) => Code::DataLoss,
        Error::DeadlineExceeded(_) => Code::DeadlineExceeded,
        Error::Unavailable(_) => Code::Unavailable,
        // A Config error ends the start, so a running server has none; if one comes it is a bug.
        Error::Config(_) | Error::Internal(_) => {
            tracing::error!(%error, "request failed");
            Code::Internal
        }
    };
    tracing::debug!(?code, %error, "call refused");
    Status::new(code, error.to_string())
}
