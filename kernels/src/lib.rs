//! The hot operators of rollout-server: one function per coarse operator.
//!
//! Every reduction order depends on nothing but the row's own inputs, so a row's result is the same bits alone or in
//! any batch, on any number of threads.

pub mod cpu;
