//! Divergences between the distributions of two rows of logits.

/// Two rows of one matrix of logits, both divided by a temperature.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LogitsPair {
    /// Row of the policy.
    pub policy: usize,
    /// Row of the reference.
    pub reference: usize,
    /// Above 0.
    pub temperature: f32,
}

impl LogitsPair {
    /// Factor of the logits; as [`SamplingTask::scale`](crate::SamplingTask).
    pub(crate) fn scale(&self) -> f32 {
        self.temperature.recip().clamp(f32::MIN_POSITIVE, f32::MAX)
    }
}

/// Kullback-Leibler divergences over the whole vocabulary, in nats. Both are NaN if a logit of either row is not
/// finite, or if one of them is too large for float32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Divergences {
    /// `KL(policy || reference)`: the sum of `policy * ln(policy / reference)`.
    pub kl: f32,
    /// `KL(reference || policy)`: the sum of `reference * ln(reference / policy)`.
    pub reverse_kl: f32,
}

impl Divergences {
    pub const NONE: Self = Self { kl: f32::NAN, reverse_kl: f32::NAN };

    /// The divergences by their sums in float64.
    pub(crate) fn new(kl: f64, reverse_kl: f64) -> Self {
        let (kl, reverse_kl) = (kl as f32, reverse_kl as f32);
        if kl.is_finite() && reverse_kl.is_finite() { Self { kl, reverse_kl } } else { Self::NONE }
    }
}
