//! The message that a sample is: its reasoning, its content and its calls of tools, found in the text while it arrives.
//! Each protocol writes the parts in its own shape.

use std::sync::Arc;

use rand::distr::{Alphanumeric, SampleString as _};

use super::parser::MessageParser;
use super::tools::ToolCalling;
use crate::engine::ValidRequest;
use crate::observe::Metrics;
use crate::server::http::openai::answers::Report;
use crate::text::{Piece, ReasoningFormat, ReasoningParser, ReasoningStart, ReasoningTokens, ToolParser};
use crate::types::{TokenId, TokenLogprobs, ToolFormat};

/// Bytes that are kept for each sample until the answer is sent, besides the names of the tools.
const SAMPLE: usize = 512;
/// Most copies of a sample's text while it is searched for reasoning and calls.
pub(in crate::server::http) const COPIES: usize = 6;

/// The options of a chat's answer.
pub(in crate::server::http) struct ChatOptions {
    pub(in crate::server::http) report: Report,
    /// The role of the answer.
    pub(super) role: String,
    /// The text that the content begins with.
    pub(super) echo: String,
    pub(super) calling: ToolCalling,
    /// Whether calls have names of nine letters and digits: Mistral's templates take no others.
    pub(super) has_short_ids: bool,
    /// Whether a message has its first call alone.
    pub(super) has_one_call: bool,
    pub(super) reasoning: Option<ReasoningFormat>,
    /// The tokens that open and close the reasoning, if the model reasons and has them.
    pub(super) marks: Option<(TokenId, TokenId)>,
    /// Whether the message has the reasoning.
    pub(in crate::server::http) includes_reasoning: bool,
    /// The format of the reasoning that the grammar spares: it constrains only the text after the reasoning.
    pub(in crate::server::http) spared: Option<ReasoningFormat>,
    /// Whether a grammar constrains the text from its first token.
    pub(super) is_constrained: bool,
    /// Counts the calls.
    pub(super) metrics: Arc<Metrics>,
}

impl ChatOptions {
    /// Bytes that are kept for each sample until the answer is sent.
    pub(in crate::server::http) fn sample_bytes(&self) -> usize {
        SAMPLE + self.calling.heap_bytes()
    }

    /// Whether the request forces a call by its name: the text is then its arguments.
    pub(in crate::server::http) fn names_call(&self) -> bool {
        matches!(self.calling, ToolCalling::Named(_))
    }

    /// A name for a call.
    fn call_id(&self) -> String {
        if self.has_short_ids {
            return Alphanumeric.sample_string(&mut rand::rng(), 9);
        }
        format!("chatcmpl-tool-{:016x}", rand::random::<u64>())
    }

    /// Finds the reasoning and the calls in the text that follows `prompt`.
    fn parser(&self, prompt: &[TokenId]) -> (MessageParser, Option<ReasoningTokens>) {
        let (tools, call) = match &self.calling {
            ToolCalling::Never | ToolCalling::Named(_) => (None, None),
            ToolCalling::Required { tools } => (Some(ToolParser::new(ToolFormat::List, tools.clone())), None),
            ToolCalling::Auto { format, tools } => (Some(ToolParser::new(*format, tools.clone())), format.mark()),
        };
        let Some((format, tokenizer)) = self.reasoning.zip(self.report.tokenizer.as_deref()) else {
            return (MessageParser::new(None, tools), None);
        };
        // A text with a grammar has reasoning only if the grammar has it.
        let is_open = !self.is_constrained && format.start_after(prompt, tokenizer) == ReasoningStart::Open;
        // The grammar waits for the mark, whatever else the reasoning has.
        let call = call.filter(|_| format.ends_at_calls() && self.spared.is_none());
        let tokens = self.marks.map(|(open, close)| {
            let ends = std::iter::once(close).chain(call.and_then(|call| tokenizer.token_to_id(call)));
            ReasoningTokens::new(open, ends.collect(), is_open)
        });
        (MessageParser::new(Some(ReasoningParser::new(is_open, call)), tools), tokens)
    }
}

/// A part of a message, in the order of the text.
pub(in crate::server::http) enum MessagePart {
    Reasoning(String),
    Content(String),
    /// The beginning of a call.
    Call {
        id: String,
        name: String,
    },
    /// The next piece of the arguments of the call that began last.
    Arguments(String),
}

/// A whole message.
#[derive(Default)]
pub(in crate::server::http) struct WholeMessage {
    pub(in crate::server::http) reasoning: Option<String>,
    pub(in crate::server::http) content: Option<String>,
    pub(in crate::server::http) calls: Vec<WholeCall>,
}

/// A call of a tool with all its arguments.
pub(in crate::server::http) struct WholeCall {
    pub(in crate::server::http) id: String,
    pub(in crate::server::http) name: String,
    /// JSON: the model's own, or what its texts stand for.
    pub(in crate::server::http) arguments: String,
}

/// Finds the parts of one sample's message, and counts the tokens of its reasoning.
#[derive(Clone)]
pub(in crate::server::http) struct MessageReader {
    parser: MessageParser,
    /// None if the model does not reason, or its marks are not tokens.
    reasoning: Option<ReasoningTokens>,
    /// Number of calls that have begun.
    calls: usize,
}

impl MessageReader {
    /// The reader of a sample of `request` before its text.
    pub(in crate::server::http) fn new(options: &ChatOptions, request: &ValidRequest) -> Self {
        let prompt = request.prompts.first().map_or(&[][..], |prompt| &prompt.tokens);
        let (parser, reasoning) = options.parser(prompt);
        Self { parser, reasoning, calls: 0 }
    }

    /// How many of the sample's next tokens are reasoning, if that is known.
    pub(in crate::server::http) fn reasoning_tokens(&mut self, tokens: &[TokenLogprobs]) -> Option<u64> {
        let reasoning = self.reasoning.as_mut()?;
        Some(tokens.iter().filter(|token| reasoning.takes(token.token)).count() as u64)
    }

    /// Number of calls that have begun.
    pub(in crate::server::http) fn calls(&self) -> usize {
        self.calls
    }

    /// The parts that `text` completes. It is the sample's last text if `is_last`.
    pub(in crate::server::http) fn read(
        &mut self,
        options: &ChatOptions,
        text: &str,
        is_last: bool,
    ) -> Vec<MessagePart> {
        let (mut pieces, mut parts) = (Vec::new(), Vec::new());
        self.parser.push(text.to_owned(), &mut pieces);
        if is_last && let Some((format, calls)) = std::mem::take(&mut self.parser).finish(&mut pieces) {
            options.metrics.tool_calls.count(format, calls);
        }
        for piece in pieces {
            match (piece, &options.calling) {
                (Piece::Reasoning(text), _) => parts.push(MessagePart::Reasoning(text)),
                (Piece::Call(_), _) if options.has_one_call && self.calls > 0 => {}
                (Piece::Call(call), _) => {
                    self.calls += 1;
                    parts.push(MessagePart::Call { id: options.call_id(), name: call.name });
                    parts.push(MessagePart::Arguments(call.arguments));
                }
                (Piece::Content(text), ToolCalling::Named(name)) => {
                    if self.calls == 0 {
                        self.calls = 1;
                        parts.push(MessagePart::Call { id: options.call_id(), name: name.clone() });
                    }
                    if !text.is_empty() {
                        parts.push(MessagePart::Arguments(text));
                    }
                }
                (Piece::Content(text), _) => parts.push(MessagePart::Content(text)),
            }
        }
        parts
    }

    /// The message of a whole text.
    pub(in crate::server::http) fn read_whole(mut self, options: &ChatOptions, text: &str) -> WholeMessage {
        let mut message = WholeMessage::default();
        for part in self.read(options, text, true) {
            match part {
                MessagePart::Reasoning(text) => message.reasoning.get_or_insert_default().push_str(&text),
                MessagePart::Content(text) => message.content.get_or_insert_default().push_str(&text),
                MessagePart::Call { id, name } => {
                    message.calls.push(WholeCall { id, name, arguments: String::new() });
                }
                MessagePart::Arguments(text) => {
                    message.calls.last_mut().expect("arguments follow a call").arguments.push_str(&text);
                }
            }
        }
        message
    }
}
