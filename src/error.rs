//! The errors of the server, typed by how the caller can react. gRPC and HTTP map them to their own statuses:
//! `server::grpc::status`, `server::http::error`.

/// A failure; its text names the offending value and says what to do.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A field of a request is wrong. gRPC INVALID_ARGUMENT.
    #[error("{field}: {message}")]
    InvalidArgument { field: String, message: String },
    /// A queue is full, or the memory ceiling leaves no room; trying later can help. gRPC RESOURCE_EXHAUSTED.
    #[error("{0}")]
    ResourceExhausted(String),
    /// The server's lifecycle state does not allow this command. gRPC FAILED_PRECONDITION.
    #[error("{0}")]
    FailedPrecondition(String),
    /// The policy does not have the version that the request requires. gRPC ABORTED.
    #[error("{0}")]
    VersionConflict(String),
    /// The given name or id does not exist. gRPC NOT_FOUND.
    #[error("{0}")]
    NotFound(String),
    /// The given name is already in use. gRPC ALREADY_EXISTS.
    #[error("{0}")]
    AlreadyExists(String),
    /// Another command, or idleness, ended the call before it had a result. gRPC ABORTED.
    #[error("{0}")]
    Aborted(String),
    /// Received bytes do not match their digest, or a file changed while it was in use. gRPC DATA_LOSS.
    #[error("{0}")]
    DataLoss(String),
    /// The client exceeded a deadline. gRPC DEADLINE_EXCEEDED.
    #[error("{0}")]
    DeadlineExceeded(String),
    /// The call has no bearer token, or an unknown one. gRPC UNAUTHENTICATED.
    #[error("{0}")]
    Unauthenticated(String),
    /// The role of the call's token does not allow this. gRPC PERMISSION_DENIED.
    #[error("{0}")]
    PermissionDenied(String),
    /// The server is shutting down. gRPC UNAVAILABLE.
    #[error("{0}")]
    Unavailable(String),
    /// A checkpoint, flag or file is invalid; the server does not start.
    #[error("{0}")]
    Config(String),
    /// A bug of the server or a fault of the machine. gRPC INTERNAL.
    #[error("internal error: {0}")]
    Internal(String),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// All values of [`Error::kind`].
    pub const KINDS: &[&str] = &[
        "invalid_argument",
        "resource_exhausted",
        "failed_precondition",
        "version_conflict",
        "not_found",
        "already_exists",
        "aborted",
        "data_loss",
        "deadline_exceeded",
        "unavailable",
        "unauthenticated",
        "permission_denied",
        "config",
        "internal",
    ];

    /// Name of the variant in metrics and error details.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::InvalidArgument { .. } => "invalid_argument",
            Self::ResourceExhausted(_) => "resource_exhausted",
            Self::FailedPrecondition(_) => "failed_precondition",
            Self::VersionConflict(_) => "version_conflict",
            Self::NotFound(_) => "not_found",
            Self::AlreadyExists(_) => "already_exists",
            Self::Aborted(_) => "aborted",
            Self::DataLoss(_) => "data_loss",
            Self::DeadlineExceeded(_) => "deadline_exceeded",
            Self::Unavailable(_) => "unavailable",
            Self::Unauthenticated(_) => "unauthenticated",
            Self::PermissionDenied(_) => "permission_denied",
            Self::Config(_) => "config",
            Self::Internal(_) => "internal",
        }
    }

    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidArgument { field: field.into(), message: message.into() }
    }

    /// Prefixes the field of an `InvalidArgument` with `outer`.
    pub fn within(self, outer: &str) -> Self {
        match self {
            Self::InvalidArgument { field, message } => Self::invalid(format!("{outer}.{field}"), message),
            other => other,
        }
    }
}

/// The message of a caught panic, or "no message" if its payload is not a string.
pub fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").into()
}

impl From<rollout_kernels::DeviceError> for Error {
    fn from(e: rollout_kernels::DeviceError) -> Self {
        match e {
            rollout_kernels::DeviceError::Unsupported(what) => Self::Config(what),
            rollout_kernels::DeviceError::OutOfMemory(what) => Self::ResourceExhausted(what),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        rollout_kernels::out_of_memory(&e).map_or_else(|| Self::Internal(e.to_string()), Self::ResourceExhausted)
    }
}

/// `text`, which comes from a client, made safe for a status or a log line: control characters are escaped, and bytes
/// beyond `most` are replaced by a note of the full length.
pub fn shown(text: &str, most: usize) -> String {
    let mut shown = String::with_capacity(text.len().min(most));
    for c in text.chars() {
        let start = shown.len();
        if c.is_control() {
            shown.extend(c.escape_default());
        } else {
            shown.push(c);
        }
        if shown.len() > most {
            shown.truncate(start);
            return format!("{shown}... ({} bytes in all)", text.len());
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_shown_whole_if_it_is_short_and_cut_between_characters_if_not() {
        assert_eq!(shown("a name", 6), "a name");
        assert_eq!(shown("a name", 5), "a nam... (6 bytes in all)");
        assert_eq!(shown("\u{1f980}\u{1f980}", 7), "\u{1f980}... (8 bytes in all)");
        assert_eq!(shown("a\nb\u{7}\u{9b}", 100), "a\\nb\\u{7}\\u{9b}");
        assert_eq!(shown("\n\n", 3), "\\n... (2 bytes in all)");
        assert_eq!(shown("", 0), "");
    }
}
