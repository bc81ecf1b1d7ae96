//! Runs plans on devices: see `sampler` for how a row of logits becomes a token.

pub mod sampler;
