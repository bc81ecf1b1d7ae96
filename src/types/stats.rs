//! The engine's numbers: one table, from which the status, the metrics and the page are rendered.

use std::array::from_fn;
use std::ops::Add;

/// One of the engine's numbers.
#[derive(Clone, Copy, Debug)]
pub struct EngineStat {
    /// Name of its field in [`EngineStats`].
    pub name: &'static str,
    pub help: &'static str,
    /// Type and name of the metric that has its value; `None` if no metric has exactly this value.
    pub metric: Option<(&'static str, &'static str)>,
    /// Whether vLLM has the same metric, with `vllm:` for `rollout:`.
    pub is_vllms: bool,
}

macro_rules! engine_stats {
    ($(#[doc = $help:literal] $name:ident $(: $kind:ident $metric:literal $(= $vllm:ident)?)?,)*) => {
        /// The engine's numbers between two steps. Counters count from the start.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct EngineStats { $(#[doc = $help] pub $name: u64,)* }

        /// The numbers in the order of their fields.
        pub const ENGINE_STATS: [EngineStat; [$($help),*].len()] = [$(EngineStat {
            name: stringify!($name),
            help: $help.trim_ascii_start(),
            metric: [$((stringify!($kind), $metric))?].first().copied(),
            is_vllms: !concat!($($(stringify!($vllm))?)?).is_empty(),
        },)*];

        impl EngineStats {
            /// The values in the order of [`ENGINE_STATS`].
            pub fn values(&self) -> [u64; ENGINE_STATS.len()] {
                [$(self.$name,)*]
            }

            pub fn from_values([$($name,)*]: [u64; ENGINE_STATS.len()]) -> Self {
                Self { $($name,)* }
            }
        }
    };
}

impl EngineStats {
    /// Share of the KV blocks that sequences hold, from 0 to 1.
    pub fn kv_cache_usage(&self) -> f64 {
        let used = self.total_blocks.saturating_sub(self.free_blocks);
        if used == 0 { 0.0 } else { used as f64 / self.total_blocks as f64 }
    }
}

engine_stats! {
    /// Samples that have a place in the batch.
    running_samples: gauge "rollout:num_requests_running" = vllm,
    /// Samples of accepted requests that wait for a place, for blocks or for their reader.
    waiting_samples: gauge "rollout:num_requests_waiting" = vllm,
    /// Requests whose samples run or wait.
    accepted_requests: gauge "rollout:requests_accepted",
    /// Requests that wait for a newer policy, for an adapter to be loaded, for Resume, or for a drain to end.
    held_requests: gauge "rollout:requests_held",
    /// KV blocks.
    total_blocks,
    /// KV blocks that no sequence holds, with a cached prefix or without.
    free_blocks,
    /// KV blocks that no sequence holds and that have a cached prefix.
    cached_blocks,
    /// Tokens of admitted prompts, once per prompt.
    prompt_tokens: counter "rollout:prompt_tokens_total" = vllm,
    /// Prompt tokens found in the prefix cache.
    cached_tokens: counter "rollout:prompt_tokens_cached_total" = vllm,
    /// Tokens given to samples.
    generated_tokens: counter "rollout:generation_tokens_total" = vllm,
    /// Samples that lost their blocks to others.
    preemptions: counter "rollout:num_preemptions_total" = vllm,
    /// Drafts that were run, each of one or more tokens of one sample in one step.
    drafts: counter "rollout:spec_decode_num_drafts_total" = vllm,
    /// Draft tokens that were run.
    drafted_tokens: counter "rollout:spec_decode_num_draft_tokens_total" = vllm,
    /// Draft tokens that turned out right.
    accepted_tokens: counter "rollout:spec_decode_num_accepted_tokens_total" = vllm,
    /// Images that the vision tower has encoded.
    encoded_images: counter "rollout:images_encoded_total",
    /// Images whose embeddings are held or being made.
    held_images: gauge "rollout:images_held",
    /// Tokens of images whose embeddings are held or being made.
    held_embeddings: gauge "rollout:image_embeddings_held",
    /// Most tokens of images whose embeddings are held at once. 0 for a model of text alone.
    embedding_capacity: gauge "rollout:image_embeddings_capacity",
    /// Images whose embeddings a prompt has needed.
    queried_images: counter "rollout:mm_cache_queries_total" = vllm,
    /// Images whose embeddings another prompt had already needed, so that they were not encoded again.
    reused_images: counter "rollout:mm_cache_hits_total" = vllm,
    /// Version of the policy that serves.
    weight_version: gauge "rollout:weight_version",
    /// Pushes applied since the start.
    updates: counter "rollout:weight_updates_total",
    /// Adapters that are resident, retired ones with leases included.
    adapters: gauge "rollout:adapters_resident",
    /// Adapters loaded from --adapters-dir because requests named them.
    adapter_loads: counter "rollout:adapter_loads_total",
    /// Adapters that requests named and that could not be loaded.
    adapter_load_failures: counter "rollout:adapter_load_failures_total",
    /// Adapters that left their slots for others.
    adapter_evictions: counter "rollout:adapter_evictions_total",
    /// Steps since the start.
    steps,
    /// Requests whose samples have all ended by themselves.
    finished_requests,
    /// Requests that ended before their samples did.
    aborted_requests,
    /// Requests that ended because their answer panicked.
    internal_errors,
    /// Tokens that were sampled for requests or samples that had ended, and that no client was given.
    dropped_tokens,
}

/// The numbers of one tenant between two steps. Counters count from the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TenantStats {
    pub running_samples: u64,
    pub waiting_samples: u64,
    /// KV blocks that its sequences hold. Those that another tenant holds too count for both.
    pub kv_blocks: u64,
    pub prompt_tokens: u64,
    pub generated_tokens: u64,
}

impl TenantStats {
    /// Most tenants with numbers of their own, the last of which stands for all further ones.
    pub const MOST: usize = 64;

    /// Type, name and meaning of the metric of each number, in the order of [`TenantStats::values`].
    pub const METRICS: [(&str, &str, &str); 5] = [
        ("gauge", "rollout:tenant_running_samples", "Samples of the tenant that have a place in the batch."),
        ("gauge", "rollout:tenant_waiting_samples", "Samples of the tenant that wait."),
        ("gauge", "rollout:tenant_kv_blocks", "KV blocks that the tenant's sequences hold."),
        ("counter", "rollout:tenant_prompt_tokens_total", "Tokens of the tenant's admitted prompts, once per prompt."),
        ("counter", "rollout:tenant_generation_tokens_total", "Tokens sampled for the tenant."),
    ];

    pub fn values(&self) -> [u64; 5] {
        [self.running_samples, self.waiting_samples, self.kv_blocks, self.prompt_tokens, self.generated_tokens]
    }

    pub fn from_values(values: [u64; 5]) -> Self {
        let [running_samples, waiting_samples, kv_blocks, prompt_tokens, generated_tokens] = values;
        Self { running_samples, waiting_samples, kv_blocks, prompt_tokens, generated_tokens }
    }
}

/// Adds the numbers of two parts of the engine. Each part leaves the other part's numbers at 0.
impl Add for EngineStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let (these, those) = (self.values(), other.values());
        Self::from_values(from_fn(|i| these[i] + those[i]))
    }
}
