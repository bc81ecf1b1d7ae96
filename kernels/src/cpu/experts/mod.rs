//! Mixture-of-experts layers: the router, the products of the experts (by [`grouped_linear`]), and the sum over a row's
//! experts.

mod combine;
mod route;
#[cfg(test)]
mod tests;

pub use combine::{add_gated, combine};
pub use route::route;
