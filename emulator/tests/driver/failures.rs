//! Failures that a test asks for.

use crate::device::*;

#[test]
fn the_nth_allocation_fails() {
    alone("failures::the_nth_allocation_fails", &[], &["cuMemAlloc_v2 fails with 2, as the test asks"], || {
        open(0);
        let (before, stream) = (calls("allocation"), new_stream());
        fail("allocation", 2, 2);
        // SAFETY: the pointers are valid.
        let codes = unsafe {
            [
                cuMemAlloc_v2(&mut 0, 8),
                cuMemAllocAsync(&mut 0, 8, stream),
                cuMemAlloc_v2(&mut 0, 8),
                cuMemAlloc_v2(&mut 0, 8),
            ]
        };
        assert_eq!((codes, calls("allocation") - before), ([0, 0, 2, 0], 4));
    });
}

#[test]
fn a_launch_fails_at_once_or_on_the_device() {
    alone("failures::a_launch_fails_at_once_or_on_the_device", &[], &["kernel:increment fails"], || {
        open(0);
        let (stream, increment, at) = (new_stream(), function("increment"), upload(&[0.0; 8]));
        fail("launch:increment", 1, 701);
        assert_eq!([(); 3].map(|()| launch(increment, 1, 8, at, 8, stream)), [0, 701, 0]);
        ok(synchronize(stream));
        assert_eq!((download(at, 1), calls("launch:increment")), (Ok(vec![2.0]), 3));
        fail("kernel:increment", 0, 719);
        ok(launch(increment, 1, 8, at, 8, stream));
        assert_eq!(synchronize(stream), 719);
        assert_eq!(download(at, 1), Err(719));
    });
}

#[test]
fn an_error_that_lasts_breaks_the_device() {
    alone("failures::an_error_that_lasts_breaks_the_device", &[("CUEMU_DEVICES", "2")], &[], || {
        open(0);
        let stream = new_stream();
        fail("cuMemAlloc_v2", 0, 700);
        // SAFETY: the pointer is valid.
        assert_eq!([(); 2].map(|()| unsafe { cuMemAlloc_v2(&mut 0, 8) }), [700, 700]);
        assert_eq!(synchronize(stream), 700);
        open(1);
        assert_eq!(download(upload(&[1.0]), 1), Ok(vec![1.0]), "the other device is well");
    });
}

#[test]
fn the_environment_makes_calls_fail() {
    let settings = [("CUEMU_FAIL", "cuStreamCreate@1=2,any@100000=1")];
    alone("failures::the_environment_makes_calls_fail", &settings, &[], || {
        open(0);
        // SAFETY: the pointer is valid.
        assert_eq!([(); 3].map(|()| unsafe { cuStreamCreate(&mut 0, 1) }), [0, 2, 0]);
    });
}

#[test]
fn failures_are_taken_back() {
    alone("failures::failures_are_taken_back", &[], &[], || {
        open(0);
        fail("cuStreamCreate", 0, 2);
        fail("cuStreamCreate", 0, 0);
        new_stream();
    });
}
