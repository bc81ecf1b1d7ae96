//! The gRPC surface over a loopback port, with the test as the engine.

mod connections;
mod harness;
mod lifecycle;
mod liveness;
mod names;
mod open_updates;
mod real;
mod requests;
mod updates;
