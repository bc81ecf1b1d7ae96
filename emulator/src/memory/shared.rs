//! Memory of a process in another process, by the handles of `cuIpcGetMemHandle`: a handle names the process, its file,
//! and the place in it.

use super::space::{PAGE, READ_WRITE};
use super::{Memory, Region, RegionKind};
use crate::error::{INVALID_CONTEXT, INVALID_VALUE, Result};

/// The 64 bytes of a handle: process, file, place in the file, bytes, device.
pub type IpcKey = [u64; 8];

impl Memory {
    /// A handle of the allocation that begins at `at`. As in CUDA, memory of a pool or virtual memory has none.
    pub fn export(&self, at: u64) -> Result<IpcKey> {
        let mut state = self.state();
        match state.regions.get_mut(&at) {
            Some(Region { bytes, kind: RegionKind::Allocated { device, physical, pool: false, exported } }) => {
                *exported = true;
                Ok([u64::from(std::process::id()), self.space.file as u64, *physical, *bytes, *device as u64, 0, 0, 0])
            }
            _ => Err(INVALID_VALUE),
        }
    }

    /// The address of another process's memory in this one, for kernels of `device`. Who opens a handle twice gets the
    /// same address.
    pub fn import(&self, device: usize, key: IpcKey) -> Result<u64> {
        let [process, file, physical, bytes, ..] = key;
        if process == u64::from(std::process::id()) {
            return Err(INVALID_CONTEXT);
        }
        let mut state = self.state();
        for (at, region) in &mut state.regions {
            if let RegionKind::Imported { key: other, opened, .. } = &mut region.kind
                && *other == key
            {
                *opened += 1;
                self.space.allow(*at, bytes, 1 << device);
                return Ok(*at);
            }
        }
        let path = std::ffi::CString::new(format!("/proc/{process}/fd/{file}")).expect("no zero in a path");
        // SAFETY: the path is a C string.
        let file = unsafe { libc::open(path.as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
        if file < 0 {
            return Err(INVALID_VALUE);
        }
        let at = state.addresses(bytes, PAGE);
        state.regions.insert(at, Region { bytes, kind: RegionKind::Imported { file, key, opened: 1 } });
        self.space.show(at, bytes.next_multiple_of(PAGE), file, physical, READ_WRITE);
        self.space.allow(at, bytes, 1 << device);
        Ok(at)
    }

    /// Closes what [`Memory::import`] opened.
    pub fn close(&self, at: u64) -> Result {
        let mut state = self.state();
        let Some(Region { bytes, kind: RegionKind::Imported { file, opened, .. } }) = state.regions.get_mut(&at) else {
            return Err(INVALID_VALUE);
        };
        *opened -= 1;
        if *opened > 0 {
            return Ok(());
        }
        self.space.hide(at, bytes.next_multiple_of(PAGE));
        // SAFETY: the file was opened by `import` and is closed once.
        unsafe { libc::close(*file) };
        state.regions.remove(&at);
        Ok(())
    }
}
