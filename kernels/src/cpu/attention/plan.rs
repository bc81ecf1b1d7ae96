//! The plan of one attention call: its tasks, and the tasks that are split by spans.

/// The queries of one KV head that one thread computes together: some queries of one sequence, or all queries of
/// several sequences that share KV blocks. Up to [`MOST_TILES`](super::units::MOST_TILES) register tiles take each unit
/// of keys and values one after the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionTask {
    /// The task's number of products, to compare it with other tasks of the call.
    pub(super) cost: u64,
    pub kv_head: u32,
    pub first_sequence: u32,
    pub sequences: u32,
    /// The first query of the task, counted from the first query of `first_sequence`.
    pub first_query: u32,
    pub queries: u32,
    /// How many leading units lie in the same KV blocks for all the sequences and are wholly below the end of what each
    /// sees.
    pub shared_units: u32,
    /// The one span that this task computes if it is part of a split task; otherwise it computes all spans and the
    /// output.
    pub only: Option<SplitSpan>,
}

/// One span of a split task, and where the task puts its partial results.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitSpan {
    pub span: u32,
    pub first_partial: u32,
}

/// A task of which every span is a task of its own. The partial results are ordered by span, then by query.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitTask {
    pub whole: AttentionTask,
    pub spans: u32,
    pub first_partial: u32,
}

/// All work of one attention call: first every task, then the folding of every split task.
#[derive(Default)]
pub(crate) struct AttentionPlan {
    /// All tasks of the call, costliest first.
    pub tasks: Vec<AttentionTask>,
    pub splits: Vec<SplitTask>,
    /// How many partial results all split tasks have together.
    pub partials: usize,
}
