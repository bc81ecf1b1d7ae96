//! CPU operators over slices. Activations are float32; weights and KV are bfloat16 or float32.

pub mod logits;
pub mod math;
