//! Kernels with mistakes: each is found, and said where.

use crate::device::*;

#[test]
fn an_access_past_the_end_is_found() {
    let said = ["4 bytes at", "past the end of an allocation, thread [10, 0, 0] of block [0, 0, 0]", "PTX line 20"];
    alone("faults::an_access_past_the_end_is_found", &[], &said, || {
        open(0);
        let (stream, at) = (new_stream(), upload(&[0.0; 10]));
        ok(launch(function("increment"), 1, 128, at, 11, stream));
        assert_eq!(synchronize(stream), 700);
    });
}

#[test]
fn a_race_is_found() {
    let said = ["race: byte", "st.shared.f32", "ld.shared.f32"];
    alone("faults::a_race_is_found", &[("CUEMU_RACES", "1")], &said, || {
        open(0);
        let (stream, at) = (new_stream(), upload(&[0.0; 128]));
        let reverse = function("reverse");
        ok(launch(reverse, 1, 128, at, 1, stream));
        ok(synchronize(stream));
        ok(launch(reverse, 1, 128, at, 0, stream));
        assert_eq!(synchronize(stream), 719);
    });
}

#[test]
fn a_divergent_barrier_is_found() {
    let said = ["threads of one warp wait at different barriers"];
    alone("faults::a_divergent_barrier_is_found", &[], &said, || {
        open(0);
        let stream = new_stream();
        ok(launch_bare(function("diverge"), 64, stream));
        assert_eq!(synchronize(stream), 719);
    });
}

#[test]
fn a_launch_that_no_device_can_run_is_refused() {
    open(0);
    let (stream, increment, at) = (new_stream(), function("increment"), upload(&[0.0; 8]));
    assert_eq!(launch(increment, 1, 1025, at, 8, stream), 1);
    assert_eq!(launch(increment, 0, 32, at, 8, stream), 1);
    // SAFETY: any handle and value may be given.
    unsafe {
        assert_eq!(cuFuncSetAttribute(increment, 8, 1 << 20), 1, "more shared memory than there is");
        ok(cuFuncSetAttribute(increment, 8, 100 << 10));
        assert_eq!(get::<i32>(|out| cuFuncGetAttribute(out, 8, increment)), 100 << 10);
    }
    ok(launch(increment, 1, 32, at, 8, stream));
    ok(synchronize(stream));
}

#[test]
fn the_host_cannot_follow_a_device_address() {
    let name = "faults::the_host_cannot_follow_a_device_address";
    let failed = std::panic::catch_unwind(|| {
        alone(name, &[], &[], || {
            open(0);
            let at = upload(&[1.0]);
            // SAFETY: there is none: this must end the process.
            println!("{}", unsafe { (at as *const f32).read_volatile() });
        });
    });
    assert!(failed.is_err(), "the address was read");
}
