//! Log-probabilities as OpenAI and vLLM write them.

use std::sync::Arc;

use serde::ser::SerializeMap as _;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use super::sampling::LogprobsMode;
use crate::text::{IncrementalDetokenizer, Tokenizer};
use crate::types::{TokenId, TokenLogprobs};

/// Bytes that the log-probability of a token takes while it is turned into text, and that of each of its alternatives:
/// texts of their own, in lists that grow.
pub(super) const LOGPROB: usize = 192;
pub(super) const ALTERNATIVE: usize = 80;
/// Stands for minus infinity, which JSON cannot write.
const MINUS_INFINITY: f32 = -9999.0;

/// `logprob` as JSON can write it: -9999 for minus infinity, null for NaN, which means that the policy is broken.
pub(in crate::server::http) fn written(logprob: f32) -> Option<f32> {
    match logprob {
        f32::NEG_INFINITY => Some(MINUS_INFINITY),
        logprob if logprob.is_nan() => None,
        logprob => Some(logprob),
    }
}

/// The log-probability of the token itself.
pub(in crate::server::http) fn chosen(token: &TokenLogprobs, mode: LogprobsMode) -> f32 {
    match mode {
        LogprobsMode::Processed => token.processed,
        LogprobsMode::Raw => token.raw,
    }
}

/// Writes tokens of one text as strings.
#[derive(Clone)]
pub(in crate::server::http) struct TokenTexts {
    /// None writes `token_id:N`.
    detokenizer: Option<IncrementalDetokenizer>,
    tokenizer: Option<Arc<Tokenizer>>,
}

impl TokenTexts {
    /// Writes tokens as text, or as `token_id:N` without a tokenizer.
    pub(super) fn new(tokenizer: Option<&Arc<Tokenizer>>) -> Self {
        let tokenizer = tokenizer.cloned();
        Self { detokenizer: tokenizer.clone().map(|t| IncrementalDetokenizer::new(t, false)), tokenizer }
    }

    /// The text that `token` adds: nothing if it ends within a character, which the token that completes it has.
    pub(super) fn next(&mut self, token: TokenId) -> String {
        let Some(detokenizer) = &mut self.detokenizer else { return by_id(token) };
        let mut text = String::new();
        detokenizer.push(token, &mut text);
        text
    }

    /// The text of an alternative to the next token.
    pub(super) fn alternative(&self, token: TokenId) -> String {
        self.tokenizer.as_ref().map_or_else(|| by_id(token), |tokenizer| tokenizer.decode(&[token], false))
    }
}

fn by_id(token: TokenId) -> String {
    format!("token_id:{token}")
}

/// Log-probabilities of a completion's tokens.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct Logprobs {
    /// Where each token begins in the text, in characters.
    text_offset: Vec<usize>,
    token_logprobs: Vec<Option<f32>>,
    tokens: Vec<String>,
    /// For each token it and the most likely ones, by their texts.
    top_logprobs: Vec<Option<TopLogprobs>>,
}

/// Tokens and their log-probabilities, written as an object.
#[derive(Debug, ToSchema)]
#[schema(value_type = std::collections::BTreeMap<String, f32>)]
struct TopLogprobs(Vec<(String, Option<f32>)>);

impl Serialize for TopLogprobs {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (i, (text, logprob)) in self.0.iter().enumerate() {
            // Equal texts of different tokens are one member, and the first is the more likely.
            if self.0[..i].iter().all(|(other, _)| other != text) {
                map.serialize_entry(text, logprob)?;
            }
        }
        map.end()
    }
}

impl Logprobs {
    /// Adds a token without log-probabilities: the first of a prompt.
    pub(super) fn push_first(&mut self, token: TokenId, texts: &mut TokenTexts, offset: &mut usize) {
        self.push_text(texts.next(token), offset);
        self.token_logprobs.push(None);
        self.top_logprobs.push(None);
    }

    /// Adds a token with those of its `top` most likely alternatives. `offset` is where its text begins, and moves on.
    pub(super) fn push(
        &mut self,
        token: &TokenLogprobs,
        mode: LogprobsMode,
        top: usize,
        texts: &mut TokenTexts,
        offset: &mut usize,
    ) {
        let others = token.top.iter().take(top).filter(|(other, _)| *other != token.token);
        let others: Vec<_> = others.map(|&(other, value)| (texts.alternative(other), written(value))).collect();
        let (text, value) = (texts.next(token.token), written(chosen(token, mode)));
        let all = std::iter::once((text.clone(), value)).chain(others).collect();
        self.push_text(text, offset);
        self.token_logprobs.push(value);
        self.top_logprobs.push(Some(TopLogprobs(all)));
    }

    fn push_text(&mut self, text: String, offset: &mut usize) {
        self.text_offset.push(*offset);
        *offset += text.chars().count();
        self.tokens.push(text);
    }
}

/// Log-probabilities of the tokens of a chat's answer.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatLogprob>,
}

/// Log-probability of one token, with the most likely tokens at its place.
#[derive(Debug, Serialize, ToSchema)]
struct ChatLogprob {
    #[serde(flatten)]
    sampled: NamedLogprob,
    top_logprobs: Vec<NamedLogprob>,
}

/// A token and its log-probability.
#[derive(Debug, Serialize, ToSchema)]
struct NamedLogprob {
    token: String,
    logprob: Option<f32>,
    /// UTF-8 of the token's text: none for a token that ends within a character, which the token that completes it has.
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Adds a token with the `top` most likely ones. `names` writes tokens, `texts` their texts.
    pub(super) fn push(
        &mut self,
        token: &TokenLogprobs,
        mode: LogprobsMode,
        top: usize,
        names: &mut TokenTexts,
        texts: &mut TokenTexts,
    ) {
        let other = |&(other, value): &(TokenId, f32)| NamedLogprob {
            token: names.alternative(other),
            logprob: written(value),
            bytes: texts.alternative(other).into_bytes(),
        };
        let top_logprobs = token.top.iter().take(top).map(other).collect();
        let sampled = NamedLogprob {
            token: names.next(token.token),
            logprob: written(chosen(token, mode)),
            bytes: texts.next(token.token).into_bytes(),
        };
        self.content.push(ChatLogprob { sampled, top_logprobs });
    }
}

/// Log-probability of one token of a prompt, or of one that might have stood there.
#[derive(Debug, Serialize, ToSchema)]
struct PromptLogprob {
    logprob: Option<f32>,
    /// 1 for the most likely token.
    rank: u32,
    decoded_token: String,
}

/// The tokens that stand or might have stood at one place of a prompt, by their ids.
#[derive(Debug, ToSchema)]
#[schema(value_type = std::collections::BTreeMap<String, PromptLogprob>)]
struct PromptPosition(Vec<(TokenId, PromptLogprob)>);

impl Serialize for PromptPosition {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

/// Log-probabilities of a prompt's tokens: null for the first, then one object for each place.
#[derive(Debug, Serialize, ToSchema)]
#[serde(transparent)]
pub(in crate::server::http) struct PromptLogprobs(Vec<Option<PromptPosition>>);

impl PromptLogprobs {
    /// Those of a prompt that begins with `first` and continues with `rest`, with the `top` most likely tokens each.
    /// They are of the model's own distribution.
    pub(in crate::server::http) fn new(
        first: TokenId,
        rest: &[TokenLogprobs],
        top: usize,
        mut texts: TokenTexts,
    ) -> Self {
        texts.next(first);
        let position = |token: &TokenLogprobs| {
            let others = token.top.iter().take(top).zip(1..).filter(|((other, _), _)| *other != token.token);
            let others: Vec<_> = others
                .map(|(&(other, value), rank)| {
                    let decoded_token = texts.alternative(other);
                    (other, PromptLogprob { logprob: written(value), rank, decoded_token })
                })
                .collect();
            let decoded_token = texts.next(token.token);
            let own = PromptLogprob { logprob: written(token.raw), rank: token.rank, decoded_token };
            Some(PromptPosition(std::iter::once((token.token, own)).chain(others).collect()))
        };
        Self(std::iter::once(None).chain(rest.iter().map(position)).collect())
    }
}
