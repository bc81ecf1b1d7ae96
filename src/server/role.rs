//! Who may call what.

/// What a caller must be allowed to do to use a method or a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// No permission is needed: liveness, which orchestrators ask without a token.
    Anyone,
    /// Generate, score, end one's own requests, and look at the server.
    Generate,
    /// Everything: weights, sleep, pause, other clients' requests.
    Control,
}

impl Role {
    /// The role's name in `--auth-token-file` and in the API's description.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Anyone => "anyone",
            Self::Generate => "generate",
            Self::Control => "control",
        }
    }
}
