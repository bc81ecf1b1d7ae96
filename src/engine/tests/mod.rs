//! `serving` runs the engine on its thread; the others go step by step with a [`rig::Rig`].

mod adapters;
mod backpressure;
mod checksums;
mod crashes;
mod damage;
mod fake;
mod isolation;
mod requests;
mod rig;
mod serving;
mod states;
mod texts;
mod updates;
