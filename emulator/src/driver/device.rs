//! The driver, its errors, devices, and their contexts. A context's handle is its device's number plus one.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::sync::Mutex;

use super::{Out, put, put_if_asked};
use crate::entry_points::entry_points;
use crate::error::{
    CODES, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NOT_SUPPORTED, PEER_ACCESS_ALREADY_ENABLED, Result,
};
use crate::handles::Handle;
use crate::settings::{self, MAX_DEVICES};
use crate::stream::{current_device, set_current_device, wait_for_device};
use crate::{memory, module};

/// How often the context of each device is held.
static CONTEXTS: Mutex<[u32; MAX_DEVICES]> = Mutex::new([0; MAX_DEVICES]);

thread_local!(static PUSHED: RefCell<Vec<Option<usize>>> = const { RefCell::new(Vec::new()) });

/// A device by its number.
pub fn device(number: i32) -> Result<usize> {
    usize::try_from(number).ok().filter(|&n| n < settings::get().devices).ok_or(INVALID_DEVICE)
}

/// The device of a context.
pub fn device_of(context: Handle) -> Result<Option<usize>> {
    match context.checked_sub(1) {
        Some(device) if device >= settings::get().devices => Err(INVALID_CONTEXT),
        device => Ok(device),
    }
}

fn context_of(device: Option<usize>) -> Handle {
    device.map_or(0, |device| device + 1)
}

/// An attribute of a device, by `CUdevice_attribute`; 0 for those that it does not have.
fn attribute(which: i32) -> i32 {
    let settings = settings::get();
    match which {
        1..=3 => crate::exec::MAX_THREADS as i32,
        4 => 64,                            // threads of a block in z
        5 => i32::MAX,                      // blocks of a grid in x
        6 | 7 => 65535,                     // and in y and z
        8 => module::DYNAMIC_SHARED as i32, // shared memory of a block that does not ask for more
        9 => 65536,                         // constant memory
        10 => 32,                           // threads of a warp
        12 | 82 => 65536,                   // registers of a block, of a processor
        13 | 36 => 1_000_000,               // clock rates in kHz
        16 => settings.processors,
        37 => 5120,     // width of the memory bus in bits
        38 => 50 << 20, // L2 cache
        39 => 2048,     // threads of a processor
        75 => settings.capability / 10,
        76 => settings.capability % 10,
        81 => (settings.shared + 1024) as i32, // shared memory of a processor
        97 => settings.shared as i32,
        106 => 32,   // blocks of a processor
        111 => 1024, // shared memory of a block that the system takes
        // Host memory can be mapped, kernels run at once, copies meanwhile, addresses are unified, registered memory
        // has the host's addresses, priorities, registration of host memory, virtual memory, pools.
        15 | 19 | 31 | 40 | 41 | 78 | 91 | 99 | 102 | 115 => 1,
        33 => 1, // PCI bus
        _ => 0,
    }
}

fn text_of(code: i32) -> Result<(&'static CStr, &'static CStr)> {
    CODES.iter().find(|(known, ..)| *known == code).map(|(_, name, text)| (*name, *text)).ok_or(INVALID_VALUE)
}

/// Copies text to where there is room for `bytes` bytes, its end included.
unsafe fn put_text(out: Out<c_char>, bytes: i32, text: &str) -> Result {
    if out.is_null() || bytes <= text.len() as i32 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller has room for `bytes`.
    unsafe {
        out.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        out.add(text.len()).write(0);
    }
    Ok(())
}

/// Sixteen bytes that tell a device from others of this machine.
fn uuid(device: usize) -> [u8; 16] {
    let mut uuid = *b"emulated device0";
    uuid[15] = device as u8;
    uuid
}

/// As tools write it.
pub fn uuid_text(device: usize) -> String {
    let digits: String = uuid(device).iter().map(|byte| format!("{byte:02x}")).collect();
    [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]].join("-")
}

/// The most bytes of a device that this process has held at a time since the last call, and -1 if there is no such
/// device.
#[unsafe(no_mangle)]
pub extern "C" fn cuemu_peak(number: i32) -> i64 {
    device(number).map_or(-1, |device| memory::get().take_peak(device) as i64)
}

/// Lets a made-up neighbour hold `bytes` bytes of a device from now on.
#[unsafe(no_mangle)]
pub extern "C" fn cuemu_neighbour(number: i32, bytes: u64) -> i32 {
    device(number).map(|device| memory::get().set_neighbour(device, bytes)).err().unwrap_or(0)
}

entry_points! {
    fn cuInit(flags: u32) { if flags == 0 { Ok(()) } else { Err(INVALID_VALUE) } }
    fn cuDriverGetVersion(out: Out<i32>) { put(out, 13000) }
    fn cuGetErrorName(code: i32, out: Out<*const c_char>) {
        put(out, text_of(code).map_or(std::ptr::null(), |(name, _)| name.as_ptr()))?;
        text_of(code).map(drop)
    }
    fn cuGetErrorString(code: i32, out: Out<*const c_char>) {
        put(out, text_of(code).map_or(std::ptr::null(), |(_, text)| text.as_ptr()))?;
        text_of(code).map(drop)
    }

    fn cuDeviceGetCount(out: Out<i32>) { put(out, settings::get().devices as i32) }
    fn cuDeviceGet(out: Out<i32>, number: i32) { device(number)?; put(out, number) }
    fn cuDeviceGetName(out: Out<c_char>, bytes: i32, number: i32) {
        device(number)?;
        put_text(out, bytes, "Emulated GPU")
    }
    fn cuDeviceGetUuid(out: Out<[u8; 16]>, number: i32) { put(out, uuid(device(number)?)) }
    fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, number: i32) { put(out, uuid(device(number)?)) }
    fn cuDeviceTotalMem_v2(out: Out<usize>, number: i32) {
        device(number)?;
        put(out, settings::get().memory as usize)
    }
    fn cuDeviceGetAttribute(out: Out<i32>, which: i32, number: i32) {
        device(number)?;
        put(out, attribute(which))
    }
    fn cuDeviceComputeCapability(major: Out<i32>, minor: Out<i32>, number: i32) {
        device(number)?;
        put(major, attribute(75))?;
        put(minor, attribute(76))
    }
    fn cuDeviceGetPCIBusId(out: Out<c_char>, bytes: i32, number: i32) {
        put_text(out, bytes, &format!("0000:{:02x}:00.0", device(number)? + 1))
    }
    fn cuDeviceCanAccessPeer(out: Out<i32>, one: i32, other: i32) {
        put(out, i32::from(device(one)? != device(other)?))
    }
    fn cuDeviceGetP2PAttribute(out: Out<i32>, which: i32, one: i32, other: i32) {
        let is_access = which == 2;
        put(out, i32::from(is_access && device(one)? != device(other)?))
    }

    fn cuDevicePrimaryCtxRetain(out: Out<Handle>, number: i32) {
        let device = device(number)?;
        let mut held = CONTEXTS.lock().unwrap();
        if held[device] == 0 {
            memory::get().open_context(device)?;
        }
        held[device] += 1;
        put(out, context_of(Some(device)))
    }
    fn cuDevicePrimaryCtxRelease_v2(number: i32) {
        let device = device(number)?;
        let mut held = CONTEXTS.lock().unwrap();
        held[device] = held[device].checked_sub(1).ok_or(INVALID_CONTEXT)?;
        if held[device] == 0 {
            memory::get().close_context(device);
        }
        Ok(())
    }
    fn cuDevicePrimaryCtxGetState(number: i32, flags: Out<u32>, active: Out<i32>) {
        let held = CONTEXTS.lock().unwrap()[device(number)?];
        put(flags, 0)?;
        put(active, i32::from(held > 0))
    }
    fn cuDevicePrimaryCtxSetFlags_v2(number: i32, _flags: u32) { device(number).map(drop) }

    fn cuCtxSetCurrent(context: Handle) { set_current_device(device_of(context)?); Ok(()) }
    fn cuCtxGetCurrent(out: Out<Handle>) { put(out, context_of(current_device().ok())) }
    fn cuCtxPushCurrent_v2(context: Handle) {
        let device = device_of(context)?;
        PUSHED.with_borrow_mut(|pushed| pushed.push(current_device().ok()));
        set_current_device(device);
        Ok(())
    }
    fn cuCtxPopCurrent_v2(out: Out<Handle>) {
        put_if_asked(out, context_of(Some(current_device()?)));
        set_current_device(PUSHED.with_borrow_mut(Vec::pop).flatten());
        Ok(())
    }
    fn cuCtxGetDevice(out: Out<i32>) { put(out, current_device()? as i32) }
    fn cuCtxSynchronize() { wait_for_device(current_device()?) }
    fn cuCtxSetFlags(_flags: u32) { current_device().map(drop) }
    fn cuCtxGetFlags(out: Out<u32>) { current_device()?; put(out, 0) }
    fn cuCtxGetApiVersion(_context: Handle, out: Out<u32>) { put(out, 3020) }
    fn cuCtxGetStreamPriorityRange(least: Out<i32>, greatest: Out<i32>) {
        put_if_asked(least, 0);
        put_if_asked(greatest, -5);
        Ok(())
    }
    fn cuCtxEnablePeerAccess(context: Handle, flags: u32) {
        let (own, other) = (current_device()?, device_of(context)?.ok_or(INVALID_CONTEXT)?);
        if flags != 0 { return Err(INVALID_VALUE) }
        if own == other { return Err(INVALID_DEVICE) }
        if memory::get().enable_peer(own, other) { Ok(()) } else { Err(PEER_ACCESS_ALREADY_ENABLED) }
    }
    fn cuCtxDisablePeerAccess(_context: Handle) { Err(NOT_SUPPORTED) }
    fn cuProfilerStart() { Ok(()) }
    fn cuProfilerStop() { Ok(()) }
}
