//! Formats of tool calls, and counts of calls by what has become of them.

use std::ops::AddAssign;

/// A format in which a family of models writes calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ToolFormat {
    /// `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, anywhere and several times: Qwen 2.5 and 3, Hermes.
    Hermes,
    /// `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, anywhere and several times:
    /// Qwen3-Coder and Qwen 3.5. Values are texts, which become JSON by the types in the tool's schema.
    Qwen3Coder,
    /// `{"name": ..., "parameters": {...}}` as the whole answer, or several of them separated by `;`: Llama 3.
    Llama,
    /// `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or the list as the whole answer, because the mark is a
    /// special token, which the text omits: Mistral.
    Mistral,
    /// `[{"name": ..., "parameters": {...}}, ...]` as the whole answer, which a grammar enforces.
    List,
}

impl ToolFormat {
    /// All formats, in the order of their declaration.
    pub const ALL: [Self; 5] = [Self::Hermes, Self::Qwen3Coder, Self::Llama, Self::Mistral, Self::List];

    /// The format's name, vLLM's where it has a parser for it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hermes => "hermes",
            Self::Qwen3Coder => "qwen3_coder",
            Self::Llama => "llama3_json",
            Self::Mistral => "mistral",
            Self::List => "list",
        }
    }
}

/// Counts of tool calls by what has become of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ToolCallCounts {
    /// Calls of tools that the request offers.
    pub parsed: u64,
    /// Calls that name another tool.
    pub unknown_tool: u64,
    /// Marks without a call behind them: the JSON is invalid, or it has no name.
    pub invalid: u64,
    /// Calls that the text ends within.
    pub unclosed: u64,
}

impl ToolCallCounts {
    /// The counts by name. All but the first are malformed calls.
    pub fn named(self) -> [(&'static str, u64); 4] {
        let Self { parsed, unknown_tool, invalid, unclosed } = self;
        [("parsed", parsed), ("unknown_tool", unknown_tool), ("invalid", invalid), ("unclosed", unclosed)]
    }

    /// Number of malformed calls.
    pub fn malformed(self) -> u64 {
        self.unknown_tool + self.invalid + self.unclosed
    }
}

impl AddAssign for ToolCallCounts {
    fn add_assign(&mut self, other: Self) {
        self.parsed += other.parsed;
        self.unknown_tool += other.unknown_tool;
        self.invalid += other.invalid;
        self.unclosed += other.unclosed;
    }
}
