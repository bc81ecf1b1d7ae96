//! Compiles grammars away from the engine's thread, one at a time, within limits of time and work.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use llguidance::TokenParser;
use llguidance::api::{ParserLimits, TopLevelGrammar};

use super::cache::Cache;
use super::source::invalid;
use super::vocabulary::Vocabulary;
use super::{Grammar, GrammarSource};
use crate::error::{Error, Result};
use crate::text::Tokenizer;
use crate::types::TokenId;

/// Stack of the thread that compiles, in bytes: grammars are compiled by recursion over their parts. Only what is used
/// of it takes memory.
const STACK_BYTES: usize = 64 << 20;
/// Longest time for compiling one grammar. Large schemas of real interfaces take a tenth of a second.
const LONGEST: Duration = Duration::from_secs(10);
/// Most grammars that wait to be compiled. Each holds a thread of the pool that parses requests.
const MOST_WAITING: usize = 32;
/// Longest message of the compiler that is passed on, in bytes.
const MAX_MESSAGE_BYTES: usize = 500;

/// What a grammar may take. A mask that takes more than the two limits of a step ends its request.
fn limits() -> ParserLimits {
    ParserLimits {
        max_items_in_row: 2000,
        initial_lexer_fuel: 1_000_000,
        step_lexer_fuel: 200_000,
        step_max_items: 50_000,
        max_lexer_states: 50_000,
        max_grammar_size: 200_000,
        precompute_large_lexemes: true,
        verbose_errors: false,
    }
}

/// Compiles grammars for one tokenizer, and keeps those that were asked for lately.
pub struct GrammarCompiler(Arc<Shared>);

/// What the threads that compile share with those that wait for them.
struct Shared {
    tokenizer: Arc<Tokenizer>,
    vocabulary: OnceLock<std::result::Result<Vocabulary, String>>,
    cache: Mutex<Cache>,
    /// Held while a grammar is compiled.
    turn: Mutex<()>,
    waiting: AtomicUsize,
}

impl GrammarCompiler {
    /// Nothing is built before the first grammar.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self(Arc::new(Shared {
            tokenizer,
            vocabulary: OnceLock::new(),
            cache: Mutex::default(),
            turn: Mutex::default(),
            waiting: AtomicUsize::new(0),
        }))
    }

    /// The grammar of `source`, for a request whose samples end by the tokens `ends`, to a model with `logits` logits
    /// in a row, which is always the same. This may take seconds.
    ///
    /// # Errors
    /// `InvalidArgument` if the grammar is wrong or takes more than the limits; the field is left to the caller.
    /// `ResourceExhausted` if too many others are being compiled.
    pub fn compile(&self, source: &GrammarSource, logits: usize, ends: &[TokenId]) -> Result<Grammar> {
        let known = lock(&self.0.cache).get(source);
        let grammar = match known {
            Some(grammar) => grammar,
            None => {
                let grammar = Arc::new(self.compile_new(source, logits)?);
                lock(&self.0.cache).insert(source.clone(), grammar.clone());
                grammar
            }
        };
        Ok(grammar.for_request(ends))
    }

    /// Compiles on a thread of its own, which has stack enough, and can be left alone if it takes too long.
    fn compile_new(&self, source: &GrammarSource, logits: usize) -> Result<Grammar> {
        let top_level = source.grammar()?;
        let waiting = Waiting::enter(&self.0)?;
        let (sender, result) = mpsc::channel();
        let shared = self.0.clone();
        let work = move || {
            let _waiting = waiting;
            let _turn = lock(&shared.turn);
            // The one that waits may have given up meanwhile.
            if sender.send(None).is_ok() {
                let _ = sender.send(Some(shared.compile(top_level, logits)));
            }
        };
        let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        thread.spawn(work).map_err(|e| Error::Internal(format!("a thread for the grammar cannot start: {e}")))?;
        match result.recv_timeout(LONGEST) {
            Ok(None) => {}
            _ => return Err(Error::ResourceExhausted("other grammars are being compiled; try again later".into())),
        }
        match result.recv_timeout(LONGEST) {
            Ok(grammar) => grammar.expect("the second message is the grammar").map_err(|e| refusal(&e)),
            Err(RecvTimeoutError::Timeout) => {
                Err(invalid(format!("takes more than {} s to compile; simplify the grammar", LONGEST.as_secs())))
            }
            Err(RecvTimeoutError::Disconnected) => Err(Error::Internal("the thread of a grammar ended".into())),
        }
    }
}

impl Shared {
    fn compile(&self, grammar: TopLevelGrammar, logits: usize) -> std::result::Result<Grammar, String> {
        let vocabulary = self.vocabulary.get_or_init(|| Vocabulary::new(&self.tokenizer, logits, limits()));
        let vocabulary = vocabulary.as_ref().map_err(|e| format!("the tokenizer cannot be used: {e}"))?;
        let mut parser: TokenParser = vocabulary.factory.create_parser(grammar).map_err(|e| e.to_string())?;
        parser.start_without_prompt();
        Grammar::new(parser, vocabulary.len, vocabulary.watchdog.clone(), LONGEST)
    }
}

/// A grammar that waits for its turn or is being compiled.
struct Waiting(Arc<Shared>);

impl Waiting {
    fn enter(shared: &Arc<Shared>) -> Result<Self> {
        let waiting = Self(shared.clone());
        match shared.waiting.fetch_add(1, Ordering::SeqCst) {
            MOST_WAITING.. => Err(Error::ResourceExhausted(format!(
                "{MOST_WAITING} grammars wait to be compiled already; try again later"
            ))),
            _ => Ok(waiting),
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The compiler's message as the reason of a refusal: one line, and shortened.
fn refusal(message: &str) -> Error {
    let words: Vec<&str> = message.split_whitespace().filter(|word| *word != "<non-verbose/>").collect();
    let message = words.join(" ");
    let end = message.floor_char_boundary(MAX_MESSAGE_BYTES);
    let rest = if end < message.len() { " …" } else { "" };
    invalid(format!("cannot be compiled: {}{rest}", &message[..end]))
}

/// A panic under one of these locks leaves what they guard as it was.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
