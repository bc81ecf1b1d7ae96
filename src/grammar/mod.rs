//! Structured output: grammars that limit the next tokens of a sample. The llguidance crate implements the grammars
//! themselves (regular expressions, JSON schemas, Lark); this module bounds their time and memory, and turns them into
//! masks.
//!
//! A [`GrammarCompiler`] compiles a client's text to a [`Grammar`], outside the engine's thread. Each sample has its
//! own [`GrammarState`], which knows the tokens that may follow. It depends only on the grammar and on the sample's
//! tokens, so it stays valid through a preemption, and is never stored anywhere else.
//!
//! The engine's thread computes masks within each step's [`MaskBudget`], and a thread of the [`MaskQueue`] computes the
//! rest. Time decides where and when a mask is computed, and may end a request; it never changes a mask.
//!
//! A mask allows a token if the sample's text can still become one that the grammar accepts, however its bytes are cut
//! into tokens. Where the text is complete, the mask also allows the tokens that end a sample.
//!
//! A chat's grammar can leave out the model's reasoning: any token may follow until the token that closes it, and the
//! text begins after that ([`Grammar::after_reasoning`]).

mod cache;
mod compiler;
mod queue;
mod reasoning;
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
