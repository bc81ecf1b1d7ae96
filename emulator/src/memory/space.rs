//! The address space of the devices. A device address is not where its bytes are: the window of device addresses is
//! reserved and unreadable, so that a host that follows one faults as it would with a GPU, and the bytes stand at the
//! same place in a second window. A table of each device says how many bytes of each page its kernels may access, so
//! that each access of a kernel or of a copy is checked to the byte.

use std::ffi::c_void;

use crate::settings;

/// Where device addresses begin.
pub const DEVICE: u64 = 1 << 44;
/// Where the bytes of the device addresses stand.
pub const STORE: u64 = 2 << 44;
/// Where page-locked host memory stands.
pub const PINNED: u64 = 3 << 44;
/// Where the stacks of CUDA threads stand, and so their local memory. (The window 4 << 44 is shared memory's.)
pub const LOCAL: u64 = 5 << 44;
/// Bytes of the devices' windows. Programs reserve many times the memory that they have.
pub const WINDOW: u64 = 1 << 44;
/// Bytes of the window of page-locked memory.
pub const PINNED_WINDOW: u64 = 1 << 40;
pub const PAGE: u64 = 4096;

const UNUSED: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
pub const READ_WRITE: i32 = libc::PROT_READ | libc::PROT_WRITE;
/// NaN in every floating-point type, and an index far out of range as an integer.
const POISON: u16 = 0x7fff;

/// Maps pages, at `at` unless that is zero.
///
/// # Safety
/// With `MAP_FIXED` nothing may use the earlier mapping at these addresses.
unsafe fn map(at: u64, bytes: u64, protection: i32, flags: i32, file: i32, offset: u64) -> *mut c_void {
    // SAFETY: the caller answers for the addresses; a failure is seen below.
    let start = unsafe { libc::mmap(at as *mut c_void, bytes as usize, protection, flags, file, offset as i64) };
    assert!(start != libc::MAP_FAILED, "mmap of {bytes} bytes: {}", std::io::Error::last_os_error());
    start
}

/// Reserves addresses, so that nothing else is mapped there and no access succeeds.
pub fn reserve(at: u64, bytes: u64) {
    // SAFETY: MAP_FIXED_NOREPLACE takes only addresses that are free.
    unsafe { map(at, bytes, libc::PROT_NONE, UNUSED | libc::MAP_FIXED_NOREPLACE, -1, 0) };
}

/// Sets what may be done with reserved pages.
pub fn protect(at: u64, bytes: u64, protection: i32) {
    // SAFETY: the addresses are in a window of the emulator, which nothing else uses.
    let done = unsafe { libc::mprotect(at as *mut c_void, bytes as usize, protection) };
    assert!(done == 0, "mprotect: {}", std::io::Error::last_os_error());
}

/// Takes reserved pages back, with what they hold.
pub fn release(at: u64, bytes: u64) {
    // SAFETY: the addresses are in a window of the emulator, whose user gives them up.
    let done = unsafe { libc::munmap(at as *mut c_void, bytes as usize) };
    assert!(done == 0, "munmap: {}", std::io::Error::last_os_error());
}

/// Gives `bytes` of the window [`PINNED`] fresh pages, or takes them away.
pub fn host_pages(at: u64, bytes: u64, there: bool) {
    let protection = if there { READ_WRITE } else { libc::PROT_NONE };
    // SAFETY: the addresses are in a window of the emulator, and are given out once.
    unsafe { map(at, bytes, protection, UNUSED | libc::MAP_FIXED, -1, 0) };
}

/// Sets what a table says of each page of `bytes` bytes at `at`, where a page begins.
fn set_limits(table: *mut u16, at: u64, bytes: u64, limit: impl Fn(u64) -> u16) {
    let page = (at - DEVICE) / PAGE;
    assert!(page + bytes.div_ceil(PAGE) <= WINDOW / PAGE);
    for i in 0..bytes.div_ceil(PAGE) {
        // SAFETY: a table has an entry for each page of the window.
        unsafe { table.add((page + i) as usize).write_volatile(limit(i)) };
    }
}

/// Devices as bits of a number.
pub type DeviceSet = u16;

/// The windows, the file that holds the devices' bytes, and the limits.
pub struct AddressSpace {
    pub file: i32,
    /// A table of each device.
    limits: Vec<*mut u16>,
}

// SAFETY: the tables are written and read by volatile accesses of whole entries, and live as long as the process.
unsafe impl Send for AddressSpace {}
// SAFETY: as above.
unsafe impl Sync for AddressSpace {}

impl AddressSpace {
    pub fn new() -> Self {
        // SAFETY: the name is a C string.
        let file = unsafe { libc::memfd_create(c"device".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: an ordinary call on the new file. Its pages take memory only once they are written.
        assert!(file >= 0 && unsafe { libc::ftruncate(file, 1 << 50) } == 0, "a file for the devices' memory");
        for (window, bytes) in [(DEVICE, WINDOW), (STORE, WINDOW), (PINNED, PINNED_WINDOW)] {
            reserve(window, bytes);
        }
        // Pages of the tables take memory once they are written.
        // SAFETY: an anonymous mapping at an address that the system chooses.
        let table = |_| unsafe { map(0, WINDOW / PAGE * 2, READ_WRITE, UNUSED, -1, 0) }.cast();
        Self { file, limits: (0..settings::get().devices).map(table).collect() }
    }

    /// For each page of the window: how many of its bytes kernels of a device may access.
    pub fn limits(&self, device: usize) -> *const u16 {
        self.limits[device]
    }

    /// How many bytes of a page are allocated: kernels of some device may access them.
    fn limit(&self, page: u64) -> u64 {
        assert!(page < WINDOW / PAGE);
        // SAFETY: each table has an entry for each page of the window.
        let limits = self.limits.iter().map(|table| unsafe { table.add(page as usize).read_volatile() });
        limits.max().unwrap_or_default().into()
    }

    /// Lets kernels of these devices access `bytes` bytes at `at`, where a page begins.
    pub fn allow(&self, at: u64, bytes: u64, devices: DeviceSet) {
        let tables = self.limits.iter().enumerate().filter(|(device, _)| devices >> device & 1 == 1);
        tables.for_each(|(_, table)| set_limits(*table, at, bytes, |i| (bytes - i * PAGE).min(PAGE) as u16));
    }

    /// Puts pages of a file behind device addresses.
    pub fn show(&self, at: u64, bytes: u64, file: i32, offset: u64, protection: i32) {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: the addresses are in the window STORE, and the region that they are of is given out once.
        unsafe { map(at + (STORE - DEVICE), bytes, protection, flags, file, offset) };
    }

    /// Takes away what is behind device addresses.
    pub fn hide(&self, at: u64, bytes: u64) {
        self.limits.iter().for_each(|table| set_limits(*table, at, bytes, |_| 0));
        // SAFETY: the addresses are in the window STORE; who uses them still has an error, which shows as a fault.
        unsafe { map(at + (STORE - DEVICE), bytes, libc::PROT_NONE, UNUSED | libc::MAP_FIXED, -1, 0) };
    }

    /// Gives pages of the file back to the system.
    pub fn discard(&self, offset: u64, bytes: u64) {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: an ordinary call on the emulator's file.
        unsafe { libc::fallocate(self.file, mode, offset as i64, bytes as i64) };
    }

    /// Fills fresh memory with NaN, as far as the settings ask for it.
    pub fn poison(&self, at: u64, bytes: u64) {
        let bytes = bytes.min(settings::get().poison);
        // SAFETY: the caller has just shown these pages, and nobody else has their addresses yet.
        let values = unsafe { std::slice::from_raw_parts_mut((at + STORE - DEVICE) as *mut u16, bytes as usize / 2) };
        values.fill(POISON);
    }

    /// Where the bytes at an address are, or the first address among them that is not allocated.
    /// Addresses outside of device memory are the host's and are not checked.
    pub fn bytes_at(&self, at: u64, bytes: usize) -> Result<*mut u8, u64> {
        if !(DEVICE..DEVICE + WINDOW).contains(&at) {
            return Ok(at as *mut u8);
        }
        let (mut here, end) = (at, at + bytes as u64);
        while here < end {
            let page = (here - DEVICE) / PAGE;
            let (page_start, page_end) = (DEVICE + page * PAGE, DEVICE + (page + 1) * PAGE);
            let limit = self.limit(page);
            if end.min(page_end) - page_start > limit {
                return Err(here.max(page_start + limit));
            }
            here = page_end;
        }
        Ok((at + (STORE - DEVICE)) as *mut u8)
    }
}
