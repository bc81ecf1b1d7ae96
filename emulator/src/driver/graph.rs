//! Captures and graphs.

use super::{Out, put, put_if_asked};
use crate::entry_points::entry_points;
use crate::error::{INVALID_VALUE, NOT_SUPPORTED};
use crate::handles::{Handle, Handles};
use crate::stream::{Capture, CaptureMode, Graph, GraphExec, check_device, stream};

static GRAPHS: Handles<Graph> = Handles::new();
static EXECS: Handles<GraphExec> = Handles::new();

/// `CUgraphExecUpdateResultInfo`
#[repr(C)]
pub struct UpdateResult {
    result: i32,
    node: Handle,
    from: Handle,
}

/// `CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED`
const TOPOLOGY_CHANGED: i32 = 2;

entry_points! {
    fn cuStreamBeginCapture_v2(on: Handle, mode: i32) {
        let mode = match mode {
            0 => CaptureMode::Global,
            1 => CaptureMode::ThreadLocal,
            2 => CaptureMode::Relaxed,
            _ => return Err(INVALID_VALUE),
        };
        // As in CUDA, the default stream cannot be captured.
        if on <= 1 { return Err(crate::error::STREAM_CAPTURE_UNSUPPORTED) }
        let stream = stream(on)?;
        check_device(stream.device)?;
        Capture::begin(&stream, mode)
    }
    fn cuStreamIsCapturing(on: Handle, out: Out<i32>) {
        put(out, stream(on)?.capture().map_or(0, |capture| if capture.is_broken() { 2 } else { 1 }))
    }
    fn cuStreamEndCapture(on: Handle, out: Out<Handle>) {
        put(out, 0)?;
        put(out, GRAPHS.add(Capture::end(&*stream(on)?)?))
    }
    fn cuGraphInstantiateWithFlags(out: Out<Handle>, graph: Handle, _flags: u64) {
        put(out, EXECS.add(GraphExec::new(GRAPHS.get(graph)?)))
    }
    fn cuGraphExecUpdate_v2(exec: Handle, graph: Handle, out: Out<UpdateResult>) {
        let updated = EXECS.get(exec)?.update(GRAPHS.get(graph)?);
        let result = if updated.is_ok() { 0 } else { TOPOLOGY_CHANGED };
        put_if_asked(out, UpdateResult { result, node: 0, from: 0 });
        updated
    }
    fn cuGraphGetNodes(graph: Handle, nodes: Out<Handle>, count: Out<usize>) {
        if !nodes.is_null() { return Err(NOT_SUPPORTED) }
        put(count, GRAPHS.get(graph)?.operations.len())
    }
    fn cuGraphUpload(exec: Handle, _on: Handle) { EXECS.get(exec).map(drop) }
    fn cuGraphLaunch(exec: Handle, on: Handle) {
        let stream = stream(on)?;
        check_device(stream.device)?;
        EXECS.get(exec)?.launch(&stream)
    }
    fn cuGraphExecDestroy(exec: Handle) { EXECS.remove(exec).map(drop) }
    fn cuGraphDestroy(graph: Handle) { GRAPHS.remove(graph).map(drop) }
}
