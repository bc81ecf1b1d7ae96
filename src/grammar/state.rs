//! A compiled grammar, and where a sample is in it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use llguidance::TokenParser;
use llguidance::api::StopReason;

use super::watchdog::Watchdog;
use crate::error::panic_message;
use crate::types::{SamplingParams, TokenId, TokenMask};

/// Time for each token that work on the grammar may take, on average over a sample's tokens. Masks of real schemas take
/// some tens of microseconds.
const TIME_PER_TOKEN: Duration = Duration::from_millis(5);
/// Time that may be saved up for one token, and that a sample begins with. The first masks of a large grammar take
/// longest.
const MOST_TIME: Duration = Duration::from_millis(500);

/// A compiled grammar, ready for the samples of one request.
#[derive(Clone)]
pub struct Grammar(GrammarState);

/// What may follow the tokens that a sample has.
#[derive(Clone)]
pub struct GrammarState {
    parser: TokenParser,
    /// Number of tokens of the vocabulary; the next id stands for the end of the text.
    vocabulary: usize,
    watchdog: Watchdog,
    /// The tokens that end a sample, and are allowed where its text is complete.
    ends: Arc<[TokenId]>,
    mask: TokenMask,
    is_complete: bool,
    /// Time that the next token may take.
    time: Duration,
    /// The bytes of what the request's samples share, as they were counted last.
    counted: Arc<AtomicUsize>,
}

impl Grammar {
    /// About the bytes of a sample's state before its first token.
    pub const SAMPLE_BYTES: usize = 16 << 10;

    /// The grammar of a parser that has taken no token. Its first mask may take `most`.
    ///
    /// # Errors
    /// Why no mask can be computed.
    pub(super) fn new(
        mut parser: TokenParser,
        vocabulary: usize,
        watchdog: Watchdog,
        most: Duration,
    ) -> Result<Self, String> {
        parser.enable_cancellation();
        let (ends, mask, time) = (Arc::default(), TokenMask::from_words([]), most);
        let mut state = GrammarState {
            parser,
            vocabulary,
            watchdog,
            ends,
            mask,
            is_complete: false,
            time,
            counted: Arc::default(),
        };
        state.within_limits(GrammarState::compute_mask)?;
        Ok(Self(state))
    }

    /// The grammar for the samples of one request, which end by `ends`. What they learn of it is theirs alone, so that
    /// no limit is reached by what others do.
    pub(super) fn for_request(&self, ends: &[TokenId]) -> Self {
        let ends = ends.iter().copied().filter(|end| (*end as usize) < self.0.vocabulary).collect();
        let counted = Arc::new(AtomicUsize::new(self.0.shared_bytes()));
        let (parser, time) = (self.0.parser.deep_clone(), MOST_TIME);
        let mut state = GrammarState { parser, ends, counted, time, ..self.0.clone() };
        state.allow_ends();
        Self(state)
    }

    /// The state of a sample without tokens.
    pub fn start(&self) -> GrammarState {
        self.0.clone()
    }

    /// Whether a sample with `params` can have a first token.
    pub fn can_start(&self, params: &SamplingParams) -> bool {
        self.0.goes_on(params, 0)
    }

    /// Bytes that are shared by all samples of the request.
    pub fn bytes(&self) -> usize {
        self.0.shared_bytes()
    }
}

impl GrammarState {
    /// About the bytes that a sample's own state grows by with each token: a token has some four bytes of text, and a
    /// byte a place in the automaton and, between the words of a grammar, a row of what may follow.
    pub const BYTES_PER_TOKEN: usize = 512;

    /// The tokens that may come next.
    pub fn mask(&self) -> &TokenMask {
        &self.mask
    }

    /// Whether a token is left that a sample with `params` and `num_outputs` tokens may be given.
    pub fn goes_on(&self, params: &SamplingParams, num_outputs: usize) -> bool {
        self.mask.tokens().any(|token| params.may_sample(token, num_outputs))
    }

    /// Notes that the sample has been given `token`, which the mask allows and which does not end it. Returns the bytes
    /// that the grammar takes more than before, of which [`GrammarState::BYTES_PER_TOKEN`] are the sample's own.
    ///
    /// # Errors
    /// Why the grammar cannot go on: it takes more work at this place than a step may have.
    pub fn advance(&mut self, token: TokenId) -> Result<usize, String> {
        self.time = MOST_TIME.min(self.time + TIME_PER_TOKEN);
        self.within_limits(|state| {
            let before = state.parser.num_tokens();
            state.parser.consume_token(token).map_err(|e| e.to_string())?;
            if state.parser.num_tokens() != before + 1 {
                return Err("takes back text that was sampled (`stop`), which is not supported; use `suffix`".into());
            }
            state.compute_mask()
        })?;
        let shared = self.shared_bytes();
        Ok(Self::BYTES_PER_TOKEN + shared.saturating_sub(self.counted.fetch_max(shared, Ordering::Relaxed)))
    }

    /// The masks after each of `drafts`, up to the first one that the grammar forbids or that would end the sample.
    pub fn masks_after(&self, drafts: &[TokenId]) -> Vec<TokenMask> {
        let mut ahead = self.clone();
        let mut masks = Vec::new();
        for &draft in drafts {
            let is_tried = ahead.mask.contains(draft) && !ahead.ends.contains(&draft);
            if !is_tried || ahead.advance(draft).is_err() {
                break;
            }
            masks.push(ahead.mask.clone());
        }
        masks
    }

    /// Bytes that all samples of a request share: the automaton of the grammar's words, which grows as it is used.
    pub fn shared_bytes(&self) -> usize {
        self.parser.parser.lexer_stats().num_bytes
    }

    fn compute_mask(&mut self) -> Result<(), String> {
        let len = self.vocabulary;
        let num_words = len.div_ceil(32);
        let mut words = vec![0; num_words];
        self.is_complete = false;
        match self.parser.compute_mask() {
            Ok(allowed) => {
                words.copy_from_slice(&allowed.as_slice()[..num_words]);
                // The bit after the vocabulary stands for the end, and what is beyond it for nothing.
                if !len.is_multiple_of(32) {
                    words[len / 32] &= (1 << (len % 32)) - 1;
                }
                self.is_complete = allowed.is_allowed(len as TokenId);
            }
            // No token fits, and the text is not complete.
            Err(_) if self.parser.stop_reason() == StopReason::NoExtensionBias => {}
            Err(error) => return Err(error.to_string()),
        }
        self.mask = TokenMask::from_words(words);
        self.allow_ends();
        Ok(())
    }

    /// Adds the tokens that end the sample to the mask, if the text is complete.
    fn allow_ends(&mut self) {
        if self.is_complete && !self.ends.is_empty() {
            let mut words = self.mask.words().to_vec();
            self.ends.iter().for_each(|end| words[*end as usize / 32] |= 1 << (end % 32));
            self.mask = TokenMask::from_words(words);
        }
    }

    /// Calls `work`, for no longer than the sample has time. A panic in it is an error.
    fn within_limits(&mut self, work: impl FnOnce(&mut Self) -> Result<(), String>) -> Result<(), String> {
        let handle = self.parser.cancellation_handle().expect("a parser can be cancelled");
        let (watchdog, most, started) = (self.watchdog.clone(), self.time, Instant::now());
        let done = watchdog.limit(most, handle.clone(), || catch_unwind(AssertUnwindSafe(|| work(self))));
        self.time = most.saturating_sub(started.elapsed());
        match done {
            _ if handle.is_cancelled() => Err("takes too long to say which tokens may follow; simplify it".into()),
            Ok(done) => done,
            Err(panic) => Err(panic_message(&*panic)),
        }
    }
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
