//! Mixture-of-experts layers: the router, and the sum over a row's experts. The products of the experts are those of
//! [`grouped_linear`](super::linear::grouped_linear).

mod combine;
mod route;
#[cfg(test)]
mod tests;

pub use combine::{add_gated, combine};
pub use route::route;
