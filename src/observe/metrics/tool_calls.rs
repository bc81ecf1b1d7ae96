//! Counts of tool calls by format and by what has become of them.

use super::Counter;
use crate::types::{ToolCallCounts, ToolFormat};

/// The counts of one format.
#[derive(Debug, Default)]
struct OfFormat {
    parsed: Counter,
    unknown_tool: Counter,
    invalid: Counter,
    unclosed: Counter,
}

/// Counts of tool calls in the samples whose text the server has searched for them.
#[derive(Debug, Default)]
pub struct ToolCallMetrics([OfFormat; ToolFormat::ALL.len()]);

impl ToolCallMetrics {
    /// Adds the calls of one sample.
    pub fn count(&self, format: ToolFormat, calls: ToolCallCounts) {
        let counters = &self.0[format as usize];
        counters.parsed.add(calls.parsed);
        counters.unknown_tool.add(calls.unknown_tool);
        counters.invalid.add(calls.invalid);
        counters.unclosed.add(calls.unclosed);
    }

    /// The calls of each format.
    pub fn snapshot(&self) -> impl Iterator<Item = (ToolFormat, ToolCallCounts)> {
        let counts = |of: &OfFormat| ToolCallCounts {
            parsed: of.parsed.get(),
            unknown_tool: of.unknown_tool.get(),
            invalid: of.invalid.get(),
            unclosed: of.unclosed.get(),
        };
        ToolFormat::ALL.into_iter().zip(self.0.iter().map(counts))
    }
}
