//! Tasks of a call.

/// Pairs of (row, head of a group) of one KV head: some of one sequence's, or all of several sequences', which share
/// blocks. Up to [`MOST_TILES`](super::units::MOST_TILES) register tiles take each unit of keys and values one after
/// the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task {
    /// What it computes, to be compared with other tasks of the call.
    pub(super) cost: u64,
    pub kv_head: u32,
    pub first_sequence: u32,
    pub sequences: u32,
    /// The first pair, counted from the first sequence's first one.
    pub first_pair: u32,
    pub pairs: u32,
    /// Units that lie in the same blocks for all the sequences, and whole below the end of what each sees.
    pub shared_units: u32,
    /// The one span that it takes and its first record, or all spans and the results.
    pub only: Option<Only>,
}

/// One span of a split task.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Only {
    pub span: u32,
    pub first_record: u32,
}

/// A task of which each span is a task of its own; records are by span, then by pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    pub whole: Task,
    pub spans: u32,
    pub first_record: u32,
}

/// What a call does, first all tasks and then all splits.
#[derive(Default)]
pub(crate) struct Plan {
    /// Costliest first.
    pub tasks: Vec<Task>,
    pub splits: Vec<Split>,
    /// Records of all splits.
    pub records: usize,
}
