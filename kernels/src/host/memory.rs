//! Reads the memory of the machine and of the process, and the limit on open files, from the operating system. On other
//! systems than Linux less is known.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::OnceLock;

/// The `statm` file of this process, kept open after the first read: its numbers are needed most when no file
/// descriptor is left.
static STATM: OnceLock<Option<File>> = OnceLock::new();
/// Bytes of the buffer that `statm` is read to. Its seven numbers have fewer digits.
const STATM_BYTES: usize = 256;

/// The memory in bytes that this process can count on: the smallest of the machine's memory, the limits of all cgroups
/// that it is in, and what its resource limits leave for data.
pub fn total_bytes() -> u64 {
    let cgroup = cgroup_limit(Path::new("/sys/fs/cgroup"), &read("/proc/self/cgroup"));
    cgroup.into_iter().fold(machine_bytes(), u64::min).min(data_bytes(
        resource_limit(libc::RLIMIT_AS),
        resource_limit(libc::RLIMIT_DATA),
        statm(Statm::Size).saturating_sub(statm(Statm::Data)),
    ))
}

/// Bytes of data that fit below the limits of the address space and of the data. `other` is what else of the address
/// space is mapped: code and libraries, and the checkpoint's files, which stay mapped and which the ledger does not
/// count.
fn data_bytes(address_space: u64, data: u64, other: u64) -> u64 {
    if address_space == libc::RLIM_INFINITY { data } else { data.min(address_space.saturating_sub(other)) }
}

/// The resident memory of the process in bytes, or 0 where the system does not report it. After the first call it can
/// be read even when no file descriptor is left.
pub fn resident_bytes() -> u64 {
    statm(Statm::Resident)
}

/// Numbers of `/proc/self/statm`, by their place in it.
#[derive(Clone, Copy)]
enum Statm {
    /// All that is mapped.
    Size = 0,
    Resident = 1,
    /// Private writable mappings: heap, stacks, anonymous memory.
    Data = 5,
}

/// A number of `/proc/self/statm` in bytes, or 0 where the system does not report it.
fn statm(number: Statm) -> u64 {
    let read = |file: &File| {
        let mut text = [0; STATM_BYTES];
        let bytes = file.read_at(&mut text, 0).ok()?;
        let pages = std::str::from_utf8(&text[..bytes]).ok()?.split_whitespace().nth(number as usize)?;
        pages.parse::<u64>().ok()
    };
    STATM.get_or_init(|| File::open("/proc/self/statm").ok()).as_ref().and_then(read).unwrap_or(0) * page_bytes()
}

/// How many file descriptors the process may have; `u64::MAX` if there is no limit.
pub fn open_files_limit() -> u64 {
    resource_limit(libc::RLIMIT_NOFILE)
}

/// The type of `RLIMIT_AS` and its like.
#[cfg(target_env = "gnu")]
type Resource = libc::__rlimit_resource_t;
#[cfg(not(target_env = "gnu"))]
type Resource = libc::c_int;

/// A soft limit of this process; `RLIM_INFINITY`, which is `u64::MAX`, if there is none.
fn resource_limit(resource: Resource) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: getrlimit writes one rlimit, to which the pointer points; if it fails the limit stays as it is.
    unsafe { libc::getrlimit(resource, &raw mut limit) };
    limit.rlim_cur
}

/// Makes all threads allocate from one heap, so that [`trim`] can give all freed memory back. glibc makes further heaps
/// for threads, of which `trim` gives back the middle but not the end, megabytes for each heap. Must be called before
/// the process starts a thread. Does nothing without glibc.
pub fn share_one_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt takes no pointers and may be called at any time. It leaves every other setting as it is.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
    }
}

/// Gives freed memory that the allocator keeps back to the operating system. Does nothing without glibc.
pub fn trim() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: malloc_trim takes no pointers and may be called at any time from any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// Bytes of a page of memory.
pub fn page_bytes() -> u64 {
    sysconf(libc::_SC_PAGESIZE)
}

fn machine_bytes() -> u64 {
    sysconf(libc::_SC_PHYS_PAGES) * page_bytes()
}

fn sysconf(name: libc::c_int) -> u64 {
    // SAFETY: sysconf takes no pointers and has no preconditions; an unknown name gives -1.
    u64::try_from(unsafe { libc::sysconf(name) }).unwrap_or(0)
}

/// The smallest limit from the process's cgroup up to the root: `memory.max` (v2) or `memory.limit_in_bytes` (v1).
/// `membership` is the content of `/proc/self/cgroup`.
fn cgroup_limit(root: &Path, membership: &str) -> Option<u64> {
    let mut smallest: Option<u64> = None;
    for line in membership.lines() {
        let mut parts = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next()) else { continue };
        let (base, file) = match controllers {
            "" => (root.to_path_buf(), "memory.max"),
            c if c.split(',').any(|c| c == "memory") => (root.join("memory"), "memory.limit_in_bytes"),
            _ => continue,
        };
        for dir in Path::new(path.trim_start_matches('/')).ancestors() {
            // "max" (no limit) does not parse. In v1 "no limit" is a number near 2^63, which is above the machine's
            // memory.
            if let Ok(limit) = read(base.join(dir).join(file)).trim().parse::<u64>() {
                smallest = Some(smallest.map_or(limit, |s| s.min(limit)));
            }
        }
    }
    smallest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_and_the_machine_have_memory() {
        let (resident, total) = (resident_bytes(), total_bytes());
        assert!(resident > 1 << 20 && resident < total, "resident {resident}, total {total}");
    }

    #[test]
    fn freed_memory_goes_back_to_the_system() {
        // The allocations are small, so that the allocator does not map and unmap each of them separately.
        let small: Vec<Box<[u8; 1024]>> = (0..64 << 10).map(|i| Box::new([i as u8; 1024])).collect();
        let held = resident_bytes();
        drop(small);
        trim();
        let freed = held.saturating_sub(resident_bytes());
        assert!(!cfg!(target_env = "gnu") || freed > 32 << 20, "{freed} bytes went back");
    }

    #[test]
    fn limits_of_the_process_count_and_what_is_mapped_comes_off_the_address_space() {
        let none = libc::RLIM_INFINITY;
        assert_eq!(data_bytes(none, none, 700), none);
        assert_eq!(data_bytes(none, 1000, 700), 1000);
        assert_eq!(data_bytes(1500, none, 700), 800);
        assert_eq!(data_bytes(1500, 600, 700), 600);
        assert_eq!(data_bytes(500, none, 700), 0);
        assert!(statm(Statm::Size) > statm(Statm::Data) && statm(Statm::Data) > 0);
    }

    #[test]
    fn the_tightest_cgroup_on_the_way_up_counts() {
        let root = std::env::temp_dir().join(format!("rollout-cgroup-{}", std::process::id()));
        let leaf = root.join("a/b");
        std::fs::create_dir_all(&leaf).unwrap();
        std::fs::write(root.join("a/memory.max"), "1000000\n").unwrap();
        std::fs::write(leaf.join("memory.max"), "max\n").unwrap();
        assert_eq!(cgroup_limit(&root, "0::/a/b\n"), Some(1_000_000));
        std::fs::write(leaf.join("memory.max"), "4096\n").unwrap();
        assert_eq!(cgroup_limit(&root, "0::/a/b\n"), Some(4096));
        assert_eq!(cgroup_limit(&root, "0::/elsewhere\n"), None);
        std::fs::create_dir_all(root.join("memory/x")).unwrap();
        std::fs::write(root.join("memory/x/memory.limit_in_bytes"), "77\n").unwrap();
        assert_eq!(cgroup_limit(&root, "5:cpu,memory:/x\n3:pids:/x\n"), Some(77));
        std::fs::remove_dir_all(root).unwrap();
    }
}
