//! Entropies, and the support of the processed distribution: [`TaskReturns`].

use super::super::logits::{self, Candidate, LogitBound, Row};
use super::Raw;
use crate::sampling::{SamplingTask, Support, TaskReturns, TokenReturns};

/// Buffers that grow once and are reused.
#[derive(Default)]
pub struct SupportScratch {
    /// The raw logits of the tokens in the support, `-inf` elsewhere.
    supported: Vec<f32>,
    maxima: Vec<f32>,
    sums: Vec<f32>,
    candidates: Vec<Candidate>,
}

/// A processed distribution in which more than one token may have a probability.
pub struct Processed<'a> {
    pub row: Row<'a>,
    /// Whether the row has other logits than the model gave.
    pub is_edited: bool,
    pub scale: f32,
    pub bound: LogitBound,
    /// The sum of the weights that the bound keeps.
    pub total: f64,
}

impl Processed<'_> {
    /// The values that the task asks for, if it asks for any.
    pub fn returns(
        &self,
        raw: &Raw<'_>,
        task: &SamplingTask<'_>,
        scratch: &mut SupportScratch,
    ) -> Option<Box<TokenReturns>> {
        answered(raw, task, |of_raw| self.entropy(raw, of_raw), |limit| self.support(raw, task, limit, scratch))
    }

    fn is_raw(&self) -> bool {
        !self.is_edited && self.scale == 1.0 && self.bound == LogitBound::NONE
    }

    fn entropy(&self, raw: &Raw<'_>, of_raw: f32) -> f32 {
        if self.is_raw() {
            return of_raw;
        }
        let weighted = logits::sum_weight_ln_weight(raw.isa, &self.row, self.scale, self.bound);
        entropy(self.total, weighted)
    }

    fn support(&self, raw: &Raw<'_>, task: &SamplingTask<'_>, limit: u32, scratch: &mut SupportScratch) -> Support {
        let (size, ids) = self.tokens(raw, limit as usize, &mut scratch.candidates);
        Support { size: size as u32, log_mass: self.log_mass(raw, task, scratch), ids }
    }

    /// The number of tokens that are kept, and their ids if they are not more than `limit`.
    fn tokens(&self, raw: &Raw<'_>, limit: usize, candidates: &mut Vec<Candidate>) -> (usize, Vec<u32>) {
        let Self { row, bound, .. } = self;
        if bound.logit > f32::NEG_INFINITY {
            logits::candidates(raw.isa, row, bound.logit, 1.0, candidates);
            candidates.retain(|c| bound.keeps(c.logit, c.id));
            let size = candidates.len();
            return (size, if size <= limit { candidates.iter().map(|c| c.id).collect() } else { Vec::new() });
        }
        let has_weight = |logit: &&f32| **logit > f32::NEG_INFINITY;
        let size = row.logits.iter().filter(has_weight).count();
        let tokens = (0..).zip(row.logits).filter(|(_, logit)| has_weight(logit));
        (size, if size <= limit { tokens.map(|(id, _)| id).collect() } else { Vec::new() })
    }

    /// See [`Support::log_mass`]. Edits choose tokens; their mass is that of the logits which the model gave.
    fn log_mass(&self, raw: &Raw<'_>, task: &SamplingTask<'_>, scratch: &mut SupportScratch) -> f32 {
        if !self.is_edited && self.bound == LogitBound::NONE {
            return 0.0;
        }
        let SupportScratch { supported, maxima, sums, .. } = scratch;
        let all = match self.scale {
            1.0 => raw.total,
            scale => logits::sum_exp(raw.isa, &raw.row, scale, LogitBound::NONE, sums),
        };
        let (max, total) = if self.is_edited {
            supported.clear();
            supported.extend((0..).zip(self.row.logits).zip(raw.row.logits).map(|((id, &edited), &logit)| {
                let is_kept = edited > f32::NEG_INFINITY && self.bound.keeps(edited, id);
                if is_kept { logit } else { f32::NEG_INFINITY }
            }));
            logits::summarise(raw.isa, supported, self.scale, maxima, sums)
        } else {
            (raw.row.max, self.total)
        };
        let depth = (f64::from(max) - f64::from(raw.row.max)) / f64::from(task.temperature);
        // Rounding may leave a support of nearly all mass with a little more.
        (depth + total.ln() - all.ln()).min(0.0) as f32
    }
}

/// The values that the task asks for where one token, `choice`, is certain. In a `broken` row nothing is a number.
pub fn of_certain(raw: &Raw<'_>, task: &SamplingTask<'_>, choice: u32, broken: bool) -> Option<Box<TokenReturns>> {
    let value = if broken { f32::NAN } else { 0.0 };
    let ids = |limit| if limit > 0 { vec![choice] } else { Vec::new() };
    answered(raw, task, |_| value, |limit| Support { size: 1, log_mass: value, ids: ids(limit) })
}

fn answered(
    raw: &Raw<'_>,
    task: &SamplingTask<'_>,
    entropy: impl FnOnce(f32) -> f32,
    support: impl FnOnce(u32) -> Support,
) -> Option<Box<TokenReturns>> {
    let TaskReturns { entropy: wants_entropy, support: limit } = task.returns;
    let raw_entropy = if wants_entropy { raw.entropy() } else { 0.0 };
    let entropy = if wants_entropy { entropy(raw_entropy) } else { 0.0 };
    let asked = wants_entropy || limit.is_some();
    asked.then(|| {
        let support = limit.map(support).unwrap_or_default();
        Box::new(TokenReturns { raw_entropy, entropy, support, ..TokenReturns::default() })
    })
}

impl Raw<'_> {
    /// The entropy of the model's own distribution; NaN if the row is broken or has no token.
    fn entropy(&self) -> f32 {
        if self.total.is_nan() || !self.row.max.is_finite() {
            return f32::NAN;
        }
        entropy(self.total, logits::sum_weight_ln_weight(self.isa, &self.row, 1.0, LogitBound::NONE))
    }
}

/// The entropy of a distribution by the sums of its weights `w` and of `w ln w`.
fn entropy(total: f64, weighted: f64) -> f32 {
    // Rounding may leave a distribution of one certain token a little below 0.
    (total.ln() - weighted / total).max(0.0) as f32
}
