//! Start, health, reflection and shutdown of the server.

use std::sync::mpsc::sync_channel;
use std::time::Duration;

use rollout_server::engine::{Command, EngineHandle, EngineStatus, LifecycleStatus};
use rollout_server::error::Error;
use rollout_server::observe::Observer;
use rollout_server::server::pb::rollout_client::RolloutClient;
use rollout_server::server::pb::{self, generate_response::Event as Message};
use rollout_server::server::{Bound, Ended, serve, shutdown_channel, watch_signals};
use rollout_server::types::FinishReason;
use tokio_stream::StreamExt as _;
use tonic::Code;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;
use tonic_reflection::pb::v1::{ServerReflectionRequest, ServiceResponse};
use tonic_reflection::pb::v1alpha;

use super::harness::*;

async fn health(watch: &mut tonic::Streaming<HealthCheckResponse>) -> Option<ServingStatus> {
    let message = tokio::time::timeout(PATIENCE, watch.message()).await.expect("a status in time");
    message.expect("no error").map(|m| m.status())
}

async fn ended(server: tokio::task::JoinHandle<Result<Ended, Error>>) -> Ended {
    let ended = tokio::time::timeout(PATIENCE, server).await.expect("ends in time");
    ended.expect("no panic").expect("no error")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_follows_the_life_of_the_server() {
    let bound = Bound::new(&config(0)).expect("a free port");
    let url = format!("http://{}", bound.address());
    let (loaded, loading) = tokio::sync::oneshot::channel();
    let (shutdown, orders) = shutdown_channel();
    let load = async { Ok(loading.await.expect("the test loads")) };
    let server = tokio::spawn(serve(bound, Observer::new().0, load, orders));

    let channel = tonic::transport::Channel::from_shared(url).expect("a URL").connect().await.expect("listens");
    let service = "rollout.v1.Rollout".to_owned();
    let watch = HealthClient::new(channel.clone()).watch(HealthCheckRequest { service }).await;
    let mut watch = watch.expect("health is there from the start").into_inner();
    assert_eq!(health(&mut watch).await, Some(ServingStatus::NotServing));
    let status = RolloutClient::new(channel.clone()).generate(request()).await.expect_err("no model yet");
    assert_eq!(status.code(), Code::Unavailable, "{status}");

    let (sender, commands) = sync_channel(1);
    assert!(loaded.send(context(EngineHandle::new(sender))).is_ok());
    assert_eq!(health(&mut watch).await, Some(ServingStatus::Serving));
    let all = HealthClient::new(channel).check(HealthCheckRequest::default()).await.expect("checked");
    assert_eq!(all.into_inner().status(), ServingStatus::Serving);

    shutdown.order();
    assert_eq!(health(&mut watch).await, Some(ServingStatus::NotServing));
    // The watcher's stream is ended, so that it cannot delay the shutdown.
    assert_eq!(health(&mut watch).await, None);
    assert!(matches!(commands.recv_timeout(PATIENCE), Ok(Command::Shutdown { .. })));
    assert_eq!(ended(server).await, Ended::Drained);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_while_loading_ends_at_once() {
    let (shutdown, orders) = shutdown_channel();
    let bound = Bound::new(&config(0)).expect("a free port");
    let server = tokio::spawn(serve(bound, Observer::new().0, std::future::pending(), orders));
    shutdown.order();
    assert_eq!(ended(server).await, Ended::Cut);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_is_an_order_to_end() {
    let server = start().await;
    watch_signals(server.shutdown.clone()).expect("handlers can be installed");
    let kill = std::process::Command::new("sh").args(["-c", "kill -TERM $PPID"]).status();
    assert!(kill.expect("there is a shell").success());
    assert!(matches!(server.command(), Command::Shutdown { .. }));
    assert_eq!(ended(server.server).await, Ended::Drained);
}

#[tokio::test]
async fn a_failed_load_ends_the_start() {
    let (_shutdown, orders) = shutdown_channel();
    let bound = Bound::new(&config(0)).expect("a free port");
    let failed = std::future::ready(Err(Error::Config("no such model".into())));
    let error = serve(bound, Observer::new().0, failed, orders).await.expect_err("cannot serve");
    assert_eq!(error.to_string(), "no such model");
}

#[test]
fn a_taken_port_is_one_clear_error() {
    let first = Bound::new(&config(0)).expect("a free port");
    let error = Bound::new(&config(first.address().port())).err().expect("the port is taken").to_string();
    assert!(error.contains(&first.address().to_string()) && error.contains("--port"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_lists_the_services() {
    let server = start().await;
    let ask = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut client = ServerReflectionClient::new(server.channel().await);
    let answers = client.server_reflection_info(tokio_stream::iter([ask])).await.expect("answers");
    let answer = answers.into_inner().next().await.expect("one answer").expect("no error");
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else { panic!("{answer:?}") };
    let names: Vec<_> = list.service.into_iter().map(|ServiceResponse { name }| name).collect();
    for name in ["rollout.v1.Rollout", "rollout.v1.Control", "grpc.health.v1.Health"] {
        assert!(names.iter().any(|n| n == name), "{name} is not in {names:?}");
    }
}

/// Python's reflection client speaks v1alpha only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reflection_answers_in_its_older_version_too() {
    let server = start().await;
    let symbol = v1alpha::server_reflection_request::MessageRequest::FileContainingSymbol("rollout.v1.Weights".into());
    let ask = v1alpha::ServerReflectionRequest { host: String::new(), message_request: Some(symbol) };
    let mut client = v1alpha::server_reflection_client::ServerReflectionClient::new(server.channel().await);
    let answers = client.server_reflection_info(tokio_stream::iter([ask])).await.expect("answers");
    let answer = answers.into_inner().next().await.expect("one answer").expect("no error");
    let found = answer.message_response.expect("a message");
    let v1alpha::server_reflection_response::MessageResponse::FileDescriptorResponse(files) = found else {
        panic!("{found:?}")
    };
    assert!(files.file_descriptor_proto[0].windows(6).any(|bytes| bytes == b"Update"), "the file has the method");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_lets_running_requests_finish_and_refuses_new_ones() {
    let server = start().await;
    let (mut stream, mut engine) = server.running(request()).await;
    let mut other = server.rollout().await;
    let mut control = server.control().await;
    server.shutdown.order();
    let Command::Shutdown { grace } = server.command() else { panic!("not a Shutdown") };
    assert_eq!(grace, Duration::from_secs(60));

    let status = other.generate(request()).await.expect_err("refused");
    assert_eq!((status.code(), status.message()), (Code::Unavailable, "the server is shutting down"));
    let asking = tokio::spawn(async move { control.get_status(pb::GetStatusRequest {}).await });
    let Command::Status { reply } = server.command() else { panic!("not a Status") };
    reply(EngineStatus { lifecycle: LifecycleStatus::ShuttingDown, ..Default::default() });
    let status = asking.await.expect("no panic").expect("still answered").into_inner();
    assert_eq!(status.lifecycle(), pb::Lifecycle::ShuttingDown);
    assert!(!server.server.is_finished());

    (engine.client.responder)(completion_event(0, &[7], FinishReason::Length));
    (engine.client.responder)(done());
    assert!(matches!(next(&mut stream).await, Some(Message::Completion(_))));
    assert!(matches!(next(&mut stream).await, Some(Message::Summary(_))));
    assert_eq!(next(&mut stream).await, None);
    assert_eq!(ended(server.server).await, Ended::Drained);
    assert!(RolloutClient::connect(server.url).await.is_err(), "nobody listens any more");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_order_aborts_what_runs() {
    let server = start().await;
    let (mut stream, mut engine) = server.running(request()).await;
    server.shutdown.order();
    assert!(matches!(server.command(), Command::Shutdown { grace } if grace == Duration::from_secs(60)));
    server.shutdown.order();
    assert!(matches!(server.command(), Command::Shutdown { grace: Duration::ZERO }));
    (engine.client.responder)(completion_event(0, &[7], FinishReason::Aborted));
    (engine.client.responder)(done());
    let Some(Message::Completion(partial)) = next(&mut stream).await else { panic!("not a completion") };
    assert_eq!(partial.finish_reason(), pb::FinishReason::Aborted);
    assert!(matches!(next(&mut stream).await, Some(Message::Summary(_))));
    assert_eq!(ended(server.server).await, Ended::Drained);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_order_to_end_waits_for_room_in_the_queue() {
    let server = start_with_queue(1).await;
    let mut client = server.rollout().await;
    let stream = client.generate(request()).await.expect("fits in the queue");
    server.shutdown.order();
    // Keeps the queue full until the server has begun to end and a moment longer, so that its order meets a full queue.
    while client.generate(request()).await.expect_err("full, then ending").code() != Code::Unavailable {}
    tokio::time::sleep(Duration::from_millis(50)).await;
    let engine = server.generate_command();
    assert!(matches!(server.command(), Command::Shutdown { .. }));
    drop((stream, engine));
    assert_eq!(ended(server.server).await, Ended::Drained);
}
