mod adapters;
pub mod harness;
mod pushes;
mod sleep;
