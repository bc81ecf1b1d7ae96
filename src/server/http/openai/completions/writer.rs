//! Makes the answers of `/v1/completions` from the events of a request.

use std::collections::VecDeque;

use bytes::Bytes;
use serde::Serialize;
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::Completion as Members;
use crate::engine::{Completion, Summary, ValidRequest};
use crate::error::Result;
use crate::memory::Traffic;
use crate::server::http::openai::chunks::{self, Chunks};
use crate::server::http::openai::logprobs::{ALTERNATIVE, LOGPROB, Logprobs, PromptLogprobs, TokenTexts};
use crate::server::http::openai::report::{Report, StopReason, VersionSpan, finish_reason};
use crate::server::http::openai::sampling::LogprobsMode;
use crate::server::http::openai::usage::{Unused, Usage};
use crate::server::http::reply::json;
use crate::server::http::samples::{Kept, Samples, samples_per_prompt};
use crate::types::{Prompt, TokenId, TokenLogprobs};

/// Bytes that are kept for each sample until the answer is sent.
const SAMPLE: usize = 256;

/// What the answers are to contain.
pub(super) struct Options {
    pub(super) report: Report,
    /// How many most likely tokens to report beside each sampled one, if log-probabilities were asked for.
    pub(super) logprobs: Option<u32>,
    /// Whether texts begin with the prompt.
    pub(super) is_echo: bool,
    /// For an echo, the text of each prompt that came as one.
    pub(super) prompt_texts: Vec<Option<String>>,
    /// Whether the one token that was sampled is left out.
    pub(super) drops_tokens: bool,
}

impl Options {
    pub(super) fn new(own: &Members, report: Report) -> Self {
        let is_echo = own.echo.unwrap_or(false);
        Self { report, logprobs: own.logprobs, is_echo, prompt_texts: Vec::new(), drops_tokens: false }
    }
}

/// The samples of a request.
#[derive(Serialize, ToSchema)]
pub(in crate::server::http) struct CompletionAnswer<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    #[schema(value_type = Vec<Choice>)]
    choices: Vec<Box<RawValue>>,
    service_tier: Option<String>,
    system_fingerprint: &'a str,
    usage: Usage,
    #[serde(flatten)]
    unused: Unused,
}

/// One sample.
#[derive(Serialize, ToSchema)]
struct Choice<'a> {
    /// Number of the prompt times `n`, plus the number of the sample.
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    /// `stop`, `length`, or `abort` for a sample that was ended by an order.
    finish_reason: &'static str,
    /// The stop string or stop token that ended the sample.
    stop_reason: Option<StopReason>,
    token_ids: Option<Vec<TokenId>>,
    prompt_logprobs: Option<&'a PromptLogprobs>,
    prompt_token_ids: Option<&'a [TokenId]>,
    /// Always null; vLLM's clients read it.
    #[schema(value_type = Option<String>)]
    routed_experts: Option<()>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_versions: Option<Vec<VersionSpan>>,
}

/// What an event adds to one sample.
#[derive(Serialize, Default)]
struct ChunkChoice {
    index: usize,
    text: String,
    logprobs: Option<Logprobs>,
    finish_reason: Option<&'static str>,
    stop_reason: Option<StopReason>,
    prompt_token_ids: Option<Vec<TokenId>>,
    token_ids: Option<Vec<TokenId>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight_versions: Option<Vec<VersionSpan>>,
}

/// What is known of one prompt before its samples end.
#[derive(Default)]
struct PromptFacts {
    /// Log-probabilities of its tokens from the second on, for an echo.
    echo: Option<Vec<TokenLogprobs>>,
    reported: Option<PromptLogprobs>,
}

/// What is known of one sample that is streamed.
struct Streamed {
    texts: TokenTexts,
    /// Characters of the tokens so far.
    offset: usize,
}

/// Turns the events of one request into its answer, or into the events of its stream.
pub(super) struct CompletionWriter {
    id: String,
    options: Options,
    prompts: Vec<Prompt>,
    samples: usize,
    facts: Vec<PromptFacts>,
    kept: Kept,
    /// The samples of a stream that have begun.
    streamed: Vec<Option<Streamed>>,
    chunks: Chunks,
}

impl CompletionWriter {
    fn index(&self, (prompt, sample): (u32, u32)) -> usize {
        prompt as usize * self.samples + sample as usize
    }

    /// Counts what turning the log-probabilities of `tokens` sampled ones of `prompt` into text takes, with those of an
    /// echo. Returns it, to be given back.
    fn hold_logprobs(&mut self, prompt: usize, tokens: usize, with_echo: bool) -> Result<u64> {
        let Some(top) = self.options.logprobs else { return Ok(0) };
        let echoed = self.facts[prompt].echo.as_ref().filter(|_| with_echo).map_or(0, Vec::len);
        self.kept.hold((tokens + echoed) * (LOGPROB + ALTERNATIVE * top as usize))
    }

    /// The text that a sample of `prompt` begins with.
    fn echo(&self, prompt: usize) -> String {
        if !self.options.is_echo {
            return String::new();
        }
        let given = self.options.prompt_texts.get(prompt).cloned().flatten();
        given.unwrap_or_else(|| self.options.report.text(&self.prompts[prompt].tokens))
    }

    /// Log-probabilities that begin with those of the prompt, if it is echoed.
    fn begun_logprobs(&self, prompt: usize, texts: &mut TokenTexts, offset: &mut usize) -> Logprobs {
        let mut logprobs = Logprobs::default();
        let facts = &self.facts[prompt];
        if let Some(echo) = &facts.echo {
            let mode = LogprobsMode::Raw;
            let top = self.options.logprobs.unwrap_or(0) as usize;
            logprobs.push_first(self.prompts[prompt].tokens[0], texts, offset);
            echo.iter().for_each(|token| logprobs.push(token, mode, top, texts, offset));
        }
        logprobs
    }

    /// Sends one event of a stream.
    fn send(&self, choice: ChunkChoice, out: &mut VecDeque<Bytes>) {
        self.chunks.send((&self.id, &self.options.report), choice, None, out);
    }
}

impl Samples for CompletionWriter {
    type Options = Options;

    fn report(options: &Options) -> &Report {
        &options.report
    }

    fn new(request: &ValidRequest, options: Options, traffic: &Traffic) -> Self {
        let samples = samples_per_prompt(request);
        let count = request.prompts.len() * samples;
        let (kept, streamed) = if options.report.is_stream { (0, count) } else { (count, 0) };
        let echoes: usize = options.prompt_texts.iter().flatten().map(|text| text.len() + size_of::<String>()).sum();
        let prompt_tokens = request.prompts.iter().map(|prompt| prompt.tokens.len() as u64).sum();
        Self {
            id: format!("cmpl-{}", request.request_id),
            options,
            prompts: request.prompts.clone(),
            samples,
            facts: request.prompts.iter().map(|_| PromptFacts::default()).collect(),
            kept: Kept::new(kept, echoes + count * SAMPLE, traffic),
            streamed: (0..streamed).map(|_| None).collect(),
            chunks: Chunks::new("text_completion", prompt_tokens),
        }
    }

    fn prompt_logprobs(&mut self, prompt: usize, logprobs: Vec<TokenLogprobs>) -> Result<()> {
        let facts = &mut self.facts[prompt];
        let kept = |token: &TokenLogprobs| {
            size_of::<TokenLogprobs>() + token.heap_bytes() + LOGPROB + ALTERNATIVE * token.top.len()
        };
        self.kept.hold(logprobs.iter().map(kept).sum())?;
        let report = &self.options.report;
        // vLLM reports them for an echo too, though they were not asked for.
        let echoed = self.options.logprobs.filter(|_| self.options.is_echo);
        let first = self.prompts[prompt].tokens[0];
        facts.reported = report
            .prompt_logprobs
            .or(echoed)
            .map(|top| PromptLogprobs::new(first, &logprobs, top as usize, report.token_texts()));
        facts.echo = echoed.map(|_| logprobs);
        Ok(())
    }

    fn token(&mut self, at: (u32, u32), token: &TokenLogprobs, text: String, out: &mut VecDeque<Bytes>) -> Result<()> {
        let (prompt, index) = (at.0 as usize, self.index(at));
        self.chunks.count_token();
        let is_first = self.streamed[index].is_none();
        let held = self.hold_logprobs(prompt, 1, is_first)?;
        let mut chunk = ChunkChoice { index, ..Default::default() };
        let mut streamed = self.streamed[index]
            .take()
            .unwrap_or_else(|| Streamed { texts: self.options.report.token_texts(), offset: 0 });
        if let Some(top) = self.options.logprobs {
            let Streamed { texts, offset } = &mut streamed;
            let mut logprobs = if is_first { self.begun_logprobs(prompt, texts, offset) } else { Logprobs::default() };
            if !self.options.drops_tokens {
                logprobs.push(token, self.options.report.mode, top as usize, texts, offset);
            }
            chunk.logprobs = Some(logprobs);
        }
        self.streamed[index] = Some(streamed);
        if is_first {
            chunk.text = self.echo(prompt);
        }
        if !self.options.drops_tokens {
            chunk.text.push_str(&text);
        }
        if self.options.report.returns_ids {
            chunk.prompt_token_ids = is_first.then(|| self.prompts[prompt].tokens.to_vec());
            chunk.token_ids = Some(if self.options.drops_tokens { Vec::new() } else { vec![token.token] });
        }
        self.send(chunk, out);
        self.kept.release(held);
        Ok(())
    }

    fn text(&mut self, at: (u32, u32), text: String, out: &mut VecDeque<Bytes>) {
        let token_ids = self.options.report.returns_ids.then(Vec::new);
        self.send(ChunkChoice { index: self.index(at), text, token_ids, ..Default::default() }, out);
    }

    fn end_sample(&mut self, completion: &Completion, out: &mut VecDeque<Bytes>) {
        let report = &self.options.report;
        let stop_reason = report.stop_reason(completion);
        let choice = ChunkChoice {
            index: self.index((completion.prompt_index, completion.sample_index)),
            text: report.ending(stop_reason.as_ref()).to_owned(),
            finish_reason: Some(finish_reason(completion.finish_reason)),
            stop_reason,
            token_ids: report.returns_ids.then(Vec::new),
            weight_versions: report.versions(completion),
            ..Default::default()
        };
        self.send(choice, out);
    }

    fn keep_sample(&mut self, completion: Completion) -> Result<()> {
        let prompt = completion.prompt_index as usize;
        let index = self.index((completion.prompt_index, completion.sample_index));
        let held = self.hold_logprobs(prompt, completion.tokens.len(), true)?;
        let report = &self.options.report;
        let tokens = if self.options.drops_tokens { &[][..] } else { &completion.tokens[..] };
        let logprobs = self.options.logprobs.map(|top| {
            let (mut texts, mut offset) = (report.token_texts(), 0);
            let mut logprobs = self.begun_logprobs(prompt, &mut texts, &mut offset);
            tokens.iter().for_each(|t| logprobs.push(t, report.mode, top as usize, &mut texts, &mut offset));
            logprobs
        });
        let stop_reason = report.stop_reason(&completion);
        let mut text = self.echo(prompt);
        if !self.options.drops_tokens {
            text.push_str(completion.text.as_deref().unwrap_or_default());
            text.push_str(report.ending(stop_reason.as_ref()));
        }
        let choice = Choice {
            index,
            text,
            logprobs,
            finish_reason: finish_reason(completion.finish_reason),
            stop_reason,
            token_ids: report.returns_ids.then(|| tokens.iter().map(|token| token.token).collect()),
            prompt_logprobs: self.facts[prompt].reported.as_ref(),
            prompt_token_ids: report.returns_ids.then_some(&self.prompts[prompt].tokens[..]),
            routed_experts: None,
            weight_versions: report.versions(&completion),
        };
        self.kept.keep(index, &choice, held)
    }

    fn end_stream(&mut self, summary: &Summary, out: &mut VecDeque<Bytes>) {
        self.chunks.end((&self.id, &self.options.report), summary, out);
    }

    fn answer(&mut self, summary: &Summary) -> Bytes {
        let report = &self.options.report;
        self.kept.finish(|choices| {
            json(&CompletionAnswer {
                id: &self.id,
                object: "text_completion",
                created: report.created,
                model: &report.model,
                choices,
                service_tier: None,
                system_fingerprint: &report.fingerprint,
                usage: Usage::of(summary),
                unused: Unused::default(),
            })
        })
    }
}

impl chunks::ChunkChoice for ChunkChoice {
    fn is_last(&self) -> bool {
        self.finish_reason.is_some()
    }
}
