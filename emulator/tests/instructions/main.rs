//! Each instruction against the same arithmetic written in Rust, through the driver's calls.

mod device;
mod half;
mod integers;
mod operations;
mod random;
