//! Memory, copies and what they count as.

use crate::device::*;

const MIB: usize = 1 << 20;

#[test]
fn copies_bring_what_was_put() {
    open(0);
    let numbers = (0..1000).map(|i| i as f32).collect::<Vec<_>>();
    let (a, b) = (upload(&numbers), upload(&[0.0; 1000]));
    // SAFETY: the addresses are checked.
    ok(unsafe { cuMemcpyDtoD_v2(b, a + 400, 400) });
    assert_eq!(download(b, 100), Ok(numbers[100..200].to_vec()));
    // SAFETY: the addresses are checked.
    ok(unsafe { cuMemsetD32_v2(b + 4, 0x3f80_0000, 2) });
    assert_eq!(download(b, 4).unwrap(), [100.0, 1.0, 1.0, 103.0]);
}

#[test]
fn fresh_memory_is_not_a_number() {
    open(0);
    // SAFETY: the pointer is valid.
    let at = get(|out| unsafe { cuMemAlloc_v2(out, 4000) });
    assert!(download(at, 1000).unwrap().iter().all(|x| x.is_nan()));
}

#[test]
fn copies_stay_within_an_allocation() {
    open(0);
    let at = upload(&[1.0; 10]);
    assert_eq!(download(at + 4, 9), Ok(vec![1.0; 9]));
    assert_eq!(download(at + 4, 10), Err(1));
    assert_eq!(download(at + 8192, 1), Err(1));
    // SAFETY: the address is the one that was allocated.
    ok(unsafe { cuMemFree_v2(at) });
    assert_eq!(download(at, 1), Err(1));
    // SAFETY: any address may be given.
    assert_eq!(unsafe { cuMemFree_v2(at) }, 1);
}

#[test]
fn ranges_and_pointers_are_known() {
    open(0);
    let at = upload(&[1.0; 10]);
    let (mut start, mut bytes) = (0, 0);
    // SAFETY: the pointers are valid.
    ok(unsafe { cuMemGetAddressRange_v2(&raw mut start, &raw mut bytes, at + 20) });
    assert_eq!((start, bytes), (at, 40));
    // SAFETY: the pointer is valid for what is asked.
    assert_eq!(get::<u64>(|out| unsafe { cuPointerGetAttribute(out, 2, at) }) as u32, 2);
    let host = pinned(1).as_ptr() as u64;
    // SAFETY: the pointer is valid for what is asked.
    assert_eq!(get::<u64>(|out| unsafe { cuPointerGetAttribute(out, 2, host) }) as u32, 1);
    // SAFETY: the pointer is valid for what is asked.
    assert_eq!(unsafe { cuPointerGetAttribute(unwanted(), 2, 12345) }, 1);
}

#[test]
fn memory_ends_at_the_size_that_was_set() {
    alone(
        "memory::memory_ends_at_the_size_that_was_set",
        &[("CUEMU_MEMORY_MIB", "256"), ("CUEMU_CONTEXT_MIB", "16")],
        &[],
        || {
            open(0);
            assert_eq!(memory_mib(), (240, 256));
            // SAFETY: the pointers are valid.
            unsafe {
                let at = get(|out| cuMemAlloc_v2(out, 200 * MIB));
                assert_eq!(memory_mib(), (40, 256));
                assert_eq!(cuMemAlloc_v2(&mut 0, 41 * MIB), 2);
                assert_eq!(cuMemAlloc_v2(&mut 0, usize::MAX), 2);
                ok(cuMemFree_v2(at));
                assert_eq!(memory_mib(), (240, 256));
                ok(cuDevicePrimaryCtxRelease_v2(0));
            }
            assert_eq!(memory_mib(), (256, 256));
        },
    );
}

#[test]
fn a_neighbour_takes_memory_and_gives_it_back() {
    alone("memory::a_neighbour_takes_memory_and_gives_it_back", &[("CUEMU_MEMORY_MIB", "256")], &[], || {
        open(0);
        assert_eq!(cuemu_neighbour(0, 100 << 20), 0);
        assert_eq!(memory_mib(), (92, 256));
        // SAFETY: the pointer is valid.
        assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 93 * MIB) }, 2);
        assert_eq!(cuemu_neighbour(0, 0), 0);
        assert_eq!(memory_mib(), (192, 256));
    });
}

#[test]
fn a_pool_keeps_what_is_freed_until_a_synchronisation() {
    alone("memory::a_pool_keeps_what_is_freed_until_a_synchronisation", &[("CUEMU_MEMORY_MIB", "256")], &[], || {
        open(0);
        let stream = new_stream();
        // SAFETY: the pointers are valid.
        unsafe {
            let pool = get(|out| cuDeviceGetDefaultMemPool(out, 0));
            let used = |which| get::<u64>(|out| cuMemPoolGetAttribute(pool, which, out)) >> 20;
            let at = get(|out| cuMemAllocAsync(out, 100 * MIB, stream));
            assert_eq!((memory_mib().0, used(7), used(5)), (92, 100, 100));
            ok(cuMemFreeAsync(at, stream));
            // The pool's memory is used again, even where the device has no more.
            let at = get(|out| cuMemAllocAsync(out, 150 * MIB, stream));
            ok(cuMemFreeAsync(at, stream));
            ok(cuMemPoolSetAttribute(pool, 4, &(120u64 << 20)));
            ok(synchronize(stream));
            assert_eq!((memory_mib().0, used(7), used(5)), (72, 0, 120));
            // What does not fit beside the pool's own makes the pool give it back.
            let at = get(|out| cuMemAlloc_v2(out, 180 * MIB));
            assert_eq!(memory_mib().0, 12);
            ok(cuMemFree_v2(at));
        }
    });
}

#[test]
fn registered_memory_is_page_locked() {
    open(0);
    let host = vec![1f32; 100];
    let at = host.as_ptr() as u64;
    // SAFETY: the memory is there until it is unregistered.
    unsafe {
        assert_eq!(cuMemHostGetDevicePointer_v2(&mut 0, at, 0), 1);
        ok(cuMemHostRegister_v2(at, 400, 0));
        assert_eq!(cuMemHostRegister_v2(at + 8, 400, 0), 712);
        assert_eq!(get(|out| cuMemHostGetDevicePointer_v2(out, at, 0)), at);
        ok(cuMemHostUnregister(at));
        assert_eq!(cuMemHostUnregister(at), 713);
    }
}

#[test]
fn kernels_read_page_locked_memory() {
    open(0);
    let (host, stream) = (pinned(100), new_stream());
    host.fill(1.0);
    ok(launch(function("increment"), 1, 128, host.as_ptr() as u64, 100, stream));
    ok(synchronize(stream));
    assert_eq!(host, [2.0; 100]);
}

#[test]
fn a_module_has_its_variables() {
    open(0);
    let (mut at, mut bytes) = (0, 0);
    // SAFETY: the pointers are valid, and the name is a C string.
    ok(unsafe { cuModuleGetGlobal_v2(&raw mut at, &raw mut bytes, module(), c"counter".as_ptr()) });
    assert_eq!((bytes, download(at, 1).unwrap()[0].to_bits()), (4, 41));
    // SAFETY: as above.
    assert_eq!(unsafe { cuModuleGetGlobal_v2(&raw mut at, &raw mut bytes, module(), c"other".as_ptr()) }, 500);
}

#[test]
fn handles_that_are_none_are_refused() {
    open(0);
    // SAFETY: any handle may be given.
    unsafe {
        assert_eq!(cuStreamSynchronize(12345), 400);
        assert_eq!(cuEventDestroy_v2(12345), 400);
        assert_eq!(cuModuleUnload(12345), 400);
        let stream = new_stream();
        ok(cuStreamDestroy_v2(stream));
        assert_eq!(cuStreamDestroy_v2(stream), 400);
        assert_eq!(cuMemAlloc_v2(std::ptr::null_mut(), 4), 1);
    }
    std::thread::spawn(|| {
        // SAFETY: the pointer is valid.
        assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 4) }, 201, "a thread has no context before it sets one");
    })
    .join()
    .unwrap();
}
