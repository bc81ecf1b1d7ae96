//! Divides the memory among its uses before any of it is allocated.

use rollout_kernels::Devices;

use super::Layout;
use crate::cache::RoutingCache;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::executor::resident_adapter_bytes;
use crate::memory::{MemoryBudget, MemoryReport, MemoryUse, Traffic, human_bytes, total_bytes};
use crate::model::config::ModelConfig;
use crate::model::{LOGITS_ROWS, Model, Parameterized, TowerShape, Workspace, kv_bytes_per_block, routing_shape};
use crate::observe::TIMELINE_BYTES;

/// Bytes for everything without an entry of its own: code, threads, tokenizer, and the allocator's slack. With
/// SmolLM2-135M, resident memory beside the touched reservations was 45 MiB when idle, and an estimated 115 MiB after
/// 64 samples (the touched part of the cache is counted from its blocks). The entry also covers incomplete frames in
/// the transport (32 MiB of long ones, and at most 96 KiB for each connection) and the timeline's 4 MiB.
const PROCESS_BYTES: u64 = 192 << 20;
const _: () = assert!(TIMELINE_BYTES < 4 << 20, "docs/observability.md says so");

/// Host memory of the driver and its libraries, for a device with memory of its own. Not measured on a card.
const DRIVER_BYTES: u64 = 256 << 20;

/// Most bytes that TLS holds for one connection: two records that are being read, one that arrives, its decrypted
/// bytes, and one that is being sent, with the slack of growing buffers.
const TLS_CONNECTION_BYTES: u64 = 96 << 10;

/// Largest default of `--request-bytes`: several batches of a large trainer while they are decoded.
const MAX_REQUEST_BYTES: u64 = 512 << 20;
/// Smallest default of `--request-bytes`: a request of a few prompts while its text is encoded, and its reply.
const MIN_REQUEST_BYTES: u64 = 8 << 20;

/// The reservations of the start.
pub(super) struct Plan {
    pub budget: MemoryBudget,
    /// The counter that holds requests and replies to their reservation.
    pub traffic: Traffic,
    /// Number of KV blocks.
    pub blocks: usize,
}

impl Plan {
    /// Divides the memory, logs the ledger, and limits the devices to their ceiling. The matrices of `models` have no
    /// memory yet. `broadcast` is the number of bytes that a broadcast of weights takes on all ranks together.
    ///
    /// # Errors
    /// `Config` or `ResourceExhausted`, with one message that says what to change.
    pub fn new(
        config: &Config,
        model: &ModelConfig,
        layout: &Layout,
        models: &[Model],
        broadcast: u64,
    ) -> Result<Self> {
        let mut budget = new_budget(config, &layout.devices)?;
        reserve_fixed(&mut budget, config, model, layout, models)?;
        let traffic = reserve_requests(&mut budget, config, model, layout)?;
        let blocks = reserve_kv(&mut budget, config, model, layout, broadcast)?;
        layout.devices.limit(budget.report().ceiling - budget.reserved(MemoryUse::Context));
        print_ledgers(&budget);
        let tokens = blocks * layout.block_size;
        tracing::info!("memory: the KV cache is {blocks} blocks of {} tokens, {tokens} tokens", layout.block_size);
        Ok(Self { budget, traffic, blocks })
    }
}

/// One ledger, and a second one for the host if the devices have memory of their own.
fn new_budget(config: &Config, devices: &Devices) -> Result<MemoryBudget> {
    let (total, of_host) = (devices.total_bytes(), total_bytes());
    match config.host_memory {
        None if !devices.have_own_memory() => Ok(MemoryBudget::new(total, config.mem_util)),
        Some(bytes) if !devices.have_own_memory() => {
            let device = config.device.name();
            Err(Error::Config(format!(
                "--host-memory {bytes}: --device {device} computes in the host's memory, whose ceiling is --mem-util; \
                 remove --host-memory"
            )))
        }
        Some(bytes) if bytes > of_host => {
            let has = human_bytes(of_host);
            Err(Error::Config(format!(
                "--host-memory {bytes}: must be at most {has}, the memory of this machine or container"
            )))
        }
        given => Ok(MemoryBudget::beside_host(total, config.mem_util, of_host, given.unwrap_or(of_host / 2))),
    }
}

/// Reserves everything whose size does not depend on the KV cache.
fn reserve_fixed(
    budget: &mut MemoryBudget,
    config: &Config,
    model: &ModelConfig,
    layout: &Layout,
    models: &[Model],
) -> Result<()> {
    let entries = fixed_entries(config, model, layout, models)?;
    let later = [
        (MemoryUse::Requests, config.request_bytes.unwrap_or(MIN_REQUEST_BYTES)),
        (MemoryUse::KvCache, block_bytes(model, layout) * blocks_for(layout.max_model_len, layout)),
        (MemoryUse::Routing, routing_bytes(layout, blocks_for(layout.max_model_len, layout))),
    ];
    let least_below = |flag: &str| -> u64 {
        let all = entries.iter().chain(&later).filter(|entry| budget.flag_for(entry.0) == flag);
        all.map(|entry| entry.1).sum()
    };
    let [least, least_of_host] = ["--mem-util", "--host-memory"].map(least_below);
    let total = budget.report().total;
    for (used_for, bytes) in entries {
        let flag = budget.flag_for(used_for);
        budget.reserve(used_for, bytes).map_err(|e| {
            Error::ResourceExhausted(match flag {
                "--mem-util" => format!(
                    "--mem-util {}: {e}; this model with --max-model-len {} needs at least {}: {}",
                    config.mem_util,
                    layout.max_model_len,
                    human_bytes(least),
                    share_of(total, least),
                ),
                flag => {
                    let least = human_bytes(least_of_host);
                    format!("{flag}: {e}; the host needs at least {least}: use {flag} {least_of_host}")
                }
            })
        })?;
    }
    Ok(())
}

/// The reservations whose size does not depend on the KV cache, in the order of the ledger.
fn fixed_entries(
    config: &Config,
    model: &ModelConfig,
    layout: &Layout,
    models: &[Model],
) -> Result<Vec<(MemoryUse, u64)>> {
    let (world, devices) = (layout.world, &layout.devices);
    let activations = Workspace::bytes(&layout.workspace(model, 0));
    let tower = layout.tower(model, 0);
    let of_tower = |bytes: fn(&TowerShape) -> u64| tower.as_ref().map_or(0, |tower| world as u64 * bytes(tower));
    let scratch = devices.of_rank(0).scratch_bytes() as u64;
    let adapters = models.iter().enumerate().map(|(rank, model)| {
        resident_adapter_bytes(
            &model.decoder,
            &layout.build(rank),
            config.adapters.max_lora_rank,
            config.adapters.max_adapters,
        )
    });
    let kept_experts = routing_shape(&layout.workspace(model, 0)).map_or(0, |shape| shape.kept_bytes());
    let logits = LOGITS_ROWS * model.vocab_size * size_of::<f32>();
    let weights = models.iter().map(Parameterized::bytes).sum();
    let driver = if devices.have_own_memory() { DRIVER_BYTES } else { 0 };
    let entries = [
        (MemoryUse::Process, PROCESS_BYTES + tls_bytes(config) + driver),
        (MemoryUse::Context, devices.context_bytes(world)),
        (MemoryUse::Weights, weights),
        (MemoryUse::KeptBase, if config.keep_base { weights } else { 0 }),
        (MemoryUse::Workspace, (activations + scratch) * world as u64),
        (MemoryUse::TowerWorkspace, of_tower(TowerShape::workspace_bytes)),
        (MemoryUse::Embeddings, of_tower(TowerShape::embedding_bytes)),
        (MemoryUse::Images, if tower.is_some() { config.image_bytes } else { 0 }),
        (MemoryUse::Adapters, adapters.sum::<Result<u64>>()?),
        (MemoryUse::PageRounding, devices.rounding_bytes()),
        (MemoryUse::CopyBuffers, devices.host_bytes(logits, kept_experts)),
    ];
    Ok(entries.into_iter().filter(|entry| entry.1 > 0).collect())
}

/// Advice on how to give the server `bytes`: the `--mem-util` that allows them, or a note that the memory is too small.
fn share_of(total: u64, bytes: u64) -> String {
    if bytes > total {
        return format!("more than the {} of this machine or container", human_bytes(total));
    }
    // Rounded up, so that it is enough.
    format!("use --mem-util {:.3}", (bytes as f64 / total as f64 * 1000.0).ceil() / 1000.0)
}

/// Bytes for TLS on all ports, with all their connections open.
fn tls_bytes(config: &Config) -> u64 {
    let ports = 1 + u64::from(config.http_port.is_some());
    if config.tls_cert.is_some() { ports * config.max_connections as u64 * TLS_CONNECTION_BYTES } else { 0 }
}

/// Reserves the memory of requests and replies in flight, and creates the counter that limits them to it.
fn reserve_requests(
    budget: &mut MemoryBudget,
    config: &Config,
    model: &ModelConfig,
    layout: &Layout,
) -> Result<Traffic> {
    let blocks = blocks_for(layout.max_model_len, layout);
    let one_sequence = block_bytes(model, layout) * blocks + routing_bytes(layout, blocks);
    let default = || {
        let left = budget.remaining_for(MemoryUse::Requests);
        // A KV cache for one sequence of the maximum length must fit beside them, if both take the same memory.
        let beside = if budget.host_report().is_some() { 0 } else { one_sequence };
        (left / 4).min(left.saturating_sub(beside)).clamp(MIN_REQUEST_BYTES, MAX_REQUEST_BYTES)
    };
    let bytes = config.request_bytes.unwrap_or_else(default);
    let flag = budget.flag_for(MemoryUse::Requests);
    budget
        .reserve(MemoryUse::Requests, bytes)
        .map_err(|e| Error::ResourceExhausted(format!("--request-bytes {bytes}: {e}; lower it, or raise {flag}")))?;
    Ok(Traffic::new(bytes))
}

/// Reserves the KV cache, with the configured size or all remaining memory, and returns its number of blocks.
/// `broadcast` is the number of bytes that a broadcast of weights takes on all ranks together.
fn reserve_kv(
    budget: &mut MemoryBudget,
    config: &Config,
    model: &ModelConfig,
    layout: &Layout,
    broadcast: u64,
) -> Result<usize> {
    let per_block = block_bytes(model, layout);
    let needed = blocks_for(layout.max_model_len, layout);
    // Beside each block in the same memory.
    let beside = if budget.host_report().is_some() { 0 } else { routing_bytes(layout, 1) };
    let bytes = config.kv_cache_bytes.unwrap_or_else(|| {
        let left = budget.remaining() - staging_room(budget, config, broadcast);
        // One sequence must fit, so the default room for pushes shrinks if necessary.
        let with_beside = per_block + beside;
        let left = match config.staging_bytes {
            Some(_) => left,
            None => left.max(needed * with_beside).min(budget.remaining()),
        };
        left / with_beside * per_block
    });
    let blocks = bytes / per_block;
    if blocks < needed {
        let tokens = blocks * layout.block_size as u64;
        let staging = config.staging_bytes.map(|bytes| format!(" beside --staging-bytes {bytes}")).unwrap_or_default();
        return Err(Error::ResourceExhausted(format!(
            "the KV cache of {}{staging} has room for {tokens} tokens, but one sequence of --max-model-len {} needs \
             {}; raise --mem-util to at least {:.3}, or lower --max-model-len to at most {tokens}",
            human_bytes(bytes),
            layout.max_model_len,
            human_bytes(needed * (per_block + beside)),
            budget.utilization_for(needed * (per_block + beside)),
        )));
    }
    budget.reserve(MemoryUse::KvCache, blocks * per_block).map_err(|e| {
        Error::ResourceExhausted(format!("--kv-cache-bytes {bytes}: {e}; lower it, or raise --mem-util"))
    })?;
    if layout.routing.is_some() {
        let flag = budget.flag_for(MemoryUse::Routing);
        budget.reserve(MemoryUse::Routing, routing_bytes(layout, blocks)).map_err(|e| {
            Error::ResourceExhausted(format!("--return-routing: {e}; raise {flag}, or set a smaller --kv-cache-bytes"))
        })?;
    }
    usize::try_from(blocks).ok().filter(|&b| b <= u32::MAX as usize / layout.block_size).ok_or_else(|| {
        Error::Config(format!(
            "a KV cache of {blocks} blocks has more slots than an index can count; set a smaller --kv-cache-bytes"
        ))
    })
}

/// Bytes that the KV cache leaves free for pushes: shadow weights for a FULL push, or an adapter with copies of the
/// base values below it; and the buffers of a broadcast.
fn staging_room(budget: &MemoryBudget, config: &Config, broadcast: u64) -> u64 {
    let (weights, remaining) = (budget.reserved(MemoryUse::Weights), budget.remaining());
    config.staging_bytes.unwrap_or_else(|| (weights + weights / 2 + broadcast).min(remaining / 4)).min(remaining)
}

/// Bytes of one KV block on all ranks together.
fn block_bytes(model: &ModelConfig, layout: &Layout) -> u64 {
    let one = kv_bytes_per_block(model, &layout.build(0), layout.kv, layout.block_size);
    one * layout.world as u64
}

/// Bytes of the experts that are kept beside so many blocks.
fn routing_bytes(layout: &Layout, blocks: u64) -> u64 {
    layout.routing.map_or(0, |format| RoutingCache::bytes(format.row_bytes(), blocks as usize, layout.block_size))
}

fn blocks_for(tokens: usize, layout: &Layout) -> u64 {
    tokens.div_ceil(layout.block_size) as u64
}

fn print_ledgers(budget: &MemoryBudget) {
    print_ledger("memory", budget.report());
    if let Some(host) = budget.host_report() {
        print_ledger("host memory", host);
    }
}

fn print_ledger(what: &str, report: &MemoryReport) {
    let share = report.ceiling as f64 / report.total as f64;
    tracing::info!("{what}: {} of {} ({share:.2})", human_bytes(report.ceiling), human_bytes(report.total));
    for (name, bytes) in &report.entries {
        tracing::info!("{what}: {name:<14} {:>10}", human_bytes(*bytes));
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use rollout_kernels::{Backend, DeviceOptions};

    use super::*;

    #[test]
    fn one_memory_has_one_ceiling() {
        let devices = Devices::open(Backend::Cpu, 2, &DeviceOptions::default()).unwrap();
        let config =
            |flags: &[&str]| Config::try_parse_from(["rollout-server", "--model", "m"].iter().chain(flags)).unwrap();
        let budget = new_budget(&config(&[]), &devices).unwrap();
        assert_eq!((budget.report().total, budget.host_report()), (total_bytes(), None));
        let error = new_budget(&config(&["--host-memory", "1GiB"]), &devices).unwrap_err().to_string();
        assert!(error.contains("--host-memory 1073741824: --device cpu computes in the host's memory"), "{error}");
    }

    #[test]
    fn a_share_is_enough_or_there_is_none() {
        assert_eq!(share_of(8 << 30, 2 << 30), "use --mem-util 0.250");
        assert_eq!(share_of(3, 1), "use --mem-util 0.334");
        assert_eq!(share_of(1 << 30, 1 << 30), "use --mem-util 1.000");
        assert_eq!(share_of(300 << 20, 698 << 20), "more than the 300.0 MiB of this machine or container");
    }
}
