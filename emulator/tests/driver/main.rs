//! The driver's calls, as a program would make them.

mod device;
mod failures;
mod faults;
mod graphs;
mod memory;
mod nccl;
mod peers;
mod processes;
mod runtime;
mod streams;
mod virtual_memory;
