//! The HTTP door: OpenAI's API, the routes by which RL trainers drive vLLM, metrics and the page. A body becomes the
//! same protobuf message that gRPC's clients send, so that both doors share checks, defaults and results.

mod body;
mod departure;
mod error;
mod events;
mod facts;
mod guard;
#[cfg(test)]
mod heap;
mod listener;
mod members;
mod observe;
mod openai;
mod origin;
mod page;
mod query;
mod reply;
mod samples;
mod vllm;
mod weight;

use std::future::Future as _;
use std::sync::Arc;
use std::task::Poll;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::sync::{Semaphore, watch};
use utoipa::openapi::extensions::Extensions;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::{Info, OpenApi};
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};
use utoipa_axum::routes;

pub(super) use listener::serve_connections;
pub(super) use origin::AllowedHosts;

use super::gate::Gate;
use super::panics::Panics;
use super::role::Role;
use super::security::Access;
use super::transfer::Transfers;
use error::HttpError;
use events::Feeds;
use guard::guarded;

/// What every route's handler can reach.
#[derive(Clone)]
pub(super) struct Door {
    gate: Gate,
    /// When the server started, in seconds since 1970.
    created: u64,
    /// The text of `/openapi.json`.
    description: Arc<str>,
    /// One permit, which a load of an adapter has while it is under way.
    loads: Arc<Semaphore>,
    feeds: Feeds,
    /// Pushes of a trainer that broadcasts its weights.
    transfers: Transfers,
}

/// A route with its handlers and their description.
type Route = UtoipaMethodRouter<Door>;

/// Every route, with the role that its callers need. `/openapi.json` itself is added by [`router`].
fn table() -> Vec<(Role, Route)> {
    let mut table = vec![
        (Role::Anyone, routes!(facts::health)),
        (Role::Anyone, routes!(facts::ping)),
        (Role::Generate, routes!(facts::version)),
        (Role::Generate, routes!(facts::models)),
        (Role::Generate, routes!(observe::metrics)),
        (Role::Generate, routes!(observe::timeline)),
        (Role::Generate, routes!(openai::completions::completions)),
        (Role::Generate, routes!(openai::chat::chat_completions)),
        (Role::Generate, routes!(openai::chat::render)),
        (Role::Generate, routes!(openai::tokens::tokenize)),
        (Role::Generate, routes!(openai::tokens::detokenize)),
        (Role::Anyone, routes!(page::page)),
        (Role::Anyone, routes!(page::part)),
    ];
    table.extend(vllm::table());
    table
}

/// The routes and their description, ready to serve. Feeds end once `stop` is true.
pub(super) fn router(gate: &Gate, access: &Access, hosts: AllowedHosts, stop: watch::Receiver<bool>) -> Router {
    let described = OpenApiRouter::with_openapi(OpenApi::new(
        Info::new("rollout-server", env!("CARGO_PKG_VERSION")),
        utoipa::openapi::path::Paths::new(),
    ));
    let described = table().into_iter().fold(described, |router, (role, route)| {
        let (schemas, paths, handlers) = with_role(role, route);
        router.routes((schemas, paths, guarded(handlers, role, access)))
    });
    let (router, description) = described.split_for_parts();
    let description = description.to_json().expect("the description is made of strings and numbers");
    let door = Door {
        gate: gate.clone(),
        created: unix_seconds(),
        description: description.into(),
        loads: Arc::new(Semaphore::new(1)),
        feeds: Feeds::new(stop),
        transfers: Transfers::start(gate),
    };
    let router = router
        .route("/openapi.json", guarded(get(openapi), Role::Generate, access))
        // Not described: it is the page's own, and whoever tries all that is described would read it for ever.
        .route("/events", guarded(get(events::events), Role::Generate, access))
        .fallback(|| async { HttpError::no_route() })
        .method_not_allowed_fallback(|| async { HttpError::wrong_method() })
        .layer(from_fn_with_state(gate.panics.clone(), isolate))
        .layer(from_fn_with_state(hosts, origin::guard));
    router.layer(from_fn_with_state(gate.observer.clone(), observe::count)).with_state(door)
}

/// Turns a panic in a handler into 500 for that request alone.
async fn isolate(State(panics): State<Panics>, request: Request, next: Next) -> Response {
    let mut answer = Box::pin(next.run(request));
    std::future::poll_fn(|cx| match panics.catch(|| answer.as_mut().poll(cx)) {
        Ok(polled) => polled,
        Err(error) => Poll::Ready(HttpError::from(error).into_response()),
    })
    .await
}

/// The route, described as one for `role`.
fn with_role(role: Role, (schemas, mut paths, handlers): Route) -> Route {
    for operation in paths.paths.values_mut().flat_map(operations) {
        let extensions = operation.extensions.get_or_insert_with(Extensions::default);
        extensions.insert("x-role".into(), role.name().into());
    }
    (schemas, paths, handlers)
}

fn operations(path: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [&mut path.get, &mut path.post, &mut path.delete].into_iter().flatten()
}

/// The time in seconds since 1970.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// The description of all routes, which OpenAPI's tools read.
async fn openapi(State(door): State<Door>) -> Response {
    ([(CONTENT_TYPE, "application/json")], door.description.to_string()).into_response()
}
