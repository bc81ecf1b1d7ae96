//! Pushes, sleep and wake at the server's edge: what is refused there, and what reaches the engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rollout_server::engine::{
    AdapterTarget, CancelFlag, Command, DrainMode, LifecycleStatus, RunningPolicy, SleepLevel, SleepReply, UpdateReply,
    UpdateSender, UpdateTicket, WakeTags,
};
use rollout_server::error::Error;
use rollout_server::server::Ended;
use rollout_server::server::pb::{self, update_request::Kind};
use rollout_server::weights::{ReceiveMode, Slice, StagingBytes, TensorData, UpdateHeader, UpdateKind, WeightUpdate};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Response, Status};
use xxhash_rust::xxh3::xxh3_128;

use super::harness::*;

const NORM: &str = "model.norm.weight";
const HEAD: &str = "lm_head.weight";

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn tensor(name: &str, shape: &[u64], bytes: &[u8]) -> pb::Tensor {
    pb::Tensor {
        name: name.into(),
        dtype: pb::TensorDtype::Float32.into(),
        shape: shape.to_vec(),
        digest: xxh3_128(bytes).to_be_bytes().to_vec(),
        ..Default::default()
    }
}

pub fn norm() -> Vec<u8> {
    bytes(&[1.0, 2.0, 3.0, 4.0])
}

fn head() -> Vec<u8> {
    bytes(&(0..24).map(|i| i as f32).collect::<Vec<_>>())
}

pub fn full() -> pb::Header {
    let tensors = vec![tensor(NORM, &[4], &norm()), tensor(HEAD, &[6, 4], &head())];
    pb::Header { kind: pb::UpdateKind::Full.into(), tensors, ..Default::default() }
}

pub fn chunk(tensor: u32, offset: u64, data: &[u8]) -> Kind {
    Kind::Chunk(pb::Chunk { tensor, offset, data: data.to_vec().into() })
}

/// The client's end of one update stream.
pub struct Update {
    messages: Option<mpsc::Sender<pb::UpdateRequest>>,
    pub reply: tokio::task::JoinHandle<Result<Response<pb::UpdateResponse>, Status>>,
}

impl Update {
    pub async fn start(server: &Harness) -> Self {
        let (messages, stream) = mpsc::channel(64);
        let mut client = server.weights().await;
        let reply = tokio::spawn(async move { client.update(ReceiverStream::new(stream)).await });
        Self { messages: Some(messages), reply }
    }

    pub async fn send(&self, kind: Kind) {
        // Sending fails if the server has already refused the update.
        let _ = self.messages.as_ref().expect("open").send(pb::UpdateRequest { kind: Some(kind) }).await;
    }

    pub async fn reply(mut self) -> Result<pb::UpdateResponse, Status> {
        self.messages = None;
        let reply = tokio::time::timeout(PATIENCE, self.reply).await.expect("an answer in time");
        reply.expect("no panic").map(Response::into_inner)
    }
}

/// An update that has begun.
pub struct Begun {
    pub header: Arc<UpdateHeader>,
    pub staging: StagingBytes,
    pub sender: UpdateSender,
}

/// Takes the command that begins the update, and lets it begin.
pub fn begin(server: &Harness, mode: ReceiveMode) -> Begun {
    let Command::BeginUpdate { header, staging, sender, reply } = server.command() else { panic!("not a BeginUpdate") };
    reply(Ok(UpdateTicket { id: 7, mode }));
    Begun { header, staging, sender }
}

pub fn update_reply() -> UpdateReply {
    let pause = Duration::from_millis(12);
    UpdateReply { weight_version: 5, pause, pending: false, adapter_generation: None }
}

fn values(data: Option<TensorData<'_>>) -> Vec<f32> {
    data.expect("it is there").into_f32().into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_push_reaches_the_engine_whole() {
    let server = start().await;
    let update = Update::start(&server).await;
    let header = pb::Header {
        new_version: Some(5),
        expected_version: Some(4),
        running: pb::RunningPolicy::Recompute.into(),
        tensors: full().tensors[..1].to_vec(),
        total_bytes: Some(112),
        ..full()
    };
    update.send(Kind::Header(header)).await;
    let begin = begin(&server, ReceiveMode::Stage);
    let header = begin.header;
    assert_eq!((header.kind, header.expected_version, header.new_version), (UpdateKind::Full, Some(4), Some(5)));
    assert_eq!((header.running, header.in_place), (RunningPolicy::Recompute, false));
    assert!(begin.staging.staged >= 112, "{:?}", begin.staging);

    update.send(Kind::Manifest(pb::Manifest { tensors: full().tensors[1..].to_vec() })).await;
    update.send(chunk(1, 40, &head()[40..])).await;
    update.send(chunk(0, 0, &norm())).await;
    update.send(chunk(1, 0, &head()[..40])).await;
    update.send(Kind::Commit(pb::Commit {})).await;
    let Command::CommitUpdate { update: id, content, reply, .. } = server.command() else { panic!("not a commit") };
    assert_eq!(id, 7);
    let WeightUpdate::Full(tensors) = content else { panic!("not FULL") };
    assert_eq!(tensors.names().collect::<Vec<_>>(), [HEAD, NORM]);
    assert_eq!(values(tensors.read(NORM, &Slice { rows: 0..4, cols: 0..1 })), [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(values(tensors.read(HEAD, &Slice { rows: 1..2, cols: 2..4 })), [6.0, 7.0]);
    assert!(!begin.sender.cancel.is_cancelled());
    reply(Ok(update_reply()));
    let reply = update.reply().await.expect("committed");
    assert_eq!((reply.weight_version, reply.parameters, reply.bytes), (5, 2, 112));
    assert_eq!((reply.pause_milliseconds, reply.digest.len()), (12.0, 16));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_place_tensors_go_to_the_engine_as_they_become_complete() {
    let server = start().await;
    let update = Update::start(&server).await;
    update.send(Kind::Header(pb::Header { in_place: true, ..full() })).await;
    assert!(begin(&server, ReceiveMode::InPlace).header.in_place);
    for (index, tensor) in [(1, head()), (0, norm())] {
        update.send(chunk(index, 0, &tensor)).await;
        let Command::WritePart { update: 7, tensors, reply } = server.command() else { panic!("not a part") };
        assert_eq!(tensors.names().count(), 1);
        reply(Ok(()));
    }
    update.send(Kind::Commit(pb::Commit {})).await;
    let Command::CommitUpdate { reply, .. } = server.command() else { panic!("not a commit") };
    reply(Ok(update_reply()));
    update.reply().await.expect("committed");
}

/// Sends the messages and returns the status of the refusal. The engine must see nothing but a beginning that is
/// cancelled.
async fn refused(messages: Vec<Kind>) -> Status {
    let server = start().await;
    let update = Update::start(&server).await;
    for message in messages {
        update.send(message).await;
    }
    let commands = server.commands;
    let refused = Arc::new(AtomicBool::new(false));
    let is_refused = refused.clone();
    let engine = tokio::task::spawn_blocking(move || {
        let (mut begun, started) = (None::<CancelFlag>, Instant::now());
        // The client's call ends first, however slow the machine is, and then the transaction.
        while !(is_refused.load(Ordering::SeqCst) && begun.as_ref().is_none_or(CancelFlag::is_cancelled)) {
            match commands.recv_timeout(Duration::from_millis(10)) {
                Ok(Command::BeginUpdate { sender, reply, .. }) => {
                    begun = Some(sender.cancel.clone());
                    reply(Ok(UpdateTicket { id: 1, mode: ReceiveMode::Stage }));
                }
                Ok(Command::Look) => {}
                Ok(Command::CommitUpdate { .. }) => panic!("a commit reached the engine"),
                Ok(_) => panic!("the engine was told more"),
                Err(_) => assert!(started.elapsed() < PATIENCE, "the transaction is still open"),
            }
        }
    });
    let status = update.reply().await.expect_err("refused");
    refused.store(true, Ordering::SeqCst);
    engine.await.expect("no panic");
    status
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_is_named_and_changes_nothing() {
    let header = |change: &dyn Fn(&mut pb::Header)| {
        let mut header = full();
        change(&mut header);
        Kind::Header(header)
    };
    let good = || header(&|_| {});
    let all = || vec![good(), chunk(0, 0, &norm()), chunk(1, 0, &head())];
    let lent = |bytes: usize, uuid: &str| {
        let allocation = pb::DeviceAllocation { device_uuid: uuid.into(), handle: vec![1; bytes] };
        header(&|h| {
            h.source = Some(pb::Source { kind: Some(pb::source::Kind::DeviceMemory(pb::DeviceMemory {})) });
            h.tensors.iter_mut().for_each(|tensor| tensor.allocation = Some(allocation.clone()));
        })
    };
    let astray = || Some(pb::DeviceAllocation { device_uuid: String::new(), handle: vec![1; 64] });
    let mut wrong_digest = all();
    wrong_digest[0] = header(&|h| h.tensors[1].digest[3] ^= 1);
    let mut corrupted = all();
    corrupted[2] = chunk(1, 0, &[&head()[..95], &[0x42]].concat());
    for (code, part, mut messages, commits) in [
        (Code::InvalidArgument, "header: is missing", vec![chunk(0, 0, &norm())], true),
        (Code::InvalidArgument, "header: comes once", vec![good(), good()], true),
        (Code::InvalidArgument, "header.kind", vec![header(&|h| h.kind = 9)], true),
        (Code::InvalidArgument, "header.running", vec![header(&|h| h.running = 9)], true),
        (Code::InvalidArgument, "header.source", vec![header(&|h| h.source = Some(pb::Source { kind: None }))], true),
        (Code::InvalidArgument, "header.adapter", vec![header(&|h| h.adapter = "a".into())], true),
        (Code::InvalidArgument, "expected_version", vec![header(&|h| h.kind = pb::UpdateKind::Delta.into())], true),
        (Code::InvalidArgument, "tensors[1].dtype", vec![header(&|h| h.tensors[1].dtype = 0)], true),
        (Code::InvalidArgument, "tensors[0].digest", vec![header(&|h| h.tensors[0].digest.clear())], true),
        (
            Code::InvalidArgument,
            "model.nrm.weight",
            vec![header(&|h| h.tensors[0].name = "model.nrm.weight".into())],
            true,
        ),
        (Code::InvalidArgument, NORM, vec![header(&|h| h.tensors[0].shape = vec![5])], true),
        (Code::InvalidArgument, HEAD, vec![header(&|h| h.tensors.truncate(1))], true),
        (Code::InvalidArgument, HEAD, all()[..2].to_vec(), true),
        (Code::InvalidArgument, "chunk.data", vec![good(), chunk(0, 0, &vec![0; (4 << 20) + 1])], true),
        (Code::InvalidArgument, "commit: is missing", all(), false),
        (Code::InvalidArgument, "tensors[0].allocation.handle: 63 bytes", vec![lent(63, "a")], true),
        (Code::InvalidArgument, "tensors[0].allocation.handle: 0 bytes", vec![lent(0, "a")], true),
        (Code::InvalidArgument, "tensors[0].allocation.device_uuid", vec![lent(64, &"a".repeat(65))], true),
        (Code::InvalidArgument, "tensors[1].allocation", vec![header(&|h| h.tensors[1].allocation = astray())], true),
        (Code::FailedPrecondition, "push inline or through shared memory", vec![lent(64, "a")], true),
        (Code::DataLoss, HEAD, wrong_digest, true),
        (Code::DataLoss, HEAD, corrupted, true),
    ] {
        if commits {
            messages.push(Kind::Commit(pb::Commit {}));
        }
        println!("expecting {code:?} with {part}");
        let status = refused(messages).await;
        assert_eq!(status.code(), code, "{part}: {status}");
        assert!(status.message().contains(part), "{part:?} is missing in {status}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_vanishes_cancels_its_transaction() {
    let server = start().await;
    let update = Update::start(&server).await;
    update.send(Kind::Header(full())).await;
    let begin = begin(&server, ReceiveMode::Stage);
    update.send(chunk(0, 0, &norm())).await;
    update.reply.abort();
    eventually("the cancel flag", || begin.sender.cancel.is_cancelled()).await;
    assert!(matches!(server.command(), Command::Look));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_engine_s_refusals_have_their_codes() {
    for (error, code) in [
        (Error::VersionConflict("have 3".into()), Code::Aborted),
        (Error::ResourceExhausted("no room".into()), Code::ResourceExhausted),
        (Error::FailedPrecondition("asleep".into()), Code::FailedPrecondition),
    ] {
        let server = start().await;
        let update = Update::start(&server).await;
        update.send(Kind::Header(full())).await;
        let Command::BeginUpdate { reply, .. } = server.command() else { panic!("not a BeginUpdate") };
        reply(Err(error));
        assert_eq!(update.reply().await.expect_err("refused").code(), code);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sleep_wake_pause_and_resume_carry_their_words() {
    let server = start().await;
    let mut client = server.control().await;
    let call = tokio::spawn(async move {
        let (level, mode) = (pb::SleepLevel::SleepLevel2.into(), pb::DrainMode::Keep.into());
        let slept = client.sleep(pb::SleepRequest { level, mode }).await.expect("sleeps").into_inner();
        let tags = vec![pb::MemoryTag::Weights.into()];
        let woken = client.wake(pb::WakeRequest { tags, reload: true }).await.expect("wakes").into_inner();
        let mode = pb::DrainMode::Abort.into();
        client.pause(pb::PauseRequest { mode }).await.expect("pauses");
        client.resume(pb::ResumeRequest {}).await.expect("resumes");
        (slept, woken)
    });
    let Command::Sleep { level: SleepLevel::Two, mode: DrainMode::Keep, reply, .. } = server.command() else {
        panic!("not that sleep")
    };
    let took = Duration::from_millis(1500);
    reply(Ok(SleepReply { weights_bytes: 10, kv_cache_bytes: 20, resident_bytes: 30, took }));
    // The guard of the finished call may wake the engine first, or not.
    let next = || loop {
        match server.command() {
            Command::Look => {}
            command => return command,
        }
    };
    let Command::Wake { tags, reload: true, reply } = next() else { panic!("not that wake") };
    let resident = WakeTags { weights: true, kv_cache: false };
    assert_eq!(tags, resident);
    reply(Ok(LifecycleStatus::Asleep { level: SleepLevel::Two, resident, pending_update: false }));
    let Command::Pause { mode: DrainMode::Abort, reply, .. } = next() else { panic!("not that pause") };
    reply(Ok(()));
    let Command::Resume { reply } = next() else { panic!("not a resume") };
    reply(Ok(()));
    let (slept, woken) = call.await.expect("no panic");
    let released: Vec<_> = slept.released.iter().map(|r| (r.tag(), r.bytes)).collect();
    assert_eq!(released, [(pb::MemoryTag::Weights, 10), (pb::MemoryTag::KvCache, 20)]);
    assert_eq!((slept.resident_bytes, slept.seconds), (30, 1.5));
    assert_eq!(woken.lifecycle(), pb::Lifecycle::Asleep);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_levels_modes_and_tags_are_refused_at_the_door() {
    let server = start().await;
    let mut client = server.control().await;
    let level = client.sleep(pb::SleepRequest { level: 3, mode: 0 }).await.expect_err("no level");
    let mode = client.pause(pb::PauseRequest { mode: 4 }).await.expect_err("no mode");
    let tag = client.wake(pb::WakeRequest { tags: vec![0], reload: false }).await.expect_err("no tag");
    let kv_cache = vec![pb::MemoryTag::KvCache.into()];
    let reload = client.wake(pb::WakeRequest { tags: kv_cache, reload: true }).await.expect_err("no weights");
    for (status, part) in [(level, "level: 3"), (mode, "mode: 4"), (tag, "tags: 0"), (reload, "reload: ")] {
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        assert!(status.message().contains(part), "{part:?} is missing in {status}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_adapter_that_stays_is_named_to_the_engine() {
    let server = start().await;
    let update = Update::start(&server).await;
    let header = pb::Header {
        kind: pb::UpdateKind::Lora.into(),
        adapter: "math".into(),
        expected_generation: Some(3),
        evict_adapter: true,
        ..Default::default()
    };
    update.send(Kind::Header(header)).await;
    let target = AdapterTarget { name: "math".into(), expected_generation: Some(3), evicts: true };
    assert_eq!(begin(&server, ReceiveMode::Stage).header.adapter, Some(target));
    update.send(Kind::Commit(pb::Commit {})).await;
    let Command::CommitUpdate { content: WeightUpdate::Lora(_), reply, .. } = server.command() else {
        panic!("not a LORA commit")
    };
    reply(Ok(UpdateReply { adapter_generation: Some(4), ..update_reply() }));
    assert_eq!(update.reply().await.expect("committed").adapter_generation, Some(4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parameters_are_listed_as_they_serve() {
    let server = start().await;
    let reply = server.weights().await.list_parameters(pb::ListParametersRequest {}).await.expect("listed");
    let listed = reply.into_inner().parameters;
    let shapes: Vec<_> = listed.iter().map(|p| (p.name.as_str(), p.shape.clone(), p.dtype())).collect();
    let dtype = pb::TensorDtype::Float32;
    assert_eq!(shapes, [(NORM, vec![4], dtype), (HEAD, vec![6, 4], dtype)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_push_that_idles_ends_with_the_engine() {
    let server = start().await;
    let update = Update::start(&server).await;
    update.send(Kind::Header(full())).await;
    begin(&server, ReceiveMode::Stage);
    server.shutdown.order();
    // The push ends with the order, and the engine may hear of that first.
    let order = std::iter::repeat_with(|| server.command()).find(|command| !matches!(command, Command::Look));
    assert!(matches!(order, Some(Command::Shutdown { .. })));
    server.shutdown.engine_ended();
    let status = tokio::time::timeout(PATIENCE, update.reply).await.expect("ends in time").expect("no panic");
    assert_eq!(status.expect_err("not committed").code(), Code::Unavailable);
    let ended = tokio::time::timeout(PATIENCE, server.server).await.expect("ends in time").expect("no panic");
    assert_eq!(ended.expect("no error"), Ended::Drained);
}
