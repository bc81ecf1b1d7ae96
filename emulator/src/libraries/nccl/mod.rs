//! NCCL. Ranks are threads of this process or of others on this machine. A collective waits for all ranks where the
//! real one does; a rank that never comes holds the others until they abort.
//!
//! Captured collectives are nodes of their graph. Each call has its number in its communicator, so that ranks are found
//! that do not launch the graphs of one capture, or of which not all have captured a call.

mod hub;
mod wire;

use std::cell::Cell;
use std::ffi::c_char;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use crate::entry_points::{entry_points, missing};
use crate::error::{ErrorCode, LAUNCH_FAILED, Result};
use crate::handles::{Handle, Handles};
use crate::memory;
use crate::stream::{Operation, OperationKind, current_device, stream};
use hub::{Collective, CollectiveError, CollectiveKind, Hub};
use wire::{HubConnection, Request, type_of};

const UNHANDLED_CUDA_ERROR: i32 = 1;
const SYSTEM_ERROR: i32 = 2;
const INVALID_ARGUMENT: i32 = 4;
const INVALID_USAGE: i32 = 5;
const REMOTE_ERROR: i32 = 6;
const IN_PROGRESS: i32 = 7;
/// How long a communicator that ends waits for launches of graphs that have been destroyed.
const END_OF_GRAPHS: Duration = Duration::from_secs(2);
/// The magic number of `ncclConfig_t`.
const CONFIG_MAGIC: u32 = 0xcafe_beef;

/// The library's status for a code, which may be one already.
fn status_of(code: ErrorCode) -> i32 {
    if (1..=7).contains(&code) { code } else { UNHANDLED_CUDA_ERROR }
}

/// `ncclUniqueId`: the process that made it, its number there, and the port on which that process listens.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId([u64; 16]);

/// The first members of `ncclConfig_t`, as since version 2.14.
#[repr(C)]
pub struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: i32,
}

/// How a rank reaches its hub.
enum Link {
    Local(Arc<Hub>),
    Remote(HubConnection),
}

struct Comm {
    link: Link,
    rank: usize,
    ranks: usize,
    device: usize,
    aborted: Mutex<bool>,
    abort: Condvar,
    /// The connection has ended.
    lost: AtomicBool,
    /// It does not block, and others have not joined yet.
    joining: AtomicBool,
    /// Collectives that were called.
    calls: AtomicU64,
    /// Held by each operation that a graph has.
    in_graphs: Arc<()>,
}

static COMMS: Handles<Comm> = Handles::new();

thread_local!(static GROUP: Cell<u32> = const { Cell::new(0) });

impl Comm {
    fn new(link: Link, rank: usize, ranks: usize, device: usize) -> Self {
        let (aborted, abort) = (Mutex::new(false), Condvar::new());
        let [lost, joining] = [const { AtomicBool::new(false) }; 2];
        let (calls, in_graphs) = (AtomicU64::new(0), Arc::new(()));
        Self { link, rank, ranks, device, aborted, abort, lost, joining, calls, in_graphs }
    }

    fn join(id: UniqueId, ranks: i32, rank: i32) -> Result<Self> {
        let device = current_device().map_err(|_| UNHANDLED_CUDA_ERROR)?;
        if ranks < 1 || !(0..ranks).contains(&rank) {
            return Err(INVALID_ARGUMENT);
        }
        let (ranks, rank) = (ranks as usize, rank as usize);
        let [process, number, port, ..] = id.0;
        let link = if process == u64::from(std::process::id()) {
            let hub = wire::hub(number, ranks);
            if hub.ranks != ranks {
                return Err(INVALID_ARGUMENT);
            }
            hub.join();
            Link::Local(hub)
        } else {
            let port = u16::try_from(port).map_err(|_| INVALID_ARGUMENT)?;
            Link::Remote(HubConnection::open(port, number, ranks, rank).map_err(|_| SYSTEM_ERROR)?)
        };
        Ok(Self::new(link, rank, ranks, device))
    }

    /// The hub's answer, or nothing once the rank has aborted.
    fn ask(&self, request: Request) -> Option<Result<Vec<u8>>> {
        let answer = match &self.link {
            Link::Local(hub) => request.answer(hub, self.rank),
            Link::Remote(connection) => match connection.ask(&request) {
                Ok(answer) => answer,
                Err(_) => {
                    self.lost.store(true, Ordering::SeqCst);
                    // As in NCCL, a wait for a rank that is gone lasts until the communicator is aborted.
                    let mut aborted = self.aborted.lock().unwrap();
                    while !*aborted {
                        aborted = self.abort.wait(aborted).unwrap();
                    }
                    Err(CollectiveError::Aborted)
                }
            },
        };
        match answer {
            Ok(data) => Some(Ok(data)),
            Err(CollectiveError::Disagreement) => Some(Err(LAUNCH_FAILED)),
            Err(CollectiveError::Aborted) => None,
        }
    }

    fn wait_for_all(&self) -> Result {
        match self.ask(Request::WaitForAll) {
            Some(Ok(_)) => Ok(()),
            _ => Err(REMOTE_ERROR),
        }
    }

    /// Fails where graphs still have operations of it. Those that were destroyed end before.
    fn leave_graphs(&self) -> Result {
        let started = Instant::now();
        while Arc::strong_count(&self.in_graphs) > 1 {
            if started.elapsed() > END_OF_GRAPHS {
                eprintln!("emulator: graphs have operations of a communicator that ends: the real one waits for ever");
                return Err(INVALID_USAGE);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    fn abort(&self) {
        *self.aborted.lock().unwrap() = true;
        self.abort.notify_all();
        match &self.link {
            Link::Local(hub) => hub.abort(self.rank),
            Link::Remote(connection) => connection.close(),
        }
    }

    fn async_error(&self) -> i32 {
        if self.joining.load(Ordering::SeqCst) {
            return IN_PROGRESS;
        }
        let lost = match &self.link {
            Link::Local(hub) => hub.has_lost(),
            Link::Remote(_) => self.lost.load(Ordering::SeqCst),
        };
        if lost { REMOTE_ERROR } else { 0 }
    }
}

/// Bytes of the device's memory.
fn read(at: u64, bytes: usize) -> Result<Vec<u8>> {
    let from = memory::get().bytes_at_run(at, bytes)?;
    let mut data = vec![0; bytes];
    // SAFETY: the device's memory is checked.
    unsafe { from.copy_to(data.as_mut_ptr(), bytes) };
    Ok(data)
}

fn write(at: u64, data: &[u8]) -> Result {
    let to = memory::get().bytes_at_run(at, data.len())?;
    // SAFETY: the device's memory is checked.
    unsafe { to.copy_from(data.as_ptr(), data.len()) };
    Ok(())
}

/// An operation of a stream that brings bytes to the hub and writes what comes back.
fn push(
    comm: Handle,
    on: Handle,
    from: (u64, usize),
    to: u64,
    request: impl Fn(Vec<u8>) -> Request + Send + Sync + 'static,
) -> Result {
    let (comm, stream) = (of(comm)?, stream(on)?);
    let in_graph = stream.capture().map(|_| comm.in_graphs.clone());
    stream.push(Operation::new(OperationKind::Kernel, move || {
        let _held = &in_graph;
        let data = read(from.0, from.1)?;
        comm.ask(request(data)).map_or(Ok(()), |answer| write(to, &answer?))
    }))
}

fn collective(
    comm: Handle,
    on: Handle,
    from: u64,
    to: u64,
    kind: CollectiveKind,
    (count, ty, op, root): (usize, i32, i32, i32),
) -> Result {
    let own = of(comm)?;
    let ty = u8::try_from(ty).ok().and_then(type_of).ok_or(INVALID_ARGUMENT)?;
    let op = u8::try_from(op).ok().filter(|op| *op <= 4).ok_or(INVALID_ARGUMENT)?;
    if root < 0 || root as usize >= own.ranks {
        return Err(INVALID_ARGUMENT);
    }
    let (index, is_captured) = (own.calls.fetch_add(1, Ordering::Relaxed), stream(on)?.capture().is_some());
    let call = Collective { kind, count: count as u64, ty, op, root: root as u32, index, is_captured };
    let bytes = call.input_bytes(own.rank, own.ranks);
    push(comm, on, (from, bytes), to, move |data| Request::Collective(call, data))
}

fn init(out: *mut Handle, ranks: i32, id: UniqueId, rank: i32, blocks: bool) -> Result {
    let comm = Arc::new(Comm::join(id, ranks, rank)?);
    if !blocks {
        comm.joining.store(true, Ordering::SeqCst);
        let joins = comm.clone();
        std::thread::spawn(move || {
            let _ = joins.wait_for_all();
            joins.joining.store(false, Ordering::SeqCst);
        });
    } else if GROUP.get() == 0 {
        // In a group the others may be made by this thread later.
        comm.wait_for_all()?;
    }
    // SAFETY: the caller's pointer is valid for a handle.
    unsafe { out.write(COMMS.add(comm)) };
    Ok(())
}

fn of(comm: Handle) -> Result<Arc<Comm>> {
    COMMS.get(comm).map_err(|_| INVALID_ARGUMENT)
}

entry_points! {
    status status_of;
    fn ncclGetVersion(out: *mut i32) { *out = 22809; Ok(()) }
    fn ncclGetUniqueId(out: *mut UniqueId) {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut id = [0; 16];
        id[0] = u64::from(std::process::id());
        id[1] = NEXT.fetch_add(1, Ordering::Relaxed);
        id[2] = u64::from(wire::listen().map_err(|_| SYSTEM_ERROR)?);
        *out = UniqueId(id);
        Ok(())
    }
    fn ncclCommInitRank(out: *mut Handle, ranks: i32, id: UniqueId, rank: i32) { init(out, ranks, id, rank, true) }
    fn ncclCommInitRankConfig(out: *mut Handle, ranks: i32, id: UniqueId, rank: i32, config: *const NcclConfig) {
        if !config.is_null() && ((*config).magic != CONFIG_MAGIC || (*config).size < size_of::<NcclConfig>()) {
            return Err(INVALID_ARGUMENT);
        }
        init(out, ranks, id, rank, config.is_null() || (*config).blocking != 0)?;
        if !config.is_null() && (*config).blocking == 0 { Err(IN_PROGRESS) } else { Ok(()) }
    }
    fn ncclCommInitAll(out: *mut Handle, ranks: i32, devices: *const i32) {
        let ranks = usize::try_from(ranks).map_err(|_| INVALID_ARGUMENT)?;
        let hub = Hub::new(ranks);
        for rank in 0..ranks {
            let device = if devices.is_null() { rank } else { *devices.add(rank) as usize };
            hub.join();
            out.add(rank).write(COMMS.add(Arc::new(Comm::new(Link::Local(hub.clone()), rank, ranks, device))));
        }
        Ok(())
    }
    fn ncclCommCount(comm: Handle, out: *mut i32) { *out = of(comm)?.ranks as i32; Ok(()) }
    fn ncclCommUserRank(comm: Handle, out: *mut i32) { *out = of(comm)?.rank as i32; Ok(()) }
    fn ncclCommCuDevice(comm: Handle, out: *mut i32) { *out = of(comm)?.device as i32; Ok(()) }
    fn ncclCommGetAsyncError(comm: Handle, out: *mut i32) { *out = of(comm)?.async_error(); Ok(()) }
    fn ncclCommFinalize(comm: Handle) { of(comm).map(drop) }
    fn ncclCommDestroy(comm: Handle) { COMMS.remove(comm).map_err(|_| INVALID_ARGUMENT)?.leave_graphs() }
    fn ncclCommAbort(comm: Handle) {
        let comm = COMMS.remove(comm).map_err(|_| INVALID_ARGUMENT)?;
        comm.abort();
        comm.leave_graphs()
    }
    fn ncclGroupStart() { GROUP.set(GROUP.get() + 1); Ok(()) }
    fn ncclGroupEnd() { GROUP.set(GROUP.get().checked_sub(1).ok_or(INVALID_USAGE)?); Ok(()) }
    fn ncclAllReduce(from: u64, to: u64, count: usize, ty: i32, op: i32, comm: Handle, on: Handle) {
        collective(comm, on, from, to, CollectiveKind::AllReduce, (count, ty, op, 0))
    }
    fn ncclReduce(from: u64, to: u64, count: usize, ty: i32, op: i32, root: i32, comm: Handle, on: Handle) {
        collective(comm, on, from, to, CollectiveKind::Reduce, (count, ty, op, root))
    }
    fn ncclBroadcast(from: u64, to: u64, count: usize, ty: i32, root: i32, comm: Handle, on: Handle) {
        collective(comm, on, from, to, CollectiveKind::Broadcast, (count, ty, 0, root))
    }
    fn ncclBcast(at: u64, count: usize, ty: i32, root: i32, comm: Handle, on: Handle) {
        collective(comm, on, at, at, CollectiveKind::Broadcast, (count, ty, 0, root))
    }
    fn ncclAllGather(from: u64, to: u64, count: usize, ty: i32, comm: Handle, on: Handle) {
        collective(comm, on, from, to, CollectiveKind::AllGather, (count, ty, 0, 0))
    }
    fn ncclReduceScatter(from: u64, to: u64, count: usize, ty: i32, op: i32, comm: Handle, on: Handle) {
        collective(comm, on, from, to, CollectiveKind::ReduceScatter, (count, ty, op, 0))
    }
    fn ncclSend(from: u64, count: usize, ty: i32, peer: i32, comm: Handle, on: Handle) {
        let ty = u8::try_from(ty).ok().and_then(type_of).ok_or(INVALID_ARGUMENT)?;
        push(comm, on, (from, count * ty.bytes()), 0, move |data| Request::Send(peer as usize, data))
    }
    fn ncclRecv(to: u64, _count: usize, ty: i32, peer: i32, comm: Handle, on: Handle) {
        u8::try_from(ty).ok().and_then(type_of).ok_or(INVALID_ARGUMENT)?;
        push(comm, on, (0, 0), to, move |_| Request::Receive(peer as usize))
    }
}

missing! {
    status INVALID_USAGE;
    ncclCommSplit ncclRedOpCreatePreMulSum ncclRedOpDestroy ncclMemAlloc ncclMemFree ncclCommRegister ncclCommDeregister
    ncclCommShrink ncclCommWindowRegister ncclCommWindowDeregister ncclCommInitRankScalable ncclAlltoAll ncclGather
    ncclScatter
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(status: i32) -> *const c_char {
    let text = match status {
        0 => c"no error",
        UNHANDLED_CUDA_ERROR => c"unhandled cuda error",
        SYSTEM_ERROR => c"unhandled system error",
        INVALID_ARGUMENT => c"invalid argument",
        INVALID_USAGE => c"invalid usage",
        IN_PROGRESS => c"NCCL operation in progress",
        REMOTE_ERROR => c"remote process exited or there was a network error",
        _ => c"internal error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(_comm: Handle) -> *const c_char {
    c"see the messages of the emulator".as_ptr()
}
