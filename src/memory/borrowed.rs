//! A file that another process owns, mapped for reading.
//!
//! Its owner can cut it short at any time. The system answers a read of what is gone with SIGBUS, which would end this
//! process; a read through [`BorrowedMap::read`] finds zeros instead, and says so.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::ptr::null;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

use memmap2::Mmap;

use rollout_kernels::host::memory::page_bytes;

/// A whole file, as it was when it was mapped.
#[derive(Debug)]
pub struct BorrowedMap {
    map: Mmap,
    /// Addresses of its pages, and the size of one.
    pages: Range<usize>,
    page: usize,
    /// Whether the owner has taken a part of it away.
    lost: AtomicBool,
}

impl BorrowedMap {
    /// # Errors
    /// The system's, if it cannot be mapped.
    pub fn new(file: &File) -> std::io::Result<Self> {
        catch_lost_pages()?;
        // SAFETY: the mapping is read-only, and only read through `read`, which survives that the file is cut short. The
        // owner may write to it at any time; users compute nothing from the bytes but values, which are then wrong.
        let map = unsafe { Mmap::map(file)? };
        let (start, page) = (map.as_ptr() as usize, page_bytes() as usize);
        let pages = start..(start + map.len()).next_multiple_of(page);
        Ok(Self { map, pages, page, lost: AtomicBool::new(false) })
    }

    /// Bytes that it had when it was mapped.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Whether a read has found a part of it gone.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// Hands a part of it on to `use_bytes`; None if any of it is gone, and what was read may have been zeros.
    ///
    /// # Panics
    /// If the part is outside.
    pub fn read<T>(&self, part: Range<usize>, use_bytes: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let bytes = &self.map[part];
        let reading = Reading::start(self);
        let used = use_bytes(bytes);
        drop(reading);
        (!self.is_lost()).then_some(used)
    }

    /// Gives the pages of a part back to the system; they come again when they are read.
    ///
    /// # Panics
    /// If the part is outside.
    pub fn release(&self, part: Range<usize>) {
        assert!(part.end <= self.bytes(), "{part:?} of {} bytes", self.bytes());
        if part.is_empty() {
            return;
        }
        // SAFETY: the mapping is never written, so that a dropped page comes back from the file, or as the zeros that lie
        // in place of a lost one.
        let advised = unsafe {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            self.map.unchecked_advise_range(advice, part.start, part.len())
        };
        // The kernel may refuse (locked pages); the only effect is that the pages stay resident.
        drop(advised);
    }
}

thread_local! {
    /// What this thread reads now, for the signal's handler: it needs neither a lock nor memory to look.
    static READING: Cell<*const BorrowedMap> = const { Cell::new(null()) };
}

/// While it lives, this thread may read pages that are gone.
struct Reading {
    before: *const BorrowedMap,
}

impl Reading {
    fn start(map: &BorrowedMap) -> Self {
        let before = READING.replace(map);
        // The handler runs in this thread: only the compiler could make it see the reads before the note of them.
        compiler_fence(Ordering::SeqCst);
        Self { before }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        compiler_fence(Ordering::SeqCst);
        READING.set(self.before);
    }
}

/// What handled SIGBUS before.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the handler, once.
fn catch_lost_pages() -> std::io::Result<()> {
    static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();
    let failed = INSTALLED.get_or_init(|| {
        // SAFETY: a zeroed `sigaction` is a valid one, and all pointers are to values that live through the calls. What
        // was there before is known before the handler can run.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, null(), &raw mut before) != 0 {
                return std::io::Error::last_os_error().raw_os_error();
            }
            BEFORE.get_or_init(|| before);
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = on_bus_error as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            match libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) {
                0 => None,
                _ => std::io::Error::last_os_error().raw_os_error(),
            }
        }
    });
    failed.map_or(Ok(()), |code| Err(std::io::Error::from_raw_os_error(code)))
}

/// Puts zeros where a page is gone that this thread reads from a [`BorrowedMap`]; any other error goes where it would
/// have gone. Takes no lock and no memory: all it does is two system calls.
extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system gives a valid `info`. The map that is being read lives, for its reader is in this thread, below
    // this frame. The new pages replace none but the map's own from the lost one on: what follows the cut is lost, too.
    unsafe {
        let address = (*info).si_addr() as usize;
        if let Some(map) = READING.get().as_ref().filter(|map| map.pages.contains(&address)) {
            // First: other threads may read the zeros as soon as they are there.
            map.lost.store(true, Ordering::SeqCst);
            let start = address / map.page * map.page;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let zeros = libc::mmap(start as *mut _, map.pages.end - start, libc::PROT_READ, flags, -1, 0);
            if zeros != libc::MAP_FAILED {
                return;
            }
        }
        // The read is tried again when this returns, and then fails as if this handler had never been.
        if let Some(before) = BEFORE.get() {
            libc::sigaction(libc::SIGBUS, before, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    const PAGE: usize = 4096;

    fn file(bytes: &[u8]) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        file
    }

    fn sum(bytes: &[u8]) -> u64 {
        bytes.iter().map(|&byte| u64::from(byte)).sum()
    }

    #[test]
    fn what_the_owner_writes_is_read_and_what_it_cuts_off_is_noticed() {
        let size = 64 * PAGE + 17;
        let file = file(&vec![1; size]);
        let map = BorrowedMap::new(file.as_file()).unwrap();
        assert_eq!((map.bytes(), map.read(0..size, sum)), (size, Some(size as u64)));
        std::fs::write(file.path(), vec![2; size]).unwrap();
        assert_eq!(map.read(3..5, <[u8]>::to_vec), Some(vec![2, 2]));
        let mut again = BorrowedMap::new(file.as_file()).unwrap();
        file.as_file().set_len(3 * PAGE as u64 + 1).unwrap();
        // What is left can still be read; the rest of its last page is zeros to the system, too.
        assert_eq!(map.read(0..4 * PAGE, sum), Some(2 * (3 * PAGE as u64 + 1)));
        assert!(!map.is_lost());
        assert_eq!(map.read(PAGE..size, sum), None);
        assert!(map.is_lost());
        assert_eq!(map.read(0..1, sum), None, "once lost, always lost");
        // Each map is its own, and one that was lost goes like any other.
        assert_eq!(again.read(0..1, sum), Some(2));
        again = map;
        assert!(again.is_lost());
    }

    #[test]
    fn a_reader_that_panics_leaves_no_note() {
        let file = file(&[1; PAGE]);
        let map = BorrowedMap::new(file.as_file()).unwrap();
        let read = std::panic::AssertUnwindSafe(|| map.read(0..1, |_| panic!("as a test")));
        assert!(std::panic::catch_unwind(read).is_err());
        assert!(READING.get().is_null());
    }

    #[test]
    fn a_map_that_is_read_while_another_is_leaves_that_guarded() {
        let files = [file(&[1; PAGE]), file(&[1; PAGE])];
        let [outer, inner] = [&files[0], &files[1]].map(|file| BorrowedMap::new(file.as_file()).unwrap());
        let read = |bytes: &[u8]| {
            assert_eq!(inner.read(0..1, sum), Some(1));
            files[0].as_file().set_len(0).unwrap();
            sum(bytes)
        };
        assert_eq!(outer.read(0..PAGE, read), None);
        assert!(READING.get().is_null());
    }

    #[test]
    fn files_are_cut_while_threads_read_them() {
        let size = 512 * PAGE;
        let mut lost = 0;
        for round in 0..100 {
            let file = file(&vec![1; size]);
            let map = BorrowedMap::new(file.as_file()).unwrap();
            std::thread::scope(|scope| {
                let read = || (0..size).step_by(PAGE).map(|i| map.read(i..i + PAGE, sum)).collect::<Vec<_>>();
                let readers = [scope.spawn(read), scope.spawn(read)];
                file.as_file().set_len((round * PAGE) as u64).unwrap();
                for sums in readers.map(|reader| reader.join().unwrap()) {
                    // Up to the first that was lost all is as it was written.
                    let whole = sums.iter().take_while(|sum| sum.is_some()).count();
                    assert!(sums[..whole].iter().all(|&sum| sum == Some(PAGE as u64)), "round {round}");
                    lost += usize::from(whole < sums.len());
                }
            });
        }
        assert!(lost > 0, "no file was cut in time: the test is blind");
    }

    #[test]
    fn any_other_bus_error_ends_the_process_as_before() {
        // In a process of its own, which knows what to do by a filter that chooses no test.
        const DIES: &str = "dies_of_a_bus_error";
        if let Some(directory) = std::env::args().skip_while(|argument| argument != DIES).nth(1) {
            // Without names, which nobody would be left to remove.
            let files = [(); 2].map(|()| tempfile::tempfile_in(&directory).unwrap());
            files.iter().for_each(|file| file.set_len(PAGE as u64).unwrap());
            let maps = [&files[0], &files[1]].map(|file| BorrowedMap::new(file).unwrap());
            // While the higher one is read, the lower one, past its own `read`.
            let lower = usize::from(maps[1].pages.start < maps[0].pages.start);
            files[lower].set_len(0).unwrap();
            maps[1 - lower].read(0..1, |_| std::hint::black_box(maps[lower].map[0]));
            return;
        }
        let test = "memory::borrowed::tests::any_other_bus_error_ends_the_process_as_before";
        let directory = tempfile::tempdir_in("/dev/shm").unwrap();
        let arguments = [test, "--exact", DIES, directory.path().to_str().unwrap()];
        let again = Command::new(std::env::current_exe().unwrap()).args(arguments).output().unwrap();
        assert_eq!(again.status.signal(), Some(libc::SIGBUS), "{again:?}");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0, "it has left files behind");
    }
}
