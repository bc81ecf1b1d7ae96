//! How updates end that are never committed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rollout_server::engine::{Command, EngineStatus, UpdateStatus};
use rollout_server::error::Error;
use rollout_server::server::pb::{self, update_request::Kind};
use rollout_server::weights::{ReceiveMode, UpdateHeader, UpdateKind};
use tonic::Code;

use super::harness::*;
use super::updates::{Update, begin, chunk, full, norm};

fn open_update() -> UpdateStatus {
    UpdateStatus {
        id: 7,
        header: Arc::new(UpdateHeader { new_version: Some(3), ..UpdateHeader::new(UpdateKind::Delta) }),
        peer: "10.0.0.7:4711".into(),
        open_for: Duration::from_millis(2500),
        idle_for: Duration::from_millis(1500),
        committed: false,
    }
}

fn as_message() -> pb::OpenUpdate {
    pb::OpenUpdate {
        id: 7,
        peer: "10.0.0.7:4711".into(),
        kind: pb::UpdateKind::Delta.into(),
        adapter: String::new(),
        new_version: Some(3),
        open_seconds: 2.5,
        idle_seconds: 1.5,
        committed: false,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_that_sends_nothing_more_is_ended() {
    let server = start_with(16, Duration::from_secs(3)).await;
    let update = Update::start(&server).await;
    update.send(Kind::Header(full())).await;
    let begin = begin(&server, ReceiveMode::Stage);
    let peer = &begin.sender.peer;
    assert!(peer.starts_with("127.0.0.1:"), "{peer}");
    update.send(chunk(0, 0, &norm()[..3])).await;
    // The stream stays open, so that only the time limit can end it.
    let status = tokio::time::timeout(PATIENCE, update.reply).await.expect("it ends").expect("no panic");
    let status = status.expect_err("ended");
    assert_eq!(status.code(), Code::Aborted, "{status}");
    assert!(status.message().contains("--update-idle-seconds"), "{status}");
    eventually("the cancel flag", || begin.sender.cancel.is_cancelled()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_is_cancelled_by_another_client_and_told_why() {
    let server = start().await;
    let update = Update::start(&server).await;
    update.send(Kind::Header(full())).await;
    let begin = begin(&server, ReceiveMode::Stage);
    let mut client = server.weights().await;
    let call = tokio::spawn(async move { client.cancel_update(pb::CancelUpdateRequest { id: Some(7) }).await });
    let Command::CancelUpdate { update: Some(7), reply } = server.command() else { panic!("not that CancelUpdate") };
    (begin.sender.ended)(Error::Aborted("ended by CancelUpdate".into()));
    reply(Some(open_update()));
    assert_eq!(call.await.expect("no panic").expect("answered").into_inner().update, Some(as_message()));
    let status = tokio::time::timeout(PATIENCE, update.reply).await.expect("it ends").expect("no panic");
    let status = status.expect_err("cancelled");
    assert_eq!((status.code(), status.message()), (Code::Aborted, "ended by CancelUpdate"));
    eventually("the cancel flag", || begin.sender.cancel.is_cancelled()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_that_is_cancelled_as_its_commit_comes_is_told_the_same() {
    let server = start().await;
    let update = Update::start(&server).await;
    let header = pb::Header { kind: pb::UpdateKind::Lora.into(), ..Default::default() };
    update.send(Kind::Header(header)).await;
    let begin = begin(&server, ReceiveMode::Stage);
    update.send(Kind::Commit(pb::Commit {})).await;
    let Command::CommitUpdate { reply, .. } = server.command() else { panic!("not a commit") };
    (begin.sender.ended)(Error::Aborted("ended by CancelUpdate".into()));
    reply(Err(Error::FailedPrecondition("update 7 is not open".into())));
    let status = update.reply().await.expect_err("cancelled");
    assert_eq!((status.code(), status.message()), (Code::Aborted, "ended by CancelUpdate"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_says_who_holds_the_update() {
    let server = start().await;
    for update in [None, Some(open_update())] {
        let mut client = server.control().await;
        let call = tokio::spawn(async move { client.get_status(pb::GetStatusRequest {}).await });
        let Command::Status { reply } = server.command() else { panic!("not a status") };
        reply(EngineStatus { update: update.clone(), ..EngineStatus::default() });
        let status = call.await.expect("no panic").expect("answered").into_inner();
        assert_eq!((status.updating, status.update), (update.is_some(), update.map(|_| as_message())));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn updates_that_have_not_committed_end_with_the_server() {
    let server = start().await;
    let (silent, idle) = (Update::start(&server).await, Update::start(&server).await);
    idle.send(Kind::Header(full())).await;
    let begin = begin(&server, ReceiveMode::Stage);
    let started = Instant::now();
    server.shutdown.order();
    for update in [silent, idle] {
        let status = tokio::time::timeout(PATIENCE, update.reply).await.expect("it ends").expect("no panic");
        assert_eq!(status.expect_err("the end").code(), Code::Unavailable);
    }
    eventually("the cancel flag", || begin.sender.cancel.is_cancelled()).await;
    tokio::time::timeout(PATIENCE, server.server).await.expect("it ends").expect("no panic").expect("in good order");
    assert!(started.elapsed() < config(0).shutdown_grace / 2, "{:?}", started.elapsed());
}
