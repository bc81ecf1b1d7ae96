//! Sampling parameters (valid by the time they are made) and per-token results.

use super::TokenId;

/// How tokens are chosen and when a sample ends. The server's `convert` is the only maker from outside input and
/// checks every range, so code that receives one may rely on the bounds given here.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// `>= 0`; 0 takes the most likely token (ties: the lowest id).
    pub temperature: f32,
    /// Keep the `k` most likely tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep the smallest set of most likely tokens whose mass reaches this, in `(0, 1]`; 1 keeps all.
    pub top_p: f32,
    /// Keep tokens with at least this fraction of the best token's probability, in `[0, 1]`; 0 keeps all.
    pub min_p: f32,
    /// `> 0`; divides positive and multiplies negative logits of tokens seen in the prompt or the output.
    pub repetition_penalty: f32,
    /// Subtracted once from the logits of tokens seen in the output.
    pub presence_penalty: f32,
    /// Subtracted per occurrence in the output.
    pub frequency_penalty: f32,
    /// Added to logits; ascending by token, no duplicates, finite.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// If given, only these may be sampled; ascending, no duplicates, not empty.
    pub allowed_tokens: Option<Vec<TokenId>>,
    /// End-of-sequence and stop tokens have probability 0 before this many tokens; `<= max_tokens`.
    pub min_tokens: u32,
    /// `>= 1`.
    pub max_tokens: u32,
    /// The model's end-of-sequence tokens; empty when the request ignores them. Ascending.
    pub eos_token_ids: Vec<TokenId>,
    /// Tokens that end a sample besides the model's own. Ascending.
    pub stop_token_ids: Vec<TokenId>,
    /// Text that ends a sample; none empty.
    pub stop_strings: Vec<String>,
    /// Log-probabilities of this many most likely tokens (raw distribution) beside the sampled one; 0 for none.
    pub top_logprobs: u32,
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
            top_logprobs: 0,
        }
    }
}

impl SamplingParams {
    /// Bytes of its lists.
    pub fn heap_bytes(&self) -> usize {
        let tokens =
            self.allowed_tokens.as_ref().map_or(0, Vec::len) + self.eos_token_ids.len() + self.stop_token_ids.len();
        let text: usize = self.stop_strings.iter().map(|s| s.len() + size_of::<String>()).sum();
        size_of_val(&self.logit_bias[..]) + tokens * size_of::<TokenId>() + text
    }

    /// Whether the distribution depends on the tokens before it (so that a step must carry them).
    pub fn needs_history(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// Why a sample ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FinishReason {
    /// The model's end-of-sequence token (the last of the token ids).
    Eos,
    /// A requested stop token (the last of the token ids).
    StopToken,
    /// A requested stop string.
    StopString,
    /// `max_tokens` or the context length.
    Length,
    /// Aborted by request or by a vanished client; the tokens so far are valid.
    Aborted,
}

/// Seed of sample `sample_index` of prompt `prompt_index` in a request drawn with `seed`. The first sample of the first
/// prompt has the seed itself, so any completion can be replayed alone (one prompt, `n = 1`) with the seed it reports;
/// equal prompts of one request get different samples. Prompts are told apart by Murmur3's finaliser (Appleby 2011),
/// samples of a prompt by SplitMix64 (Steele et al. 2014), so that the two never count the same sequence of seeds.
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
