//! What every call needs, whichever door it comes through: questions to the engine, the events of a request, its end
//! when the client vanishes or the deadline passes, and the pace at which its bytes must come.

mod ask;
mod deadline;
mod events;
mod pace;
mod reply;

pub(super) use ask::{ask, ask_patiently, engine_gone, reply_channel};
pub(super) use deadline::{Deadline, exceeded};
pub(super) use events::{CancelOnDrop, ReplyEnd, event_channel};
pub(super) use pace::{PATIENCE, Pace};
pub(super) use reply::{Progress, ReplyStream, StreamGuards, Writer};
