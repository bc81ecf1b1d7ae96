//! Pushes: checks the header of an update, and makes the reply to its commit.

use std::time::Duration;

use super::{MAX_ADAPTER_NAME_BYTES, MAX_PARAMETER_NAME_BYTES, check_length};
use crate::engine::{AdapterStatus, AdapterTarget, RunningPolicy, UpdateReply, UpdateStatus};
use crate::error::{Error, Result};
use crate::observe::{PushGuard, PushKind, Transport};
use crate::server::pb;
use crate::types::Tenant;
use crate::weights::{Allocation, DeltaStore, Dtype, Source, TensorEntry, UpdateHeader, UpdateKind};

/// Longest adapter_config.json in bytes: one that names each module of a large model has some 100 KiB.
const MAX_ADAPTER_CONFIG_BYTES: usize = 1 << 20;
/// Longest name of a segment in bytes; the limit of the file system.
const MAX_SEGMENT_NAME_BYTES: usize = 255;
/// Longest path of a directory in bytes; the limit of the file system.
const MAX_PATH_BYTES: usize = 4096;
/// Longest UUID of a device in bytes, with room for a prefix.
const MAX_UUID_BYTES: usize = 64;

/// Tells observers the kind and the transport of a push.
pub(in crate::server) fn describe(header: &UpdateHeader, push: &PushGuard) {
    let kind = match header.kind {
        UpdateKind::Lora if header.adapter.is_some() => PushKind::Adapter,
        UpdateKind::Lora => PushKind::Lora,
        UpdateKind::Full => PushKind::Full,
        UpdateKind::Delta => PushKind::Delta,
    };
    let transport = match header.source {
        Source::Inline => Transport::Inline,
        Source::Broadcast(_) => Transport::Broadcast,
        Source::SharedMemory(_) => Transport::SharedMemory,
        Source::Directory(_) | Source::DeltaStore(_) => Transport::Directory,
        Source::DeviceMemory => Transport::DeviceMemory,
    };
    push.is(kind, transport, header.adapter.as_ref().map(|adapter| adapter.name.as_str()));
}

/// Checks the header of an update, and the tensors that it declares.
pub(in crate::server) fn header(header: pb::Header) -> Result<(UpdateHeader, Vec<TensorEntry>)> {
    let running = running_policy(header.running)?;
    let kind = match header.kind() {
        pb::UpdateKind::Lora => UpdateKind::Lora,
        pb::UpdateKind::Full => UpdateKind::Full,
        pb::UpdateKind::Delta => UpdateKind::Delta,
        pb::UpdateKind::Unspecified => {
            return Err(Error::invalid("header.kind", format!("{} is not LORA, FULL or DELTA", header.kind)));
        }
    };
    let only = |field: &str, is_set: bool, wanted: UpdateKind, name: &str| {
        let wrong = is_set && kind != wanted;
        if wrong { Err(Error::invalid(field, format!("is for {name} pushes only; leave it out"))) } else { Ok(()) }
    };
    only("header.adapter", !header.adapter.is_empty(), UpdateKind::Lora, "LORA")?;
    only("header.adapter_config", !header.adapter_config.is_empty(), UpdateKind::Lora, "LORA")?;
    only("header.in_place", header.in_place, UpdateKind::Full, "FULL")?;
    only("header.keep_missing", header.keep_missing, UpdateKind::Full, "FULL")?;
    if header.keep_missing && header.in_place {
        let message = "is not possible with in_place, which overwrites the values that would be kept; leave one out";
        return Err(Error::invalid("header.keep_missing", message));
    }
    let source = match (source(header.source)?, kind) {
        (Source::Directory(path), UpdateKind::Delta) => {
            let version = header.new_version.ok_or_else(|| {
                Error::invalid("header.new_version", "is missing; it names the version of the delta store")
            })?;
            Source::DeltaStore(DeltaStore { path, version, serving: None })
        }
        (_, UpdateKind::Delta) if header.expected_version.is_none() => {
            return Err(Error::invalid("header.expected_version", "is missing; a DELTA is against a version, name it"));
        }
        (source, _) => source,
    };
    check_length("header.adapter_config", &header.adapter_config, MAX_ADAPTER_CONFIG_BYTES)?;
    let checked = UpdateHeader {
        kind,
        source,
        adapter: adapter_target(header.adapter, header.expected_generation, header.evict_adapter)?,
        tenant: Tenant::default(),
        adapter_config: header.adapter_config,
        expected_version: header.expected_version,
        new_version: header.new_version,
        force_version: header.force_version,
        running,
        in_place: header.in_place,
        keep_missing: header.keep_missing,
        total_bytes: header.total_bytes,
    };
    Ok((checked, tensors(header.tensors, 0)?))
}

/// Checks the tensors that a header or a manifest declares. `first` is the index of the first one within the stream.
pub(in crate::server) fn tensors(tensors: Vec<pb::Tensor>, first: usize) -> Result<Vec<TensorEntry>> {
    (first..).zip(tensors).map(|(i, t)| tensor(i, t)).collect()
}

fn tensor(index: usize, tensor: pb::Tensor) -> Result<TensorEntry> {
    let field = |part: &str| format!("tensors[{index}].{part}");
    check_length(format_args!("tensors[{index}].name"), &tensor.name, MAX_PARAMETER_NAME_BYTES)?;
    let dtype = match tensor.dtype() {
        pb::TensorDtype::Float32 => Dtype::F32,
        pb::TensorDtype::Bfloat16 => Dtype::Bf16,
        pb::TensorDtype::Float16 => Dtype::F16,
        pb::TensorDtype::Unspecified => {
            let message = format!("{} of {} is not FLOAT32, BFLOAT16 or FLOAT16", tensor.dtype, tensor.name);
            return Err(Error::invalid(field("dtype"), message));
        }
    };
    let digest = match tensor.digest.as_slice() {
        [] => None,
        bytes => Some(<[u8; 16]>::try_from(bytes).map_err(|_| {
            let message = format!("{} bytes of {}; an XXH3-128 has 16", bytes.len(), tensor.name);
            Error::invalid(field("digest"), message)
        })?),
    };
    let allocation = tensor.allocation.map(|given| allocation(&field("allocation"), given)).transpose()?;
    let shape = tensor.shape.iter().map(|&d| usize::try_from(d)).collect::<std::result::Result<_, _>>();
    let shape = shape.map_err(|_| Error::invalid(field("shape"), format!("{:?} is too large", tensor.shape)))?;
    let payload = match (tensor.changed, tensor.payload_bytes) {
        (0, 0) => None,
        both => Some(both),
    };
    Ok(TensorEntry { name: tensor.name, dtype, shape, digest, payload, offset: tensor.offset, allocation })
}

fn allocation(path: &str, given: pb::DeviceAllocation) -> Result<Allocation> {
    check_length(format_args!("{path}.device_uuid"), &given.device_uuid, MAX_UUID_BYTES)?;
    Allocation::new(given.device_uuid, &given.handle).map_err(|error| error.within(path))
}

fn running_policy(value: i32) -> Result<RunningPolicy> {
    use pb::RunningPolicy as Policy;
    match Policy::try_from(value) {
        Ok(Policy::Unspecified | Policy::Keep) => Ok(RunningPolicy::Keep),
        Ok(Policy::Recompute) => Ok(RunningPolicy::Recompute),
        Ok(Policy::Wait) => Ok(RunningPolicy::Wait),
        Ok(Policy::Abort) => Ok(RunningPolicy::Abort),
        Err(_) => {
            Err(Error::invalid("header.running", format!("{value} is not a policy: KEEP, RECOMPUTE, WAIT or ABORT")))
        }
    }
}

fn source(source: Option<pb::Source>) -> Result<Source> {
    match source.map(|s| s.kind) {
        None => Ok(Source::Inline),
        Some(Some(pb::source::Kind::SharedMemory(s))) => {
            check_length("header.source.shared_memory.name", &s.name, MAX_SEGMENT_NAME_BYTES)?;
            Ok(Source::SharedMemory(s.name))
        }
        Some(Some(pb::source::Kind::Directory(d))) => {
            check_length("header.source.directory.path", &d.path, MAX_PATH_BYTES)?;
            Ok(Source::Directory(d.path))
        }
        Some(Some(pb::source::Kind::DeviceMemory(pb::DeviceMemory {}))) => Ok(Source::DeviceMemory),
        Some(None) => Err(Error::invalid(
            "header.source",
            "is empty; name shared_memory, a directory or device_memory, or leave it out",
        )),
    }
}

fn adapter_target(name: String, expected_generation: Option<u64>, evicts: bool) -> Result<Option<AdapterTarget>> {
    check_length("header.adapter", &name, MAX_ADAPTER_NAME_BYTES)?;
    if name.is_empty() && expected_generation.is_some() {
        return Err(Error::invalid("header.expected_generation", "is of a resident adapter; name it in adapter"));
    }
    if name.is_empty() && evicts {
        return Err(Error::invalid("header.evict_adapter", "is for a resident adapter; name it in adapter"));
    }
    Ok((!name.is_empty()).then_some(AdapterTarget { name, expected_generation, evicts }))
}

pub(in crate::server) fn open_update(update: &UpdateStatus) -> pb::OpenUpdate {
    let kind = match update.header.kind {
        UpdateKind::Lora => pb::UpdateKind::Lora,
        UpdateKind::Full => pb::UpdateKind::Full,
        UpdateKind::Delta => pb::UpdateKind::Delta,
    };
    pb::OpenUpdate {
        id: update.id,
        peer: update.peer.clone(),
        kind: kind.into(),
        adapter: update.header.adapter.as_ref().map(|adapter| adapter.name.clone()).unwrap_or_default(),
        new_version: update.header.new_version,
        open_seconds: update.open_for.as_secs_f64(),
        idle_seconds: update.idle_for.as_secs_f64(),
        committed: update.committed,
    }
}

/// The reply to a commit of a verified push. `staging` is the time from the header's arrival to the end of the
/// verification.
pub(in crate::server) fn update_reply(
    reply: &UpdateReply,
    digest: [u8; 16],
    bytes: u64,
    parameters: usize,
    staging: Duration,
) -> pb::UpdateResponse {
    pb::UpdateResponse {
        weight_version: reply.weight_version,
        pause_milliseconds: reply.pause.as_secs_f64() * 1e3,
        pending: reply.pending,
        adapter_generation: reply.adapter_generation,
        digest: digest.to_vec(),
        parameters: saturated(parameters),
        bytes,
        staging_milliseconds: staging.as_secs_f64() * 1e3,
    }
}

pub(in crate::server) fn adapters(
    adapters: Vec<AdapterStatus>,
    info: &pb::GetInfoResponse,
) -> pb::ListAdaptersResponse {
    let adapter = |a: AdapterStatus| pb::Adapter {
        name: a.name,
        generation: a.generation,
        rank: saturated(a.rank),
        bytes: a.bytes,
        leases: saturated(a.leases),
        retired: a.retired,
    };
    pb::ListAdaptersResponse {
        adapters: adapters.into_iter().map(adapter).collect(),
        max_adapters: info.max_adapters,
        max_lora_rank: info.max_lora_rank,
    }
}

fn saturated(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// The protocol's value for a data type.
pub(in crate::server) fn dtype(dtype: Dtype) -> pb::TensorDtype {
    match dtype {
        Dtype::F32 => pb::TensorDtype::Float32,
        Dtype::Bf16 => pb::TensorDtype::Bfloat16,
        Dtype::F16 => pb::TensorDtype::Float16,
    }
}
