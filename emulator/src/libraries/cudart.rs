//! The runtime, as far as code that nvcc has compiled with `<<<>>>` calls it: binaries that are registered before
//! `main`, and launches of what they hold. A binary is loaded on a device when one of its kernels is first asked for
//! there.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_void};
use std::sync::{LazyLock, Mutex, PoisonError};

use crate::driver::device::cuDeviceGetAttribute;
use crate::driver::launch::{cuFuncSetAttribute, cuLaunchKernel, load_function};
use crate::entry_points::{entry_points, missing};
use crate::error::{ErrorCode, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED, Result, SUCCESS};
use crate::handles::Handle;
use crate::stream::{PER_THREAD, current_device, stream};

/// `dim3`
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Dim3 {
    pub x: u32,
    pub y: u32,
    pub z: u32,
}

/// `__fatBinC_Wrapper_t`
#[repr(C)]
pub struct Wrapper {
    pub magic: i32,
    pub version: i32,
    pub image: *const u8,
    pub file: *const c_char,
}

/// A kernel of a registered binary: the program knows it by the address of a function of the host.
struct Registered {
    image: usize,
    name: String,
    /// By device.
    loaded: HashMap<usize, Handle>,
}

static KERNELS: LazyLock<Mutex<HashMap<usize, Registered>>> = LazyLock::new(Mutex::default);

thread_local! {
    /// Grid, block, shared memory and stream of launches whose kernels are still to be named.
    static CONFIGURATIONS: RefCell<Vec<(Dim3, Dim3, usize, Handle)>> = const { RefCell::new(Vec::new()) };
    static LAST_ERROR: Cell<ErrorCode> = const { Cell::new(SUCCESS) };
}

fn note(result: ErrorCode) -> ErrorCode {
    if result != SUCCESS {
        LAST_ERROR.set(result);
    }
    result
}

fn check(status: ErrorCode) -> Result {
    if status == SUCCESS { Ok(()) } else { Err(status) }
}

/// The driver's handle of a kernel on a device.
fn kernel(function: usize, device: usize) -> Result<Handle> {
    let mut kernels = KERNELS.lock().unwrap_or_else(PoisonError::into_inner);
    let kernel = kernels.get_mut(&function).ok_or(NOT_FOUND)?;
    if let Some(&loaded) = kernel.loaded.get(&device) {
        return Ok(loaded);
    }
    // SAFETY: the program has registered the image, which is part of it.
    let loaded = unsafe { load_function(kernel.image as *const u8, &kernel.name) }?;
    kernel.loaded.insert(device, loaded);
    Ok(loaded)
}

/// # Safety
/// As of `cuLaunchKernel`.
unsafe fn launch(
    function: usize,
    [grid, block]: [Dim3; 2],
    arguments: *const *const u8,
    shared: usize,
    on: Handle,
) -> Result {
    let kernel = kernel(function, stream(on)?.device)?;
    let shared = u32::try_from(shared).map_err(|_| INVALID_VALUE)?;
    let ((gx, gy, gz), (bx, by, bz)) = ((grid.x, grid.y, grid.z), (block.x, block.y, block.z));
    // SAFETY: the caller's promise.
    check(unsafe { cuLaunchKernel(kernel, gx, gy, gz, bx, by, bz, shared, on, arguments, std::ptr::null()) })
}

/// Gives the image itself as the handle of the binary.
///
/// # Safety
/// `wrapper` is one.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the names are CUDA's")]
pub unsafe extern "C" fn __cudaRegisterFatBinary(wrapper: *const Wrapper) -> *const u8 {
    // SAFETY: the caller answers for it.
    unsafe { (*wrapper).image }
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the names are CUDA's")]
pub extern "C" fn __cudaRegisterFatBinaryEnd(_binary: *const u8) {}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the names are CUDA's")]
pub extern "C" fn __cudaUnregisterFatBinary(_binary: *const u8) {}

/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the names are CUDA's")]
#[allow(clippy::too_many_arguments, reason = "what it takes is CUDA's")]
pub unsafe extern "C" fn __cudaRegisterFunction(
    binary: *const u8,
    function: *const c_void,
    _stub: *const c_void,
    name: *const c_char,
    _thread_limit: i32,
    _thread: *const c_void,
    _block: *const c_void,
    _block_dim: *const c_void,
    _grid_dim: *const c_void,
    _warp: *const c_void,
) {
    // SAFETY: the caller answers for the name.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let registered = Registered { image: binary as usize, name, loaded: HashMap::new() };
    KERNELS.lock().unwrap_or_else(PoisonError::into_inner).insert(function as usize, registered);
}

/// Variables of a binary are not found by the host's names.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the names are CUDA's")]
pub extern "C" fn __cudaRegisterVar(
    _binary: *const u8,
    _host: *const c_void,
    _stub: *const c_void,
    _name: *const c_char,
) {
}

/// Gives what the last call of this thread that failed has failed with, and forgets it.
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the names are CUDA's")]
pub extern "C" fn cudaGetLastError() -> ErrorCode {
    LAST_ERROR.replace(SUCCESS)
}

#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the names are CUDA's")]
pub extern "C" fn cudaGetErrorString(_code: ErrorCode) -> *const c_char {
    c"an error of the emulated driver".as_ptr()
}

entry_points! {
    status note;
    fn __cudaPushCallConfiguration(grid: Dim3, block: Dim3, shared: usize, on: Handle) {
        CONFIGURATIONS.with_borrow_mut(|waiting| waiting.push((grid, block, shared, on)));
        Ok(())
    }
    fn __cudaPopCallConfiguration(grid: *mut Dim3, block: *mut Dim3, shared: *mut usize, on: *mut Handle) {
        (*grid, *block, *shared, *on) = CONFIGURATIONS.with_borrow_mut(Vec::pop).ok_or(INVALID_VALUE)?;
        Ok(())
    }
    fn __cudaGetKernel(kernel: *mut usize, function: usize) {
        *kernel = function;
        Ok(())
    }
    fn __cudaLaunchKernel(
        function: usize, grid: Dim3, block: Dim3, arguments: *const *const u8, shared: usize, on: Handle
    ) {
        launch(function, [grid, block], arguments, shared, on)
    }
    fn __cudaLaunchKernel_ptsz(
        function: usize, grid: Dim3, block: Dim3, arguments: *const *const u8, shared: usize, on: Handle
    ) {
        launch(function, [grid, block], arguments, shared, if on == 0 { PER_THREAD } else { on })
    }
    fn cudaFuncSetAttribute(function: usize, which: i32, value: i32) {
        check(cuFuncSetAttribute(kernel(function, current_device()?)?, which, value))
    }
    fn cudaGetDevice(device: *mut i32) {
        *device = i32::try_from(current_device()?).map_err(|_| NOT_SUPPORTED)?;
        Ok(())
    }
    fn cudaDeviceGetAttribute(value: *mut i32, which: i32, device: i32) {
        check(cuDeviceGetAttribute(value, which, device))
    }
}

missing! {
    status NOT_SUPPORTED;
    cudaLaunchKernel cudaLaunchKernelExC cudaMalloc cudaFree cudaMemcpy cudaMemcpyAsync cudaMemset cudaStreamSynchronize
    cudaDeviceSynchronize
}
