//! Sampling parameters, finish reasons, and the seeds of samples.

use std::sync::Arc;

use super::{Distribution, TaskReturns, TokenId};

/// How tokens are chosen and when a sample ends. The server checks every range before it makes one from a request, so
/// code that receives one may rely on the bounds given here.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// At least 0. 0 takes the most likely token, and among equally likely ones the lowest id.
    pub temperature: f32,
    /// Only the `top_k` most likely tokens can be sampled; 0 keeps all.
    pub top_k: u32,
    /// Only the smallest set of most likely tokens whose probabilities reach this sum can be sampled, in `(0, 1]`; 1
    /// keeps all.
    pub top_p: f32,
    /// Only tokens with at least this fraction of the best token's probability can be sampled, in `[0, 1]`; 0 keeps
    /// all.
    pub min_p: f32,
    /// Above 0. Divides positive and multiplies negative logits of tokens that occur in the prompt or the output.
    pub repetition_penalty: f32,
    /// Subtracted once from the logit of each token that occurs in the output.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a token for each time it occurs in the output.
    pub frequency_penalty: f32,
    /// Finite values added to the logits of these tokens; ascending by token, no duplicates.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// If given, only these tokens can be sampled; ascending, no duplicates, not empty.
    pub allowed_tokens: Option<Vec<TokenId>>,
    /// End-of-sequence and stop tokens have probability 0 until the output has this many tokens; at most `max_tokens`.
    pub min_tokens: u32,
    /// Most tokens of the output; at least 1.
    pub max_tokens: u32,
    /// The model's end-of-sequence tokens, ascending; empty if the request ignores them.
    pub eos_token_ids: Vec<TokenId>,
    /// Tokens that end a sample of this request, ascending.
    pub stop_token_ids: Vec<TokenId>,
    /// Texts that end a sample; none is empty.
    pub stop_strings: Vec<String>,
    /// Sequences of tokens, none empty, that are not sampled: the last token of each has probability 0 where the output
    /// ends with the others.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Whether the text leaves out special tokens.
    pub skip_special_tokens: bool,
    /// The limit on the model's reasoning, if there is one.
    pub thinking: Option<ThinkingBudget>,
    /// Number of most likely tokens that are reported beside each sampled or scored one, with its rank; 0 for none.
    pub top_logprobs: u32,
    /// Tokens that are reported beside each sampled one instead of the most likely ones; empty for those.
    pub logprob_token_ids: Arc<[TokenId]>,
    /// The distribution of `top_logprobs`; of the tokens of a prompt that is sampled from, it is always the raw one.
    pub top_logprobs_of: Distribution,
    /// Further values that are reported beside log-probabilities.
    pub returns: TaskReturns,
    /// Whether the final hidden states of sampled and scored tokens are kept, to compute divergences from them.
    pub keeps_hidden: bool,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed_tokens: None,
            min_tokens: 0,
            max_tokens: 16,
            eos_token_ids: Vec::new(),
            stop_token_ids: Vec::new(),
            stop_strings: Vec::new(),
            bad_words: Vec::new(),
            skip_special_tokens: true,
            thinking: None,
            top_logprobs: 0,
            logprob_token_ids: Arc::default(),
            top_logprobs_of: Distribution::Raw,
            returns: TaskReturns::default(),
            keeps_hidden: false,
        }
    }
}

impl SamplingParams {
    /// Size of the lists on the heap, in bytes.
    pub fn heap_bytes(&self) -> usize {
        let tokens = self.allowed_tokens.as_ref().map_or(0, Vec::len)
            + self.eos_token_ids.len()
            + self.stop_token_ids.len()
            + self.logprob_token_ids.len();
        let text: usize = self.stop_strings.iter().map(|s| s.len() + size_of::<String>()).sum();
        let bad: usize = self.bad_words.iter().map(|word| size_of_val(word) + size_of_val(&word[..])).sum();
        size_of_val(&self.logit_bias[..]) + tokens * size_of::<TokenId>() + text + bad
    }

    /// Whether `allowed_tokens` and `min_tokens` allow `token` in a sample with `num_outputs` tokens.
    pub fn may_sample(&self, token: TokenId, num_outputs: usize) -> bool {
        let has = |tokens: &[TokenId]| tokens.binary_search(&token).is_ok();
        let is_banned =
            num_outputs < self.min_tokens as usize && (has(&self.eos_token_ids) || has(&self.stop_token_ids));
        !is_banned && self.allowed_tokens.as_ref().is_none_or(|allowed| has(allowed))
    }

    /// The tokens that would complete a bad word after `output` and the tokens of `draft` behind it.
    pub fn bad_after(&self, output: &[TokenId], draft: &[TokenId]) -> Vec<TokenId> {
        let completed = |word: &Vec<TokenId>| {
            let (last, start) = word.split_last()?;
            let ends_with_start = start.len() <= output.len() + draft.len()
                && start.iter().rev().eq(output.iter().chain(draft).rev().take(start.len()));
            ends_with_start.then_some(*last)
        };
        self.bad_words.iter().filter_map(completed).collect()
    }

    /// Whether a penalty makes the distribution depend on the tokens so far, so that each task must carry them.
    pub fn needs_history(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// A limit on the tokens of the model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThinkingBudget {
    /// Most tokens between the two marks. After so many the sample gets the mark that closes the reasoning, undrawn.
    pub tokens: u32,
    /// The token that opens the reasoning.
    pub open: TokenId,
    /// The token that closes it.
    pub close: TokenId,
}

/// The reason why a sample ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FinishReason {
    /// The model's end-of-sequence token, which is the last of the sample's tokens.
    Eos,
    /// A stop token of the request, which is the last of the sample's tokens.
    StopToken,
    /// A stop string of the request, which the last token completed.
    StopString,
    /// `max_tokens` was reached, or the context is full.
    Length,
    /// No token may follow: the text is complete for its grammar and no token ends a sample, or the other parameters
    /// exclude every token that the grammar allows.
    Grammar,
    /// The request was aborted, or its client disconnected; the tokens so far are valid.
    Aborted,
}

/// Seed of sample `sample_index` of prompt `prompt_index` in a request with the seed `seed`. The first sample of the
/// first prompt gets `seed` itself, so any completion can be replayed alone (one prompt, `n = 1`) with the seed that it
/// reports. Equal prompts of one request get different seeds. Prompts are mixed in by Murmur3's finaliser (Appleby
/// 2011) and samples by SplitMix64 (Steele et al. 2014), so that the two never run through the same sequence of seeds.
pub fn sample_seed(seed: u64, prompt_index: u32, sample_index: u32) -> u64 {
    split_mix(prompt_seed(seed, prompt_index), sample_index)
}

fn prompt_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add(u64::from(index).wrapping_mul(0xD1B5_4A32_D192_ED03));
    z = (z ^ (z >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    z = (z ^ (z >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    z ^ (z >> 33)
}

fn split_mix(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add(u64::from(index).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn the_last_token_of_a_bad_word_is_bad_after_the_others() {
        let bad_words = vec![vec![7], vec![1, 2, 3], vec![2, 4]];
        let params = SamplingParams { bad_words, ..SamplingParams::default() };
        assert_eq!(params.bad_after(&[], &[]), [7]);
        assert_eq!(params.bad_after(&[1], &[]), [7]);
        assert_eq!(params.bad_after(&[9, 1, 2], &[]), [7, 3, 4]);
        assert_eq!(params.bad_after(&[9, 1], &[2]), [7, 3, 4]);
        assert_eq!(params.bad_after(&[1, 2], &[5]), [7]);
        assert_eq!(params.bad_after(&[], &[2]), [7, 4]);
    }
}
