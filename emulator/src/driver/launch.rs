//! Modules, functions and their launches.

use std::ffi::{CStr, c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Out, put, put_if_asked};
use crate::entry_points::entry_points;
use crate::error::{
    FILE_NOT_FOUND, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, Result, STREAM_CAPTURE_INVALIDATED, is_sticky,
};
use crate::exec::{self, KernelLaunch};
use crate::failures;
use crate::handles::{Handle, Handles};
use crate::module::{LoadedKernel, LoadedModule};
use crate::settings;
use crate::stream::{
    Operation, OperationKind, break_device, check_device, current_device, forbid_while_capturing, stream,
};

static MODULES: Handles<LoadedModule> = Handles::new();
static FUNCTIONS: Handles<LoadedKernel> = Handles::new();

/// `CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES`
const MAX_DYNAMIC_SHARED: i32 = 8;

/// `CUlaunchConfig`
#[repr(C)]
pub struct LaunchConfig {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: *const c_void,
    attribute_count: u32,
}

/// # Safety
/// As [`LoadedModule::load`].
unsafe fn load(image: *const u8) -> Result<Handle> {
    forbid_while_capturing()?;
    let device = current_device()?;
    check_device(device)?;
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller keeps what this asks for.
    Ok(MODULES.add(Arc::new(unsafe { LoadedModule::load(device, image) }?)))
}

/// The handle of a function of an image, which is loaded on the current device.
///
/// # Safety
/// As [`LoadedModule::load`].
pub(crate) unsafe fn load_function(image: *const u8, name: &str) -> Result<Handle> {
    // SAFETY: the caller keeps what this asks for.
    let module = MODULES.get(unsafe { load(image) }?)?;
    Ok(FUNCTIONS.add(module.kernel(name)?))
}

/// # Safety
/// `name` is a C string.
unsafe fn text(name: *const c_char) -> String {
    // SAFETY: the caller answers for it.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// Maximum blocks on a multiprocessor, by threads and shared memory. The emulator does not know a kernel's registers.
fn blocks_per_processor(kernel: &LoadedKernel, threads: i32, shared: usize) -> i32 {
    let of_shared = settings::get().shared as usize / (kernel.shared + shared + 1024);
    (2048 / threads.max(1)).min(32).min(of_shared as i32)
}

/// Says why a launch is not possible.
fn refusal(launch: &KernelLaunch) -> Option<&'static str> {
    let (grid, block, kernel) = (launch.grid, launch.block, &launch.kernel);
    let threads = block.iter().map(|&n| u64::from(n)).product::<u64>();
    let shared = launch.dynamic_shared;
    if threads == 0 || threads > u64::from(kernel.max_threads.min(exec::MAX_THREADS)) || block[2] > 64 {
        Some("block size")
    } else if grid.contains(&0) || grid[0] > i32::MAX as u32 || grid[1] > 65535 || grid[2] > 65535 {
        Some("grid size")
    } else if shared > kernel.dynamic_limit.load(Ordering::Relaxed)
        || kernel.shared as u32 + shared > settings::get().shared
    {
        Some("dynamic shared memory")
    } else {
        None
    }
}

/// The parameters, laid out as the kernel takes them.
///
/// # Safety
/// `params` points to a pointer to each, or is null, and `extra` gives a buffer with all of them.
unsafe fn parameters(kernel: &LoadedKernel, params: *const *const u8, extra: *const *const u8) -> Result<Vec<u8>> {
    let mut bytes = vec![0; kernel.params.last().map_or(0, |(at, n)| at + n)];
    if kernel.params.is_empty() {
        return Ok(bytes);
    }
    if params.is_null() && extra.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller answers for the pointers; `extra` is CU_LAUNCH_PARAM_BUFFER_POINTER, the buffer,
    // CU_LAUNCH_PARAM_BUFFER_SIZE, a pointer to its size.
    unsafe {
        if params.is_null() {
            let (buffer, size) = (*extra.add(1), *(*extra.add(3)).cast::<usize>());
            buffer.copy_to_nonoverlapping(bytes.as_mut_ptr(), size.min(bytes.len()));
        } else {
            for (i, &(at, n)) in kernel.params.iter().enumerate() {
                (*params.add(i)).copy_to_nonoverlapping(bytes[at..at + n].as_mut_ptr(), n);
            }
        }
    }
    Ok(bytes)
}

/// # Safety
/// As for [`parameters`].
unsafe fn launch(
    function: Handle,
    (grid, block, dynamic_shared): ([u32; 3], [u32; 3], u32),
    on: Handle,
    params: *const *const u8,
    extra: *const *const u8,
) -> Result {
    let stream = stream(on)?;
    check_device(stream.device)?;
    let kernel = FUNCTIONS.get(function)?;
    failures::begin_launch(&kernel.name).inspect_err(|&code| {
        if is_sticky(code) {
            break_device(stream.device, code);
        }
        // A test says so that another thread has broken it off.
        if let (STREAM_CAPTURE_INVALIDATED, Some(capture)) = (code, stream.capture()) {
            capture.break_off();
        }
    })?;
    // SAFETY: the caller keeps what this asks for.
    let params = unsafe { parameters(&kernel, params, extra) }?;
    let launch = Arc::new(KernelLaunch { device: stream.device, kernel, grid, block, dynamic_shared, params });
    if let Some(what) = refusal(&launch) {
        let name = &launch.kernel.name;
        eprintln!("emulator: {name}: {what} (grid {grid:?}, block {block:?}, {dynamic_shared} bytes)");
        return Err(INVALID_VALUE);
    }
    stream.push(Operation::new(OperationKind::Kernel, move || {
        failures::begin_kernel(&launch.kernel.name)?;
        exec::run(&launch)
    }))
}

entry_points! {
    fn cuModuleLoadData(out: Out<Handle>, image: *const u8) { put(out, load(image)?) }
    fn cuModuleLoadDataEx(out: Out<Handle>, image: *const u8, _count: u32, _options: *const i32, _values: *const u64) {
        put(out, load(image)?)
    }
    fn cuModuleLoadFatBinary(out: Out<Handle>, image: *const u8) { put(out, load(image)?) }
    fn cuModuleLoad(out: Out<Handle>, path: *const c_char) {
        let mut image = std::fs::read(text(path)).map_err(|_| FILE_NOT_FOUND)?;
        image.push(0);
        put(out, load(image.as_ptr())?)
    }
    fn cuModuleUnload(module: Handle) { MODULES.remove(module).map(drop) }
    fn cuModuleGetLoadingMode(out: Out<i32>) { put(out, 2) } // lazy
    fn cuModuleGetFunction(out: Out<Handle>, module: Handle, name: *const c_char) {
        put(out, FUNCTIONS.add(MODULES.get(module)?.kernel(&text(name))?))
    }
    fn cuModuleGetGlobal_v2(at: Out<u64>, bytes: Out<usize>, module: Handle, name: *const c_char) {
        let (module, name) = (MODULES.get(module)?, text(name));
        let variable = module.variables.iter().find(|v| v.name == name && v.at != 0).ok_or(NOT_FOUND)?;
        put_if_asked(at, variable.at);
        put_if_asked(bytes, variable.bytes as usize);
        Ok(())
    }
    fn cuFuncGetAttribute(out: Out<i32>, which: i32, function: Handle) {
        let kernel = FUNCTIONS.get(function)?;
        put(out, match which {
            0 => kernel.max_threads as i32,
            1 => kernel.shared as i32,
            2..=4 | 7 => 0, // constant and local memory, registers, caching: not known here
            5 | 6 => settings::get().capability,
            MAX_DYNAMIC_SHARED => kernel.dynamic_limit.load(Ordering::Relaxed) as i32,
            _ => return Err(NOT_SUPPORTED),
        })
    }
    fn cuFuncSetAttribute(function: Handle, which: i32, value: i32) {
        let kernel = FUNCTIONS.get(function)?;
        match which {
            MAX_DYNAMIC_SHARED if value < 0 || value as u32 + kernel.shared as u32 > settings::get().shared => {
                return Err(INVALID_VALUE);
            }
            MAX_DYNAMIC_SHARED => kernel.dynamic_limit.store(value as u32, Ordering::Relaxed),
            9 => {} // how much shared memory is preferred
            _ => return Err(NOT_SUPPORTED),
        }
        Ok(())
    }
    fn cuFuncSetCacheConfig(function: Handle, _config: i32) { FUNCTIONS.get(function).map(drop) }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(out: Out<i32>, function: Handle, threads: i32, shared: usize) {
        put(out, blocks_per_processor(&*FUNCTIONS.get(function)?, threads, shared))
    }
    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        out: Out<i32>, function: Handle, threads: i32, shared: usize, _flags: u32
    ) {
        put(out, blocks_per_processor(&*FUNCTIONS.get(function)?, threads, shared))
    }
    fn cuLaunchKernel(
        function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, on: Handle,
        params: *const *const u8, extra: *const *const u8
    ) {
        launch(function, ([gx, gy, gz], [bx, by, bz], shared), on, params, extra)
    }
    fn cuLaunchKernelEx(config: *const LaunchConfig, function: Handle, params: *const *const u8, extra: *const *const u8) {
        let config = config.as_ref().ok_or(INVALID_VALUE)?;
        if config.attribute_count > 0 {
            eprintln!("emulator: attributes of launches (clusters, cooperation) are not emulated");
            return Err(NOT_SUPPORTED);
        }
        launch(function, (config.grid, config.block, config.shared), config.stream, params, extra)
    }
}
