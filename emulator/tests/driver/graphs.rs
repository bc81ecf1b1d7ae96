//! Captures and graphs.

use crate::device::*;

/// Begins a capture that other threads do not disturb.
pub fn begin(stream: usize) {
    // SAFETY: any handle may be given.
    ok(unsafe { cuStreamBeginCapture_v2(stream, 1) });
}

pub fn end(stream: usize) -> Result<usize, i32> {
    let mut graph = 0;
    // SAFETY: the pointer is valid.
    match unsafe { cuStreamEndCapture(stream, &raw mut graph) } {
        0 => Ok(graph),
        code => Err(code),
    }
}

pub fn instantiate(graph: usize) -> usize {
    // SAFETY: the pointer is valid.
    get(|out| unsafe { cuGraphInstantiateWithFlags(out, graph, 0) })
}

pub fn replay(exec: usize, stream: usize) {
    // SAFETY: any handle may be given.
    ok(unsafe { cuGraphLaunch(exec, stream) });
}

fn status(stream: usize) -> i32 {
    // SAFETY: the pointer is valid.
    get(|out| unsafe { cuStreamIsCapturing(stream, out) })
}

#[test]
fn a_graph_does_what_was_captured_as_often_as_it_is_launched() {
    open(0);
    let (stream, increment, at) = (new_stream(), function("increment"), upload(&[0.0; 8]));
    begin(stream);
    assert_eq!(status(stream), 1);
    ok(launch(increment, 1, 8, at, 8, stream));
    ok(launch(increment, 1, 8, at, 4, stream));
    let graph = end(stream).unwrap();
    assert_eq!(status(stream), 0);
    // SAFETY: the pointers are valid.
    assert_eq!(get::<usize>(|out| unsafe { cuGraphGetNodes(graph, unwanted(), out) }), 2);
    assert_eq!(download(at, 1), Ok(vec![0.0]), "a capture does nothing");
    let exec = instantiate(graph);
    // SAFETY: any handle may be given.
    ok(unsafe { cuGraphDestroy(graph) });
    (0..5).for_each(|_| replay(exec, stream));
    ok(synchronize(stream));
    assert_eq!(download(at, 8).unwrap(), [10.0, 10.0, 10.0, 10.0, 5.0, 5.0, 5.0, 5.0]);
    // SAFETY: any handle may be given.
    unsafe {
        ok(cuGraphExecDestroy(exec));
        assert_eq!(cuGraphLaunch(exec, stream), 400);
    }
}

#[test]
fn a_graph_is_updated_to_one_of_the_same_shape() {
    open(0);
    let (stream, increment) = (new_stream(), function("increment"));
    let (a, b) = (upload(&[0.0; 8]), upload(&[0.0; 8]));
    let capture = |at, count| {
        begin(stream);
        (0..count).for_each(|_| ok(launch(increment, 1, 8, at, 8, stream)));
        end(stream).unwrap()
    };
    let exec = instantiate(capture(a, 1));
    // SAFETY: any handle may be given.
    unsafe {
        ok(cuGraphExecUpdate_v2(exec, capture(b, 1), unwanted()));
        assert_eq!(cuGraphExecUpdate_v2(exec, capture(b, 2), unwanted()), 910);
    }
    replay(exec, stream);
    ok(synchronize(stream));
    assert_eq!((download(a, 1), download(b, 1)), (Ok(vec![0.0]), Ok(vec![1.0])));
}

#[test]
fn waiting_breaks_a_capture() {
    open(0);
    let stream = new_stream();
    begin(stream);
    assert_eq!(synchronize(stream), 900);
    assert_eq!(status(stream), 2);
    assert_eq!(end(stream), Err(901));
    assert_eq!(status(stream), 0);
    begin(stream);
    // SAFETY: the pointer is valid.
    assert_eq!(unsafe { cuMemAlloc_v2(&mut 0, 8) }, 900, "the thread captures");
    assert_eq!(end(stream), Err(901));
    assert_eq!(end(stream), Err(903));
}

#[test]
fn what_the_host_would_wait_for_or_take_breaks_a_capture() {
    open(0);
    let (stream, other, at) = (new_stream(), new_stream(), upload(&[0.0; 8]));
    // SAFETY: the pointer is valid.
    let event = get(|out| unsafe { cuEventCreate(out, 2) });
    // SAFETY: any handle may be given.
    ok(unsafe { cuEventRecord(event, other) });
    let pageable = [1.0_f32; 8];
    // SAFETY: the pointers are valid, and the values as long as is said.
    let calls: [(&str, i32, &dyn Fn() -> i32); 9] = unsafe {
        [
            ("cuEventQuery", 900, &|| cuEventQuery(event)),
            ("cuEventSynchronize", 900, &|| cuEventSynchronize(event)),
            ("cuStreamWaitEvent", 905, &|| cuStreamWaitEvent(stream, event, 0)),
            ("cuMemHostAlloc", 900, &|| cuMemHostAlloc(&mut 0, 64, 0)),
            ("cuMemCreate", 900, &|| cuMemCreate(&mut 0, 2 << 20, [1, 0, 1, 0, 0, 0, 0, 0].as_ptr().cast(), 0)),
            ("cuMemUnmap", 900, &|| cuMemUnmap(1 << 40, 2 << 20)),
            ("cuModuleLoadData", 900, &|| cuModuleLoadData(&mut 0, std::ptr::null())),
            ("cuMemcpyHtoD", 900, &|| cuMemcpyHtoD_v2(at, pageable.as_ptr() as u64, 32)),
            ("cuMemcpyHtoDAsync", 900, &|| cuMemcpyHtoDAsync_v2(at, pageable.as_ptr() as u64, 32, stream)),
        ]
    };
    for (name, code, call) in calls {
        begin(stream);
        assert_eq!(call(), code, "{name}");
        assert_eq!(end(stream), Err(901), "{name}");
    }
    ok(synchronize(other));
}

#[test]
fn a_capture_has_its_own_events_and_thread() {
    open(0);
    let (stream, increment, at) = (new_stream(), function("increment"), upload(&[0.0; 8]));
    // SAFETY: the pointer is valid.
    let event = get(|out| unsafe { cuEventCreate(out, 2) });
    begin(stream);
    // SAFETY: any handle may be given.
    unsafe {
        ok(cuEventRecord(event, stream));
        assert_eq!((cuEventQuery(event), cuEventSynchronize(event)), (907, 907));
    }
    ok(launch(increment, 1, 8, at, 8, stream));
    let ended = std::thread::spawn(move || {
        open(0);
        // Another thread may take memory meanwhile, and cannot end the capture.
        // SAFETY: the pointer is valid, and the memory its own.
        unsafe {
            let own = get(|out| cuMemHostAlloc(out, 64, 0));
            ok(cuMemFreeHost(own));
        }
        end(stream)
    });
    assert_eq!(ended.join().unwrap(), Err(908));
    replay(instantiate(end(stream).unwrap()), stream);
    ok(synchronize(stream));
    assert_eq!(download(at, 1), Ok(vec![1.0]));
}

#[test]
fn another_stream_joins_through_an_event() {
    open(0);
    let (stream, other, increment, at) = (new_stream(), new_stream(), function("increment"), upload(&[0.0; 8]));
    // SAFETY: the pointer is valid.
    let event = get(|out| unsafe { cuEventCreate(out, 2) });
    begin(stream);
    for (from, to) in [(stream, other), (other, stream)] {
        ok(launch(increment, 1, 8, at, 8, from));
        // SAFETY: any handle may be given.
        unsafe {
            ok(cuEventRecord(event, from));
            ok(cuStreamWaitEvent(to, event, 0));
        }
    }
    let exec = instantiate(end(stream).unwrap());
    assert_eq!(status(other), 0);
    assert_eq!(download(at, 1), Ok(vec![0.0]));
    replay(exec, stream);
    ok(synchronize(stream));
    assert_eq!(download(at, 1), Ok(vec![2.0]));
}

#[test]
fn memory_of_a_capture_lives_as_long_as_its_graph() {
    open(0);
    let (stream, increment) = (new_stream(), function("increment"));
    begin(stream);
    // SAFETY: the pointers are valid.
    let at = unsafe {
        let at = get(|out| cuMemAllocAsync(out, 32, stream));
        ok(cuMemsetD32Async(at, 0, 8, stream));
        ok(launch(increment, 1, 8, at, 8, stream));
        ok(cuMemFreeAsync(at, stream));
        at
    };
    let graph = end(stream).unwrap();
    let exec = instantiate(graph);
    (0..2).for_each(|_| replay(exec, stream));
    ok(synchronize(stream));
    assert_eq!(download(at, 8), Ok(vec![1.0; 8]));
    // SAFETY: any handle may be given.
    unsafe {
        ok(cuGraphDestroy(graph));
        ok(cuGraphExecDestroy(exec));
    }
    assert_eq!(download(at, 8), Err(1));
}
