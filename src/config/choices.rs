//! The values of flags that are a choice.

use clap::ValueEnum;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DTypeChoice {
    Auto,
    Bfloat16,
    #[value(alias = "float")]
    Float32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReasoningChoice {
    /// Text that `<think>` opens, in the prompt or in the answer, if the chat template has such marks.
    Auto,
    None,
    /// All text before `</think>`.
    #[value(name = "deepseek_r1", alias = "deepseek-r1")]
    DeepseekR1,
    /// All text before `</think>` or before a call of a tool.
    Qwen3,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KernelChoice {
    Auto,
    Amx,
    #[value(name = "avx512_bf16")]
    Avx512Bf16,
    #[value(name = "avx512f")]
    Avx512,
    Avx2,
    Neon,
    Scalar,
    /// The results of avx512_bf16, emulated without its instructions and several times slower: for tests on other
    /// processors.
    #[value(name = "avx512_bf16_emulated", hide = true)]
    Avx512Bf16Emulated,
    /// The results of amx, emulated without its instructions and several times slower: for tests on other processors.
    #[value(name = "amx_emulated", hide = true)]
    AmxEmulated,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SpeculationChoice {
    /// Speculate in the steps where it is likely to save time.
    Auto,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GraphsChoice {
    Auto,
    On,
    Off,
}

/// A set of names of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MetricNames {
    /// Those of vLLM 0.33, with its labels and buckets.
    Vllm,
    /// Those of this server.
    Rollout,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}
