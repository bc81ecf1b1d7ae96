//! The message that a sample is: its content and its calls of tools, found in the text while it arrives. Each protocol
//! writes the parts in its own shape.

use rand::distr::{Alphanumeric, SampleString as _};

use super::tools::ToolCalling;
use crate::server::http::openai::answers::Report;
use crate::text::{Piece, ToolFormat, ToolParser};

/// Bytes that are kept for each sample until the answer is sent, besides the names of the tools.
const SAMPLE: usize = 512;
/// Most copies of a sample's text while it is searched for calls.
pub(in crate::server::http) const COPIES: usize = 4;

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
}

/// A part of a message, in the order of the text.
pub(in crate::server::http) enum MessagePart {
    Content(String),
    /// The beginning of a call.
    Call {
        id: String,
        name: String,
    },
    /// The next piece of the arguments of the call that began last.
    Arguments(String),
}

/// A call of a tool with all its arguments.
pub(in crate::server::http) struct WholeCall {
    pub(in crate::server::http) id: String,
    pub(in crate::server::http) name: String,
    /// JSON, as the model has written it.
    pub(in crate::server::http) arguments: String,
}

/// Finds the parts of one sample's message.
pub(in crate::server::http) struct MessageReader {
    parser: Option<ToolParser>,
    /// Number of calls that have begun.
    calls: usize,
}

impl MessageReader {
    pub(in crate::server::http) fn new(options: &ChatOptions) -> Self {
        let parser = match &options.calling {
            ToolCalling::Never | ToolCalling::Named(_) => None,
            ToolCalling::Required { names } => Some(ToolParser::new(ToolFormat::List, names.clone())),
            ToolCalling::Auto { format, names } => Some(ToolParser::new(*format, names.clone())),
        };
        Self { parser, calls: 0 }
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
        let mut parts = Vec::new();
        match (&mut self.parser, &options.calling) {
            (Some(parser), _) => {
                let mut pieces = Vec::new();
                parser.push(text, &mut pieces);
                if is_last && let Some(parser) = self.parser.take() {
                    parser.finish(&mut pieces);
                }
                for piece in pieces {
                    match piece {
                        Piece::Content(text) => parts.push(MessagePart::Content(text)),
                        Piece::Call(call) => {
                            self.calls += 1;
                            parts.push(MessagePart::Call { id: options.call_id(), name: call.name });
                            parts.push(MessagePart::Arguments(call.arguments));
                        }
                    }
                }
            }
            (None, ToolCalling::Named(name)) => {
                if self.calls == 0 {
                    self.calls = 1;
                    parts.push(MessagePart::Call { id: options.call_id(), name: name.clone() });
                }
                if !text.is_empty() {
                    parts.push(MessagePart::Arguments(text.to_owned()));
                }
            }
            (None, _) => parts.push(MessagePart::Content(text.to_owned())),
        }
        parts
    }

    /// The content of a whole text, and the calls in it.
    pub(in crate::server::http) fn read_whole(options: &ChatOptions, text: &str) -> (Option<String>, Vec<WholeCall>) {
        let (mut content, mut calls) = (None::<String>, Vec::<WholeCall>::new());
        for part in Self::new(options).read(options, text, true) {
            match part {
                MessagePart::Content(text) => content.get_or_insert_default().push_str(&text),
                MessagePart::Call { id, name } => calls.push(WholeCall { id, name, arguments: String::new() }),
                MessagePart::Arguments(text) => {
                    calls.last_mut().expect("arguments follow a call").arguments.push_str(&text);
                }
            }
        }
        (content, calls)
    }
}
