//! A file that another process owns, mapped for reading.
//!
//! The owner can truncate the file at any time. Reading a page that is gone raises SIGBUS, which would end this
//! process. A read through [`BorrowedMap::read`] finds zeros instead, and reports that a part was lost.

use std::cell::Cell;
use std::fs::File;
use std::ops::Range;
use std::ptr::null;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering, compiler_fence};

use memmap2::Mmap;

use rollout_kernels::host::memory::page_bytes;

/// A read-only mapping of a whole file, with the length that the file had when it was mapped.
#[derive(Debug)]
pub struct BorrowedMap {
    map: Mmap,
    /// Addresses of the mapping's pages, and the size of a page in bytes.
    pages: Range<usize>,
    page: usize,
    /// Whether a read has found that the owner took a part of the file away.
    lost: AtomicBool,
}

impl BorrowedMap {
    /// Maps the whole file.
    ///
    /// # Errors
    /// The system's error if the file cannot be mapped.
    pub fn new(file: &File) -> std::io::Result<Self> {
        catch_lost_pages()?;
        // SAFETY: the mapping is read-only, and it is read through `read` alone, which survives a truncated file. The
        // owner may write to the file at any time; users only compute values from the bytes, which are then wrong.
        let map = unsafe { Mmap::map(file)? };
        let (start, page) = (map.as_ptr() as usize, page_bytes() as usize);
        let pages = start..(start + map.len()).next_multiple_of(page);
        Ok(Self { map, pages, page, lost: AtomicBool::new(false) })
    }

    /// Length in bytes that the file had when it was mapped.
    pub fn bytes(&self) -> usize {
        self.map.len()
    }

    /// Whether any read so far has found a part of the file gone.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    /// Calls `use_bytes` with the bytes `part` of the file. None if the file has lost any part, as the bytes that were
    /// read may then have been zeros.
    ///
    /// # Panics
    /// If `part` is not inside the mapping.
    pub fn read<T>(&self, part: Range<usize>, use_bytes: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let bytes = &self.map[part];
        let reading = Reading::start(self);
        let used = use_bytes(bytes);
        drop(reading);
        (!self.is_lost()).then_some(used)
    }

    /// Gives the pages of `part` back to the system. Reading them again brings them back.
    ///
    /// # Panics
    /// If `part` is not inside the mapping.
    pub fn release(&self, part: Range<usize>) {
        assert!(part.end <= self.bytes(), "{part:?} of {} bytes", self.bytes());
        if part.is_empty() {
            return;
        }
        // SAFETY: the mapping is never written, so a dropped page comes back from the file, or as zeros if the page was
        // lost.
        let advised = unsafe {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            self.map.unchecked_advise_range(advice, part.start, part.len())
        };
        // The kernel may refuse (for locked pages); then the pages only stay resident.
        drop(advised);
    }
}

thread_local! {
    /// The map that this thread is reading, for the signal handler, which can look it up without a lock or an
    /// allocation.
    static READING: Cell<*const BorrowedMap> = const { Cell::new(null()) };
}

/// Guard: while it lives, this thread may read pages that are gone.
struct Reading {
    before: *const BorrowedMap,
}

impl Reading {
    fn start(map: &BorrowedMap) -> Self {
        let before = READING.replace(map);
        // The handler runs in this thread, so only the compiler could move the reads before the assignment above.
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

/// The SIGBUS action that was installed before ours.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Installs the SIGBUS handler, once per process.
fn catch_lost_pages() -> std::io::Result<()> {
    static INSTALLED: OnceLock<Option<i32>> = OnceLock::new();
    let failed = INSTALLED.get_or_init(|| {
        // SAFETY: a zeroed `sigaction` is valid, and all pointers are to values that live through the calls. The action
        // of before is stored before the handler can run.
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

/// The SIGBUS handler. If this thread was reading a page of a [`BorrowedMap`] that is gone, it maps zeros in its place;
/// any other error goes to the handler that was installed before. It takes no lock and no memory, only two system
/// calls.
extern "C" fn on_bus_error(_: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the system passes a valid `info`. The map that is being read is alive, because its reader is a frame of
    // this thread below this one. The new pages replace only pages of that map, from the lost one on: what follows it
    // is lost, too.
    unsafe {
        let address = (*info).si_addr() as usize;
        if let Some(map) = READING.get().as_ref().filter(|map| map.pages.contains(&address)) {
            // Set before the zeros are mapped, because other threads may read them at once.
            map.lost.store(true, Ordering::SeqCst);
            let start = address / map.page * map.page;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED;
            let zeros = libc::mmap(start as *mut _, map.pages.end - start, libc::PROT_READ, flags, -1, 0);
            if zeros != libc::MAP_FAILED {
                return;
            }
        }
        // The faulting read is repeated when this handler returns, and then fails as if this handler had never been
        // installed.
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
        // What is left of the file can still be read; the system fills the rest of its last page with zeros.
        assert_eq!(map.read(0..4 * PAGE, sum), Some(2 * (3 * PAGE as u64 + 1)));
        assert!(!map.is_lost());
        assert_eq!(map.read(PAGE..size, sum), None);
        assert!(map.is_lost());
        assert_eq!(map.read(0..1, sum), None, "once lost, always lost");
        // A new map of the file does not know of the other one's loss, and a map with a loss can be dropped like any
        // other.
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
                    // Before the first lost part, all sums are those of the bytes as written.
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
        // Runs this test binary again as a process of its own. Its filter chooses no test and tells it what to do.
        const DIES: &str = "dies_of_a_bus_error";
        if let Some(directory) = std::env::args().skip_while(|argument| argument != DIES).nth(1) {
            // Files without names, because nobody would be left to remove them.
            let files = [(); 2].map(|()| tempfile::tempfile_in(&directory).unwrap());
            files.iter().for_each(|file| file.set_len(PAGE as u64).unwrap());
            let maps = [&files[0], &files[1]].map(|file| BorrowedMap::new(file).unwrap());
            // While the map at the higher address is being read, touch the one at the lower address without its `read`.
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
