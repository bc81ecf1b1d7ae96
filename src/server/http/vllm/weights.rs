//! The policy's version and checksums.

use std::collections::{BTreeMap, BTreeSet};

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::engine::Command;
use crate::error::shown;
use crate::server::calls::{ask, ask_cancellable};
use crate::server::http::{AppState, HttpError, HttpResult, JsonBody};
use crate::types::WeightVersion;

#[derive(Deserialize, ToSchema)]
pub(super) struct NewVersion {
    /// A decimal number below 2^64.
    #[schema(pattern = "^(0|[1-9][0-9]{0,18})$")]
    new_version: String,
    /// Whether the version may be equal to or below the current one. Not in vLLM.
    force_version: Option<bool>,
}

#[derive(Serialize, ToSchema)]
pub(super) struct Versioned {
    success: bool,
    new_version: String,
}

/// Sets the policy's version without changing its weights; tokens sampled from now on report it. A push sets its own.
#[utoipa::path(post, path = "/update_weight_version", request_body = NewVersion, responses(
    (status = 200, body = Versioned),
    (status = 409, description = "there is no policy, or the version is not above the policy's"),
))]
pub(super) async fn update_weight_version(
    State(app): State<AppState>,
    body: JsonBody<NewVersion>,
) -> HttpResult<Response> {
    let version = version_of("new_version", &body.value.new_version)?;
    let (context, _in_flight) = app.server.admit()?;
    let force = body.value.force_version.unwrap_or(false);
    ask(&context.engine, |reply| Command::SetVersion { version, force, reply }).await??;
    Ok(body.ignored.name_in(Json(Versioned { success: true, new_version: body.value.new_version })))
}

/// The version that the member `name` gives; 400 with the member if it gives none.
pub(super) fn version_of(name: &str, given: &str) -> HttpResult<WeightVersion> {
    given.parse().ok().filter(|version: &u64| version.to_string() == *given).ok_or_else(|| {
        let given = shown(given, 100);
        let message = format!("{given:?} is not a version; versions are decimal numbers here, such as \"7\"");
        HttpError::invalid(name, &message)
    })
}

#[derive(Deserialize, ToSchema)]
pub(super) struct Check {
    action: Action,
    /// For `compare`: SHA-256 of each parameter in hexadecimal digits, as `checksum` answers them.
    baseline: Option<BTreeMap<String, String>>,
}

#[derive(Clone, Copy, Deserialize, ToSchema, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Action {
    Checksum,
    Compare,
    Reset,
}

/// The answer to `checksum`, or to `compare`.
#[derive(Serialize, ToSchema)]
#[serde(untagged)]
pub(super) enum Checked {
    Checksums {
        /// SHA-256 of each parameter, whole and as it serves, by its name in the checkpoint.
        checksums: BTreeMap<String, String>,
    },
    Compared {
        r#match: bool,
        /// Parameters that differ or exist on one side only.
        mismatches: Vec<String>,
    },
}

/// Returns the SHA-256 of each serving parameter, or compares them with earlier ones. Generation continues meanwhile.
#[utoipa::path(post, path = "/weight_checker", request_body = Check, responses(
    (status = 200, body = Checked),
    (status = 409, description = "the weights are asleep or missing"),
    (status = 501, description = "`reset`"),
))]
pub(super) async fn weight_checker(State(app): State<AppState>, body: JsonBody<Check>) -> HttpResult<Response> {
    let Check { action, baseline } = body.value;
    let baseline = match (action, baseline) {
        (Action::Reset, _) => {
            let message = "action: no weights are zeroed here; POST /sleep?level=2 drops the policy, and \
                           /wake_up?reload=true reads the checkpoint again";
            let param = Some("action".into());
            return Err(HttpError::new(StatusCode::NOT_IMPLEMENTED, "NotImplementedError", param, message));
        }
        (Action::Compare, None) => {
            return Err(HttpError::invalid("baseline", "action='compare' requires a 'baseline' object"));
        }
        (Action::Compare, baseline) => baseline,
        (Action::Checksum, _) => None,
    };
    let context = app.server.context()?;
    let checksum = |cancel, reply| Command::Checksum { names: Vec::new(), cancel, reply };
    let reply = ask_cancellable(&context.engine, checksum).await??;
    let hex = |sha256: &[u8]| sha256.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let checksums: BTreeMap<_, _> = reply.parameters.into_iter().map(|(name, sha256)| (name, hex(&sha256))).collect();
    let checked = match baseline {
        None => Checked::Checksums { checksums },
        Some(baseline) => {
            let names: BTreeSet<_> = checksums.keys().chain(baseline.keys()).collect();
            let differing = names.into_iter().filter(|name| checksums.get(*name) != baseline.get(*name));
            let mismatches: Vec<_> = differing.cloned().collect();
            Checked::Compared { r#match: mismatches.is_empty(), mismatches }
        }
    };
    Ok(body.ignored.name_in(Json(checked)))
}
