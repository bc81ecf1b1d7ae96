//! Compiles grammars outside the engine's thread, one at a time, within limits of time and work.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
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

/// Stack of the compiling thread, in bytes: the compiler recurses over the parts of a grammar. Only the used part takes
/// memory.
const STACK_BYTES: usize = 64 << 20;
/// Longest time for compiling one grammar. Large schemas of real interfaces take a tenth of a second.
const LONGEST: Duration = Duration::from_secs(10);
/// Most strays: compilations that exceeded [`LONGEST`] and keep running, each on a thread that cannot be stopped. While
/// there are this many, no new grammar is compiled.
const MOST_STRAYS: usize = 2;
/// Most grammars that wait to be compiled. Each blocks a thread of the pool that parses requests.
const MOST_WAITING: usize = 32;
/// Longest compiler message in an error, in bytes.
const MAX_MESSAGE_BYTES: usize = 500;

/// Limits on the work for a grammar. A mask that exceeds the limits of a step or a row ends its request.
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

/// Compiles grammars for one tokenizer, and caches those that were used recently.
pub struct GrammarCompiler(Arc<Shared>);

/// State that compiling threads share with the threads that wait for them.
struct Shared {
    tokenizer: Arc<Tokenizer>,
    vocabulary: OnceLock<std::result::Result<Vocabulary, String>>,
    /// The grammar of JSON objects, compiled ahead so that no request waits for it.
    json_object: OnceLock<Arc<Grammar>>,
    cache: Mutex<Cache>,
    turns: Mutex<Turns>,
    turn_ended: Condvar,
    waiting: AtomicUsize,
}

/// The turns of compilations: one compilation at a time has the turn.
#[derive(Default)]
struct Turns {
    /// Number of turns so far.
    given: u64,
    /// Number of the turn that a compilation has now.
    running: Option<u64>,
    /// Number of compilations that lost their turn and keep running.
    strays: usize,
}

impl GrammarCompiler {
    /// The vocabulary is built for the first grammar, not before.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        Self(Arc::new(Shared {
            tokenizer,
            vocabulary: OnceLock::new(),
            json_object: OnceLock::new(),
            cache: Mutex::default(),
            turns: Mutex::default(),
            turn_ended: Condvar::new(),
            waiting: AtomicUsize::new(0),
        }))
    }

    /// The grammar of `source` for a request whose samples end with the tokens `ends`. `logits` is the number of logits
    /// in a row of the model, the same in every call. This may take seconds.
    ///
    /// # Errors
    /// `InvalidArgument` if the grammar is wrong or exceeds a limit; the caller names the field. `ResourceExhausted` if
    /// too many others are being compiled.
    pub fn compile(&self, source: &GrammarSource, logits: usize, ends: &[TokenId]) -> Result<Grammar> {
        let known = match source {
            GrammarSource::JsonObject => self.0.json_object.get().cloned(),
            _ => lock(&self.0.cache).get(source),
        };
        let grammar = match known {
            Some(grammar) => grammar,
            None => self.keep(source, self.compile_new(source, logits)?),
        };
        Ok(grammar.for_request(ends))
    }

    /// Compiles the grammar of JSON objects ahead of any request. If the tokenizer cannot be used, each request reports
    /// it.
    pub fn prepare(&self, logits: usize) {
        if let Ok(grammar) = self.compile_new(&GrammarSource::JsonObject, logits) {
            self.keep(&GrammarSource::JsonObject, grammar);
        }
    }

    fn keep(&self, source: &GrammarSource, grammar: Grammar) -> Arc<Grammar> {
        let grammar = Arc::new(grammar);
        match source {
            GrammarSource::JsonObject => self.0.json_object.get_or_init(|| grammar).clone(),
            _ => {
                lock(&self.0.cache).insert(source.clone(), grammar.clone());
                grammar
            }
        }
    }

    /// Compiles on a separate thread, which has enough stack and can be abandoned if it takes too long.
    fn compile_new(&self, source: &GrammarSource, logits: usize) -> Result<Grammar> {
        let top_level = source.grammar()?;
        let shared = self.0.clone();
        self.on_a_thread(LONGEST, move || shared.compile(top_level, logits))
    }

    /// Waits for a turn and returns the result of `work`. Work that takes longer than `longest` loses its turn and
    /// keeps running as a stray.
    fn on_a_thread<T: Send + 'static>(
        &self,
        longest: Duration,
        work: impl FnOnce() -> std::result::Result<T, String> + Send + 'static,
    ) -> Result<T> {
        let _waiting = Waiting::enter(&self.0)?;
        let turn = Turn::wait(&self.0, longest)?;
        let number = turn.number;
        let (sender, result) = mpsc::channel();
        let work = move || {
            let _turn = turn;
            let _ = sender.send(work());
        };
        let thread = thread::Builder::new().name("grammar".into()).stack_size(STACK_BYTES);
        thread.spawn(work).map_err(|e| Error::Internal(format!("a thread for the grammar cannot start: {e}")))?;
        match result.recv_timeout(longest) {
            Ok(result) => result.map_err(|e| refusal(&e)),
            Err(RecvTimeoutError::Timeout) => {
                self.0.leave_alone(number);
                Err(Error::ResourceExhausted(format!(
                    "a grammar takes more than {} s to compile; simplify it",
                    longest.as_secs_f32()
                )))
            }
            Err(RecvTimeoutError::Disconnected) => Err(Error::Internal("the thread of a grammar ended".into())),
        }
    }
}

/// The turn of one compilation. It ends when the compilation ends or becomes a stray.
struct Turn {
    shared: Arc<Shared>,
    number: u64,
}

impl Turn {
    /// # Errors
    /// `ResourceExhausted` if the turn does not come within `longest`, or if there are too many strays.
    fn wait(shared: &Arc<Shared>, longest: Duration) -> Result<Self> {
        let turns = lock(&shared.turns);
        let waited = shared.turn_ended.wait_timeout_while(turns, longest, |turns| turns.running.is_some());
        let (mut turns, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if turns.running.is_some() {
            return Err(Error::ResourceExhausted("other grammars are being compiled; try again later".into()));
        }
        if turns.strays == MOST_STRAYS {
            return Err(Error::ResourceExhausted(format!(
                "{MOST_STRAYS} grammars that passed their time limit are still being compiled; try again later"
            )));
        }
        turns.given += 1;
        turns.running = Some(turns.given);
        Ok(Self { shared: shared.clone(), number: turns.given })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = lock(&self.shared.turns);
        match turns.running == Some(self.number) {
            true => turns.running = None,
            false => turns.strays -= 1,
        }
        self.shared.turn_ended.notify_one();
    }
}

impl Shared {
    /// Passes the turn `number` on to the next compilation, unless it has just ended.
    fn leave_alone(&self, number: u64) {
        let mut turns = lock(&self.turns);
        if turns.running == Some(number) {
            turns.running = None;
            turns.strays += 1;
            self.turn_ended.notify_one();
        }
    }

    fn compile(&self, grammar: TopLevelGrammar, logits: usize) -> std::result::Result<Grammar, String> {
        let vocabulary = self.vocabulary.get_or_init(|| Vocabulary::new(&self.tokenizer, logits, limits()));
        let vocabulary = vocabulary.as_ref().map_err(|e| format!("the tokenizer cannot be used: {e}"))?;
        let mut parser: TokenParser = vocabulary.factory.create_parser(grammar).map_err(|e| e.to_string())?;
        parser.start_without_prompt();
        Grammar::new(parser, vocabulary.len, vocabulary.watchdog.clone())
    }
}

/// Counts a grammar that waits for its turn or is being compiled.
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

/// The compiler's message as an error: on one line, and shortened.
fn refusal(message: &str) -> Error {
    let words: Vec<&str> = message.split_whitespace().filter(|word| *word != "<non-verbose/>").collect();
    let message = words.join(" ");
    let end = message.floor_char_boundary(MAX_MESSAGE_BYTES);
    let rest = if end < message.len() { " …" } else { "" };
    invalid(format!("cannot be compiled: {}{rest}", &message[..end]))
}

/// Locks `mutex`, even after a panic: no panic leaves the guarded state half changed.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn work_that_takes_too_long_gives_its_turn_back() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer/tokenizer.json");
        let compiler = GrammarCompiler::new(Arc::new(Tokenizer::from_file(file.as_ref()).unwrap()));
        let compile = |source| compiler.compile(&source, 512, &[2]).map(drop);
        let lark = |i: usize| GrammarSource::Lark(format!("start: \"{i}\""));
        compiler.prepare(512);
        let mut ends = Vec::new();
        for stray in 0..MOST_STRAYS {
            compile(lark(stray)).expect("there are fewer strays than the most");
            let (end, ended) = channel::<()>();
            ends.push(end);
            let done = compiler.on_a_thread(Duration::from_millis(20), move || {
                let _ = ended.recv();
                Ok(())
            });
            assert!(matches!(done, Err(Error::ResourceExhausted(_))), "{done:?}");
        }
        let refused = compile(lark(100));
        assert!(matches!(&refused, Err(Error::ResourceExhausted(why)) if why.contains("2 grammars")), "{refused:?}");
        compile(lark(0)).expect("it is compiled already");
        compile(GrammarSource::JsonObject).expect("it is compiled from the start");
        ends.pop();
        // The stray's thread ends by itself eventually.
        while matches!(compile(lark(101)), Err(Error::ResourceExhausted(_))) {
            thread::yield_now();
        }
        compile(lark(102)).unwrap();
    }
}
