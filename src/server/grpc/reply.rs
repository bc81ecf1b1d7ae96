//! Turns the engine's events into the messages of gRPC replies.

use std::collections::VecDeque;
use std::iter::repeat_n;
use std::ops::Range;

use super::returned::ReturnedArrays;
use crate::engine::{Completion, Event, PolicyScore, PolicyScores, Summary, ValidRequest};
use crate::error::{Error, Result};
use crate::server::pb;
use crate::server::replies::Writer;
use crate::types::{
    Divergences, FinishReason, Prompt, PromptImage, RoutingFormat, TokenId, TokenLogprobs, WeightVersion,
};
use pb::generate_response::Event as Message;

/// Most tokens of a sequence in one message of scores: 0.8 MB with 100 most likely tokens at each position.
const PIECE_TOKENS: usize = 1024;
/// Most bytes of arrays in one message of scores, unless one token has more.
const PIECE_BYTES: usize = 1 << 20;

/// Turns the events of one `Generate` into its messages.
pub(super) struct GenerateWriter {
    request_id: String,
    /// The prompts that have not been sent back, by their index.
    prompts: Vec<Option<Prompt>>,
    /// Whether the request has `top_logprobs` or `logprob_token_ids`.
    top: bool,
    returned: ReturnedArrays,
    /// Tokens of each prompt.
    prompt_tokens: Vec<u32>,
    /// How experts are returned, if they are.
    routing: Option<RoutingFormat>,
}

impl GenerateWriter {
    pub(super) fn new(request: &ValidRequest) -> Self {
        Self {
            prompt_tokens: request.prompts.iter().map(|prompt| prompt.tokens.len() as u32).collect(),
            routing: request.return_routing,
            request_id: request.request_id.clone(),
            prompts: request.prompts.iter().cloned().map(Some).collect(),
            top: request.params.top_logprobs > 0 || !request.params.logprob_token_ids.is_empty(),
            returned: ReturnedArrays::new(request),
        }
    }

    fn completion(&self, c: Completion) -> pb::Completion {
        let span =
            |&(weight_version, start, end): &(WeightVersion, u32, u32)| pb::VersionSpan { weight_version, start, end };
        pb::Completion {
            prompt_index: c.prompt_index,
            sample_index: c.sample_index,
            token_ids: c.tokens.iter().map(|t| t.token).collect(),
            logprobs: c.tokens.iter().map(|t| t.processed).collect(),
            raw_logprobs: c.tokens.iter().map(|t| t.raw).collect(),
            top_logprobs: self.if_listed(|| c.tokens.iter().map(top_logprobs).collect()),
            finish_reason: finish_reason(c.finish_reason).into(),
            weight_versions: c.weight_versions.iter().map(span).collect(),
            seed: c.seed,
            cached_tokens: c.cached_tokens,
            text: c.text,
            ranks: self.if_top(|| c.tokens.iter().map(|t| t.rank).collect()),
            returned: self.returned.of(0, &c.tokens),
            references: c.scores.references.iter().map(|score| policy_score(score, 0, 0..c.tokens.len())).collect(),
            base: c.scores.base.as_ref().map(|score| policy_score(score, 0, 0..c.tokens.len())),
            current: c.scores.current.as_ref().map(|score| policy_score(score, 0, 0..c.tokens.len())),
            routing: self
                .routing
                .map(|format| routing(&format, self.prompt_tokens[c.prompt_index as usize], c.routing)),
        }
    }

    fn prompt_logprobs(
        &self,
        prompt_index: u32,
        prompt: &Prompt,
        mut logprobs: Vec<TokenLogprobs>,
    ) -> Result<pb::PromptLogprobs> {
        let token_id_logprobs = token_id_logprobs(prompt, &mut logprobs);
        let skipped = skipped(prompt, &logprobs)?;
        Ok(pb::PromptLogprobs {
            prompt_index,
            token_ids: prompt.tokens.to_vec(),
            raw_logprobs: after(skipped, f32::NAN, &logprobs, |t| t.raw),
            top_logprobs: self.if_listed(|| after(skipped, pb::TopLogprobs::default(), &logprobs, top_logprobs)),
            ranks: self.if_top(|| after(skipped, 0, &logprobs, |t| t.rank)),
            token_id_logprobs,
            returned: self.returned.of(skipped, &logprobs),
        })
    }

    /// A list of most likely tokens, if the request asks for one in a message for each token.
    fn if_listed<T>(&self, list: impl FnOnce() -> Vec<T>) -> Vec<T> {
        if self.returned.have_top() { Vec::new() } else { self.if_top(list) }
    }

    /// A list beside the log-probabilities, if the request asks for most likely tokens.
    fn if_top<T>(&self, list: impl FnOnce() -> Vec<T>) -> Vec<T> {
        if self.top { list() } else { Vec::new() }
    }

    fn summary(&self, s: &Summary) -> pb::GenerateSummary {
        pb::GenerateSummary {
            request_id: self.request_id.clone(),
            prompt_tokens: s.prompt_tokens,
            cached_tokens: s.cached_tokens,
            completion_tokens: s.completion_tokens,
            seconds: s.seconds,
        }
    }
}

impl Writer for GenerateWriter {
    type Message = pb::GenerateResponse;

    fn write(&mut self, event: Event, out: &mut VecDeque<pb::GenerateResponse>) -> Result<Option<Summary>> {
        let prompt = prompt_of(&event).and_then(|index| Some((index, self.prompts.get_mut(index as usize)?.take()?)));
        let mut push = |event| out.push_back(pb::GenerateResponse { event: Some(event) });
        if let Some((prompt_index, prompt)) = &prompt {
            let (prompt_index, token_ids) = (*prompt_index, prompt.tokens.to_vec());
            let images = prompt.images.iter().map(prompt_image).collect();
            push(Message::Prompt(pb::PromptTokens { prompt_index, token_ids, images }));
        }
        match event {
            Event::Token { prompt_index, sample_index, logprobs, text, .. } => push(Message::Delta(pb::TokenDelta {
                prompt_index,
                sample_index,
                token_ids: vec![logprobs.token],
                logprobs: vec![logprobs.processed],
                raw_logprobs: vec![logprobs.raw],
                text,
                top_logprobs: self.if_listed(|| vec![top_logprobs(&logprobs)]),
                ranks: self.if_top(|| vec![logprobs.rank]),
                returned: self.returned.of(0, std::slice::from_ref(&logprobs)),
            })),
            Event::Text { prompt_index, sample_index, text } => push(Message::Delta(pb::TokenDelta {
                prompt_index,
                sample_index,
                text: Some(text),
                ..Default::default()
            })),
            Event::PromptDone { prompt_index, logprobs, routing: experts, .. } => {
                if let Some(format) = &self.routing {
                    let routing = Some(routing(format, 0, experts));
                    push(Message::PromptRouting(pb::PromptRouting { prompt_index, routing }));
                }
                if let Some(logprobs) = logprobs {
                    let (_, prompt) = prompt.ok_or_else(|| unrequested(prompt_index))?;
                    push(Message::PromptLogprobs(self.prompt_logprobs(prompt_index, &prompt, logprobs)?));
                }
            }
            Event::Completion(completion) => push(Message::Completion(self.completion(completion))),
            Event::Done(summary) => {
                push(Message::Summary(self.summary(&summary)));
                return Ok(Some(summary));
            }
            Event::Failed(error) => return Err(error),
        }
        Ok(None)
    }
}

/// The experts of tokens from the one with the index `first_token` on.
fn routing(format: &RoutingFormat, first_token: u32, experts: Vec<u8>) -> pb::Routing {
    pb::Routing { first_token, layers: format.layers as u32, top_k: format.top_k as u32, experts }
}

fn prompt_image(image: &PromptImage) -> pb::PromptImage {
    pb::PromptImage {
        hash: image.picture.hash().0.to_vec(),
        width: image.picture.width(),
        height: image.picture.height(),
        first_token: image.placeholders.start as u32,
        tokens: image.placeholders.len() as u32,
        tiles: image.picture.tiles(),
    }
}

/// Turns the events of one `Score` into its messages.
pub(super) struct ScoreWriter {
    /// The sequences, each None once it has scores.
    sequences: Vec<Option<Prompt>>,
    left: usize,
    /// Whether the request has `top_logprobs`.
    listed: bool,
    returned: ReturnedArrays,
    /// How experts are returned, if they are.
    routing: Option<RoutingFormat>,
}

impl ScoreWriter {
    pub(super) fn new(request: &ValidRequest) -> Self {
        Self {
            sequences: request.prompts.iter().cloned().map(Some).collect(),
            left: request.prompts.len(),
            listed: request.params.top_logprobs > 0 && request.top_arrays.is_none(),
            returned: ReturnedArrays::new(request),
            routing: request.return_routing,
        }
    }

    fn score(
        &mut self,
        index: u32,
        (mut logprobs, experts): (Vec<TokenLogprobs>, Vec<u8>),
        (scores, weight_version): (PolicyScores, WeightVersion),
        out: &mut VecDeque<pb::ScoreResponse>,
    ) -> Result<()> {
        let sequence = self.sequences.get_mut(index as usize).ok_or_else(|| unrequested(index))?;
        let sequence = sequence.take().ok_or_else(|| Error::Internal(format!("two scores for sequence {index}")))?;
        self.left -= 1;
        let named = token_id_logprobs(&sequence, &mut logprobs);
        let (length, skipped) = (sequence.tokens.len(), skipped(&sequence, &logprobs)?);
        if skipped > 1 {
            return Err(wrong_count(&sequence, &logprobs));
        }
        let raw = after(skipped, f32::NAN, &logprobs, |t| t.raw);
        let processed = after(skipped, f32::NAN, &logprobs, |t| t.processed);
        let mut start = 0;
        while start < length {
            let piece = start..self.piece_end(start, length, &logprobs);
            // The first token of a sequence has no log-probabilities.
            let scored = piece.start.saturating_sub(1)..piece.end - 1;
            let tops =
                piece.clone().map(|i| i.checked_sub(1).map_or_else(Default::default, |i| top_logprobs(&logprobs[i])));
            let skipped = piece.len() - scored.len();
            let policy = |score: &PolicyScore| policy_score(score, skipped, scored.clone());
            let score = pb::SequenceScore {
                references: scores.references.iter().map(policy).collect(),
                base: scores.base.as_ref().map(policy),
                raw_logprobs: raw[piece.clone()].to_vec(),
                logprobs: processed[piece.clone()].to_vec(),
                top_logprobs: if self.listed { tops.collect() } else { Vec::new() },
                weight_version,
                returned: self.returned.of(skipped, &logprobs[scored.clone()]),
                token_id_logprobs: named.get(piece.clone()).unwrap_or_default().to_vec(),
                routing: self.routing.map(|format| {
                    let byte = |token: usize| (token * format.row_bytes()).min(experts.len());
                    routing(&format, start as u32, experts[byte(piece.start)..byte(piece.end)].to_vec())
                }),
            };
            out.push_back(pb::ScoreResponse { score: Some(score), sequence_index: index, start: start as u32 });
            start = piece.end;
        }
        Ok(())
    }
}

impl ScoreWriter {
    /// The end of the part of a sequence of `length` tokens that begins at `start`. `logprobs` are those of all tokens
    /// but the first.
    fn piece_end(&self, start: usize, length: usize, logprobs: &[TokenLogprobs]) -> usize {
        let end = length.min(start + PIECE_TOKENS);
        let mut bytes = 0;
        let is_full = |token: &usize| {
            bytes += self.returned.bytes_of(&logprobs[token - 1]);
            bytes > PIECE_BYTES && *token > start
        };
        (start.max(1)..end).find(is_full).unwrap_or(end)
    }
}

impl Writer for ScoreWriter {
    type Message = pb::ScoreResponse;

    fn write(&mut self, event: Event, out: &mut VecDeque<pb::ScoreResponse>) -> Result<Option<Summary>> {
        match event {
            Event::PromptDone { prompt_index, logprobs, routing, weight_version, scores } => {
                let own = (logprobs.unwrap_or_default(), routing);
                self.score(prompt_index, own, (scores, weight_version), out).map(|()| None)
            }
            Event::Done(_) if self.left > 0 => Err(Error::Aborted(format!(
                "the request was aborted before {} of its {} sequences were scored",
                self.left,
                self.sequences.len()
            ))),
            Event::Done(summary) => Ok(Some(summary)),
            Event::Failed(error) => Err(error),
            // Abort ends a scored sequence by an aborted completion without tokens; its score is then missing.
            Event::Completion(_) | Event::Token { .. } | Event::Text { .. } => Ok(None),
        }
    }
}

/// Number of a prompt's tokens before those that `logprobs` are of: at least the first, which has no tokens before it.
fn skipped(prompt: &Prompt, logprobs: &[TokenLogprobs]) -> Result<usize> {
    let skipped = prompt.tokens.len().checked_sub(logprobs.len()).filter(|skipped| *skipped > 0);
    skipped.ok_or_else(|| wrong_count(prompt, logprobs))
}

fn wrong_count(prompt: &Prompt, logprobs: &[TokenLogprobs]) -> Error {
    Error::Internal(format!("{} log-probabilities for {} tokens", logprobs.len(), prompt.tokens.len()))
}

/// One value per token of a prompt: `none` for those that are skipped, then those of `logprobs`.
fn after<T: Clone>(skipped: usize, none: T, logprobs: &[TokenLogprobs], value: impl Fn(&TokenLogprobs) -> T) -> Vec<T> {
    repeat_n(none, skipped).chain(logprobs.iter().map(value)).collect()
}

/// Moves the log-probabilities of a prompt's named tokens out of `logprobs`: one list per token of the prompt. Empty if
/// the prompt names none.
fn token_id_logprobs(prompt: &Prompt, logprobs: &mut [TokenLogprobs]) -> Vec<pb::TopLogprobs> {
    let rows = prompt.take_rows(logprobs);
    if rows.is_empty() {
        return Vec::new();
    }
    let skipped = prompt.tokens.len().saturating_sub(rows.len());
    repeat_n(pb::TopLogprobs::default(), skipped).chain(rows.iter().map(|row| listed(row))).collect()
}

/// Index of the prompt that the event is about.
fn prompt_of(event: &Event) -> Option<u32> {
    match event {
        Event::Token { prompt_index, .. } | Event::Text { prompt_index, .. } => Some(*prompt_index),
        Event::PromptDone { prompt_index, .. } => Some(*prompt_index),
        Event::Completion(completion) => Some(completion.prompt_index),
        Event::Done(_) | Event::Failed(_) => None,
    }
}

fn top_logprobs(token: &TokenLogprobs) -> pb::TopLogprobs {
    listed(&token.top)
}

fn listed(tokens: &[(TokenId, f32)]) -> pb::TopLogprobs {
    let (token_ids, logprobs) = tokens.iter().copied().unzip();
    pb::TopLogprobs { token_ids, logprobs }
}

/// The values of some tokens of a score, behind those of `skipped` tokens without log-probabilities.
fn policy_score(score: &PolicyScore, skipped: usize, tokens: Range<usize>) -> pb::PolicyScore {
    let logprobs = repeat_n((f32::NAN, f32::NAN), skipped).chain(score.logprobs[tokens.clone()].iter().copied());
    let (raw_logprobs, logprobs) = logprobs.unzip();
    let (kl, reverse_kl) = match &score.divergences[..] {
        [] => (Vec::new(), Vec::new()),
        divergences => {
            let divergences = repeat_n(&Divergences::NONE, skipped).chain(&divergences[tokens]);
            divergences.map(|divergence| (divergence.kl, divergence.reverse_kl)).unzip()
        }
    };
    pb::PolicyScore { weight_version: score.weight_version, raw_logprobs, logprobs, kl, reverse_kl }
}

fn finish_reason(reason: FinishReason) -> pb::FinishReason {
    match reason {
        FinishReason::Eos => pb::FinishReason::Eos,
        FinishReason::StopToken => pb::FinishReason::StopToken,
        FinishReason::StopString => pb::FinishReason::StopString,
        FinishReason::Length => pb::FinishReason::Length,
        FinishReason::Grammar => pb::FinishReason::Grammar,
        FinishReason::Aborted => pb::FinishReason::Aborted,
    }
}

fn unrequested(prompt_index: u32) -> Error {
    Error::Internal(format!("log-probabilities of prompt {prompt_index} were not asked for"))
}

#[cfg(test)]
mod tests;
