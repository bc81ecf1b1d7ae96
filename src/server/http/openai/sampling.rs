//! The members that bodies of completions and of chats share: how to sample, when to end, and the report.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;
use utoipa::ToSchema;

use super::returned::ReturnOptions;
use super::structured::structured;
use crate::error::{Error, Result, shown};
use crate::server::http::{members, text_or_list};
use crate::server::{ModelFacts, pb};
use crate::types::SamplingParams;

/// Longest part of a client's text in an error.
const MAX_SHOWN: usize = 64;

members! {
    /// How to sample, when to end, and the report. Members that would change these, and that this server does not have,
    /// are rejected.
    pub(in crate::server::http) struct Sampling {
        /// The policy's name, or that of a resident adapter; none, null or "" is the policy.
        pub(in crate::server::http) model: String,
        /// Divisor of the logits, at least 0; 0 is greedy (default: 1).
        pub(in crate::server::http) temperature: f32,
        /// Keep the smallest set of most likely tokens with this much probability (default: 1).
        pub(in crate::server::http) top_p: f32,
        /// Keep this many most likely tokens; 0 and -1 keep all (default: 0).
        top_k: i32,
        /// Keep tokens with at least this fraction of the best token's probability (default: 0).
        min_p: f32,
        /// Divides positive and multiplies negative logits of tokens in the prompt or the output (default: 1).
        repetition_penalty: f32,
        /// Subtracted from logits of tokens in the output (default: 0).
        pub(in crate::server::http) presence_penalty: f32,
        /// Subtracted from a token's logit for each time it is in the output (default: 0).
        pub(in crate::server::http) frequency_penalty: f32,
        /// Values added to logits, by token id.
        #[schema(value_type = Option<BTreeMap<String, f32>>)]
        logit_bias: LogitBias,
        /// Only these tokens may be sampled.
        allowed_token_ids: Vec<u32>,
        /// Seed of the request, from which each sample's own seed is derived.
        seed: i64,
        /// Samples of each prompt (default: 1).
        pub(super) n: u32,
        /// Tokens to make before a sample may end (default: 0).
        min_tokens: u32,
        /// Whether to continue at the end-of-sequence token (default: false).
        ignore_eos: bool,
        /// A text, or texts, that end a sample.
        pub(in crate::server::http) stop: Stop,
        /// Tokens that end a sample.
        stop_token_ids: Vec<u32>,
        /// Whether the text includes the stop string that ended it (default: false).
        pub(super) include_stop_str_in_output: bool,
        /// The form of the text: `text`, `json_object`, or `json_schema` with a schema.
        #[schema(value_type = Option<serde_json::Value>)]
        pub(in crate::server::http) response_format: Box<RawValue>,
        /// The grammar of the text: an object with `json` (a schema), `regex`, `choice`, `grammar` (Lark) or
        /// `json_object`.
        #[schema(value_type = Option<serde_json::Value>)]
        pub(super) structured_outputs: Box<RawValue>,
        /// Texts that are not generated.
        bad_words: Vec<String>,
        /// Whether special tokens are left out of the text (default: true).
        pub(super) skip_special_tokens: bool,
        /// No effect: the tokenizers that are supported write no spaces between special tokens.
        spaces_between_special_tokens: bool,
        /// Tokens of reasoning after which `</think>` follows without a draw; -1 allows any number (default: -1).
        pub(in crate::server::http) thinking_token_budget: i64,
        /// Report the log-probabilities of the prompt's tokens, with those of this many most likely ones; -1 is all.
        pub(super) prompt_logprobs: i32,
        /// Report the log-probabilities of these tokens beside each sampled one, instead of the most likely ones.
        pub(super) logprob_token_ids: Vec<u32>,
        /// Report the ids of the prompt's and the sample's tokens (default: false).
        pub(in crate::server::http) return_token_ids: bool,
        /// Write tokens beside log-probabilities as `token_id:N` (default: whether the server has
        /// `--return-tokens-as-token-ids`).
        pub(super) return_tokens_as_token_ids: bool,
        /// Report which versions of the policy made the tokens (default: false).
        pub(super) return_weight_versions: bool,
        /// Report more of each token: entropies, supports, and log-probabilities under other policies.
        pub(super) returns: ReturnOptions,
        /// Leave out the experts of this many first tokens of the prompt (default: 0).
        pub(super) routed_experts_prompt_start: usize,
        /// Distribution of the reported log-probabilities (default: processed; raw at temperature 0).
        pub(super) logprobs_mode: LogprobsMode,
        /// Whether to send tokens as they are made, as server-sent events (default: false).
        pub(in crate::server::http) stream: bool,
        /// Further contents of a stream.
        pub(in crate::server::http) stream_options: StreamOptions,
        /// Keep only this many of the prompt's tokens; -1 keeps as many as leave room for `max_tokens` (default: all).
        pub(in crate::server::http) truncate_prompt_tokens: i32,
        /// With `truncate_prompt_tokens`, the side where tokens are dropped (default: left).
        pub(in crate::server::http) truncation_side: TruncationSide,
        /// Name by which the request can be aborted, unique among running ones. The header X-Request-Id wins.
        pub(in crate::server::http) request_id: String,
        /// Refuse the request unless the policy has this version when it starts.
        if_weight_version: u64,
        /// Wait for a policy of at least this version, until `time_limit_seconds` if there is one.
        min_weight_version: u64,
        /// End the request this many seconds after its arrival, at least 0: samples that have not ended have the finish
        /// reason `abort` and the tokens so far (default: no limit).
        time_limit_seconds: f64,
    } rejects [
        "best_of", "use_beam_search", "length_penalty", "logits_processors", "prompt_logprob_token_ids",
        "prompt_logprob_start", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
        "repetition_detection", "prompt_embeds", "suffix", "vllm_xargs"
    ];
}

/// The side of a prompt where tokens are dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::server::http) enum TruncationSide {
    Left,
    Right,
}

/// Distribution that log-probabilities are taken from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(in crate::server::http) enum LogprobsMode {
    /// The one that the token was drawn from: temperature, penalties and filters applied.
    #[serde(alias = "processed_logprobs")]
    Processed,
    /// The model's own.
    #[serde(alias = "raw_logprobs")]
    Raw,
}

members! {
    /// Further contents of a stream, beside its tokens.
    #[derive(Clone, Copy, Serialize)]
    pub(in crate::server::http) struct StreamOptions {
        /// End with an event that has the usage figures (default: false).
        include_usage: bool,
        /// With `include_usage`, every event has the usage figures so far (default: false).
        continuous_usage_stats: bool,
    }
}

/// The events of a stream that have usage figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::server::http) enum UsageEvents {
    None,
    /// One more event at the end.
    Last,
    /// All events, and one more at the end.
    All,
}

impl UsageEvents {
    /// Those that a request asks for.
    pub(in crate::server::http) fn requested(options: Option<&StreamOptions>) -> Self {
        let is_set = |option: fn(&StreamOptions) -> Option<bool>| options.and_then(option) == Some(true);
        match (is_set(|options| options.include_usage), is_set(|options| options.continuous_usage_stats)) {
            (false, _) => Self::None,
            (true, false) => Self::Last,
            (true, true) => Self::All,
        }
    }
}

/// Texts that end a sample: one, or a list.
#[derive(Clone, Debug, Default, ToSchema)]
#[schema(value_type = serde_json::Value)]
pub(in crate::server::http) struct Stop(pub(in crate::server::http) Vec<String>);

impl<'de> Deserialize<'de> for Stop {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        text_or_list(deserializer, "a string or a list of strings", str::to_owned).map(Self)
    }
}

/// Values that are added to logits, by token id.
#[derive(Clone, Debug, Default)]
struct LogitBias(BTreeMap<u32, f32>);

impl<'de> Deserialize<'de> for LogitBias {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct BiasVisitor;

        impl<'de> Visitor<'de> for BiasVisitor {
            type Value = LogitBias;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of numbers by token id")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<LogitBias, A::Error> {
                let mut values = BTreeMap::new();
                while let Some(key) = map.next_key::<String>()? {
                    let wrong = || de::Error::custom(format_args!("{:?} is not a token id", shown(&key, MAX_SHOWN)));
                    values.insert(key.parse().map_err(|_| wrong())?, map.next_value()?);
                }
                Ok(LogitBias(values))
            }
        }

        deserializer.deserialize_map(BiasVisitor)
    }
}

impl Sampling {
    /// The distribution that the reported log-probabilities are taken from. At temperature 0 the processed distribution
    /// is the chosen token alone, with a log-probability of 0.
    pub(super) fn reported(&self) -> LogprobsMode {
        let default = if self.temperature == Some(0.0) { LogprobsMode::Raw } else { LogprobsMode::Processed };
        self.logprobs_mode.unwrap_or(default)
    }

    /// Checks that the answer needs no more than the message of one sample.
    ///
    /// # Errors
    /// `InvalidArgument` for a member that only OpenAI's completions and chats answer.
    pub(in crate::server::http) fn check_is_plain(&self) -> Result<()> {
        let options = self.stream_options.as_ref();
        let has_usage = |options: &StreamOptions| {
            options.include_usage == Some(true) || options.continuous_usage_stats == Some(true)
        };
        let members = [
            ("n", self.n.is_some_and(|n| n != 1)),
            ("prompt_logprobs", self.prompt_logprobs.is_some()),
            ("return_token_ids", self.return_token_ids == Some(true)),
            ("return_tokens_as_token_ids", self.return_tokens_as_token_ids == Some(true)),
            ("return_weight_versions", self.return_weight_versions == Some(true)),
            ("logprobs_mode", self.logprobs_mode.is_some()),
            ("stream_options", options.is_some_and(has_usage)),
            ("logprob_token_ids", self.logprob_token_ids.is_some()),
            ("returns", self.returns.is_some()),
        ];
        match members.into_iter().find(|(_, is_given)| *is_given) {
            Some((name, _)) => {
                Err(Error::invalid(name, "is not supported here; use /v1/chat/completions, which has it"))
            }
            None => Ok(()),
        }
    }

    pub(in crate::server::http) fn stop_strings(&self) -> Vec<String> {
        self.stop.as_ref().map_or_else(Vec::new, |stop| stop.0.clone())
    }

    /// How many tokens of each prompt to keep; `None` for all.
    fn kept_prompt_tokens(&self, max_tokens: Option<u32>, model: &ModelFacts) -> Result<Option<u32>> {
        let Some(given) = self.truncate_prompt_tokens else { return Ok(None) };
        if given != -1 {
            let kept = u32::try_from(given).ok().filter(|kept| *kept > 0);
            let wrong = || Error::invalid("truncate_prompt_tokens", format!("{given} is neither -1 nor at least 1"));
            return kept.ok_or_else(wrong).map(Some);
        }
        let context = u32::try_from(model.max_model_len).unwrap_or(u32::MAX);
        // Without a smaller maximum, a sample may take all that the prompt leaves, which is at least one token.
        let answer = max_tokens.unwrap_or(SamplingParams::default().max_tokens);
        Ok(Some(if answer < context { context - answer } else { context.saturating_sub(1) }))
    }

    /// The message that a gRPC client would send for `prompts`. `model` has the names of the policy, `top_logprobs` is
    /// the number of most likely tokens that the reply needs.
    ///
    /// # Errors
    /// `InvalidArgument` for a member whose value only HTTP's bodies can have. Everything else is checked when the
    /// message is.
    pub(in crate::server::http) fn into_message(
        self,
        mut prompts: Vec<pb::Prompt>,
        max_tokens: Option<u32>,
        top_logprobs: u32,
        model: &ModelFacts,
    ) -> Result<pb::GenerateRequest> {
        if self.stream_options.is_some() && self.stream != Some(true) {
            return Err(Error::invalid("stream_options", "has no meaning without stream; set stream to true"));
        }
        if self.allowed_token_ids.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::invalid("allowed_token_ids", "is empty, so no token could be sampled; leave it out"));
        }
        let kept = self.kept_prompt_tokens(max_tokens, model)?;
        for prompt in &mut prompts {
            (prompt.keep_tokens, prompt.keep_first) = (kept, self.truncation_side == Some(TruncationSide::Right));
        }
        let top_logprobs_of = match self.reported() {
            LogprobsMode::Processed => pb::Distribution::Processed,
            LogprobsMode::Raw => pb::Distribution::Raw,
        };
        let sampling = pb::SamplingParams {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.unwrap_or_default().0.into_iter().collect(),
            allowed_token_ids: self.allowed_token_ids.unwrap_or_default(),
            min_tokens: self.min_tokens,
            max_tokens,
            stop_token_ids: self.stop_token_ids.unwrap_or_default(),
            stop: self.stop.unwrap_or_default().0,
            ignore_eos: self.ignore_eos.unwrap_or(false),
            seed: self.seed.map(i64::cast_unsigned),
            structured_outputs: structured(self.structured_outputs.as_deref(), self.response_format.as_deref())?,
            skip_special_tokens: self.skip_special_tokens,
            bad_words: self.bad_words.unwrap_or_default(),
            thinking_token_budget: self.thinking_token_budget.map_or(Ok(None), thinking_budget)?,
        };
        Ok(pb::GenerateRequest {
            request_id: self.request_id.unwrap_or_default(),
            prompts,
            n: self.n,
            sampling: Some(sampling),
            top_logprobs,
            logprob_token_ids: self.logprob_token_ids.unwrap_or_default(),
            top_logprobs_of: top_logprobs_of.into(),
            prompt_logprobs: false,
            return_text: false,
            stream_tokens: self.stream.unwrap_or(false),
            adapter: self.model.filter(|name| !model.is_policy(name)).unwrap_or_default(),
            if_weight_version: self.if_weight_version,
            min_weight_version: self.min_weight_version,
            time_limit_seconds: self.time_limit_seconds,
            return_routing: self.stream != Some(true) && model.routing.as_ref().is_some_and(|routing| routing.is_kept),
            returns: self.returns.as_ref().map(ReturnOptions::message),
            // The header names it.
            tenant: String::new(),
        })
    }
}

/// The limit on reasoning that the member asks for.
fn thinking_budget(given: i64) -> Result<Option<u32>> {
    match u32::try_from(given) {
        Ok(tokens) => Ok(Some(tokens)),
        Err(_) if given == -1 => Ok(None),
        Err(_) => Err(Error::invalid("thinking_token_budget", format!("{given} is neither -1 nor a count of tokens"))),
    }
}
