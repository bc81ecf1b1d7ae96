//! Checks the token of each request before its body is received.

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;

use super::Door;
use super::error::HttpError;
use crate::server::role::Role;
use crate::server::security::Access;

/// The handlers, of which each request is checked: whether its caller may do what needs `role`.
pub(super) fn guarded(handlers: MethodRouter<Door>, role: Role, access: &Access) -> MethodRouter<Door> {
    handlers.layer(from_fn_with_state((access.clone(), role), guard))
}

/// Refuses a request, or lets it through with its [`Caller`](crate::server::security::Caller) among its extensions.
async fn guard(State((access, role)): State<(Access, Role)>, mut request: Request, next: Next) -> Response {
    match access.check(request.headers(), role, request.uri().path()) {
        Ok(caller) => {
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(error) => HttpError::from(error).into_response(),
    }
}
