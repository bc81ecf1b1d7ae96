//! Calls every method with whatever a client may send: hostile values, bytes that are no message, streams that break
//! off, many calls at once. Each call must end with OK or a status of the right kind, and leave nothing behind.
//!
//! `make test` runs the same few thousand cases each time; `make fuzz` runs others for as long as asked. A failure says
//! how to repeat its case. `dice` makes values from a seed, `mutate` and `wire` make the calls, `run` runs the cases of
//! a target, and `rest` checks the server afterwards. `http` makes requests to the other port, after the server's own
//! description, which `describe` reads, and `features` sends pictures to it. `picture` decodes files without a server.
//! The other files have the cases of each method.

mod control;
mod describe;
mod dice;
mod features;
mod http;
mod mutate;
mod picture;
mod push;
mod rest;
mod returns;
mod rollout;
mod run;
mod sampling;
mod sequence;
mod server;
mod weights;
mod wire;
