//! The server at rest: it is brought back to running after each batch, and compared with its state before the first.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use prost::Message;
use rollout_server::server::pb::{self, generate_response::Event, prompt::Kind};
use tonic::Code;

use super::wire::{Call, Connection, Outcome, PATIENCE, envelope};

/// Facts of the server that must be the same before the first batch and after each.
pub struct Rest {
    ledger: BTreeMap<String, u64>,
    /// Policy version and count of updates with which the checkpoint's own weights serve now.
    policy: std::cell::Cell<(u64, u64)>,
    checksums: Vec<pb::ParameterChecksum>,
    samples: Vec<Bits>,
}

/// Tokens and the bits of both log-probabilities of one sample.
type Bits = (Vec<u32>, Vec<u32>, Vec<u32>);

/// Makes a call and returns the one message of its answer.
///
/// # Errors
/// A text about any other answer.
pub async fn ask<Q: Message + std::fmt::Debug, A: Message + Default>(
    connection: &Connection,
    method: &'static str,
    request: &Q,
) -> Result<A, String> {
    match connection.call(&Call::of(method, request)).await? {
        Outcome::Answered { code: Code::Ok, messages, .. } if messages.len() == 1 => {
            A::decode(messages[0].clone()).map_err(|e| format!("{method}: the reply is no message: {e}"))
        }
        other => Err(format!("{method} {request:?}: {other:?}")),
    }
}

pub async fn status(connection: &Connection) -> Result<pb::GetStatusResponse, String> {
    ask(connection, "rollout.v1.Control/GetStatus", &pb::GetStatusRequest {}).await
}

pub async fn parameters(connection: &Connection) -> Vec<pb::Parameter> {
    let reply = ask(connection, "rollout.v1.Weights/ListParameters", &pb::ListParametersRequest {}).await;
    let reply: pb::ListParametersResponse = reply.expect("it is running");
    reply.parameters
}

async fn checksums(connection: &Connection) -> Result<Vec<pb::ParameterChecksum>, String> {
    let request = pb::ChecksumRequest::default();
    let reply: pb::ChecksumResponse = ask(connection, "rollout.v1.Weights/Checksum", &request).await?;
    Ok(reply.parameters)
}

/// Samples whose tokens depend on every weight.
async fn samples(connection: &Connection) -> Result<Vec<Bits>, String> {
    let prompt = |kind| pb::Prompt { kind: Some(kind), ..Default::default() };
    let request = pb::GenerateRequest {
        prompts: vec![
            prompt(Kind::Tokens(pb::TokenIds { ids: (20..61).collect() })),
            prompt(Kind::Text("Hello, how are you?".into())),
        ],
        n: Some(3),
        sampling: Some(pb::SamplingParams { max_tokens: Some(12), seed: Some(5), ..Default::default() }),
        ..Default::default()
    };
    let outcome = connection.call(&Call::of("rollout.v1.Rollout/Generate", &request)).await?;
    let Outcome::Answered { code: Code::Ok, messages, .. } = outcome else {
        return Err(format!("the reference request: {outcome:?}"));
    };
    let event = |message| pb::GenerateResponse::decode(message).ok().and_then(|message| message.event);
    let mut completions: Vec<pb::Completion> = messages.into_iter().filter_map(event).filter_map(completion).collect();
    completions.sort_by_key(|c| (c.prompt_index, c.sample_index));
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect();
    Ok(completions.into_iter().map(|c| (c.token_ids, bits(&c.logprobs), bits(&c.raw_logprobs))).collect())
}

fn completion(event: Event) -> Option<pb::Completion> {
    match event {
        Event::Completion(completion) => Some(completion),
        _ => None,
    }
}

fn ledger(status: &pb::GetStatusResponse) -> BTreeMap<String, u64> {
    let entries = status.memory.iter().flat_map(|memory| &memory.entries);
    entries.filter(|entry| entry.bytes > 0).map(|entry| (entry.name.clone(), entry.bytes)).collect()
}

impl Rest {
    pub async fn before(connection: &Connection) -> Self {
        let status = status(connection).await.expect("it is running");
        Self {
            ledger: ledger(&status),
            policy: (status.weight_version, status.updates).into(),
            checksums: checksums(connection).await.expect("it is running"),
            samples: samples(connection).await.expect("it is running"),
        }
    }

    /// Brings the server back to running with the checkpoint's weights and no adapters, and checks it.
    ///
    /// # Errors
    /// A text about the first fact that has changed.
    pub async fn check(&self, connection: &Connection) -> Result<(), String> {
        run_again(connection).await?;
        remove_adapters(connection).await?;
        let now = status(connection).await?;
        if now.internal_errors > 0 {
            return Err(format!("{} requests have met a bug", now.internal_errors));
        }
        if (now.weight_version, now.updates) != self.policy.get() {
            restore(connection).await?;
            let now = status(connection).await?;
            self.policy.set((now.weight_version, now.updates));
        }
        self.comes_to_rest(connection).await?;
        if checksums(connection).await? != self.checksums {
            return Err("the weights are not those of the checkpoint".into());
        }
        let samples = samples(connection).await?;
        if samples != self.samples {
            return Err(format!("the reference samples were {:?}\n    and are {samples:?}", self.samples));
        }
        self.comes_to_rest(connection).await
    }

    async fn comes_to_rest(&self, connection: &Connection) -> Result<(), String> {
        let started = Instant::now();
        loop {
            let now = status(connection).await?;
            let requests = now.running_requests + now.held_requests + now.running_samples + now.waiting_samples;
            let is_idle = requests == 0 && now.free_blocks == now.total_blocks && !now.updating;
            let memory = now.memory.clone().unwrap_or_default();
            if is_idle && ledger(&now) == self.ledger && memory.resident_bytes <= memory.ceiling_bytes {
                return Ok(());
            }
            if started.elapsed() > PATIENCE {
                return Err(format!("does not come to rest; the ledger was {:?}, and now: {now:?}", self.ledger));
            }
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }
}

/// Wakes, resumes and reloads the server until it serves requests.
async fn run_again(connection: &Connection) -> Result<(), String> {
    let started = Instant::now();
    loop {
        let now = status(connection).await?;
        let (method, request) = match now.lifecycle() {
            pb::Lifecycle::Running => return Ok(()),
            pb::Lifecycle::Paused => ("rollout.v1.Control/Resume", Vec::new()),
            pb::Lifecycle::Asleep => ("rollout.v1.Control/Wake", Vec::new()),
            pb::Lifecycle::WeightsMissing => {
                ("rollout.v1.Control/Wake", pb::WakeRequest { reload: true, ..Default::default() }.encode_to_vec())
            }
            other => return Err(format!("the server is {other:?}")),
        };
        let outcome = connection.call(&Call::raw(method, vec![envelope(&request)])).await?;
        if started.elapsed() > PATIENCE {
            return Err(format!("cannot be brought to run: {now:?}, {outcome:?}"));
        }
    }
}

async fn remove_adapters(connection: &Connection) -> Result<(), String> {
    let list = pb::ListAdaptersRequest {};
    let reply: pb::ListAdaptersResponse = ask(connection, "rollout.v1.Weights/ListAdapters", &list).await?;
    for adapter in reply.adapters.into_iter().filter(|adapter| !adapter.retired) {
        let request = pb::RemoveAdapterRequest { name: adapter.name, expected_generation: None };
        let _: pb::RemoveAdapterResponse = ask(connection, "rollout.v1.Weights/RemoveAdapter", &request).await?;
    }
    Ok(())
}

/// Has the server read the checkpoint again, under version 0.
async fn restore(connection: &Connection) -> Result<(), String> {
    let level = pb::SleepLevel::SleepLevel2.into();
    let sleep = pb::SleepRequest { level, mode: pb::DrainMode::Abort.into() };
    let _: pb::SleepResponse = ask(connection, "rollout.v1.Control/Sleep", &sleep).await?;
    let wake = pb::WakeRequest { tags: Vec::new(), reload: true };
    let _: pb::WakeResponse = ask(connection, "rollout.v1.Control/Wake", &wake).await?;
    let header = pb::Header {
        kind: pb::UpdateKind::Lora.into(),
        new_version: Some(0),
        force_version: true,
        ..Default::default()
    };
    let kinds = [pb::update_request::Kind::Header(header), pb::update_request::Kind::Commit(pb::Commit {})];
    let body = kinds.map(|kind| envelope(&pb::UpdateRequest { kind: Some(kind) }.encode_to_vec()));
    let started = Instant::now();
    // An update may still be open whose client has gone.
    loop {
        match connection.call(&Call::raw("rollout.v1.Weights/Update", body.to_vec())).await? {
            Outcome::Answered { code: Code::Ok, .. } => return Ok(()),
            Outcome::Answered { code: Code::Aborted, .. } if started.elapsed() < PATIENCE => {
                tokio::time::sleep(Duration::from_millis(3)).await;
            }
            other => return Err(format!("the base cannot be pushed: {other:?}")),
        }
    }
}
