//! The engine: one thread that owns every piece of mutable serving state.

mod command;

pub use command::*;
