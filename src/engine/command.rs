//! Commands to the engine, and their replies. Only the server makes them, from requests that it has checked.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::client::{Activity, CancelFlag};
use super::request::{GenerateCommand, RequestList};
use crate::error::{Error, Result};
use crate::memory::{Charge, MemoryReport};
use crate::types::{EngineStats, Owner, Tenant, WeightVersion};
use crate::weights::{
    Adapter, ReceiveMode, ServingWeights, StagingBytes, StoredVersion, Tensors, UpdateHeader, WeightUpdate,
};
pub use crate::weights::{AdapterTarget, RunningPolicy};

/// Takes the answer to a command.
pub type Reply<T> = Box<dyn FnOnce(T) + Send>;

/// One message to the engine.
pub enum Command {
    /// Runs a request; its events go to its responder.
    Generate(Box<GenerateCommand>),
    /// Ends requests. Their samples keep the tokens they have. With an owner, only that owner's requests end, and
    /// requests of others count as unknown.
    Abort {
        target: AbortTarget,
        owner: Option<Owner>,
        reply: Reply<AbortReply>,
    },
    Status {
        reply: Reply<EngineStatus>,
    },
    /// Frees the cached prefixes that no sequence holds. The reply is the number of their blocks.
    ResetPrefixCache {
        reply: Reply<Result<usize>>,
    },
    /// Drops the embeddings of all pictures. The reply is the number of the pictures.
    ResetEncoderCache {
        reply: Reply<usize>,
    },
    /// Opens an update: makes all checks that are possible before its data arrives, and reserves memory for it.
    BeginUpdate {
        header: Arc<UpdateHeader>,
        staging: StagingBytes,
        sender: UpdateSender,
        reply: Reply<Result<UpdateTicket>>,
    },
    /// Writes tensors of a FULL push in place. From then on the weights are missing, until the commit.
    WritePart {
        update: u64,
        tensors: Arc<Tensors>,
        reply: Reply<Result<()>>,
    },
    /// Applies the open update between two steps: at once, or when its [`RunningPolicy`] allows it. `content` is the
    /// whole push or, for a push in place, the part that has not been written.
    CommitUpdate {
        update: u64,
        content: WeightUpdate,
        /// Digest of the values of the vision tower, if the push brings all of them.
        tower: Option<[u8; 16]>,
        /// The policy's version after the update, if it was not known when the update began.
        new_version: Option<WeightVersion>,
        reply: Reply<Result<UpdateReply>>,
    },
    /// Cancels the open update, if its number is `update` or no number is given. The reply describes the update; it is
    /// `None` if no such update was open.
    CancelUpdate {
        update: Option<u64>,
        reply: Reply<Option<UpdateStatus>>,
    },
    /// Gives the serving policy another version, without changing weights.
    SetVersion {
        version: WeightVersion,
        /// Whether the version may be at or below the current one.
        force: bool,
        reply: Reply<Result<()>>,
    },
    /// Releases memory.
    Sleep {
        level: SleepLevel,
        mode: DrainMode,
        cancel: CancelFlag,
        reply: Reply<Result<SleepReply>>,
    },
    /// Takes memory back after a sleep.
    Wake {
        tags: WakeTags,
        /// Loads the checkpoint if the server has no policy, for example after a sleep at level 2.
        reload: bool,
        reply: Reply<Result<LifecycleStatus>>,
    },
    /// Stops stepping.
    Pause {
        mode: DrainMode,
        cancel: CancelFlag,
        reply: Reply<Result<()>>,
    },
    /// Steps again after a pause.
    Resume {
        reply: Reply<Result<()>>,
    },
    /// Computes the SHA-256 of parameters as they serve, or of all parameters if `names` is empty. The work is done in
    /// pieces between steps.
    Checksum {
        names: Vec<String>,
        cancel: CancelFlag,
        reply: Reply<Result<ChecksumReply>>,
    },
    /// Reads rows of a parameter as it serves: row-major, little-endian.
    ReadRows {
        parameter: String,
        rows: Range<usize>,
        reply: Reply<Result<Vec<u8>>>,
    },
    /// Lists at most this many requests that have not ended.
    ListRequests {
        most: usize,
        reply: Reply<RequestList>,
    },
    ListAdapters {
        reply: Reply<Vec<AdapterStatus>>,
    },
    /// Retires a resident adapter. The reply is its generation, sent when its last lease has ended and its memory is
    /// free.
    RemoveAdapter {
        name: String,
        expected_generation: Option<u64>,
        cancel: CancelFlag,
        reply: Reply<Result<u64>>,
    },
    /// The server has read the adapter of this name, as an [`AdapterReader`](super::AdapterReader) was asked to, or
    /// could not.
    AdapterRead {
        name: String,
        read: Result<ReadAdapter>,
    },
    /// Wakes an idle engine, because a [`CancelFlag`] was set or a reader has caught up with its
    /// [backlog](crate::memory::Backlog).
    Look,
    /// Ends the engine: new requests are rejected, running ones may finish within `grace`, and the rest are aborted.
    Shutdown {
        grace: Duration,
    },
}

/// The client that sends an update.
pub struct UpdateSender {
    /// Address of the client.
    pub peer: String,
    /// Set when the client's stream breaks, which rolls the update back.
    pub cancel: CancelFlag,
    /// For how long the client has been idle.
    pub activity: Activity,
    /// Takes the reason if `CancelUpdate` ends the update.
    pub ended: Reply<Error>,
}

/// The answer to the sender of an update that has been opened.
#[derive(Debug)]
pub struct UpdateTicket {
    pub id: u64,
    /// How to receive the tensors; in place, they are written with [`Command::WritePart`].
    pub mode: ReceiveMode,
}

/// The open update, as clients see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpdateStatus {
    pub id: u64,
    pub header: Arc<UpdateHeader>,
    pub peer: String,
    pub open_for: Duration,
    /// Time since the sender's last sign of life.
    pub idle_for: Duration,
    /// Whether its commit has arrived and waits for requests to end.
    pub committed: bool,
}

/// The result of a commit.
#[derive(Debug)]
pub struct UpdateReply {
    pub weight_version: WeightVersion,
    /// Time for which nothing stepped.
    pub pause: Duration,
    /// Whether the weights are asleep, so that the policy is loaded when they wake.
    pub pending: bool,
    /// Generation of the adapter that became resident; `None` for an update that changes the policy.
    pub adapter_generation: Option<u64>,
}

/// How a sleep or a pause treats running requests; `control.proto` describes the choices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DrainMode {
    #[default]
    Wait,
    Abort,
    Keep,
}

/// How much memory a sleep releases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SleepLevel {
    /// Releases all memory of the device, and keeps the policy so that it can be loaded again.
    #[default]
    One,
    /// Drops the policy too.
    Two,
}

/// Kinds of memory, each of which is awake or asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WakeTags {
    pub weights: bool,
    /// The KV cache with the workspace.
    pub kv_cache: bool,
}

/// Bytes that a sleep released, measured as the decrease of the process's resident memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SleepReply {
    pub weights_bytes: u64,
    /// With the workspace.
    pub kv_cache_bytes: u64,
    pub resident_bytes: u64,
    pub took: Duration,
}

/// State of the lifecycle, as clients see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LifecycleStatus {
    #[default]
    Running,
    Paused,
    Asleep {
        level: SleepLevel,
        /// The memory that is awake again.
        resident: WakeTags,
        /// Whether a pushed policy will be loaded when the weights wake.
        pending_update: bool,
    },
    WeightsMissing,
    ShuttingDown,
}

/// Checksums of parameters under one policy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ChecksumReply {
    pub weight_version: WeightVersion,
    /// Name and SHA-256 of each parameter, in the model's order.
    pub parameters: Vec<(String, [u8; 32])>,
}

/// Status of a resident adapter.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AdapterStatus {
    pub name: String,
    pub generation: u64,
    pub rank: usize,
    pub bytes: u64,
    /// The tenant whose push made it resident, or whose request named it first.
    pub tenant: Tenant,
    /// The directory that it was read from; `None` if a client sent it.
    pub directory: Option<String>,
    /// Whether it was loaded because a request named it. It leaves its slot for any other adapter that needs one, since
    /// it can be read again.
    pub on_demand: bool,
    /// Number of accepted requests that use it.
    pub leases: usize,
    /// Orders adapters by their last use: that of the least recently used one is the lowest.
    pub last_use: u64,
    /// Whether it was replaced or removed. A retired adapter is dropped with its last lease.
    pub retired: bool,
}

/// An adapter that the server has read for requests that name it.
#[derive(Debug)]
pub struct ReadAdapter {
    pub adapter: Arc<Adapter>,
    /// The directory that it was read from.
    pub directory: String,
    /// Covers the memory for it until it is resident.
    pub charge: Charge,
}

/// The requests that an abort ends.
#[derive(Clone, Debug, PartialEq)]
pub enum AbortTarget {
    All,
    /// Requests by their ids.
    Requests(Vec<String>),
}

/// Ids of the requests that an abort ended, and ids that no request had.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AbortReply {
    pub aborted: Vec<String>,
    pub unknown: Vec<String>,
}

/// Status of the engine between two steps.
#[derive(Clone, Debug, Default)]
pub struct EngineStatus {
    pub lifecycle: LifecycleStatus,
    pub memory: MemoryReport,
    /// The host's ledger, if the device has memory of its own.
    pub host_memory: Option<MemoryReport>,
    /// Bytes of requests and replies in flight.
    pub traffic_bytes: u64,
    /// The open update.
    pub update: Option<UpdateStatus>,
    pub stats: EngineStats,
    /// Sampled tokens per second, over the last ten seconds of stepping.
    pub tokens_per_second: f64,
    /// The delta store version that is serving; `None` if the policy did not come from a store.
    pub stored: Option<StoredVersion>,
}

/// Sends commands to the engine through its bounded queue. Cheap to clone.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    sender: std::sync::mpsc::SyncSender<Command>,
}

impl EngineHandle {
    pub fn new(sender: std::sync::mpsc::SyncSender<Command>) -> Self {
        Self { sender }
    }

    /// Notes in `flag` that the client is gone, and wakes the engine.
    pub fn cancel(&self, flag: &CancelFlag) {
        flag.cancel();
        self.look();
    }

    /// Notes in `flag` that the request's time is up, and wakes the engine.
    pub fn expire(&self, flag: &CancelFlag) {
        flag.expire();
        self.look();
    }

    /// Wakes an idle engine. If the queue is full, nothing is sent, because the engine is awake then.
    pub fn look(&self) {
        let _ = self.sender.try_send(Command::Look);
    }

    /// Sends a command, and blocks while the queue is full. Must not be called on a thread of an async runtime.
    ///
    /// # Errors
    /// `Unavailable` if the engine has ended.
    pub fn send_blocking(&self, command: Command) -> Result<()> {
        self.sender.send(command).map_err(|_| Error::Unavailable("the engine has ended".into()))
    }

    /// Sends a command without blocking.
    ///
    /// # Errors
    /// `ResourceExhausted` if the queue is full, `Unavailable` if the engine has ended.
    pub fn send(&self, command: Command) -> Result<()> {
        use std::sync::mpsc::TrySendError;
        self.sender.try_send(command).map_err(|e| match e {
            TrySendError::Full(_) => Error::ResourceExhausted("the engine's command queue is full; try again".into()),
            TrySendError::Disconnected(_) => Error::Unavailable("the engine has ended".into()),
        })
    }
}

impl ServingWeights for EngineHandle {
    /// Blocks until the engine has read them between two steps. Must not be called on a thread of an async runtime.
    fn read(&self, parameter: &str, rows: Range<usize>) -> Result<Vec<u8>> {
        let (sender, answer) = std::sync::mpsc::sync_channel(1);
        // The caller may be gone only if its thread has died.
        let reply = Box::new(move |read| drop(sender.send(read)));
        self.send_blocking(Command::ReadRows { parameter: parameter.into(), rows, reply })?;
        answer.recv().map_err(|_| Error::Unavailable("the engine has ended".into()))?
    }
}
