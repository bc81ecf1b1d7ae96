//! Each instruction against the same arithmetic written in Rust, through the driver's calls.

mod atomics;
mod conversions;
mod copies;
mod device;
mod faults;
mod floats;
mod flow;
mod half;
mod halves;
mod integers;
mod kernel;
mod matrices;
mod memory;
mod operations;
mod random;
mod warps;
