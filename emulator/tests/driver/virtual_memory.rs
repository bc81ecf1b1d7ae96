//! Virtual memory.

use crate::device::*;

const GRANULE: usize = 2 << 20;

/// `CUmemAllocationProp` for memory of a device, and `CUmemAccessDesc` to read and write it.
fn properties(device: i32) -> [i32; 8] {
    [1, 0, 1, device, 0, 0, 0, 0]
}

/// Physical memory.
fn create(granules: usize) -> u64 {
    // SAFETY: the pointers are valid.
    get(|out| unsafe { cuMemCreate(out, granules * GRANULE, properties(0).as_ptr().cast(), 0) })
}

fn reserve(granules: usize) -> u64 {
    // SAFETY: the pointer is valid.
    get(|out| unsafe { cuMemAddressReserve(out, granules * GRANULE, 0, 0, 0) })
}

fn map(at: u64, granules: usize, handle: u64) -> i32 {
    // SAFETY: any addresses may be given.
    unsafe { cuMemMap(at, granules * GRANULE, 0, handle, 0) }
}

fn allow(at: u64, granules: usize) -> i32 {
    let access = [1, 0, 3];
    // SAFETY: the description is valid.
    unsafe { cuMemSetAccess(at, granules * GRANULE, access.as_ptr().cast(), 1) }
}

fn unmap(at: u64, granules: usize) -> i32 {
    // SAFETY: any addresses may be given.
    unsafe { cuMemUnmap(at, granules * GRANULE) }
}

fn put(at: u64, number: f32) -> i32 {
    // SAFETY: the number is there.
    unsafe { cuMemcpyHtoD_v2(at, (&raw const number) as u64, 4) }
}

#[test]
fn addresses_stay_while_memory_comes_and_goes() {
    alone("virtual_memory::addresses_stay_while_memory_comes_and_goes", &[], &[], || {
        open(0);
        let (at, before) = (reserve(4), memory_mib().0);
        assert_eq!(put(at, 1.0), 1, "nothing is mapped");
        let handle = create(4);
        assert_eq!(memory_mib().0, before - 8);
        ok(map(at, 4, handle));
        assert_eq!(put(at, 1.0), 1, "no access yet");
        ok(allow(at, 4));
        assert!(download(at, 1).unwrap()[0].is_nan());
        ok(put(at, 1.0));
        // What is mapped keeps its bytes, wherever it is mapped next.
        ok(unmap(at, 4));
        assert_eq!(download(at, 1), Err(1));
        let other = reserve(4);
        ok(map(other, 4, handle));
        ok(allow(other, 4));
        assert_eq!(download(other, 1), Ok(vec![1.0]));
        // SAFETY: any handle or address may be given.
        unsafe {
            ok(cuMemRelease(handle));
            assert_eq!(memory_mib().0, before - 8, "it is still mapped");
            ok(unmap(other, 4));
            assert_eq!(memory_mib().0, before);
            assert_eq!(cuMemRelease(handle), 1);
            ok(cuMemAddressFree(at, 4 * GRANULE));
            assert_eq!(cuMemAddressFree(at, 4 * GRANULE), 1);
        }
    });
}

#[test]
fn pieces_are_mapped_side_by_side() {
    open(0);
    let at = reserve(3);
    for i in 0..3 {
        ok(map(at + i * GRANULE as u64, 1, create(1)));
    }
    ok(allow(at, 3));
    let last_word = at + 3 * GRANULE as u64 - 4;
    ok(put(last_word, 3.0));
    assert_eq!(download(at + GRANULE as u64 - 8, 4).map(|x| x.len()), Ok(4), "a copy may go from one to the next");
    ok(unmap(at + GRANULE as u64, 1));
    assert_eq!(download(at + GRANULE as u64 - 8, 4), Err(1));
    assert_eq!(download(last_word, 1), Ok(vec![3.0]));
}

#[test]
fn mistakes_are_refused() {
    open(0);
    let (at, handle) = (reserve(2), create(2));
    // SAFETY: any sizes and addresses may be given.
    unsafe {
        assert_eq!(cuMemAddressReserve(&mut 0, 4096, 0, 0, 0), 1, "no multiple of the granularity");
        assert_eq!(cuMemCreate(&mut 0, GRANULE + 1, properties(0).as_ptr().cast(), 0), 1);
        assert_eq!(cuMemCreate(&mut 0, GRANULE, properties(7).as_ptr().cast(), 0), 101, "no such device");
        assert_eq!(cuMemAddressFree(at, GRANULE), 1, "another size");
    }
    assert_eq!(map(at, 3, handle), 1, "past the reserved addresses");
    assert_eq!(map(at + 4096, 1, handle), 1, "between granules");
    assert_eq!(allow(at, 2), 1, "nothing is mapped");
    ok(map(at, 2, handle));
    assert_eq!(map(at, 2, handle), 1, "mapped already");
    assert_eq!(unmap(at, 1), 1, "a part of a mapping");
    // SAFETY: any addresses may be given.
    assert_eq!(unsafe { cuMemAddressFree(at, 2 * GRANULE) }, 1, "still mapped");
}

#[test]
fn a_kernel_that_uses_what_was_unmapped_fails() {
    let name = "virtual_memory::a_kernel_that_uses_what_was_unmapped_fails";
    alone(name, &[], &["which is not allocated", "ld.global.f32"], || {
        open(0);
        let (at, handle, stream) = (reserve(1), create(1), new_stream());
        ok(map(at, 1, handle));
        ok(allow(at, 1));
        let increment = function("increment");
        ok(launch(increment, 1, 32, at, 32, stream));
        ok(synchronize(stream));
        ok(unmap(at, 1));
        ok(launch(increment, 1, 32, at, 32, stream));
        assert_eq!(synchronize(stream), 700);
        // The device stays broken.
        // SAFETY: the pointer is valid.
        assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 4) }, 700);
    });
}
