//! NVML, which says how much of a device each process holds. It comes with the driver and is loaded where it is there.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

use candle_core::cuda_backend::cudarc::driver::sys::CUuuid;

use super::library::Library;

/// `nvmlDevice_t`.
type Handle = *mut c_void;
/// `nvmlReturn_t`; 0 is success.
type Status = c_int;
/// With NVML's error message.
type Result<T> = std::result::Result<T, String>;

/// Processes that a reading has room for. Few share a device.
const MOST_PROCESSES: usize = 256;
/// `NVML_VALUE_NOT_AVAILABLE`: the driver does not tell what a process holds.
const NOT_AVAILABLE: u64 = u64::MAX;

/// `nvmlMemory_t`.
#[derive(Default)]
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_t`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct ProcessInfo {
    pid: u32,
    used: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// The functions that are called, as `nvml.h` declares them.
struct NvmlFunctions {
    handle_by_uuid: unsafe extern "C" fn(*const c_char, *mut Handle) -> Status,
    memory_info: unsafe extern "C" fn(Handle, *mut Memory) -> Status,
    processes: unsafe extern "C" fn(Handle, *mut u32, *mut ProcessInfo) -> Status,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
}

impl NvmlFunctions {
    fn get() -> Result<&'static Self> {
        static FUNCTIONS: OnceLock<Result<NvmlFunctions>> = OnceLock::new();
        FUNCTIONS.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self> {
        let library = Library::open(c"libnvidia-ml.so.1").ok_or("there is no libnvidia-ml.so.1")?;
        // SAFETY: the types are those of the functions, all of which drivers that take the kernels have.
        let (functions, start) = unsafe {
            let start: unsafe extern "C" fn() -> Status = library.find(c"nvmlInit_v2")?;
            let functions = Self {
                handle_by_uuid: library.find(c"nvmlDeviceGetHandleByUUID")?,
                memory_info: library.find(c"nvmlDeviceGetMemoryInfo")?,
                processes: library.find(c"nvmlDeviceGetComputeRunningProcesses_v3")?,
                error_string: library.find(c"nvmlErrorString")?,
            };
            (functions, start)
        };
        // SAFETY: it may be called at any time.
        functions.check("nvmlInit_v2", unsafe { start() })?;
        Ok(functions)
    }

    fn check(&self, call: &str, status: Status) -> Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any status, and gives a text that lives for ever.
        let text = unsafe { CStr::from_ptr((self.error_string)(status)) };
        Err(format!("{call}: {}", text.to_string_lossy()))
    }
}

/// A device as NVML knows it.
pub(super) struct Monitor {
    functions: &'static NvmlFunctions,
    handle: Handle,
}

/// The memory of a device that is in use at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    /// Bytes that all processes hold together.
    pub used: u64,
    /// The number of each process that computes on it and the bytes that it holds, of those that the driver tells. In a
    /// container the numbers may be those of another namespace.
    pub processes: Vec<(u32, u64)>,
}

impl Monitor {
    /// The device, or part of one, with this UUID. Numbers of devices are others for NVML than for the process.
    ///
    /// # Errors
    /// What NVML says, or that there is none.
    pub fn of(uuid: CUuuid) -> Result<Self> {
        let functions = NvmlFunctions::get()?;
        let mut handle = null_mut();
        let mut find = |kind: &str| {
            let name = CString::new(format!("{kind}-{}", text(uuid))).expect("it has no zero");
            // SAFETY: the name is a C string, and the handle is written.
            let status = unsafe { (functions.handle_by_uuid)(name.as_ptr(), &raw mut handle) };
            functions.check("nvmlDeviceGetHandleByUUID", status)
        };
        find("GPU").or_else(|error| find("MIG").map_err(|_| error))?;
        Ok(Self { functions, handle })
    }

    /// # Errors
    /// What NVML says.
    pub fn read(&self) -> Result<Reading> {
        let mut memory = Memory::default();
        // SAFETY: the structure is written.
        let status = unsafe { (self.functions.memory_info)(self.handle, &raw mut memory) };
        self.functions.check("nvmlDeviceGetMemoryInfo", status)?;
        let (mut count, mut processes) = (MOST_PROCESSES as u32, [ProcessInfo::default(); MOST_PROCESSES]);
        // SAFETY: there is room for as many as `count` says.
        let status = unsafe { (self.functions.processes)(self.handle, &raw mut count, processes.as_mut_ptr()) };
        // Who may not see them still knows what is held in all.
        let seen = if status == 0 { &processes[..MOST_PROCESSES.min(count as usize)] } else { &[] };
        let told = seen.iter().filter(|process| process.used != NOT_AVAILABLE);
        Ok(Reading { used: memory.used, processes: told.map(|process| (process.pid, process.used)).collect() })
    }
}

/// As NVML writes it: five groups of hexadecimal digits.
fn text(uuid: CUuuid) -> String {
    let digits: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}
