//! HTTP: OpenAI's API, the routes by which RL trainers drive vLLM, metrics and the page. A body becomes the protobuf
//! message that gRPC's clients send, so that both share checks, defaults and results.

mod anthropic;
mod connections;
mod error;
mod events;
mod facts;
mod features;
mod members;
mod middleware;
mod models;
mod npy;
mod openai;
mod page;
mod query;
mod reply;
mod request_body;
mod samples;
mod vllm;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::routing::{MethodRouter, get};
use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use utoipa::OpenApi;
use utoipa::openapi::extensions::Extensions;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};
use utoipa_axum::routes;

pub(super) use connections::serve_connections;
pub(super) use middleware::AllowedHosts;

use super::security::{Access, Role};
use super::state::ServerState;
use super::transfer::Transfers;
use anthropic::MessagesError;
use connections::Peer;
use error::{ErrorBody, HttpError, HttpResult};
use events::Feeds;
use members::{members, text_or_list};
use query::Query;
use reply::{counted, event, json, named_event};
use request_body::{Ignored, JsonBody};
use samples::{FinishedSamples, Outbox, Samples, sample, samples_per_prompt};

/// The state that every handler can reach.
#[derive(Clone)]
struct AppState {
    server: ServerState,
    /// One permit, which a load of an adapter holds while it runs.
    loads: Arc<Semaphore>,
    /// One permit, which an order of `/liveness` holds until the engine answers.
    probes: Arc<Semaphore>,
    feeds: Feeds,
    /// Pushes of a trainer that broadcasts its weights.
    transfers: Transfers,
}

/// The description of the server, to which the routes are added.
#[derive(OpenApi)]
#[openapi(components(schemas(ErrorBody, MessagesError)))]
struct Description;

/// A route with its handlers and their description.
type Route = UtoipaMethodRouter<AppState>;

/// Every route, with the role that its callers need. `/openapi.json` itself is added by [`router`].
fn table() -> impl Iterator<Item = (Role, Route)> {
    let table = [
        (Role::Anyone, routes!(facts::health)),
        (Role::Anyone, routes!(facts::ping)),
        (Role::Generate, routes!(facts::version)),
        (Role::Generate, routes!(models::models)),
        (Role::Generate, routes!(models::model)),
        (Role::Generate, routes!(facts::metrics)),
        (Role::Generate, routes!(facts::timeline)),
        (Role::Generate, routes!(openai::completions::completions)),
        (Role::Generate, routes!(openai::chat::chat_completions)),
        (Role::Generate, routes!(openai::chat::render)),
        (Role::Generate, routes!(openai::responses::responses)),
        (Role::Generate, routes!(openai::invocations::invocations)),
        (Role::Generate, routes!(anthropic::messages)),
        (Role::Generate, routes!(anthropic::count_tokens)),
        (Role::Generate, routes!(openai::tokens::tokenize)),
        (Role::Generate, routes!(openai::tokens::detokenize)),
        (Role::Generate, routes!(openai::tokens::tokenizer_info)),
        (Role::Anyone, routes!(page::page)),
        (Role::Anyone, routes!(page::part)),
    ];
    table.into_iter().chain(vllm::table())
}

/// The routes behind their middleware, and their description. Feeds end once `stop` is cancelled.
pub(super) fn router(server: &ServerState, access: &Access, hosts: AllowedHosts, stop: CancellationToken) -> Router {
    let described = OpenApiRouter::with_openapi(Description::openapi());
    let authenticated = |handlers: MethodRouter<AppState>, role| {
        handlers.layer(from_fn_with_state((access.clone(), role), middleware::authenticate))
    };
    let described = table().fold(described, |router, (role, route)| {
        let (schemas, paths, handlers) = describe(role, route);
        router.routes((schemas, paths, authenticated(handlers, role)))
    });
    let (router, mut description) = described.split_for_parts();
    // `{*id}` is axum's spelling of a parameter that may have slashes.
    let paths = std::mem::take(&mut description.paths.paths);
    description.paths.paths = paths.into_iter().map(|(path, item)| (path.replace("{*", "{"), item)).collect();
    let description: Bytes = description.to_json().expect("it is made of strings and numbers").into();
    let openapi = || async move { ([(CONTENT_TYPE, "application/json")], description) };
    let app = AppState {
        server: server.clone(),
        loads: Arc::new(Semaphore::new(1)),
        probes: Arc::new(Semaphore::new(1)),
        feeds: Feeds::new(stop),
        transfers: Transfers::start(server),
    };
    // The last layer runs first.
    router
        .route("/openapi.json", authenticated(get(openapi), Role::Generate))
        // Not described: it is the page's own, and a client that tries all described routes would read it forever.
        .route("/events", authenticated(get(events::events), Role::Generate))
        .fallback(|| async { HttpError::no_route() })
        .method_not_allowed_fallback(|| async { HttpError::wrong_method() })
        .layer(from_fn_with_state(server.panics.clone(), middleware::catch_panic))
        .layer(from_fn_with_state(hosts, middleware::check_origin))
        .layer(from_fn(anthropic::write_errors))
        .layer(from_fn_with_state(server.observer.clone(), openai::load::report_load))
        .layer(from_fn_with_state(server.observer.clone(), middleware::count_request))
        .with_state(app)
}

/// The route, with the parts of its description that follow from its role and its errors.
fn describe(role: Role, (schemas, mut paths, handlers): Route) -> Route {
    for (route, path) in &mut paths.paths {
        for operation in [&mut path.get, &mut path.post, &mut path.delete].into_iter().flatten() {
            operation.extensions.get_or_insert_with(Extensions::default).insert("x-role".into(), role.name().into());
            error::describe_errors(operation, if anthropic::is_route(route) { "MessagesError" } else { "ErrorBody" });
        }
    }
    (schemas, paths, handlers)
}

/// The time in seconds since 1970.
fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    pub(super) mod bodies;
    pub(super) mod heap;
}
