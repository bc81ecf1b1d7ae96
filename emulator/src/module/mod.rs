//! Modules: PTX text, or a fat binary that has some. A function is translated and compiled when it is first asked for.

mod compile;
mod image;

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};

use crate::error::{ErrorCode, INVALID_PTX, NOT_FOUND, Result};
use crate::{memory, ptx, settings};
pub use compile::Compiled;

/// Dynamic shared memory that a function may have unless it asks for more.
pub const DYNAMIC_SHARED: u32 = 48 << 10;

/// A function that can be launched.
pub struct LoadedKernel {
    pub name: String,
    pub function: Compiled,
    /// Offset and size of each parameter.
    pub params: Vec<(usize, usize)>,
    /// Static shared memory in bytes.
    pub shared: usize,
    pub max_threads: u32,
    /// No thread waits for another.
    pub alone: bool,
    /// Accesses to shared memory are checked for races.
    pub races: bool,
    /// Addresses of the module's variables.
    pub globals: Vec<u64>,
    /// Most dynamic shared memory in bytes.
    pub dynamic_limit: AtomicU32,
    text: Arc<Vec<String>>,
}

/// A variable of a module.
pub struct LoadedVariable {
    pub name: String,
    pub at: u64,
    pub bytes: u64,
}

pub struct LoadedModule {
    entries: BTreeMap<String, ptx::EntryPoint>,
    pub variables: Vec<LoadedVariable>,
    text: Arc<Vec<String>>,
    kernels: Mutex<Vec<Arc<LoadedKernel>>>,
}

/// Prints the error of a function or module, and returns its code.
fn invalid(what: &str, error: &str) -> ErrorCode {
    eprintln!("emulator: {what}: {error}");
    INVALID_PTX
}

impl LoadedModule {
    /// Loads a module for a device.
    ///
    /// # Safety
    /// `image` is a fat binary or PTX text that ends with a zero.
    pub unsafe fn load(device: usize, image: *const u8) -> Result<Self> {
        // SAFETY: the caller keeps what this asks for.
        let text = unsafe { image::ptx_of(image) }?;
        let module = ptx::PtxModule::parse(&text).map_err(|error| invalid("module", &error.to_string()))?;
        let mut variables = Vec::new();
        for variable in &module.variables {
            let (mut at, bytes) = (0, variable.bytes);
            if variable.space != "shared" && !variable.external && bytes > 0 {
                at = memory::get().allocate(device, bytes as u64, false)?;
                let mut value = variable.value.clone();
                value.resize(bytes, 0);
                let to = memory::get().bytes_at(at, bytes)?;
                // SAFETY: the memory has just been allocated with this size.
                unsafe { to.copy_from_nonoverlapping(value.as_ptr(), bytes) };
            }
            variables.push(LoadedVariable { name: variable.name.clone(), at, bytes: bytes as u64 });
        }
        let text = Arc::new(text.lines().map(str::to_owned).collect());
        Ok(Self { entries: module.entries, variables, text, kernels: Mutex::default() })
    }

    /// The function of a name, compiled.
    pub fn kernel(&self, name: &str) -> Result<Arc<LoadedKernel>> {
        let find = |kernels: &[Arc<LoadedKernel>]| kernels.iter().find(|kernel| kernel.name == name).cloned();
        if let Some(kernel) = find(&self.kernels.lock().unwrap()) {
            return Ok(kernel);
        }
        let code = self.entries.get(name).ok_or(NOT_FOUND)?;
        let races = settings::get().races;
        let function = compile::compile(name, &code.c, races).map_err(|error| invalid(name, &error))?;
        let kernel = Arc::new(LoadedKernel {
            name: name.into(),
            function,
            params: code.params.clone(),
            shared: code.shared,
            max_threads: code.max_threads,
            alone: code.alone,
            races,
            globals: self.variables.iter().map(|variable| variable.at).collect(),
            dynamic_limit: AtomicU32::new(DYNAMIC_SHARED),
            text: self.text.clone(),
        });
        // Other functions were compiled meanwhile, and maybe this one by another thread.
        let mut kernels = self.kernels.lock().unwrap();
        if let Some(first) = find(&kernels) {
            return Ok(first);
        }
        kernels.push(kernel.clone());
        Ok(kernel)
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        for variable in self.variables.iter().filter(|variable| variable.at != 0) {
            let _ = memory::get().free(variable.at);
        }
    }
}

impl LoadedKernel {
    /// A line of the PTX and, if it was compiled with -lineinfo, of the source.
    pub fn place(&self, line: u32) -> String {
        let Some(text) = self.text.get((line as usize).wrapping_sub(1)) else { return "an unknown place".into() };
        let source = self.source(line as usize).map_or_else(String::new, |place| format!(" ({place})"));
        format!("«{}», PTX line {line}{source}", text.trim())
    }

    /// File and line of the source that a line of the PTX is of.
    fn source(&self, line: usize) -> Option<String> {
        let mark = self.text[..line].iter().rev().find_map(|text| text.trim().strip_prefix(".loc"))?;
        let mut words = mark.split_whitespace();
        let (file, line) = (words.next()?, words.next()?);
        let path = self.text.iter().rev().find_map(|text| {
            let (number, path) = text.trim().strip_prefix(".file")?.trim().split_once(char::is_whitespace)?;
            (number == file).then(|| path.split('"').nth(1))?
        })?;
        Some(format!("{}:{line}", path.rsplit('/').next()?))
    }
}
