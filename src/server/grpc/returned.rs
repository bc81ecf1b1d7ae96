//! The further values that a request asks for beside log-probabilities, as the arrays of a reply.

use half::bf16;

use crate::engine::{TopArrays, ValidRequest};
use crate::server::pb;
use crate::types::{TaskReturns, TokenLogprobs};

/// Stands in a row of most likely tokens where no further token has a probability.
const NO_TOKEN: u32 = u32::MAX;

/// The arrays that replies to one request have.
#[derive(Clone, Copy)]
pub(super) struct ReturnedArrays {
    returns: TaskReturns,
    /// How many most likely tokens a row has, and how they are encoded.
    top: Option<(usize, TopArrays)>,
}

impl ReturnedArrays {
    pub(super) fn new(request: &ValidRequest) -> Self {
        let top = request.top_arrays.map(|arrays| (request.params.top_logprobs as usize, arrays));
        Self { returns: request.params.returns, top }
    }

    /// Whether the most likely tokens are in the arrays, and not in a message for each token.
    pub(super) fn have_top(&self) -> bool {
        self.top.is_some()
    }

    /// Bytes that the arrays take for a token, at most.
    pub(super) fn bytes_of(&self, token: &TokenLogprobs) -> usize {
        let ids = token.returned.as_ref().map_or(0, |returned| size_of_val(&returned.support.ids[..]));
        let row = self.top.map_or(0, |(width, _)| width * size_of::<(u32, f32)>());
        4 * size_of::<f32>() + ids + row
    }

    /// The arrays of `skipped` tokens without log-probabilities, then of `tokens`; `None` if nothing is asked for.
    pub(super) fn of(&self, skipped: usize, tokens: &[TokenLogprobs]) -> Option<pb::Returned> {
        let Self { returns, top } = *self;
        if returns == TaskReturns::default() && top.is_none() {
            return None;
        }
        let mut arrays = pb::Returned { max_support_ids: returns.support.unwrap_or(0), ..Default::default() };
        for token in std::iter::repeat_n(None, skipped).chain(tokens.iter().map(Some)) {
            let returned = token.and_then(|token| token.returned.as_deref());
            if returns.entropy {
                arrays.raw_entropies.push(returned.map_or(f32::NAN, |returned| returned.raw_entropy));
                arrays.entropies.push(returned.map_or(f32::NAN, |returned| returned.entropy));
            }
            if returns.support.is_some() {
                let support = returned.map(|returned| &returned.support);
                arrays.support_sizes.push(support.map_or(0, |support| support.size));
                arrays.support_log_masses.push(support.map_or(f32::NAN, |support| support.log_mass));
                let ids = support.map_or(&[][..], |support| &support.ids);
                arrays.support_ids.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
            }
            if let Some((width, encoding)) = top {
                push_row(token.map_or(&[], |token| &token.top), width, encoding, &mut arrays);
            }
        }
        Some(arrays)
    }
}

/// Appends a row of `width` most likely tokens.
fn push_row(top: &[(u32, f32)], width: usize, encoding: TopArrays, arrays: &mut pb::Returned) {
    let missing = std::iter::repeat((NO_TOKEN, f32::NEG_INFINITY));
    for (id, logprob) in top.iter().copied().chain(missing).take(width) {
        arrays.top_ids.extend(id.to_le_bytes());
        if encoding.as_bfloat16 {
            arrays.top_logprobs.extend(bf16::from_f32(logprob).to_le_bytes());
        } else {
            arrays.top_logprobs.extend(logprob.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use rollout_kernels::{Support, TokenReturns};

    use super::*;

    fn token(ids: &[u32], top: &[(u32, f32)]) -> TokenLogprobs {
        let support = Support { size: 3, log_mass: -0.5, ids: ids.to_vec() };
        let returned =
            Some(Box::new(TokenReturns { raw_entropy: 1.5, entropy: 0.5, support, ..TokenReturns::default() }));
        TokenLogprobs { token: 1, raw: -1.0, processed: -0.5, top: top.to_vec(), rank: 1, returned }
    }

    fn words(bytes: &[u8]) -> Vec<u32> {
        bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect()
    }

    #[test]
    fn arrays_have_a_row_for_each_token() {
        let returns = TaskReturns { entropy: true, support: Some(4) };
        let format = ReturnedArrays { returns, top: Some((2, TopArrays { as_bfloat16: false })) };
        let tokens = [token(&[4, 7, 9], &[(7, -0.25), (4, -2.0)]), token(&[], &[(5, 0.0)])];
        let arrays = format.of(1, &tokens).unwrap();
        assert!(arrays.raw_entropies[0].is_nan() && arrays.entropies[0].is_nan());
        assert_eq!((&arrays.raw_entropies[1..], &arrays.entropies[1..]), (&[1.5, 1.5][..], &[0.5, 0.5][..]));
        assert_eq!(arrays.support_sizes, [0, 3, 3]);
        assert_eq!(words(&arrays.support_ids), [4, 7, 9]);
        assert_eq!(arrays.max_support_ids, 4);
        assert_eq!(words(&arrays.top_ids), [NO_TOKEN, NO_TOKEN, 7, 4, 5, NO_TOKEN]);
        let logprobs: Vec<f32> = words(&arrays.top_logprobs).into_iter().map(f32::from_bits).collect();
        let none = f32::NEG_INFINITY;
        assert_eq!(logprobs, [none, none, -0.25, -2.0, 0.0, none]);
        assert_eq!(format.bytes_of(&tokens[0]), 8 + 8 + 12 + 16);
    }

    #[test]
    fn only_what_is_asked_for_is_there() {
        let none = ReturnedArrays { returns: TaskReturns::default(), top: None };
        assert!(none.of(1, &[token(&[1], &[])]).is_none());
        let entropy = ReturnedArrays { returns: TaskReturns { entropy: true, support: None }, top: None };
        let arrays = entropy.of(0, &[token(&[1], &[(1, 0.0)])]).unwrap();
        let expected = pb::Returned { raw_entropies: vec![1.5], entropies: vec![0.5], ..Default::default() };
        assert_eq!(arrays, expected);
        let bf16 = ReturnedArrays { top: Some((1, TopArrays { as_bfloat16: true })), ..none };
        let arrays = bf16.of(0, &[token(&[], &[(1, -0.123_456)])]).unwrap();
        let rounded = bf16::from_le_bytes([arrays.top_logprobs[0], arrays.top_logprobs[1]]);
        assert_eq!((arrays.top_logprobs.len(), rounded), (2, bf16::from_f32(-0.123_456)));
    }
}
