//! Structured output: what a grammar lets a sample say next. The grammars themselves (regular expressions, JSON
//! schemas, Lark) are the work of the llguidance crate; this module bounds what they may take, and makes masks of them.
//!
//! A [`GrammarCompiler`] makes a [`Grammar`] of a client's text, away from the engine's thread. Each sample has its own
//! [`GrammarState`], which knows what may follow the sample's tokens: it is a function of the grammar and of those
//! tokens alone, so it stays as it is through a preemption, and is never stored anywhere else.
//!
//! Masks are computed on the engine's thread within each step's [`MaskBudget`], and the others on a thread of the
//! [`MaskQueue`]. Time decides where and when a mask is computed, and may end a request; it never changes a mask.
//!
//! A token is allowed if the sample's text can still become one that the grammar accepts, however its bytes are cut
//! into tokens. Where the text is complete, the tokens that end a sample are allowed as well.

mod cache;
mod compiler;
mod queue;
mod source;
mod state;
#[cfg(test)]
mod tests;
mod vocabulary;
mod watchdog;

pub use compiler::GrammarCompiler;
pub use queue::{MaskDone, MaskJob, MaskQueue};
pub use source::GrammarSource;
pub use state::{Grammar, GrammarError, GrammarState, MaskBudget};
