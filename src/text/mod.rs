//! Conversion between text and tokens: tokenizer, chat templates, incremental detokenization, stop strings, reasoning,
//! tool calls.

mod chat_template;
mod detokenizer;
mod gguf;
mod reasoning;
mod stop;
mod tokenizer;
mod tool_calls;

pub use chat_template::{ChatTemplate, Conversation};
pub use detokenizer::IncrementalDetokenizer;
pub use reasoning::{ReasoningFormat, ReasoningParser};
pub use stop::{StopMatcher, StopStrings};
pub use tokenizer::Tokenizer;
pub use tool_calls::{Piece, ToolCall, ToolFormat, ToolParser};
