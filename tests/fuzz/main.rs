//! Calls of every method with whatever a client may send: hostile values, bytes that are no message, streams that break
//! off, many at once. Each ends, with OK or a status of the right kind, and leaves nothing behind.
//!
//! `make test` runs the same few thousand cases each time, `make fuzz` others for as long as asked. A failure says how
//! its case is run again. `dice` makes values from a seed, `mutate` and `wire` what is sent, `run` goes through the
//! cases of a target, and `rest` knows how the server must be when all is over; the other files are the methods.

mod control;
mod dice;
mod mutate;
mod push;
mod rest;
mod rollout;
mod run;
mod sampling;
mod sequence;
mod server;
mod weights;
mod wire;
