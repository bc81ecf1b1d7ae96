//! Tests of the engine without a model. `serving` runs it on its own thread, and the others step it with a
//! [`rig::Rig`].

mod adapter_loads;
mod adapters;
mod backpressure;
mod checksums;
mod crashes;
mod damage;
mod fake;
mod host_memory;
mod isolation;
mod packed;
mod requests;
mod rig;
mod serving;
mod states;
mod stored;
mod texts;
mod updates;
mod watching;
