//! Equalities of the operators on a GPU: a row has the same bits alone and in any batch, whole and in shards. They hold
//! exactly, so no test here has a tolerance. `tests/devices/` compares the same operators with the reference.

mod attention;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "the tests of all devices use the rest of it")]
mod common;
mod graphs;
mod group;
mod linear;
mod merge;
mod sampling;
