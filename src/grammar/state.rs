//! A compiled grammar, and a sample's position in it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use llguidance::TokenParser;
use llguidance::api::StopReason;
use rustix::time::{ClockId, clock_gettime};

use super::reasoning::SparedReasoning;
use super::watchdog::Watchdog;
use crate::error::panic_message;
use crate::types::{SamplingParams, TokenId, TokenMask};

/// Processor time that each token gets for free. Masks of real schemas take some tens of microseconds, and the first
/// masks of a large schema a few milliseconds.
const TIME_PER_TOKEN: Duration = Duration::from_millis(5);
/// Most processor time that all tokens of a request's samples may take together beyond [`TIME_PER_TOKEN`] each.
/// llguidance counts the items of its tables, but not the comparisons between them, whose number grows with the third
/// power in an ambiguous grammar. So only time bounds those.
const MOST_EXCESS: Duration = Duration::from_secs(2);
/// Longest time for one token's mask. Masks within the counted limits take less than a second.
const LONGEST_MASK: Duration = Duration::from_secs(10);
/// Time that the masks of one step may take on the engine's thread: those of 256 samples with real schemas.
const STEP_TIME: Duration = Duration::from_millis(20);

/// The reason why a grammar has no next mask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarError {
    /// It exceeds a counted limit, and so does every attempt at this place.
    TooMuchWork(String),
    /// It exceeds a limit of time.
    TooMuchTime(String),
}

/// The rest of the time that masks may take on the engine's thread in one step. It decides where and when a mask is
/// computed, never its content.
#[derive(Clone, Debug)]
pub struct MaskBudget(Duration);

impl MaskBudget {
    pub fn of(time: Duration) -> Self {
        Self(time)
    }
}

impl Default for MaskBudget {
    fn default() -> Self {
        Self::of(STEP_TIME)
    }
}

/// A compiled grammar, ready for the samples of one request.
#[derive(Clone)]
pub struct Grammar(GrammarState);

/// The tokens that may follow a sample's tokens.
#[derive(Clone)]
pub struct GrammarState {
    parser: TokenParser,
    /// Number of tokens of the vocabulary; the next id stands for the end of the text.
    vocabulary: usize,
    watchdog: Watchdog,
    /// The tokens that end a sample; they are allowed where its text is complete.
    ends: Arc<[TokenId]>,
    /// The tokens that the parser allows next.
    mask: TokenMask,
    is_complete: bool,
    /// The parser before the first token.
    start: Arc<TokenParser>,
    /// The reasoning that the sample may have before the grammar's text, and the same before the first token.
    reasoning: SparedReasoning,
    first_reasoning: SparedReasoning,
    /// Whether `parser` was cancelled in the middle of a token, so that a new one must parse the sample's tokens again.
    is_lost: bool,
    /// Processor time of the last mask.
    took: Duration,
    /// Microseconds that the request's samples have taken beyond [`TIME_PER_TOKEN`].
    excess: Arc<AtomicU64>,
    /// Bytes that the request's samples share, as last counted.
    counted: Arc<AtomicUsize>,
}

impl Grammar {
    /// Approximate size in bytes of a sample's state before its first token.
    pub const SAMPLE_BYTES: usize = 16 << 10;

    /// The grammar of a parser that has taken no token.
    ///
    /// # Errors
    /// The reason why no mask can be computed.
    pub(super) fn new(mut parser: TokenParser, vocabulary: usize, watchdog: Watchdog) -> Result<Self, String> {
        parser.enable_cancellation();
        let mut state = GrammarState {
            start: Arc::new(parser.clone()),
            parser,
            vocabulary,
            watchdog,
            ends: Arc::default(),
            mask: TokenMask::from_words([]),
            is_complete: false,
            reasoning: SparedReasoning::Over,
            first_reasoning: SparedReasoning::Over,
            is_lost: false,
            took: Duration::ZERO,
            excess: Arc::default(),
            counted: Arc::default(),
        };
        match state.within(LONGEST_MASK, GrammarState::compute_mask)? {
            true => Ok(Self(state)),
            false => Err("its first mask takes too long; simplify the grammar".into()),
        }
    }

    /// The grammar for the samples of one request; the tokens `ends` end a sample. The samples share their automaton
    /// with no other request, so that other requests cannot push this one over a limit.
    pub(super) fn for_request(&self, ends: &[TokenId]) -> Self {
        let ends = ends.iter().copied().filter(|end| (*end as usize) < self.0.vocabulary).collect();
        let counted = Arc::new(AtomicUsize::new(self.0.shared_bytes()));
        let parser = self.0.parser.deep_clone();
        let start = Arc::new(parser.clone());
        let mut state = GrammarState { parser, start, ends, counted, excess: Arc::default(), ..self.0.clone() };
        state.allow_ends();
        Self(state)
    }

    /// The grammar of the text that follows the model's reasoning, in which any token may come. The token `open` opens
    /// the reasoning and `close` closes it; `is_open`: the prompt has opened it. A grammar that allows `open` as the
    /// first token describes the reasoning itself, unless the prompt has opened it.
    pub fn after_reasoning(&self, open: TokenId, close: TokenId, is_open: bool) -> Self {
        let mut state = self.0.clone();
        if is_open {
            state.reasoning = SparedReasoning::Open { close };
        } else if !state.mask.contains(open) {
            state.reasoning = SparedReasoning::Possible { open, close, mask: state.mask.with(&[open]) };
        }
        state.first_reasoning = state.reasoning.clone();
        Self(state)
    }

    /// The state of a sample that has no tokens.
    pub fn start(&self) -> GrammarState {
        self.0.clone()
    }

    /// Whether a sample with `params` can have a first token.
    pub fn can_start(&self, params: &SamplingParams) -> bool {
        self.0.goes_on(params, &[])
    }

    /// Bytes that all samples of the request share.
    pub fn bytes(&self) -> usize {
        self.0.shared_bytes()
    }
}

impl GrammarState {
    /// Approximate number of bytes by which a sample's own state grows per token. A token has about four bytes of text;
    /// each byte takes a place in the automaton and, between the words of a grammar, a row of the parser's table.
    pub const BYTES_PER_TOKEN: usize = 512;

    /// The tokens that may come next; `None` for any.
    pub fn mask(&self) -> Option<&TokenMask> {
        match &self.reasoning {
            SparedReasoning::Possible { mask, .. } => Some(mask),
            SparedReasoning::Open { .. } => None,
            SparedReasoning::Over => Some(&self.mask),
        }
    }

    /// Whether `token` may come next.
    pub fn allows(&self, token: TokenId) -> bool {
        self.mask().is_none_or(|mask| mask.contains(token))
    }

    /// Whether a sample with `params` and the tokens `outputs` can have another token.
    pub fn goes_on(&self, params: &SamplingParams, outputs: &[TokenId]) -> bool {
        let bad = params.bad_after(outputs, &[]);
        let may_come = |token| params.may_sample(token, outputs.len()) && !bad.contains(&token);
        self.mask().is_none_or(|mask| mask.tokens().any(may_come))
    }

    /// Adds `token`, which the mask allows and which does not end the sample, if the next mask can be computed within
    /// `budget`. Returns by how many bytes the grammar grew, of which at most [`GrammarState::BYTES_PER_TOKEN`] are the
    /// sample's own. After `None` the caller must use [`GrammarState::advance`].
    ///
    /// # Errors
    /// The reason why the grammar has no next mask.
    pub fn advance_within(&mut self, token: TokenId, budget: &mut MaskBudget) -> Result<Option<usize>, GrammarError> {
        if !self.is_lost && self.reasoning.takes(token) {
            return Ok(Some(0));
        }
        // After a slow mask, the next one is slow too.
        if self.is_lost || self.took > TIME_PER_TOKEN || budget.0.is_zero() {
            return Ok(None);
        }
        let started = Instant::now();
        let advanced = self.take(token, budget.0);
        budget.0 = budget.0.saturating_sub(started.elapsed());
        match advanced? {
            true => Ok(Some(self.grown())),
            false => {
                self.lose();
                Ok(None)
            }
        }
    }

    /// Marks the parser as unusable. [`GrammarState::advance`] feeds the tokens to a new one.
    pub(super) fn lose(&mut self) {
        self.parser = (*self.start).clone();
        self.reasoning = self.first_reasoning.clone();
        self.is_lost = true;
    }

    /// Adds the last of the sample's tokens `outputs`, even if the next mask is slow, within the request's limits.
    /// Returns the same number as [`GrammarState::advance_within`].
    ///
    /// # Errors
    /// The reason why the grammar has no next mask.
    pub fn advance(&mut self, outputs: &[TokenId]) -> Result<usize, GrammarError> {
        let (token, before) = outputs.split_last().expect("a sample that advances has a token");
        let too_long = || GrammarError::TooMuchTime(format!("takes more than {} s", LONGEST_MASK.as_secs()));
        if std::mem::take(&mut self.is_lost) {
            for token in before {
                self.take(*token, LONGEST_MASK)?.then_some(()).ok_or_else(too_long)?;
            }
        }
        self.take(*token, LONGEST_MASK)?.then_some(()).ok_or_else(too_long)?;
        let excess = self.took.saturating_sub(TIME_PER_TOKEN).as_micros() as u64;
        if self.excess.fetch_add(excess, Ordering::Relaxed) + excess > MOST_EXCESS.as_micros() as u64 {
            return Err(GrammarError::TooMuchTime(format!(
                "its samples have taken {} s of processor time beyond {} ms for each token",
                MOST_EXCESS.as_secs(),
                TIME_PER_TOKEN.as_millis()
            )));
        }
        Ok(self.grown())
    }

    /// The masks after each of `drafts`, up to the first draft that the grammar forbids, that would end the sample, or
    /// whose mask exceeds `budget`.
    pub fn masks_after(&self, drafts: &[TokenId], budget: &mut MaskBudget) -> Vec<Option<TokenMask>> {
        let mut ahead = self.clone();
        let mut masks = Vec::new();
        for &draft in drafts {
            let is_tried = ahead.allows(draft) && !ahead.ends.contains(&draft);
            if !is_tried || !matches!(ahead.advance_within(draft, budget), Ok(Some(_))) {
                break;
            }
            masks.push(ahead.mask().cloned());
        }
        masks
    }

    /// Bytes that all samples of a request share: the automaton of the grammar's words, which grows with use.
    pub fn shared_bytes(&self) -> usize {
        self.parser.parser.lexer_stats().num_bytes
    }

    /// Feeds `token` to the parser, unless it belongs to the reasoning, and computes the next mask. If that takes
    /// longer than `most`, returns false and leaves the parser unusable.
    fn take(&mut self, token: TokenId, most: Duration) -> Result<bool, GrammarError> {
        if self.reasoning.takes(token) {
            return Ok(true);
        }
        let taken = self.within(most, |state| {
            let before = state.parser.num_tokens();
            state.parser.consume_token(token).map_err(|e| e.to_string())?;
            if state.parser.num_tokens() != before + 1 {
                return Err("takes back text that was sampled (`stop`), which is not supported; use `suffix`".into());
            }
            state.compute_mask()
        });
        taken.map_err(GrammarError::TooMuchWork)
    }

    /// Number of bytes that the sample's last token added.
    fn grown(&self) -> usize {
        let shared = self.shared_bytes();
        Self::BYTES_PER_TOKEN + shared.saturating_sub(self.counted.fetch_max(shared, Ordering::Relaxed))
    }

    fn compute_mask(&mut self) -> Result<(), String> {
        let len = self.vocabulary;
        let num_words = len.div_ceil(32);
        let mut words = vec![0; num_words];
        self.is_complete = false;
        match self.parser.compute_mask() {
            Ok(allowed) => {
                words.copy_from_slice(&allowed.as_slice()[..num_words]);
                // The bit after the vocabulary stands for the end; the bits after that have no meaning.
                if !len.is_multiple_of(32) {
                    words[len / 32] &= (1 << (len % 32)) - 1;
                }
                self.is_complete = allowed.is_allowed(len as TokenId);
            }
            // No token may follow, and the text is not complete.
            Err(_) if self.parser.stop_reason() == StopReason::NoExtensionBias => {}
            Err(error) => return Err(error.to_string()),
        }
        self.mask = TokenMask::from_words(words);
        self.allow_ends();
        Ok(())
    }

    /// Adds the tokens that end the sample to the mask if the text is complete.
    fn allow_ends(&mut self) {
        if self.is_complete && !self.ends.is_empty() {
            self.mask = self.mask.with(&self.ends);
        }
    }

    /// Calls `work`. Returns false if it was cancelled because it took longer than `most`. A panic in it becomes an
    /// error.
    fn within(&mut self, most: Duration, work: impl FnOnce(&mut Self) -> Result<(), String>) -> Result<bool, String> {
        let handle = self.parser.cancellation_handle().expect("a parser can be cancelled");
        let (watchdog, started) = (self.watchdog.clone(), processor_time());
        let most = most.min(LONGEST_MASK);
        let done = watchdog.limit(most, handle.clone(), || catch_unwind(AssertUnwindSafe(|| work(self))));
        self.took = processor_time().saturating_sub(started);
        match done {
            _ if handle.is_cancelled() => Ok(false),
            Ok(done) => done.map(|()| true),
            Err(panic) => Err(panic_message(&*panic)),
        }
    }
}

/// Processor time of this thread. Unlike wall time, it hardly depends on the machine's other load.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Grammar({:?})", self.0.mask)
    }
}

impl fmt::Debug for GrammarState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GrammarState({} tokens, {:?})", self.parser.num_tokens(), self.mask)
    }
}
