//! One feed: the changes since its last event, as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use serde_json::{Map, Value, json};
use tokio::sync::{Semaphore, watch};

use crate::engine::{Command, EngineHandle, RequestList, RequestStatus};
use crate::error::shown;
use crate::memory::{MemoryReport, resident_bytes};
use crate::observe::{ErrorNote, Follower, Histogram, Phase, PushNote, Span};
use crate::server::security::Caller;
use crate::server::{ServerState, ServingContext};
use crate::types::{ENGINE_STATS, Tenant, TenantStats};

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
/// Most requests in the list: a page full.
const MOST_REQUESTS: usize = 50;
/// Shortest time between two lists of requests from the engine, however many feeds there are.
const REQUESTS_INTERVAL: Duration = Duration::from_secs(1);

/// Numbers of the engine that the page does not show as they are.
const NOT_SENT: &[&str] = &["steps", "finished_requests", "aborted_requests", "internal_errors", "dropped_tokens"];

/// A feed: its reader's permissions, and the state that was sent last.
pub(super) struct Feed {
    server: ServerState,
    requests: RequestListCache,
    caller: Caller,
    follower: Follower,
    /// Hash of each member as it was sent last.
    sent: BTreeMap<&'static str, u64>,
}

impl Feed {
    pub(super) fn new(server: &ServerState, requests: RequestListCache, caller: Caller) -> Self {
        let follower = server.observer.timeline.follow(HISTORY.as_nanos() as u64, MOST_SPANS);
        Self { server: server.clone(), requests, caller, follower, sent: BTreeMap::new() }
    }

    /// The next event, and whether there are spans left for another one at once.
    pub(super) fn next(&mut self) -> (Bytes, bool) {
        let news = self.follower.news(SPANS_PER_EVENT);
        let [engine, push] = news.spans.map(|spans| spans.iter().map(row).collect::<Value>());
        let mut event = format!("data: {{\"now\":{},\"spans\":{}", news.now, json!({ "engine": engine, "push": push }));
        let context = self.server.context().ok();
        // It has the names of phases, without which spans cannot be read.
        self.member(&mut event, "server", &self.server(context.as_deref()));
        if !news.has_more {
            self.member(&mut event, "engine", &self.engine());
            self.member(&mut event, "latencies", &self.latencies());
            self.member(&mut event, "outcomes", &self.outcomes());
            self.member(&mut event, "tool_calls", &self.tool_calls());
            self.member(&mut event, "tenants", &self.tenants());
            self.member(&mut event, "stall", &self.stall());
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
        let started = self.server.observer.timeline.origin_unix() / 1_000_000;
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
        let metrics = &self.server.observer.metrics;
        let stats = metrics.engine();
        let mut members = Map::from_iter([("lifecycle".to_owned(), json!(metrics.lifecycle()))]);
        let numbers = ENGINE_STATS.iter().zip(stats.values()).filter(|(stat, _)| !NOT_SENT.contains(&stat.name));
        members.extend(numbers.map(|(stat, value)| (stat.name.to_owned(), json!(value))));
        members.insert("panics".into(), json!(self.server.panics.count() + stats.internal_errors));
        members.into()
    }

    /// The buckets that have values: both bounds in seconds, of which the last may have no upper one, and the count.
    fn latencies(&self) -> Value {
        let [first_token, next_token] = self.server.observer.metrics.token_times().map(Histogram::buckets);
        json!({ "first_token": first_token, "next_token": next_token })
    }

    /// Number of requests that have ended, by outcome.
    fn outcomes(&self) -> Value {
        self.server.observer.metrics.outcomes().map(|(outcome, n)| (outcome.to_owned(), json!(n))).collect()
    }

    /// The last work that the watchdog has reported; null if there was none.
    fn stall(&self) -> Value {
        self.server.observer.journal.last_stall().map_or(Value::Null, |stall| {
            json!({
                "at": millis(stall.at),
                "phase": stall.phase.name(),
                "push": stall.push,
                "seconds": stall.lasted.as_secs_f64(),
                "is_over": stall.is_over,
            })
        })
    }

    /// The numbers of each tenant; empty as long as no request has named one.
    fn tenants(&self) -> Value {
        let tenants = self.server.observer.metrics.tenants.snapshot();
        if tenants.iter().all(|(name, _)| name.as_str().is_empty()) {
            return json!([]);
        }
        let row = |(name, stats): &(Tenant, TenantStats)| {
            json!({
                "name": name.as_str(),
                "running": stats.running_samples,
                "waiting": stats.waiting_samples,
                "kv_blocks": stats.kv_blocks,
                "prompt_tokens": stats.prompt_tokens,
                "generated_tokens": stats.generated_tokens,
            })
        };
        tenants.iter().map(row).collect()
    }

    /// Parsed and malformed tool calls by format, without formats that no sample has used.
    fn tool_calls(&self) -> Value {
        let counts = self.server.observer.metrics.tool_calls.snapshot();
        let used = counts.map(|(format, calls)| (format.name(), calls.parsed, calls.malformed()));
        used.filter(|(_, parsed, malformed)| parsed + malformed > 0)
            .map(|(format, parsed, malformed)| (format.to_owned(), json!({ "parsed": parsed, "malformed": malformed })))
            .collect()
    }

    /// The ledger in bytes, beside what the process really takes.
    fn memory(&self, context: Option<&ServingContext>) -> Value {
        let (ledger, host) = self.server.observer.metrics.ledgers();
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
        self.server.observer.journal.pushes().iter().take(MOST_NOTES).map(|push| self.push(push)).collect()
    }

    fn push(&self, push: &PushNote) -> Value {
        // The list of models has each adapter that a push has made resident, but not that of a failed push.
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
            "digest": format!("{:032x}", u128::from_be_bytes(push.digest)),
            "error": push.error.as_ref().map(|(kind, message)| self.error_text(kind, message)),
        })
    }

    fn errors(&self) -> Value {
        let error = |note: &ErrorNote| {
            let request_id = note.request_id.as_ref().filter(|_| self.sees_all());
            json!({ "at": millis(note.at), "error": self.error_text(note.kind, &note.message), "request": request_id })
        };
        self.server.observer.journal.errors().iter().take(MOST_NOTES).map(error).collect()
    }

    /// An error's kind and message. A caller that may abort only its own requests does not see the messages, which can
    /// quote what others have sent.
    fn error_text(&self, kind: &str, message: &str) -> Value {
        json!({ "kind": kind, "message": self.sees_all().then_some(message) })
    }

    fn sees_all(&self) -> bool {
        self.caller.limited_to.is_none()
    }

    /// The requests that have not ended. The engine is not asked while there are none.
    fn requests(&self, context: Option<Arc<ServingContext>>) -> Value {
        let engine = self.server.observer.metrics.engine();
        let has_any = engine.accepted_requests + engine.held_requests > 0;
        let answer = context.filter(|_| has_any).map(|context| self.requests.get(&context.engine)).unwrap_or_default();
        let (list, Some(at)) = &*answer else { return json!({ "total": 0, "oldest": [] }) };
        let began = |age: Duration| millis(SystemTime::now() - at.elapsed() - age);
        let oldest: Vec<_> = list.oldest.iter().map(|request| self.request(request, began(request.age))).collect();
        json!({ "total": list.total, "oldest": oldest })
    }

    /// A request, with its id if the reader may abort it.
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

/// The last list of the engine, and its time.
type Answer = Arc<(RequestList, Option<Instant>)>;

/// The list of requests, shared by clones. Asks the engine one question at a time, and does not wait for the answer.
#[derive(Clone)]
pub(super) struct RequestListCache {
    answer: watch::Sender<Answer>,
    /// Its only permit is with the pending question, which ends when the engine answers it or drops it.
    free: Arc<Semaphore>,
    /// Shortest time between two questions.
    interval: Duration,
}

impl Default for RequestListCache {
    fn default() -> Self {
        Self { answer: watch::Sender::default(), free: Arc::new(Semaphore::new(1)), interval: REQUESTS_INTERVAL }
    }
}

impl RequestListCache {
    /// The last answer. If it is old, this asks the engine for the next one.
    fn get(&self, engine: &EngineHandle) -> Answer {
        let answer = self.answer.borrow().clone();
        let is_due = answer.1.is_none_or(|at| at.elapsed() >= self.interval);
        if is_due && let Ok(question) = self.free.clone().try_acquire_owned() {
            let cache = self.answer.clone();
            let reply = Box::new(move |list| {
                cache.send_replace(Arc::new((list, Some(Instant::now()))));
                drop(question);
            });
            // A full queue drops the question, and the next call asks again.
            let _ = engine.send(Command::ListRequests { most: MOST_REQUESTS, reply });
        }
        answer
    }
}

/// A span as a row: number, index of its phase, start, end or null, sampled and computed tokens, version, bytes, push,
/// level, and the parts of a brief one. Times are nanoseconds since the timeline's start.
fn row(s: &Span) -> Value {
    let parts = if s.phase == Phase::Brief { s.parts.to_vec() } else { Vec::new() };
    let (phase, sampled, computed) = (s.phase as u8, s.sampled_tokens, s.computed_tokens);
    json!([s.id, phase, s.start, s.end, sampled, computed, s.weight_version, s.bytes, s.push, s.level, parts])
}

/// A time in milliseconds since 1970.
fn millis(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}

/// The entries of a ledger by their names.
fn named(ledger: &MemoryReport) -> Vec<(&'static str, u64)> {
    ledger.entries.iter().map(|(used_for, bytes)| (used_for.name(), *bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::observe::{Observer, PushKind, Transport};
    use crate::server::state::ServerState;
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
        let (_stage, server) = ServerState::new(observer.clone());
        let mut feed = Feed::new(&server, RequestListCache::default(), Caller::default());
        let first = event(&mut feed);
        let members: Vec<_> = first.as_object().expect("an object").keys().map(String::as_str).collect();
        let all = [
            "engine",
            "latencies",
            "outcomes",
            "tool_calls",
            "tenants",
            "stall",
            "memory",
            "pushes",
            "errors",
            "requests",
        ];
        assert_eq!(members, [&["now", "spans", "server"], &all[..]].concat());
        assert_eq!(first["engine"]["lifecycle"], "starting");
        let load = first["spans"]["engine"][0].as_array().expect("a row");
        assert_eq!((load.len(), &first["server"]["phases"][0]), (11, &json!("load")));
        assert!(load[3].is_null(), "it lasts");

        recorder.enter(Phase::Idle, Instant::now());
        let second = event(&mut feed);
        assert_eq!(second["spans"]["engine"].as_array().expect("rows").len(), 2);
        for name in ["engine", "errors", "latencies", "outcomes", "pushes", "requests", "server"] {
            assert!(second.get(name).is_none(), "{name} is as it was");
        }
        observer.journal.error(&Error::NotFound("x".into()), None);
        assert_eq!(event(&mut feed)["errors"][0]["error"]["kind"], "not_found");

        observer.metrics.next_token(Duration::from_millis(25));
        observer.metrics.next_token(Duration::from_secs(3600));
        observer.metrics.request_failed(&Error::NotFound("x".into()));
        let third = event(&mut feed);
        assert_eq!(third["latencies"]["next_token"], json!([[0.02, 0.025, 1], [80.0, null, 1]]));
        assert_eq!(third["outcomes"], json!({ "not_found": 1 }));
    }

    #[test]
    fn a_caller_that_may_abort_only_its_own_requests_sees_only_numbers_of_others() {
        let (observer, _recorder) = Observer::new();
        let (_stage, server) = ServerState::new(observer.clone());
        observer.journal.error(&Error::NotFound("secret".into()), Some("secret"));
        let push = observer.journal.push();
        push.is(PushKind::Adapter, Transport::Inline, Some("secret"));
        push.failed(&Error::DataLoss("secret".into()));
        let push = observer.journal.push();
        push.is(PushKind::Adapter, Transport::Inline, Some("resident"));
        push.applied(1, Duration::ZERO);
        let (own, other) = (Owner(1), Owner(2));
        let limited = Caller { owner: Some(own), limited_to: Some(own), ..Caller::default() };
        let mut feed = Feed::new(&server, RequestListCache::default(), limited);
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
        let all = Caller { owner: Some(own), ..Caller::default() };
        let mut all = Feed::new(&server, RequestListCache::default(), all);
        assert_eq!(event(&mut all).to_string().matches("secret").count(), 4);
        assert_eq!(all.request(&request(Some(other)), 0)["id"], "id");
    }

    /// A cache that asks again after `interval`, and what the engine is sent.
    fn cache(interval: Duration) -> (RequestListCache, EngineHandle, std::sync::mpsc::Receiver<Command>) {
        let (sender, commands) = std::sync::mpsc::sync_channel(4);
        (RequestListCache { interval, ..RequestListCache::default() }, EngineHandle::new(sender), commands)
    }

    #[test]
    fn the_engine_is_asked_one_question_at_a_time() {
        let (cache, engine, commands) = cache(Duration::ZERO);
        assert_eq!(cache.get(&engine).0.total, 0);
        // The engine is in a long step: no call waits for it, and the questions do not pile up.
        cache.get(&engine);
        let Ok(Command::ListRequests { most, reply }) = commands.try_recv() else { panic!("a question") };
        assert!(most == MOST_REQUESTS && commands.try_recv().is_err());
        reply(RequestList { total: 7, oldest: Vec::new() });
        assert_eq!(cache.get(&engine).0.total, 7);
        // A question that is dropped is asked again.
        drop(commands.try_recv().expect("the next question"));
        cache.get(&engine);
        assert!(commands.try_recv().is_ok());
    }

    #[test]
    fn the_engine_is_not_asked_while_the_answer_is_new() {
        let (cache, engine, commands) = cache(Duration::MAX);
        cache.get(&engine);
        let Ok(Command::ListRequests { reply, .. }) = commands.try_recv() else { panic!("a question") };
        reply(RequestList::default());
        cache.clone().get(&engine);
        assert!(commands.try_recv().is_err());
    }
}
