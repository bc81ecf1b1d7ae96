//! The values that labels may have. Each set is closed, which bounds the number of time series.

use crate::types::FinishReason;

/// A closed set of label values.
pub(super) trait Label: Copy + 'static {
    const ALL: &'static [Self];

    fn name(self) -> &'static str;

    /// Index in [`Label::ALL`].
    fn index(self) -> usize;
}

macro_rules! label {
    ($(#[$doc:meta])* $vis:vis enum $set:ident { $($(#[$case_doc:meta])* $case:ident = $name:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $set { $($(#[$case_doc])* $case,)* }

        impl Label for $set {
            const ALL: &'static [Self] = &[$(Self::$case,)*];

            fn name(self) -> &'static str {
                match self { $(Self::$case => $name,)* }
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

label! {
    /// Kind of a step, by the work in it.
    pub enum StepKind {
        /// Prompts only.
        Prefill = "prefill",
        /// The next tokens of samples only.
        Decode = "decode",
        Mixed = "mixed",
    }
}

label! {
    /// Kind of a push.
    pub enum PushKind {
        Lora = "lora",
        Full = "full",
        Delta = "delta",
        /// A LoRA that becomes resident.
        Adapter = "adapter",
    }
}

label! {
    /// Path of the bytes of a push.
    pub enum Transport {
        Inline = "inline",
        Broadcast = "broadcast",
        SharedMemory = "shared_memory",
        Directory = "directory",
        /// Device memory of the sender.
        DeviceMemory = "device_memory",
    }
}

label! {
    /// State of the lifecycle.
    pub enum Lifecycle {
        Starting = "starting",
        Running = "running",
        Paused = "paused",
        Asleep = "asleep",
        WeightsMissing = "weights_missing",
        ShuttingDown = "shutting_down",
    }
}

label! {
    /// How deep the server sleeps.
    pub enum SleepState {
        Awake = "awake",
        /// Level 1: the policy is kept.
        WeightsOffloaded = "weights_offloaded",
        /// Level 2.
        DiscardAll = "discard_all",
    }
}

label! {
    /// Why a sample has ended, in vLLM's words.
    pub(super) enum Finished {
        Stop = "stop",
        Length = "length",
        Abort = "abort",
    }
}

impl From<FinishReason> for Finished {
    fn from(reason: FinishReason) -> Self {
        match reason {
            FinishReason::Eos | FinishReason::StopToken | FinishReason::StopString | FinishReason::Grammar => {
                Self::Stop
            }
            FinishReason::Length => Self::Length,
            FinishReason::Aborted => Self::Abort,
        }
    }
}

impl PushKind {
    pub fn name(self) -> &'static str {
        Label::name(self)
    }
}

impl Transport {
    pub fn name(self) -> &'static str {
        Label::name(self)
    }
}
