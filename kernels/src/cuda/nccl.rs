//! NCCL, which is loaded when ranks join, so that a server with one rank starts on machines without it. candle's
//! feature `nccl` would link it, and every program would need it then.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};

use super::library::Library;
use crate::values::Dtype;

/// The id of a group of ranks, `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct NcclId(pub [u8; 128]);

/// `ncclComm_t`.
type Handle = *mut c_void;
/// `ncclResult_t`; 0 is success.
type Status = c_int;

/// `ncclDataType_t`.
const UINT8: c_int = 1;
const FLOAT16: c_int = 6;
const FLOAT32: c_int = 7;
const BFLOAT16: c_int = 9;
const SUM: c_int = 0;
/// `ncclInProgress`: the call has not finished, and [`NonblockingCommunicator::is_ready`] says when it has.
const IN_PROGRESS: Status = 7;

/// The first members of `ncclConfig_t`, all that there were in version 2.14; later ones get their defaults.
#[repr(C)]
struct NcclConfig {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

/// Calls return at once, so that a wait can be cancelled.
static DOES_NOT_BLOCK: NcclConfig =
    NcclConfig { size: size_of::<NcclConfig>(), magic: 0xcafe_beef, version: 2_14_00, blocking: 0 };

/// The functions that are called, as `nccl.h` declares them.
struct NcclFunctions {
    get_unique_id: unsafe extern "C" fn(*mut NcclId) -> Status,
    init_rank: unsafe extern "C" fn(*mut Handle, c_int, NcclId, c_int) -> Status,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Handle, sys::CUstream) -> Status,
    all_reduce: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, sys::CUstream) -> Status,
    destroy: unsafe extern "C" fn(Handle) -> Status,
    init_rank_config: unsafe extern "C" fn(*mut Handle, c_int, NcclId, c_int, *const NcclConfig) -> Status,
    broadcast: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, c_int, Handle, sys::CUstream) -> Status,
    async_error: unsafe extern "C" fn(Handle, *mut Status) -> Status,
    abort: unsafe extern "C" fn(Handle) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    last_error: unsafe extern "C" fn(Handle) -> *const c_char,
    version: unsafe extern "C" fn(*mut c_int) -> Status,
}

/// With NCCL's error message.
type Result<T> = std::result::Result<T, String>;

impl NcclFunctions {
    fn get() -> Result<&'static Self> {
        static FUNCTIONS: OnceLock<Result<NcclFunctions>> = OnceLock::new();
        FUNCTIONS.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self> {
        let library = Library::open(c"libnccl.so.2")
            .ok_or("there is no libnccl.so.2: LD_LIBRARY_PATH must name its directory")?;
        // SAFETY: the types of the fields are those of the functions, all of which NCCL has had since version 2.14.
        unsafe {
            Ok(Self {
                get_unique_id: library.find(c"ncclGetUniqueId")?,
                init_rank: library.find(c"ncclCommInitRank")?,
                all_gather: library.find(c"ncclAllGather")?,
                all_reduce: library.find(c"ncclAllReduce")?,
                destroy: library.find(c"ncclCommDestroy")?,
                init_rank_config: library.find(c"ncclCommInitRankConfig")?,
                broadcast: library.find(c"ncclBroadcast")?,
                async_error: library.find(c"ncclCommGetAsyncError")?,
                abort: library.find(c"ncclCommAbort")?,
                error_string: library.find(c"ncclGetErrorString")?,
                last_error: library.find(c"ncclGetLastError")?,
                version: library.find(c"ncclGetVersion")?,
            })
        }
    }

    fn check(&self, call: &str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any status, and returns a static text.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(format!("{call}: {}", text.to_string_lossy()))
    }

    /// As [`NcclFunctions::check`], for a call that may return before it has finished.
    fn begun(&self, call: &str, status: Status) -> Result<()> {
        if status == IN_PROGRESS { Ok(()) } else { self.check(call, status) }
    }
}

impl NcclId {
    /// # Errors
    /// If there is no NCCL, or it finds no way between ranks.
    pub fn new() -> Result<Self> {
        let (library, mut id) = (NcclFunctions::get()?, Self([0; 128]));
        // SAFETY: the id is written.
        let status = unsafe { (library.get_unique_id)(&raw mut id) };
        library.check("ncclGetUniqueId", status).map(|()| id)
    }
}

/// The communicator of one rank. Its calls are operations of a stream.
pub(super) struct NcclCommunicator {
    library: &'static NcclFunctions,
    handle: Handle,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time.
unsafe impl Send for NcclCommunicator {}

impl NcclCommunicator {
    /// Joins with the device that is current on this thread; waits until all ranks have.
    ///
    /// # Errors
    /// NCCL's error.
    pub fn join(id: NcclId, rank: usize, world: usize) -> Result<Self> {
        let (library, mut handle) = (NcclFunctions::get()?, null_mut());
        // SAFETY: the handle is written.
        let status = unsafe { (library.init_rank)(&raw mut handle, world as c_int, id, rank as c_int) };
        library.check("ncclCommInitRank", status).map(|()| Self { library, handle })
    }

    /// Copies `count` values of each rank to `to` on all, those of rank 0 first.
    ///
    /// # Errors
    /// NCCL's error.
    ///
    /// # Safety
    /// Both addresses are of memory that is large enough until the stream has come so far, and all ranks call the same.
    pub unsafe fn all_gather(&self, from: u64, to: u64, count: usize, stream: &CudaStream) -> Result<()> {
        let (from, to) = (from as *const c_void, to as *mut c_void);
        // SAFETY: the caller's promise.
        let status = unsafe { (self.library.all_gather)(from, to, count, FLOAT32, self.handle, stream.cu_stream()) };
        self.library.check("ncclAllGather", status)
    }

    /// Replaces `count` values by their sums over all ranks, in the order of NCCL.
    ///
    /// # Errors
    /// NCCL's error.
    ///
    /// # Safety
    /// The same as [`NcclCommunicator::all_gather`].
    pub unsafe fn all_reduce(&self, at: u64, count: usize, stream: &CudaStream) -> Result<()> {
        let (from, to) = (at as *const c_void, at as *mut c_void);
        // SAFETY: the caller's promise.
        let status =
            unsafe { (self.library.all_reduce)(from, to, count, FLOAT32, SUM, self.handle, stream.cu_stream()) };
        self.library.check("ncclAllReduce", status)
    }
}

impl Drop for NcclCommunicator {
    /// Waits until all ranks drop theirs.
    fn drop(&mut self) {
        // SAFETY: nothing uses the communicator any more.
        let status = unsafe { (self.library.destroy)(self.handle) };
        if let Err(error) = self.library.check("ncclCommDestroy", status) {
            tracing::error!("{error}");
        }
    }
}

/// The communicator of one rank among processes that may vanish. Its calls do not block: each begins an operation, and
/// [`NonblockingCommunicator::is_ready`] says when the next may be called. Dropping it aborts the operation and leaves
/// the group.
pub(super) struct NonblockingCommunicator {
    library: &'static NcclFunctions,
    handle: Handle,
}

// SAFETY: NCCL's communicators may be used from any thread, by one at a time.
unsafe impl Send for NonblockingCommunicator {}

impl NonblockingCommunicator {
    /// Begins to join with the device that is current on this thread.
    ///
    /// # Errors
    /// NCCL's error.
    pub fn join(id: NcclId, rank: usize, world: usize) -> Result<Self> {
        let (library, mut handle) = (NcclFunctions::get()?, null_mut());
        let (rank, world) = (rank as c_int, world as c_int);
        // SAFETY: the handle is written, and the configuration read, during the call.
        let status = unsafe { (library.init_rank_config)(&raw mut handle, world, id, rank, &raw const DOES_NOT_BLOCK) };
        library.begun("ncclCommInitRankConfig", status).map(|()| Self { library, handle })
    }

    /// Whether what was called last is done, and the next may be called.
    ///
    /// # Errors
    /// What NCCL says of the group: a process of it is gone.
    pub fn is_ready(&self) -> Result<bool> {
        let mut status = 0;
        // SAFETY: the status is written.
        let asked = unsafe { (self.library.async_error)(self.handle, &raw mut status) };
        self.library.check("ncclCommGetAsyncError", asked)?;
        self.library.begun("the group", status).map(|()| status == 0).map_err(|why| self.explained(&why))
    }

    /// An error of the group with what else NCCL says of it. It takes no group of different versions, and does not say
    /// so in the error.
    fn explained(&self, why: &str) -> String {
        let mut version = 0;
        // SAFETY: the version is written; the communicator is one, and the text is read before the next call.
        let (_, last) = unsafe { ((self.library.version)(&raw mut version), (self.library.last_error)(self.handle)) };
        let last = match last.is_null() {
            true => "".into(),
            // SAFETY: a text that there is ends with a zero.
            false => unsafe { CStr::from_ptr(last) }.to_string_lossy(),
        };
        let [major, minor, patch] = [version / 10_000, version / 100 % 100, version % 100];
        let ours = format!("this is NCCL {major}.{minor}.{patch}, and all of a group must have the same version");
        if last.is_empty() { format!("{why} ({ours})") } else { format!("{why}: {last} ({ours})") }
    }

    /// Begins to receive `count` values that rank 0 broadcasts; bytes without a type.
    ///
    /// # Errors
    /// NCCL's error.
    ///
    /// # Safety
    /// The address is of memory that is large enough until the stream has come so far.
    pub unsafe fn receive(&self, to: u64, count: usize, dtype: Option<Dtype>, stream: &CudaStream) -> Result<()> {
        let (to, dtype, stream) = (to as *mut c_void, code_of(dtype), stream.cu_stream());
        // SAFETY: the caller's promise. What it would send is read at the root alone.
        let status = unsafe { (self.library.broadcast)(to, to, count, dtype, 0, self.handle, stream) };
        self.library.begun("ncclBroadcast", status)
    }

    /// Begins to replace a float32 by its sum over all ranks.
    ///
    /// # Errors
    /// NCCL's error.
    ///
    /// # Safety
    /// The same as [`NonblockingCommunicator::receive`].
    pub unsafe fn add_one_value(&self, at: u64, stream: &CudaStream) -> Result<()> {
        let (at, stream) = (at as *mut c_void, stream.cu_stream());
        // SAFETY: the caller's promise.
        let status = unsafe { (self.library.all_reduce)(at, at, 1, FLOAT32, SUM, self.handle, stream) };
        self.library.begun("ncclAllReduce", status)
    }
}

impl Drop for NonblockingCommunicator {
    fn drop(&mut self) {
        // SAFETY: nothing uses the communicator any more; what it has begun on a stream ends.
        let status = unsafe { (self.library.abort)(self.handle) };
        if let Err(error) = self.library.begun("ncclCommAbort", status) {
            tracing::error!("{error}");
        }
    }
}

fn code_of(dtype: Option<Dtype>) -> c_int {
    match dtype {
        None => UINT8,
        Some(Dtype::F16) => FLOAT16,
        Some(Dtype::F32) => FLOAT32,
        Some(Dtype::Bf16) => BFLOAT16,
    }
}
