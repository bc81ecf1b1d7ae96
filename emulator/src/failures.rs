//! Counts the calls of a program and makes those fail that a test has chosen.
//!
//! A call is chosen by its name (`cuMemAllocAsync`), by the group that it is of (`allocation`, `mapping`, `copy`,
//! `fill`, `launch`, `blas`, `nccl`), by `any`, by `launch:` and the name of a kernel, or by `kernel:` and the name of
//! a kernel, which then fails on the device after its launch went well.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::error::{ErrorCode, Result};
use crate::settings;

/// A call that will fail once.
struct Failure {
    call: String,
    /// How many calls go well before it.
    after: u64,
    code: ErrorCode,
}

static FAILURES: LazyLock<Mutex<Vec<Failure>>> = LazyLock::new(|| Mutex::new(from_settings(&settings::get().failures)));
/// Whether there are any, so that calls need not lock the list.
static ARMED: LazyLock<AtomicBool> = LazyLock::new(|| AtomicBool::new(!FAILURES.lock().unwrap().is_empty()));
static CALLS: Mutex<Vec<&'static CallCounter>> = Mutex::new(Vec::new());
/// Launches of each kernel.
static LAUNCHES: LazyLock<Mutex<HashMap<String, u64>>> = LazyLock::new(Mutex::default);

/// Failures as `CUEMU_FAIL` gives them: `call@after=code`, separated by commas.
///
/// # Panics
/// Where the text is something else.
fn from_settings(text: &str) -> Vec<Failure> {
    let failure = |part: &str| {
        let (call, rest) = part.split_once('@')?;
        let (after, code) = rest.split_once('=')?;
        Some(Failure { call: call.into(), after: after.parse().ok()?, code: code.parse().ok()? })
    };
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    parts.map(|part| failure(part).unwrap_or_else(|| panic!("CUEMU_FAIL: «{part}» is not call@after=code"))).collect()
}

/// The group that a call is of.
fn group(name: &str) -> &'static str {
    const GROUPS: &[(&str, &str)] = &[
        ("cuMemAlloc", "allocation"),
        ("cuMemHostAlloc", "allocation"),
        ("cuMemCreate", "allocation"),
        ("cuMemMap", "mapping"),
        ("cuMemSetAccess", "mapping"),
        ("cuMemcpy", "copy"),
        ("cuMemset", "fill"),
        ("cuLaunch", "launch"),
        ("cuGraphLaunch", "launch"),
        ("cublas", "blas"),
        ("nccl", "nccl"),
    ];
    GROUPS.iter().find(|(prefix, _)| name.starts_with(prefix)).map_or("", |(_, group)| group)
}

/// Fails if it is the turn of this name or of its group.
fn check(name: &str) -> Result {
    if !ARMED.load(Ordering::Relaxed) {
        return Ok(());
    }
    let is_call = !name.contains(':');
    let mut failures = FAILURES.lock().unwrap();
    let mut failed = None;
    for (i, failure) in failures.iter_mut().enumerate() {
        let chosen = failure.call == name || (is_call && (failure.call == group(name) || failure.call == "any"));
        if chosen && failure.after == 0 {
            failed.get_or_insert((i, failure.code));
        } else if chosen {
            failure.after -= 1;
        }
    }
    let Some((i, code)) = failed else { return Ok(()) };
    failures.remove(i);
    ARMED.store(!failures.is_empty(), Ordering::Relaxed);
    eprintln!("emulator: {name} fails with {code}, as the test asks");
    Err(code)
}

/// A function of the driver or of a library, which counts its calls.
pub struct CallCounter {
    name: &'static str,
    count: AtomicU64,
}

impl CallCounter {
    pub const fn new(name: &'static str) -> Self {
        Self { name, count: AtomicU64::new(0) }
    }

    /// Counts a call, which may be one that is to fail.
    pub fn begin(&'static self) -> Result {
        if self.count.fetch_add(1, Ordering::Relaxed) == 0 {
            CALLS.lock().unwrap().push(self);
        }
        check(self.name)
    }
}

/// Counts a launch of a kernel, which may be one that is to fail.
pub fn begin_launch(kernel: &str) -> Result {
    let mut launches = LAUNCHES.lock().unwrap();
    if let Some(count) = launches.get_mut(kernel) {
        *count += 1;
    } else {
        launches.insert(kernel.into(), 1);
    }
    drop(launches);
    if ARMED.load(Ordering::Relaxed) { check(&format!("launch:{kernel}")) } else { Ok(()) }
}

/// Whether a kernel that its stream has come to is to fail.
pub fn begin_kernel(kernel: &str) -> Result {
    if ARMED.load(Ordering::Relaxed) { check(&format!("kernel:{kernel}")) } else { Ok(()) }
}

/// Makes the call of this name fail with `code`, once, after it went well `after` times from now on. A `code` of zero
/// takes back all failures of that name that have not happened.
///
/// # Safety
/// `call` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuemu_fail(call: *const c_char, after: u32, code: i32) {
    // SAFETY: the caller gives a C string.
    let call = unsafe { CStr::from_ptr(call) }.to_string_lossy().into_owned();
    let mut failures = FAILURES.lock().unwrap();
    if code == 0 {
        failures.retain(|failure| failure.call != call);
    } else {
        failures.push(Failure { call, after: u64::from(after), code });
    }
    let armed = !failures.is_empty();
    drop(failures);
    ARMED.store(armed, Ordering::Relaxed);
}

/// How often the call of this name, or those of this group, were made until now.
///
/// # Safety
/// `call` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuemu_calls(call: *const c_char) -> u64 {
    // SAFETY: the caller gives a C string.
    let call = unsafe { CStr::from_ptr(call) }.to_string_lossy();
    if let Some(kernel) = call.strip_prefix("launch:") {
        return LAUNCHES.lock().unwrap().get(kernel).copied().unwrap_or(0);
    }
    let calls = CALLS.lock().unwrap();
    let chosen = calls.iter().filter(|c| c.name == call || group(c.name) == call || call == "any");
    chosen.map(|c| c.count.load(Ordering::Relaxed)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_of_the_environment_are_read() {
        let failures = from_settings("cuMemCreate@3=2, launch:gemm@0=719");
        let seen = failures.iter().map(|f| (f.call.as_str(), f.after, f.code)).collect::<Vec<_>>();
        assert_eq!(seen, [("cuMemCreate", 3, 2), ("launch:gemm", 0, 719)]);
        assert!(from_settings("").is_empty());
    }

    #[test]
    #[should_panic(expected = "not call@after=code")]
    fn what_is_no_failure_is_refused() {
        from_settings("cuMemCreate=2");
    }

    #[test]
    fn a_call_fails_at_its_turn_and_once() {
        static CALL: CallCounter = CallCounter::new("cuMemHostAlloc");
        let name = c"allocation".as_ptr();
        // SAFETY: the name is a C string.
        let before = unsafe { cuemu_calls(name) };
        // SAFETY: as above.
        unsafe { cuemu_fail(name, 1, 2) };
        assert_eq!([(); 3].map(|()| CALL.begin()), [Ok(()), Err(2), Ok(())]);
        // SAFETY: as above.
        assert_eq!(unsafe { cuemu_calls(name) } - before, 3);
    }
}
