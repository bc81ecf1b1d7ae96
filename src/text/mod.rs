//! Conversion between text and tokens: tokenizer, chat templates, incremental detokenization, stop strings, reasoning,
//! tool calls.

mod byte_level;
mod chat_template;
mod detokenizer;
mod gguf;
mod reasoning;
mod stop;
mod tiktoken;
mod tokenizer;
mod tokenizer_info;
mod tool_calls;

pub use chat_template::{
    ChatTemplate, Conversation, read_tokenizer_config, special_tokens_of_config, special_tokens_of_gguf,
};
pub use detokenizer::IncrementalDetokenizer;
pub use reasoning::{ReasoningFormat, ReasoningParser, ReasoningStart, ReasoningTokens};
pub use stop::{StopMatcher, StopStrings};
pub use tiktoken::TiktokenRanks;
pub use tokenizer::Tokenizer;
pub use tokenizer_info::tokenizer_info;
pub use tool_calls::{KnownTool, Piece, ToolCall, ToolParser};
