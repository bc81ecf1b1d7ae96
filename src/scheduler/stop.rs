//! When a sample ends by its tokens. Stop strings need text, so the engine finds them.

use crate::types::{FinishReason, SamplingParams, TokenId};

/// Why a sample ends with `token`, its `num_outputs`-th output token (counted from 1) after `prompt_len` prompt tokens;
/// `None` if it continues.
///
/// The sampler gives stop tokens probability 0 while there are fewer than `min_tokens` output tokens. One may be
/// sampled nevertheless, where `allowed_tokens` leaves nothing else; it does not end the sample then.
pub fn stop_reason(
    params: &SamplingParams,
    token: TokenId,
    num_outputs: usize,
    prompt_len: usize,
    max_model_len: usize,
) -> Option<FinishReason> {
    let may_stop = num_outputs > params.min_tokens as usize;
    if may_stop && params.eos_token_ids.binary_search(&token).is_ok() {
        Some(FinishReason::Eos)
    } else if may_stop && params.stop_token_ids.binary_search(&token).is_ok() {
        Some(FinishReason::StopToken)
    } else if num_outputs >= params.max_tokens as usize || prompt_len + num_outputs >= max_model_len {
        Some(FinishReason::Length)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reason(token: TokenId, num_outputs: usize) -> Option<FinishReason> {
        let params = SamplingParams {
            min_tokens: 2,
            max_tokens: 5,
            eos_token_ids: vec![7, 9],
            stop_token_ids: vec![3, 9],
            ..SamplingParams::default()
        };
        stop_reason(&params, token, num_outputs, 10, 14)
    }

    #[test]
    fn stop_tokens_count_after_min_tokens() {
        assert_eq!(reason(7, 1), None);
        assert_eq!(reason(3, 2), None);
        assert_eq!(reason(7, 3), Some(FinishReason::Eos));
        assert_eq!(reason(3, 3), Some(FinishReason::StopToken));
        assert_eq!(reason(9, 3), Some(FinishReason::Eos), "the model's own comes first");
        assert_eq!(reason(4, 3), None);
    }

    #[test]
    fn length_is_of_the_output_and_of_the_context() {
        assert_eq!(reason(4, 4), Some(FinishReason::Length), "10 + 4 tokens fill the context");
        assert_eq!(reason(7, 4), Some(FinishReason::Eos), "a stop token is the better reason");
        let params = SamplingParams { max_tokens: 2, ..SamplingParams::default() };
        assert_eq!(stop_reason(&params, 4, 1, 10, 100), None);
        assert_eq!(stop_reason(&params, 4, 2, 10, 100), Some(FinishReason::Length));
    }

    #[test]
    fn min_tokens_equal_to_max_tokens_ends_by_length() {
        let params =
            SamplingParams { min_tokens: 2, max_tokens: 2, eos_token_ids: vec![1], ..SamplingParams::default() };
        assert_eq!(stop_reason(&params, 1, 2, 1, 100), Some(FinishReason::Length));
    }
}
