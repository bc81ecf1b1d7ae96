//! Between text and tokens: the tokenizer, chat templates, incremental detokenization, stop strings.

mod chat_template;
mod detokenizer;
mod gguf;
mod stop;
mod tokenizer;

pub use chat_template::ChatTemplate;
pub use detokenizer::IncrementalDetokenizer;
pub use stop::{StopMatcher, StopStrings};
pub use tokenizer::Tokenizer;
