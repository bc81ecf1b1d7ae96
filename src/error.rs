//! Errors, typed by what the caller can do about them. `server::convert` maps each variant to a gRPC status; nothing
//! else does.

/// What went wrong, with the offending value and what to do in the text.
#[derive(Clone, Debug, thiserror::Error)]
pub enum Error {
    /// A field of a request is wrong. gRPC INVALID_ARGUMENT.
    #[error("{field}: {message}")]
    InvalidArgument { field: String, message: String },
    /// A queue is full or the memory ceiling says no; trying later can help. gRPC RESOURCE_EXHAUSTED.
    #[error("{0}")]
    ResourceExhausted(String),
    /// The lifecycle forbids this order. gRPC FAILED_PRECONDITION.
    #[error("{0}")]
    FailedPrecondition(String),
    /// The policy's version is not the one insisted on. gRPC ABORTED.
    #[error("{0}")]
    VersionConflict(String),
    /// No such thing. gRPC NOT_FOUND.
    #[error("{0}")]
    NotFound(String),
    /// The name is taken. gRPC ALREADY_EXISTS.
    #[error("{0}")]
    AlreadyExists(String),
    /// Ended by an order, or for idleness, before it had anything to give. gRPC ABORTED.
    #[error("{0}")]
    Aborted(String),
    /// Bytes are not those that were announced. gRPC DATA_LOSS.
    #[error("{0}")]
    DataLoss(String),
    /// The client took longer than it may. gRPC DEADLINE_EXCEEDED.
    #[error("{0}")]
    DeadlineExceeded(String),
    /// The server is ending. gRPC UNAVAILABLE.
    #[error("{0}")]
    Unavailable(String),
    /// A checkpoint, flag or file is wrong; ends the start.
    #[error("{0}")]
    Config(String),
    /// A bug or the machine. gRPC INTERNAL.
    #[error("internal error: {0}")]
    Internal(String),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub fn invalid(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::InvalidArgument { field: field.into(), message: message.into() }
    }
}

/// The message that a panic was given.
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
        Self::Internal(e.to_string())
    }
}

/// Text of a client as a status or a log may carry it: control characters escaped, and cut after `most` bytes, with the
/// length it has.
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
