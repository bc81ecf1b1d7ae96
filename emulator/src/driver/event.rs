//! Events.

use super::{Out, put};
use crate::entry_points::entry_points;
use crate::error::NOT_READY;
use crate::handles::{Handle, Handles};
use crate::stream::{StreamEvent, check_device, current_device, forbid_while_capturing, stream};

static EVENTS: Handles<StreamEvent> = Handles::new();

/// `CU_EVENT_DISABLE_TIMING`
const DISABLE_TIMING: u32 = 2;

entry_points! {
    fn cuEventCreate(out: Out<Handle>, flags: u32) {
        check_device(current_device()?)?;
        put(out, EVENTS.add(StreamEvent::new(flags & DISABLE_TIMING == 0)))
    }
    fn cuEventDestroy_v2(event: Handle) { EVENTS.remove(event).map(drop) }
    fn cuEventRecord(event: Handle, on: Handle) { EVENTS.get(event)?.record(&*stream(on)?) }
    fn cuEventRecordWithFlags(event: Handle, on: Handle, _flags: u32) { EVENTS.get(event)?.record(&*stream(on)?) }
    fn cuEventQuery(event: Handle) {
        check_device(current_device()?)?;
        let event = EVENTS.get(event)?;
        event.forbid_capture()?;
        forbid_while_capturing()?;
        if event.is_done() { Ok(()) } else { Err(NOT_READY) }
    }
    fn cuEventSynchronize(event: Handle) {
        let event = EVENTS.get(event)?;
        event.forbid_capture()?;
        forbid_while_capturing()?;
        event.wait(current_device()?)
    }
    fn cuEventElapsedTime(out: Out<f32>, start: Handle, end: Handle) {
        put(out, EVENTS.get(end)?.milliseconds_since(&*EVENTS.get(start)?)?)
    }
    fn cuEventElapsedTime_v2(out: Out<f32>, start: Handle, end: Handle) {
        put(out, EVENTS.get(end)?.milliseconds_since(&*EVENTS.get(start)?)?)
    }
    fn cuStreamWaitEvent(on: Handle, event: Handle, _flags: u32) { EVENTS.get(event)?.hold(&*stream(on)?) }
}
