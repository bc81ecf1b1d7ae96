//! The C of a kernel to machine code, by the system's C compiler, kept on disk under the digest of the C.

use std::ffi::{CStr, CString, c_void};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{ptx, settings};

/// A kernel's machine code: it takes the thread and the parameters.
pub type Compiled = unsafe extern "C" fn(*mut c_void, *const u8);

/// Contraction and reassociation would make other numbers than the PTX says. The expensive optimisations are for the
/// one that clears the upper halves of vector registers: else all code that follows a kernel's runs at half its speed.
const FLAGS: &str = "-O1 -fexpensive-optimizations -march=native -std=gnu17 -shared -fPIC -ffp-contract=off -fwrapv \
    -fno-math-errno -fno-strict-aliasing -fno-stack-protector -fcf-protection=none -w";

/// The machine code of a kernel's C. Threads and processes that ask for the same at once build it once.
pub fn compile(name: &str, c: &str, races: bool) -> Result<Compiled, String> {
    let settings = settings::get();
    std::fs::create_dir_all(&settings.cache).map_err(|e| format!("{}: {e}", settings.cache.display()))?;
    let mut hash = DefaultHasher::new();
    (ptx::RUNTIME, c, FLAGS, races, &settings.compiler).hash(&mut hash);
    let library = settings.cache.join(format!("{name:.60}-{:016x}.so", hash.finish()));
    if !library.exists() {
        let lock = File::create(library.with_extension("lock")).map_err(|e| e.to_string())?;
        lock.lock().map_err(|e| e.to_string())?;
        // Whoever had the lock before may have built it.
        if !library.exists() {
            build(&library, c, races)?;
        }
    }
    load(&library)
}

/// Compiles `c` to `library`, which appears at once and whole: other processes may be looking for it.
fn build(library: &Path, c: &str, races: bool) -> Result<(), String> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let unique = format!("{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let (source, fresh) = (library.with_extension(format!("{unique}.c")), library.with_extension(unique));
    std::fs::write(&source, c.replace("#include \"runtime.h\"", ptx::RUNTIME)).map_err(|e| e.to_string())?;
    let mut command = Command::new(&settings::get().compiler);
    command.args(FLAGS.split_whitespace());
    if races {
        command.arg("-DRACE");
    }
    let output = command.arg("-o").arg(&fresh).arg(&source).arg("-lm").output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).chars().take(2000).collect());
    }
    std::fs::rename(&source, library.with_extension("c")).map_err(|e| e.to_string())?;
    std::fs::rename(&fresh, library).map_err(|e| e.to_string())
}

/// The function `kernel` of a library, which is never unloaded.
fn load(library: &Path) -> Result<Compiled, String> {
    let path = CString::new(library.as_os_str().as_encoded_bytes()).map_err(|e| e.to_string())?;
    // SAFETY: the paths and names are C strings; the library has been made by `build` and has the function with the
    // type that the translation gives it.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL);
        let function = if handle.is_null() { handle } else { libc::dlsym(handle, c"kernel".as_ptr()) };
        if function.is_null() {
            return Err(CStr::from_ptr(libc::dlerror()).to_string_lossy().into_owned());
        }
        Ok(std::mem::transmute::<*mut c_void, Compiled>(function))
    }
}
