//! Log-probabilities as OpenAI and vLLM write them.

use std::fmt;
use std::sync::Arc;

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use utoipa::ToSchema;

use super::sampling::LogprobsMode;
use crate::error::{Error, Result};
use crate::server::ModelFacts;
use crate::server::convert::MAX_TOP_LOGPROBS;
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

/// The `logprobs` of a completion: a number, or as vLLM takes it too, true for 1. Clients that also speak to chats send
/// false for none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LogprobsCount(pub(super) Option<i32>);

impl<'de> Deserialize<'de> for LogprobsCount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(LogprobsCountVisitor)
    }
}

struct LogprobsCountVisitor;

impl Visitor<'_> for LogprobsCountVisitor {
    type Value = LogprobsCount;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("i32, true or false")
    }

    fn visit_bool<E: de::Error>(self, is_reported: bool) -> std::result::Result<LogprobsCount, E> {
        Ok(LogprobsCount(is_reported.then_some(1)))
    }

    fn visit_i64<E: de::Error>(self, count: i64) -> std::result::Result<LogprobsCount, E> {
        let count = i32::try_from(count).map_err(|_| E::invalid_value(Unexpected::Signed(count), &self))?;
        Ok(LogprobsCount(Some(count)))
    }

    fn visit_u64<E: de::Error>(self, count: u64) -> std::result::Result<LogprobsCount, E> {
        let count = i32::try_from(count).map_err(|_| E::invalid_value(Unexpected::Unsigned(count), &self))?;
        Ok(LogprobsCount(Some(count)))
    }
}

/// The number of most likely tokens that the member `name` asks for: -1 is all of the vocabulary.
///
/// # Errors
/// `InvalidArgument` for other negative numbers, and above the limit.
pub(in crate::server::http) fn most_likely(name: &str, given: Option<i32>, model: &ModelFacts) -> Result<Option<u32>> {
    let Some(given) = given else { return Ok(None) };
    let vocab_size = model.vocab_size;
    let count = if given == -1 { Ok(u32::try_from(vocab_size).unwrap_or(u32::MAX)) } else { u32::try_from(given) };
    let count = count.map_err(|_| Error::invalid(name, format!("{given} is neither -1 nor a count")))?;
    if count > MAX_TOP_LOGPROBS {
        let asked = if given == -1 { format!("-1, all {vocab_size} tokens,") } else { count.to_string() };
        return Err(Error::invalid(name, format!("{asked} is more than {MAX_TOP_LOGPROBS}; ask for fewer")));
    }
    Ok(Some(count))
}

/// Writes tokens of one text as strings: as text, or as `token_id:N` without a tokenizer.
pub(super) struct TokenTexts(Option<(Arc<Tokenizer>, IncrementalDetokenizer)>);

impl TokenTexts {
    pub(super) fn new(tokenizer: Option<&Arc<Tokenizer>>) -> Self {
        Self(tokenizer.map(|tokenizer| (tokenizer.clone(), IncrementalDetokenizer::new(tokenizer.clone(), false))))
    }

    /// The text that `token` adds: nothing if it ends within a character, which the token that completes it has.
    fn next(&mut self, token: TokenId) -> String {
        let Some((_, detokenizer)) = &mut self.0 else { return by_id(token) };
        let mut text = String::new();
        detokenizer.push(token, &mut text);
        text
    }

    /// The text of an alternative to a token.
    fn alternative(&self, token: TokenId) -> String {
        self.0.as_ref().map_or_else(|| by_id(token), |(tokenizer, _)| tokenizer.decode(&[token], false))
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
    #[schema(value_type = Vec<Option<BTreeMap<String, f32>>>)]
    top_logprobs: Vec<Option<TopLogprobs>>,
}

type TopLogprobs = Object<String, Option<f32>>;

/// A JSON object with its members in this order.
#[derive(Debug)]
struct Object<K, V>(Vec<(K, V)>);

impl<K: Serialize, V: Serialize> Serialize for Object<K, V> {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// Writes the log-probabilities of the tokens of one sample.
pub(super) struct LogprobsWriter {
    texts: TokenTexts,
    /// How many most likely tokens are reported beside each.
    top: usize,
    /// Where the next token begins in the text, in characters.
    offset: usize,
}

impl LogprobsWriter {
    pub(super) fn new(texts: TokenTexts, top: u32) -> Self {
        Self { texts, top: top as usize, offset: 0 }
    }

    /// Adds a token without log-probabilities, which the first of a prompt is, to `out`.
    pub(super) fn push_first(&mut self, token: TokenId, out: &mut Logprobs) {
        let text = self.texts.next(token);
        self.add(text, None, None, out);
    }

    /// Adds a token and its most likely alternatives to `out`.
    pub(super) fn push(&mut self, token: &TokenLogprobs, mode: LogprobsMode, out: &mut Logprobs) {
        let (text, value) = (self.texts.next(token.token), written(chosen(token, mode)));
        // A list that grows would take more than is counted.
        let mut all = Vec::with_capacity(1 + self.top);
        all.push((text.clone(), value));
        for &(other, value) in token.top.iter().take(self.top).filter(|(other, _)| *other != token.token) {
            let text = self.texts.alternative(other);
            // Equal texts of different tokens are one member, and the first is the more likely.
            if all.iter().all(|(before, _)| *before != text) {
                all.push((text, written(value)));
            }
        }
        self.add(text, value, Some(Object(all)), out);
    }

    fn add(&mut self, text: String, logprob: Option<f32>, top: Option<TopLogprobs>, out: &mut Logprobs) {
        out.text_offset.push(self.offset);
        self.offset += text.chars().count();
        out.tokens.push(text);
        out.token_logprobs.push(logprob);
        out.top_logprobs.push(top);
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
#[derive(Clone, Debug, Serialize, ToSchema)]
struct NamedLogprob {
    token: String,
    logprob: Option<f32>,
    /// UTF-8 of the token's text: none for a token that ends within a character, which the token that completes it has.
    bytes: Vec<u8>,
}

/// Writes the log-probabilities of the tokens of one sample of a chat.
pub(super) struct ChatLogprobsWriter {
    /// The tokens as text or as `token_id:N`.
    pub(super) names: TokenTexts,
    /// The tokens as text, for their bytes.
    pub(super) texts: TokenTexts,
    /// Whether `top_logprobs` begins with the sampled token, as before tokens that the request names.
    pub(super) lists_sampled: bool,
}

impl ChatLogprobsWriter {
    /// The log-probabilities of `tokens`, with the `top` most likely tokens at the place of each.
    pub(super) fn write(&mut self, tokens: &[TokenLogprobs], mode: LogprobsMode, top: u32) -> ChatLogprobs {
        let entry = |token: &TokenLogprobs| {
            let sampled = NamedLogprob {
                token: self.names.next(token.token),
                logprob: written(chosen(token, mode)),
                bytes: self.texts.next(token.token).into_bytes(),
            };
            let first = self.lists_sampled.then(|| sampled.clone());
            let is_first = |token: &TokenLogprobs, other: TokenId| self.lists_sampled && other == token.token;
            let other = |&(other, value): &(TokenId, f32)| NamedLogprob {
                token: self.names.alternative(other),
                logprob: written(value),
                bytes: self.texts.alternative(other).into_bytes(),
            };
            let others = token.top.iter().take(top as usize).filter(|(id, _)| !is_first(token, *id)).map(other);
            ChatLogprob { sampled, top_logprobs: first.into_iter().chain(others).collect() }
        };
        ChatLogprobs { content: tokens.iter().map(entry).collect() }
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

/// Log-probabilities of a prompt's tokens: null for the first, then for each place the tokens that stand or might have
/// stood there, by their ids.
#[derive(Debug, Serialize, ToSchema)]
#[serde(transparent)]
#[schema(value_type = Vec<Option<BTreeMap<String, PromptLogprob>>>)]
pub(in crate::server::http) struct PromptLogprobs(Vec<Option<Object<TokenId, PromptLogprob>>>);

impl PromptLogprobs {
    /// Those of a prompt that begins with `first` and continues with `rest`, with the `top` most likely tokens each.
    /// They are of the model's own distribution.
    pub(super) fn new(first: TokenId, rest: &[TokenLogprobs], top: u32, mut texts: TokenTexts) -> Self {
        let top = top as usize;
        texts.next(first);
        let position = |token: &TokenLogprobs| {
            let decoded_token = texts.next(token.token);
            let own = PromptLogprob { logprob: written(token.raw), rank: token.rank, decoded_token };
            let others = token.top.iter().take(top).zip(1..).filter(|((other, _), _)| *other != token.token);
            let mut all = Vec::with_capacity(1 + top);
            all.push((token.token, own));
            all.extend(others.map(|(&(other, value), rank)| {
                let decoded_token = texts.alternative(other);
                (other, PromptLogprob { logprob: written(value), rank, decoded_token })
            }));
            Some(Object(all))
        };
        Self(std::iter::once(None).chain(rest.iter().map(position)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_tokens_are_reported_up_to_the_limit() {
        let asked = |given, vocab_size| {
            let model = ModelFacts { vocab_size, ..ModelFacts::default() };
            most_likely("logprobs", given, &model).map_err(|error| error.to_string())
        };
        assert_eq!(
            (asked(None, 500), asked(Some(0), 500), asked(Some(100), 500)),
            (Ok(None), Ok(Some(0)), Ok(Some(100)))
        );
        assert_eq!(asked(Some(-1), 100), Ok(Some(100)));
        for (given, start) in
            [(-1, "-1, all 500 tokens, is more than 100"), (101, "101 is more than 100"), (-2, "-2 is")]
        {
            let error = asked(Some(given), 500).expect_err("refused");
            assert!(error.starts_with(&format!("logprobs: {start}")), "{error}");
        }
    }
}
