//! Streams, events, and the order of what they do.

use crate::device::*;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};

/// Copies to page-locked memory in a stream.
fn copy_to_host(host: &mut [f32], at: u64, stream: usize) {
    // SAFETY: the memory is page-locked and lives as long as the process.
    ok(unsafe { cuMemcpyDtoHAsync_v2(host.as_mut_ptr() as u64, at, size_of_val(host), stream) });
}

#[test]
fn a_stream_keeps_its_order() {
    open(0);
    let (stream, increment, at) = (new_stream(), function("increment"), upload(&[0.0; 300]));
    for _ in 0..50 {
        ok(launch(increment, 3, 128, at, 300, stream));
    }
    let host = pinned(300);
    copy_to_host(host, at, stream);
    ok(synchronize(stream));
    assert_eq!(host, [50.0; 300]);
}

/// With these, the first operation of the first stream starts 0.65 s late: more than a busy machine holds a test up.
const LATE: &[(&str, &str)] = &[("CUEMU_JITTER_US", "1000000"), ("CUEMU_SEED", "3")];

#[test]
fn what_was_not_waited_for_comes_late() {
    let name = "streams::what_was_not_waited_for_comes_late";
    alone(name, LATE, &[], || {
        open(0);
        let (stream, at, host) = (new_stream(), upload(&[7.0; 1000]), pinned(1000));
        host.fill(0.0);
        copy_to_host(host, at, stream);
        // SAFETY: the memory is valid; the compiler must not assume that nobody writes it.
        let early = unsafe { (&raw const host[0]).read_volatile() };
        ok(synchronize(stream));
        assert_eq!((early, host[0]), (0.0, 7.0));
    });
}

#[test]
fn page_locked_memory_is_read_when_the_copy_runs_and_pageable_memory_at_the_call() {
    let name = "streams::page_locked_memory_is_read_when_the_copy_runs_and_pageable_memory_at_the_call";
    alone(name, LATE, &[], || {
        open(0);
        let (stream, a, b) = (new_stream(), upload(&[0.0; 8]), upload(&[0.0; 8]));
        let (locked, mut pageable) = (pinned(8), vec![1f32; 8]);
        locked.fill(1.0);
        // SAFETY: the page-locked memory lives as long as the process.
        unsafe {
            ok(cuMemcpyHtoDAsync_v2(a, locked.as_ptr() as u64, 32, stream));
            ok(cuMemcpyHtoDAsync_v2(b, pageable.as_ptr() as u64, 32, stream));
        }
        locked.fill(2.0);
        pageable.fill(2.0);
        ok(synchronize(stream));
        assert_eq!((download(a, 8), download(b, 8)), (Ok(vec![2.0; 8]), Ok(vec![1.0; 8])));
    });
}

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let name = "streams::a_stream_waits_for_an_event_of_another";
    alone(name, &[("CUEMU_JITTER_US", "20000")], &[], || {
        open(0);
        let (one, other, increment, at) = (new_stream(), new_stream(), function("increment"), upload(&[0.0; 8]));
        // SAFETY: the pointer is valid.
        let event = get(|out| unsafe { cuEventCreate(out, 2) });
        for _ in 0..10 {
            for (stream, next) in [(one, other), (other, one)] {
                ok(launch(increment, 1, 8, at, 8, stream));
                // SAFETY: any handle may be given.
                unsafe {
                    ok(cuEventRecord(event, stream));
                    ok(cuStreamWaitEvent(next, event, 0));
                }
            }
        }
        // SAFETY: any handle may be given.
        ok(unsafe { cuEventSynchronize(event) });
        assert_eq!(download(at, 8), Ok(vec![20.0; 8]));
    });
}

#[test]
fn events_tell_the_time_if_they_were_made_to() {
    open(0);
    let stream = new_stream();
    // SAFETY: the pointers are valid.
    unsafe {
        let [start, end, untimed] = [0, 0, 2].map(|flags| get(|out| cuEventCreate(out, flags)));
        for event in [start, end, untimed] {
            ok(cuEventRecord(event, stream));
        }
        ok(cuEventSynchronize(untimed));
        assert!(get::<f32>(|out| cuEventElapsedTime(out, start, end)) >= 0.0);
        assert_eq!(cuEventElapsedTime(&mut 0.0, start, untimed), 400);
        ok(cuEventQuery(end));
    }
}

unsafe extern "C" fn count(counter: *mut c_void) {
    // SAFETY: the test gives a counter that lives as long as the process.
    unsafe { (*counter.cast::<AtomicU32>()).fetch_add(1, Ordering::SeqCst) };
}

#[test]
fn a_stream_calls_the_host() {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    open(0);
    let stream = new_stream();
    for _ in 0..3 {
        // SAFETY: the counter lives as long as the process.
        ok(unsafe { cuLaunchHostFunc(stream, count, (&raw const COUNTER) as usize) });
    }
    ok(synchronize(stream));
    assert_eq!(COUNTER.load(Ordering::SeqCst), 3);
}

#[test]
fn devices_have_their_own_memory_and_streams() {
    let name = "streams::devices_have_their_own_memory_and_streams";
    alone(name, &[("CUEMU_DEVICES", "4"), ("CUEMU_MEMORY_MIB", "128")], &[], || {
        // SAFETY: the pointer is valid.
        assert_eq!(get::<i32>(|out| unsafe { cuDeviceGetCount(out) }), 4);
        let work = |device| {
            std::thread::spawn(move || {
                open(device);
                let (stream, at) = (new_stream(), upload(&[device as f32; 1 << 18]));
                ok(launch(function("increment"), 2048, 128, at, 1 << 18, stream));
                ok(synchronize(stream));
                // SAFETY: the pointer is valid for what is asked.
                assert_eq!(get::<u64>(|out| unsafe { cuPointerGetAttribute(out, 9, at) }) as i32, device);
                assert!(download(at, 1 << 18).unwrap().iter().all(|x| *x == device as f32 + 1.0));
                memory_mib().0
            })
        };
        let free = (0..4).map(work).collect::<Vec<_>>().into_iter().map(|thread| thread.join().unwrap());
        // One MiB of numbers, and a page of the module's variable, of what the context leaves.
        assert!(free.into_iter().all(|free| free == 62));
    });
}

#[test]
fn blocks_run_on_several_threads_and_in_any_order() {
    for seed in ["0", "1", "2"] {
        let name = "streams::blocks_run_on_several_threads_and_in_any_order";
        alone(name, &[("CUEMU_THREADS", "3"), ("CUEMU_SEED", seed), ("CUEMU_RACES", "1")], &[], || {
            open(0);
            let (stream, numbers) = (new_stream(), (0..128 * 50).map(|i| i as f32).collect::<Vec<_>>());
            let (at, reverse) = (upload(&numbers), function("reverse"));
            for _ in 0..3 {
                ok(launch(reverse, 50, 128, at, 1, stream));
            }
            ok(synchronize(stream));
            let want = numbers.chunks(128).flat_map(|block| block.iter().rev().copied()).collect::<Vec<_>>();
            assert_eq!(download(at, want.len()), Ok(want));
        });
    }
}
