//! One feed: what has changed since its last event, as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::requests::Board;
use crate::engine::RequestStatus;
use crate::error::shown;
use crate::memory::{MemoryReport, resident_bytes};
use crate::observe::{ErrorNote, Follower, Phase, PushNote, Span};
use crate::server::context::ServingContext;
use crate::server::gate::Gate;
use crate::server::security::Caller;
use crate::types::ENGINE_STATS;

/// How far back the timeline of a new feed goes: some rounds of a trainer.
const HISTORY: Duration = Duration::from_secs(15 * 60);
/// Most spans of each track that a new feed begins with: at the most there can be in the long run, six minutes.
const MOST_SPANS: u64 = 8192;
/// Spans of each track in one event, which then takes 30 KB or so.
const SPANS_PER_EVENT: u64 = 512;
/// Pushes, and errors, in the lists: what a page shows.
const MOST_NOTES: usize = 20;
/// Longest id of a request that is sent, in bytes.
const ID_BYTES: usize = 80;

/// Numbers of the engine that the page does not show as they are.
const NOT_SENT: &[&str] = &["steps", "finished_requests", "aborted_requests", "internal_errors", "dropped_tokens"];

/// What is known of a feed's reader and of what it has been told.
pub(super) struct Feed {
    gate: Gate,
    board: Board,
    caller: Caller,
    follower: Follower,
    /// Hash of each member as it was sent last.
    sent: BTreeMap<&'static str, u64>,
}

impl Feed {
    pub(super) fn new(gate: &Gate, board: Board, caller: Caller) -> Self {
        let follower = gate.observer.timeline.follow(HISTORY.as_nanos() as u64, MOST_SPANS);
        Self { gate: gate.clone(), board, caller, follower, sent: BTreeMap::new() }
    }

    /// The next event, and whether there are spans left for another one at once.
    pub(super) fn next(&mut self) -> (Bytes, bool) {
        let news = self.follower.news(SPANS_PER_EVENT);
        let [engine, push] = news.spans.map(|spans| spans.iter().map(SpanRow::from).collect::<Vec<_>>());
        let mut event = format!("data: {{\"now\":{},\"spans\":{}", news.now, json!({ "engine": engine, "push": push }));
        let context = self.gate.look().ok();
        // It has the names of phases, without which spans cannot be read.
        self.member(&mut event, "server", &self.server(context.as_deref()));
        if !news.has_more {
            self.member(&mut event, "engine", &self.engine());
            self.member(&mut event, "memory", &self.memory(context.as_deref()));
            self.member(&mut event, "pushes", &self.pushes());
            self.member(&mut event, "errors", &self.errors());
            self.member(&mut event, "requests", &self.requests(context));
        }
        event.push_str("}\n\n");
        (event.into(), news.has_more)
    }

    /// Adds a member, if it is not what was sent last.
    fn member(&mut self, event: &mut String, name: &'static str, value: &Value) {
        let text = value.to_string();
        let mut hasher = DefaultHasher::new();
        text.hash(&mut hasher);
        let hash = hasher.finish();
        if self.sent.insert(name, hash) != Some(hash) {
            write!(event, ",\"{name}\":{text}").expect("writing to a string");
        }
    }

    /// Facts that do not change once the model is loaded.
    fn server(&self, context: Option<&ServingContext>) -> Value {
        let started = self.gate.observer.timeline.origin_unix() / 1_000_000;
        let phases: Vec<_> = Phase::ALL.into_iter().map(Phase::name).collect();
        let version = env!("CARGO_PKG_VERSION");
        let Some(ServingContext { info, model, .. }) = context else {
            return json!({ "started": started, "version": version, "phases": phases });
        };
        json!({
            "started": started,
            "version": version,
            "phases": phases,
            "model": info.model,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "device": info.device,
            "kernel": info.kernel,
            "tensor_parallel_size": info.tensor_parallel_size,
            "parameters": info.parameters,
            "max_model_len": model.max_model_len,
            "max_num_seqs": info.max_num_seqs,
            "block_size": info.block_size,
        })
    }

    /// The numbers that the engine published last.
    fn engine(&self) -> Value {
        let metrics = &self.gate.observer.metrics;
        let stats = metrics.engine();
        let mut members = Map::from_iter([("lifecycle".to_owned(), json!(metrics.lifecycle()))]);
        let numbers = ENGINE_STATS.iter().zip(stats.values()).filter(|(stat, _)| !NOT_SENT.contains(&stat.name));
        members.extend(numbers.map(|(stat, value)| (stat.name.to_owned(), json!(value))));
        members.insert("panics".into(), json!(self.gate.panics.count() + stats.internal_errors));
        members.into()
    }

    /// The ledger in bytes, beside what the process really takes.
    fn memory(&self, context: Option<&ServingContext>) -> Value {
        let (ledger, host) = self.gate.observer.metrics.ledgers();
        json!({
            "total": ledger.total,
            "ceiling": ledger.ceiling,
            "entries": named(&ledger),
            "host": host.map(|host| json!({"total": host.total, "ceiling": host.ceiling, "entries": named(&host)})),
            "resident": resident_bytes(),
            "under_way": context.map_or(0, |context| context.traffic.used()),
        })
    }

    fn pushes(&self) -> Value {
        let pushes = self.gate.observer.journal.pushes();
        pushes.iter().take(MOST_NOTES).map(|push| self.push(push)).collect()
    }

    fn push(&self, push: &PushNote) -> Value {
        // An adapter that a push has made resident is in everybody's list of models; that of a failed push is not.
        let adapter = push.adapter.as_ref().filter(|_| push.error.is_none() || self.sees_all());
        json!({
            "at": millis(push.at),
            "number": push.number,
            "kind": push.kind.name(),
            "transport": push.transport.name(),
            "adapter": adapter,
            "bytes": push.bytes,
            "staging": push.staging.as_secs_f64(),
            "pause": push.pause.map(|pause| pause.as_secs_f64()),
            "version": push.weight_version,
            "digest": hex(push.digest),
            "error": push.error.as_ref().map(|(kind, message)| self.error_text(kind, message)),
        })
    }

    fn errors(&self) -> Value {
        let errors = self.gate.observer.journal.errors();
        errors.iter().take(MOST_NOTES).map(|error| self.error(error)).collect()
    }

    fn error(&self, error: &ErrorNote) -> Value {
        let ErrorNote { at, kind, message, request_id } = error;
        let request_id = request_id.as_ref().filter(|_| self.sees_all());
        json!({ "at": millis(*at), "error": self.error_text(kind, message), "request": request_id })
    }

    /// An error's kind and message. Who may end only own requests is not told the messages, which can quote what others
    /// have sent.
    fn error_text(&self, kind: &str, message: &str) -> Value {
        json!({ "kind": kind, "message": self.sees_all().then_some(message) })
    }

    fn sees_all(&self) -> bool {
        self.caller.limited_to.is_none()
    }

    /// The requests that have not ended. The engine is not asked while there are none.
    fn requests(&self, context: Option<Arc<ServingContext>>) -> Value {
        let engine = self.gate.observer.metrics.engine();
        let none = engine.accepted_requests + engine.held_requests == 0;
        let Some(context) = context.filter(|_| !none) else { return json!({ "total": 0, "oldest": [] }) };
        let answer = self.board.look(&context.engine);
        let (list, Some(at)) = &*answer else { return json!({ "total": 0, "oldest": [] }) };
        let began = |age: Duration| millis(SystemTime::now() - at.elapsed() - age);
        let oldest: Vec<_> = list.oldest.iter().map(|request| self.request(request, began(request.age))).collect();
        json!({ "total": list.total, "oldest": oldest })
    }

    /// A request. Ids are told to those alone who may end it.
    fn request(&self, request: &RequestStatus, began: u64) -> Value {
        let RequestStatus { id, owner, progress, prompts, prompt_tokens, samples, open_samples, tokens, .. } = request;
        let is_theirs = self.sees_all() || self.caller.limited_to == *owner;
        json!({
            "id": is_theirs.then(|| shown(id, ID_BYTES)),
            "progress": progress.name(),
            "prompts": prompts,
            "prompt_tokens": prompt_tokens,
            "samples": samples,
            "open_samples": open_samples,
            "tokens": tokens,
            // In tenths of a second, so that a request that makes no progress is not sent again.
            "began": began / 100 * 100,
        })
    }
}

/// A span as a row: number, index of its phase, start, end or null, sampled and computed tokens, version, bytes, push,
/// level, and the parts of a brief one. Times are nanoseconds since the timeline's start.
#[derive(Serialize)]
struct SpanRow(u64, u8, u64, Option<u64>, u64, u64, u64, u64, u64, u64, Vec<u64>);

impl From<&Span> for SpanRow {
    fn from(s: &Span) -> Self {
        let parts = if s.phase == Phase::Brief { s.parts.to_vec() } else { Vec::new() };
        let counts = (s.sampled_tokens, s.computed_tokens);
        Self(s.id, s.phase as u8, s.start, s.end, counts.0, counts.1, s.weight_version, s.bytes, s.push, s.level, parts)
    }
}

/// A time in milliseconds since 1970.
fn millis(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

fn hex(digest: [u8; 16]) -> String {
    format!("{:032x}", u128::from_be_bytes(digest))
}

/// The entries of a ledger by their names.
fn named(ledger: &MemoryReport) -> Vec<(&'static str, u64)> {
    ledger.entries.iter().map(|(used_for, bytes)| (used_for.name(), *bytes)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use crate::error::Error;
    use crate::observe::{Observer, PushKind, Transport};
    use crate::server::gate::gate;
    use crate::types::Owner;

    fn event(feed: &mut Feed) -> Value {
        let (bytes, has_more) = feed.next();
        assert!(!has_more);
        let text = std::str::from_utf8(&bytes).expect("text");
        let json = text.strip_prefix("data: ").and_then(|text| text.strip_suffix("\n\n")).expect("one event");
        assert!(!json.contains('\n'));
        serde_json::from_str(json).expect("JSON")
    }

    #[test]
    fn an_event_has_what_has_changed() {
        let (observer, mut recorder) = Observer::new();
        let (_keeper, gate) = gate(observer.clone());
        let mut feed = Feed::new(&gate, Board::default(), Caller::default());
        let first = event(&mut feed);
        let members: Vec<_> = first.as_object().expect("an object").keys().map(String::as_str).collect();
        assert_eq!(members, ["now", "spans", "server", "engine", "memory", "pushes", "errors", "requests"]);
        assert_eq!(first["engine"]["lifecycle"], "starting");
        let load = first["spans"]["engine"][0].as_array().expect("a row");
        assert_eq!((load.len(), &first["server"]["phases"][0]), (11, &json!("load")));
        assert!(load[3].is_null(), "it lasts");

        recorder.enter(Phase::Idle, Instant::now());
        let second = event(&mut feed);
        assert_eq!(second["spans"]["engine"].as_array().expect("rows").len(), 2);
        for name in ["engine", "errors", "pushes", "requests", "server"] {
            assert!(second.get(name).is_none(), "{name} is as it was");
        }
        observer.journal.error(&Error::NotFound("x".into()), None);
        assert_eq!(event(&mut feed)["errors"][0]["error"]["kind"], "not_found");
    }

    #[test]
    fn who_may_end_only_own_requests_sees_no_more_of_others_than_numbers() {
        let (observer, _recorder) = Observer::new();
        let (_keeper, gate) = gate(observer.clone());
        observer.journal.error(&Error::NotFound("secret".into()), Some("secret"));
        let push = observer.journal.push();
        push.is(PushKind::Adapter, Transport::Inline, Some("secret"));
        push.failed(&Error::DataLoss("secret".into()));
        let push = observer.journal.push();
        push.is(PushKind::Adapter, Transport::Inline, Some("resident"));
        push.applied(1, Duration::ZERO);
        let (own, other) = (Owner(1), Owner(2));
        let limited = Caller { owner: Some(own), limited_to: Some(own) };
        let mut feed = Feed::new(&gate, Board::default(), limited);
        let seen = event(&mut feed).to_string();
        assert!(!seen.contains("secret") && seen.contains("not_found") && seen.contains("data_loss"), "{seen}");
        assert!(seen.contains("resident"), "{seen}");
        let request = |owner| RequestStatus {
            id: "id".into(),
            owner,
            progress: crate::engine::RequestProgress::Running,
            prompts: 1,
            prompt_tokens: 2,
            samples: 3,
            open_samples: 1,
            tokens: 4,
            age: Duration::from_secs(1),
        };
        assert_eq!(feed.request(&request(Some(own)), 0)["id"], "id");
        assert_eq!(feed.request(&request(Some(other)), 0)["id"], Value::Null);
        let mut all = Feed::new(&gate, Board::default(), Caller { owner: Some(own), limited_to: None });
        assert_eq!(event(&mut all).to_string().matches("secret").count(), 4);
        assert_eq!(all.request(&request(Some(other)), 0)["id"], "id");
    }
}
