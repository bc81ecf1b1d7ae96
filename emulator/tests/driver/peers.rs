//! Several devices: whose kernels may access what, and copies from one to another.

use crate::device::*;

const GRANULE: usize = 2 << 20;
const TWO: [(&str, &str); 1] = [("CUEMU_DEVICES", "2")];

/// The context of a device.
fn context(device: usize) -> usize {
    device + 1
}

/// `CUDA_MEMCPY3D_PEER`, of rows of so many bytes: addresses, contexts and pitches that they come from and go to.
fn copy_rows(from: (u64, usize, usize), to: (u64, usize, usize), [width, height]: [usize; 2], stream: usize) -> i32 {
    let half = |(at, context, pitch): (u64, usize, usize)| {
        [0, 0, 0, 0, 2, 0, at, 0, context as u64, pitch as u64, height as u64]
    };
    let words: Vec<u64> = [half(from), half(to)].concat().into_iter().chain([width as u64, height as u64, 1]).collect();
    // SAFETY: the description is valid.
    unsafe { cuMemcpy3DPeerAsync(words.as_ptr().cast(), stream) }
}

#[test]
fn a_kernel_has_no_access_to_another_devices_memory() {
    let said = ["4 bytes at", "or another device's"];
    alone("peers::a_kernel_has_no_access_to_another_devices_memory", &TWO, &said, || {
        open(1);
        let at = upload(&[1.0; 10]);
        open(0);
        let stream = new_stream();
        ok(launch(function("increment"), 1, 32, at, 10, stream));
        assert_eq!(synchronize(stream), 700);
    });
}

#[test]
fn peers_have_access_once_they_ask_for_it() {
    alone("peers::peers_have_access_once_they_ask_for_it", &TWO, &[], || {
        open(1);
        let before = upload(&[1.0; 10]);
        open(0);
        // SAFETY: any context may be given.
        unsafe {
            assert_eq!(cuCtxEnablePeerAccess(context(0), 0), 101, "no device is its own peer");
            ok(cuCtxEnablePeerAccess(context(1), 0));
            assert_eq!(cuCtxEnablePeerAccess(context(1), 0), 704);
        }
        let (stream, increment) = (new_stream(), function("increment"));
        open(1);
        let after = upload(&[2.0; 10]);
        open(0);
        for at in [before, after] {
            ok(launch(increment, 1, 32, at, 10, stream));
        }
        ok(synchronize(stream));
        assert_eq!([before, after].map(|at| download(at, 1).unwrap()[0]), [2.0, 3.0]);
    });
}

#[test]
fn virtual_memory_is_accessed_by_the_devices_that_are_named() {
    alone("peers::virtual_memory_is_accessed_by_the_devices_that_are_named", &TWO, &["or another device's"], || {
        for device in [1, 0] {
            open(device);
            let (stream, increment) = (new_stream(), function("increment"));
            // SAFETY: the descriptions are valid, and the addresses are reserved.
            unsafe {
                let at = get(|out| cuMemAddressReserve(out, GRANULE, 0, 0, 0));
                let properties = [1, 0, 1, 0, 0, 0, 0, 0];
                let handle = get(|out| cuMemCreate(out, GRANULE, properties.as_ptr().cast(), 0));
                ok(cuMemMap(at, GRANULE, 0, handle, 0));
                ok(cuMemSetAccess(at, GRANULE, [1, 1, 3].as_ptr().cast(), 1));
                ok(launch(increment, 1, 32, at, 10, stream));
            }
            assert_eq!(synchronize(stream), [700, 0][device as usize], "device {device} of memory of device 0");
        }
    });
}

#[test]
fn rows_are_copied_from_device_to_device() {
    alone("peers::rows_are_copied_from_device_to_device", &TWO, &["are not rows of the context's device"], || {
        open(1);
        let from = upload(&(0..12).map(|i| i as f32).collect::<Vec<_>>());
        open(0);
        let (stream, to) = (new_stream(), upload(&[-1.0; 12]));
        // Columns 1 and 2 of three rows of four, to rows of five.
        ok(copy_rows((from + 4, context(1), 16), (to, context(0), 20), [8, 3], stream));
        ok(synchronize(stream));
        assert_eq!(download(to, 12).unwrap(), [1.0, 2.0, -1.0, -1.0, -1.0, 5.0, 6.0, -1.0, -1.0, -1.0, 9.0, 10.0]);
        let refused = [
            ((from, context(0), 16), (to, context(0), 16), "the other device's memory"),
            ((from, context(1), 16), (to, context(1), 16), "memory of the other device"),
            ((from, context(1), 4), (to, context(0), 16), "rows that overlap"),
            ((from + 16, context(1), 16), (to, context(0), 16), "rows that pass the end"),
            ((from, context(1), 16), (to + 16, context(0), 16), "rows that pass the end of where they go"),
            ((from, 0, 16), (to, context(0), 16), "no context"),
        ];
        for (from, to, what) in refused {
            assert_eq!(copy_rows(from, to, [8, 3], stream), 1, "{what}");
        }
        // SAFETY: any addresses may be given.
        unsafe {
            ok(cuMemcpyPeerAsync(to, context(0), from, context(1), 8, stream));
            assert_eq!(cuMemcpyPeerAsync(to, context(1), from, context(0), 8, stream), 1, "the wrong way round");
        }
        ok(synchronize(stream));
        assert_eq!(download(to, 3).unwrap(), [0.0, 1.0, -1.0]);
    });
}
