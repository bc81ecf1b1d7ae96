//! Checks the token of each call before its message is received, so that a client without one cannot make the server
//! hold a message.

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::Response;
use tonic::service::Routes;

use super::status::to_status;
use crate::server::role::Role;
use crate::server::security::{Access, Caller};

/// Every method, with the role that its callers need. A test compares the list with the services' descriptors.
const METHODS: &[(&str, Role)] = &[
    ("/rollout.v1.Rollout/Generate", Role::Generate),
    ("/rollout.v1.Rollout/Score", Role::Generate),
    ("/rollout.v1.Rollout/Abort", Role::Generate),
    ("/rollout.v1.Weights/Update", Role::Control),
    ("/rollout.v1.Weights/CancelUpdate", Role::Control),
    ("/rollout.v1.Weights/ListParameters", Role::Control),
    ("/rollout.v1.Weights/Checksum", Role::Control),
    ("/rollout.v1.Weights/ListAdapters", Role::Generate),
    ("/rollout.v1.Weights/RemoveAdapter", Role::Control),
    ("/rollout.v1.Control/GetInfo", Role::Generate),
    ("/rollout.v1.Control/GetStatus", Role::Generate),
    ("/rollout.v1.Control/GetTimeline", Role::Generate),
    ("/rollout.v1.Control/ResetPrefixCache", Role::Control),
    ("/rollout.v1.Control/Sleep", Role::Control),
    ("/rollout.v1.Control/Wake", Role::Control),
    ("/rollout.v1.Control/Pause", Role::Control),
    ("/rollout.v1.Control/Resume", Role::Control),
    ("/grpc.health.v1.Health/Check", Role::Anyone),
    ("/grpc.health.v1.Health/Watch", Role::Anyone),
    ("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", Role::Generate),
    ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", Role::Generate),
];

/// The role that a call of `path` needs. A method that there is not needs some token, so that only clients with one
/// learn that.
pub(super) fn role_of(path: &str) -> Role {
    METHODS.iter().find(|(method, _)| *method == path).map_or(Role::Generate, |(_, role)| *role)
}

/// Service and method of a path, if there are such.
pub(super) fn method_of(path: &str) -> Option<(&'static str, &'static str)> {
    let (method, _) = METHODS.iter().find(|(method, _)| *method == path)?;
    method.trim_start_matches('/').split_once('/')
}

/// The routes, of which each call is checked.
pub(in crate::server) fn guarded(routes: Routes, access: &Access) -> Routes {
    routes.into_axum_router().layer(from_fn_with_state(access.clone(), guard)).into()
}

/// Refuses a call, or lets it through with its [`Caller`] among its extensions.
async fn guard(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    match access.check(request.headers(), role_of(path), path.trim_start_matches('/')) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => to_status(error).into_http(),
    }
}

/// Who makes a call, as [`guarded`] has found.
pub(super) fn caller_of<T>(request: &tonic::Request<T>) -> Caller {
    request.extensions().get().copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prost::Message as _;

    use super::*;

    #[test]
    fn every_method_has_a_role() {
        let mut described = BTreeSet::new();
        for set in [
            crate::server::pb::DESCRIPTORS,
            tonic_health::pb::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1::FILE_DESCRIPTOR_SET,
            tonic_reflection::pb::v1alpha::FILE_DESCRIPTOR_SET,
        ] {
            for file in prost_types::FileDescriptorSet::decode(set).expect("descriptors").file {
                for service in &file.service {
                    let name = format!("/{}.{}", file.package(), service.name());
                    described.extend(service.method.iter().map(|method| format!("{name}/{}", method.name())));
                }
            }
        }
        let listed: BTreeSet<String> = METHODS.iter().map(|(method, _)| (*method).to_owned()).collect();
        assert_eq!(listed, described, "give each method a role in METHODS");
        assert_eq!(listed.len(), METHODS.len(), "each method is listed once");
    }

    #[test]
    fn only_health_needs_no_token() {
        for path in ["/rollout.v1.Rollout/Nothing", "/nothing", "", "/grpc.health.v1.Health/Check/", "/x"] {
            assert_eq!(role_of(path), Role::Generate, "{path:?}");
        }
        let open: Vec<_> =
            METHODS.iter().filter(|(_, role)| *role == Role::Anyone).map(|(method, _)| *method).collect();
        assert_eq!(open, ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"]);
    }
}
