//! A "model" that is a hash of the salt and of all tokens so far.

use crate::cache::CacheSalt;
use crate::scheduler::*;
use crate::types::*;

pub const VOCAB: u64 = 5;

/// SplitMix64's finaliser over a running state.
pub fn mix(state: u64, value: u64) -> u64 {
    let mut z = (state ^ value.wrapping_mul(0xD6E8_FEB8_6659_FD93)).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

pub fn root(salt: CacheSalt) -> u64 {
    let weights = match salt.weights {
        PolicyWeights::Serving => 0,
        PolicyWeights::Base => 1,
        PolicyWeights::Adapter(generation) => generation + 2,
    };
    mix(mix(11, salt.epoch), weights)
}

pub fn next_state(state: u64, salt: CacheSalt, token: TokenId, beside: u64) -> u64 {
    mix(mix(state, root(salt)), u64::from(token) ^ beside)
}

/// The value of the prompt's image and of its forced experts at the token with this index; 0 where there are none.
pub fn beside(prompt: &Prompt, index: usize) -> u64 {
    let image = prompt.images.iter().find(|image| image.placeholders.contains(&index));
    let forced = prompt.routing.as_ref().and_then(|routing| routing.within(index..index + 1));
    image.map_or(0, |image| mix(u64::from(image.picture.rgb()[0]), (index - image.placeholders.start) as u64))
        ^ forced.map_or(0, |(_, row)| mix(13, row[0].into()))
}

pub fn raw_logprobs(logprobs: &[TokenLogprobs]) -> Vec<f32> {
    logprobs.iter().map(|l| l.raw).collect()
}

/// The states of a group's prompt if the policy of the group's salt computes all of it.
pub fn prompt_states(group: &Group) -> impl Iterator<Item = u64> {
    (0..).zip(&group.prompt.tokens[..]).scan(0, |state, (index, &token)| {
        *state = next_state(*state, group.salt, token, beside(&group.prompt, index));
        Some(*state)
    })
}

/// The log-probabilities of a sample's tokens under the policy of the group's salt.
pub fn output_logprobs(group: &Group, outputs: &[TokenId]) -> Vec<f32> {
    let last = prompt_states(group).last().expect("a prompt has tokens");
    let len = group.prompt.tokens.len();
    let scored = outputs.iter().zip(len..).scan(last, |state, (&token, index)| {
        let logprob = raw_logprob(*state, token);
        *state = next_state(*state, group.salt, token, beside(&group.prompt, index));
        Some(logprob)
    });
    scored.collect()
}

/// The log-probabilities of a group's prompt under the same policy.
pub fn prompt_logprobs(group: &Group) -> Vec<f32> {
    let tokens = &group.prompt.tokens[1..];
    prompt_states(group).zip(tokens).map(|(state, &token)| raw_logprob(state, token)).collect()
}

pub fn raw_logprob(state: u64, token: TokenId) -> f32 {
    -((mix(state, u64::from(token) + 99) >> 40) as f32) / 65536.0
}

/// Answers a task. `repeated` is the last token, if the next one should mostly follow from it.
pub fn answer(state: u64, repeated: Option<TokenId>, task: &LogitsTask) -> TokenLogprobs {
    let raw = |token| raw_logprob(state, token);
    if let Some(token) = task.target {
        assert_eq!(task.history, None, "penalties are of what is sampled");
        return TokenLogprobs {
            token,
            raw: raw(token),
            processed: raw(token) / task.params.temperature,
            top: vec![],
            rank: 0,
            returned: None,
        };
    }
    let mut draw = mix(mix(state, task.seed), u64::from(task.output_index));
    assert_eq!(task.history.is_some(), task.params.needs_history());
    if let Some(History { prompt, output }) = &task.history {
        assert_eq!(output.len(), task.output_index as usize);
        draw = prompt.iter().chain(output).fold(draw, |draw, &token| mix(draw, u64::from(token)));
    }
    let choice = match repeated {
        Some(last) if !draw.is_multiple_of(8) => u64::from(last) + 1,
        _ => draw,
    };
    let stops =
        |token: &TokenId| task.params.eos_token_ids.contains(token) || task.params.stop_token_ids.contains(token);
    let masked = task.output_index < task.params.min_tokens;
    let allowed: Vec<TokenId> = (0..VOCAB as TokenId).filter(|token| !(masked && stops(token))).collect();
    let token = task.forced.unwrap_or(allowed[(choice % allowed.len() as u64) as usize]);
    TokenLogprobs { token, raw: raw(token), processed: (draw >> 40) as f32, top: vec![], rank: 0, returned: None }
}
