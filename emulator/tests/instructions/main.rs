//! Each instruction against the same arithmetic written in Rust, through the driver's calls.

mod conversions;
mod device;
mod floats;
mod half;
mod halves;
mod integers;
mod kernel;
mod matrices;
mod memory;
mod operations;
mod random;
mod warps;
