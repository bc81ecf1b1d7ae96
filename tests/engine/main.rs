//! Whole engines on the processor, without the server: what they compute, load, merge and speculate.

#[path = "../common/mod.rs"]
mod common;

mod checkpoint;
mod divergences;
mod equalities;
mod images;
mod kept_base;
mod oracle;
mod parity;
mod rescoring;
mod returns;
mod routing;
mod speculation;
mod structured;
mod tensor_parallel;
mod weights;
