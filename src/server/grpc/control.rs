//! The service Control: GetInfo, GetStatus, GetTimeline, ResetPrefixCache, Sleep, Wake, Pause, Resume.

use std::time::Instant;

use tonic::{Request, Response};

use super::middleware::{Answer, answer, caller_of, deadline_of};
use super::status::to_status;
use crate::engine::{Command, EngineStatus};
use crate::memory::{MemoryReport, MemoryUse, resident_bytes};
use crate::observe::Metrics;
use crate::server::calls::ask;
use crate::server::{ImageRules, RoutingRules, ServerState, ServingContext, convert, lifecycle, pb};
use crate::types::{Tenant, TenantStats, ToolCallCounts};

pub(super) struct ControlService {
    server: ServerState,
    started: Instant,
}

impl ControlService {
    pub(super) fn new(server: ServerState) -> Self {
        Self { server, started: Instant::now() }
    }
}

#[tonic::async_trait]
impl pb::control_server::Control for ControlService {
    async fn get_info(&self, _: Request<pb::GetInfoRequest>) -> Answer<pb::GetInfoResponse> {
        self.server.context().map(|context| Response::new(info_response(&context))).map_err(to_status)
    }

    /// A caller that may abort only its own requests does not see the adapter of an open push, which may fail: others'
    /// adapters show once they are resident.
    async fn get_status(&self, request: Request<pb::GetStatusRequest>) -> Answer<pb::GetStatusResponse> {
        let status = async {
            let context = self.server.context()?;
            let engine = ask(&context.engine, |reply| Command::Status { reply }).await?;
            let mut status = status_response(&engine);
            let is_limited = caller_of(&request).limited_to.is_some();
            if let Some(update) = status.update.as_mut().filter(|_| is_limited) {
                update.adapter.clear();
            }
            status.named_images = count(context.model.images.as_ref().map_or(0, |images| images.held.count()));
            status.uptime_seconds = self.started.elapsed().as_secs_f64();
            status.internal_errors += self.server.panics.count();
            status.tool_calls = tool_calls(&self.server.observer.metrics);
            status.tenants = tenants(&self.server.observer.metrics);
            status.stall = self.server.observer.journal.last_stall().map(|stall| convert::stall(&stall));
            Ok(status)
        };
        answer(deadline_of(&request), status).await
    }

    async fn get_timeline(&self, request: Request<pb::GetTimelineRequest>) -> Answer<pb::GetTimelineResponse> {
        Ok(Response::new(convert::timeline(&self.server.observer.timeline, request.get_ref())))
    }

    async fn reset_prefix_cache(
        &self,
        request: Request<pb::ResetPrefixCacheRequest>,
    ) -> Answer<pb::ResetPrefixCacheResponse> {
        let blocks = answer(deadline_of(&request), lifecycle::reset_prefix_cache(&self.server)).await?.into_inner();
        Ok(Response::new(pb::ResetPrefixCacheResponse { blocks: count(blocks) }))
    }

    async fn sleep(&self, request: Request<pb::SleepRequest>) -> Answer<pb::SleepResponse> {
        let sleep = async {
            let pb::SleepRequest { level, mode } = *request.get_ref();
            let (level, mode) = (convert::sleep_level(level)?, convert::drain_mode(mode)?);
            lifecycle::sleep(&self.server, level, mode).await.map(|reply| convert::sleep_reply(&reply))
        };
        answer(deadline_of(&request), sleep).await
    }

    async fn wake(&self, request: Request<pb::WakeRequest>) -> Answer<pb::WakeResponse> {
        let wake = async {
            let (started, request) = (Instant::now(), request.get_ref());
            let tags = convert::wake_tags(&request.tags, request.reload)?;
            let status = lifecycle::wake(&self.server, tags, request.reload).await?;
            let lifecycle = convert::lifecycle(status).into();
            Ok(pb::WakeResponse { lifecycle, seconds: started.elapsed().as_secs_f64() })
        };
        answer(deadline_of(&request), wake).await
    }

    async fn pause(&self, request: Request<pb::PauseRequest>) -> Answer<pb::PauseResponse> {
        let pause = async {
            lifecycle::pause(&self.server, convert::drain_mode(request.get_ref().mode)?).await?;
            Ok(pb::PauseResponse {})
        };
        answer(deadline_of(&request), pause).await
    }

    async fn resume(&self, request: Request<pb::ResumeRequest>) -> Answer<pb::ResumeResponse> {
        answer(deadline_of(&request), lifecycle::resume(&self.server)).await?;
        Ok(Response::new(pb::ResumeResponse {}))
    }
}

fn info_response(context: &ServingContext) -> pb::GetInfoResponse {
    let model = &context.model;
    pb::GetInfoResponse {
        server_version: env!("CARGO_PKG_VERSION").into(),
        vocab_size: count(model.vocab_size),
        max_model_len: count(model.max_model_len),
        eos_token_ids: model.eos_token_ids.clone(),
        images: model.images.as_ref().map(image_info),
        routing: model.routing.as_ref().map(routing_info),
        has_tokenizer: model.encoder.is_some(),
        has_chat_template: model.encoder.as_ref().is_some_and(|e| e.chat_template.is_some()),
        ..context.info.clone()
    }
}

fn image_info(rules: &ImageRules) -> pb::ImageInfo {
    pb::ImageInfo {
        most_per_prompt: count(rules.most_per_prompt),
        most_tokens: count(rules.most_tokens),
        token_side: count(rules.vision.token_side()),
        placeholder: rules.vision.image_token,
        forbidden_token_ids: rules.vision.forbidden_tokens.clone(),
        tile_side: count(rules.vision.tile_side().unwrap_or(0)),
    }
}

fn routing_info(rules: &RoutingRules) -> pb::RoutingInfo {
    pb::RoutingInfo {
        layers: rules.layers.iter().copied().map(count).collect(),
        top_k: count(rules.format.top_k),
        experts: count(rules.format.experts),
        returned: rules.is_kept,
    }
}

fn tenants(metrics: &Metrics) -> Vec<pb::TenantStatus> {
    let status = |(name, stats): (Tenant, TenantStats)| pb::TenantStatus {
        name: name.to_string(),
        running_samples: count(stats.running_samples),
        waiting_samples: count(stats.waiting_samples),
        kv_blocks: count(stats.kv_blocks),
        prompt_tokens: stats.prompt_tokens,
        generated_tokens: stats.generated_tokens,
    };
    metrics.tenants.snapshot().into_iter().map(status).collect()
}

fn tool_calls(metrics: &Metrics) -> Vec<pb::ToolCalls> {
    let used = metrics.tool_calls.snapshot().filter(|(_, calls)| *calls != ToolCallCounts::default());
    used.map(|(format, calls)| pb::ToolCalls {
        format: format.name().into(),
        parsed: calls.parsed,
        unknown_tool: calls.unknown_tool,
        invalid: calls.invalid,
        unclosed: calls.unclosed,
    })
    .collect()
}

/// The part of the reply to GetStatus that the engine knows.
fn status_response(status: &EngineStatus) -> pb::GetStatusResponse {
    let s = &status.stats;
    pb::GetStatusResponse {
        lifecycle: convert::lifecycle(status.lifecycle).into(),
        weight_version: s.weight_version,
        memory: Some(ledger(&status.memory, status)),
        host_memory: status.host_memory.as_ref().map(|report| ledger(report, status)),
        total_blocks: count(s.total_blocks),
        free_blocks: count(s.free_blocks),
        cached_blocks: count(s.cached_blocks),
        running_requests: count(s.accepted_requests),
        running_samples: count(s.running_samples),
        waiting_samples: count(s.waiting_samples),
        steps: s.steps,
        prompt_tokens: s.prompt_tokens,
        generated_tokens: s.generated_tokens,
        cached_tokens: s.cached_tokens,
        preemptions: s.preemptions,
        drafted_tokens: s.drafted_tokens,
        accepted_tokens: s.accepted_tokens,
        finished_requests: s.finished_requests,
        aborted_requests: s.aborted_requests,
        internal_errors: s.internal_errors,
        encoded_images: s.encoded_images,
        queried_images: s.queried_images,
        reused_images: s.reused_images,
        held_images: count(s.held_images),
        tokens_per_second: status.tokens_per_second,
        asleep: convert::asleep(status.lifecycle),
        held_requests: count(s.held_requests),
        updating: status.update.is_some(),
        updates: s.updates,
        update: status.update.as_ref().map(convert::open_update),
        ..Default::default()
    }
}

fn ledger(report: &MemoryReport, status: &EngineStatus) -> pb::MemoryLedger {
    let entry = |&(used_for, bytes): &(MemoryUse, u64)| pb::MemoryEntry { name: used_for.name().into(), bytes };
    pb::MemoryLedger {
        total_bytes: report.total,
        ceiling_bytes: report.ceiling,
        entries: report.entries.iter().map(entry).collect(),
        resident_bytes: resident_bytes(),
        traffic_bytes: status.traffic_bytes,
    }
}

/// `n` as a 32-bit count; blocks, samples and tokens are also numbered with 32 bits.
fn count(n: impl TryInto<u32>) -> u32 {
    n.try_into().ok().expect("blocks, samples and tokens are counted with 32 bits")
}
