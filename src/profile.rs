//! The profile of `--profile`: the time of each part of a step, measured from the trace-level spans of our own crates.
//!
//! A span measures the time of the thread that opened it. A rank's thread opens an operator's span and closes it when
//! the last thread of its pool has finished, so it measures wall time. [`Spans`] adds each span to its parent when it
//! closes. A root span's tree goes to one collecting thread, so that a step costs one message. Without `--profile`
//! [`Spans`] is not installed, and a span costs the comparison of two levels.

use std::fmt::Write as _;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::LookupSpan;

use crate::error::{Error, Result};

/// Name of the root span of the engine's thread. The report gives shares of its time.
const STEP: &str = "step";

/// Numbers that distinguish spans of the same name, such as the rows and columns of a matrix.
type Shape = [Option<u64>; 2];

/// Makes a layer that measures the spans of our crates, and the handle that reports them.
///
/// # Errors
/// `Internal` if the collecting thread cannot be started.
pub fn profile<S>() -> Result<(impl Layer<S>, Profile)>
where
    S: Subscriber + for<'s> LookupSpan<'s>,
{
    // The channel is unbounded: each step sends one message, and the collector handles it in far less time than a step
    // takes.
    let (sender, messages) = channel();
    let thread = std::thread::Builder::new().name("profile".into()).spawn(move || collect(&messages));
    thread.map_err(|e| Error::Internal(format!("the profile's thread did not start: {e}")))?;
    let layer = Spans { sender: sender.clone() };
    Ok((layer.with_filter(filter_fn(is_ours)), Profile { sender }))
}

/// Whether a span is measured: trace-level spans of our crates exist only for the profile.
fn is_ours(metadata: &Metadata<'_>) -> bool {
    metadata.is_span() && *metadata.level() == Level::TRACE && metadata.target().starts_with("rollout_")
}

/// Handle to the measurements, which prints them. Cheap to clone.
#[derive(Clone)]
pub struct Profile {
    sender: Sender<Message>,
}

impl Profile {
    /// A table of the spans since the last report, or since the start.
    pub fn report(&self) -> String {
        let (reply, table) = channel();
        // The collector lives as long as a sender does, so this send succeeds.
        let _ = self.sender.send(Message::Report(reply));
        table.recv().unwrap_or_default()
    }
}

enum Message {
    /// The tree of a closed span that has no parent.
    Root(Node),
    Report(Sender<String>),
}

fn collect(messages: &Receiver<Message>) {
    let (mut since, mut roots) = (Instant::now(), Vec::new());
    for message in messages {
        match message {
            Message::Root(node) => absorb(&mut roots, node),
            Message::Report(reply) => {
                let table = table(std::mem::take(&mut roots), since.elapsed());
                since = Instant::now();
                // The thread that requested the report may be gone.
                let _ = reply.send(table);
            }
        }
    }
}

/// All spans of one name and shape below the same parent, summed.
#[derive(Debug, Default, PartialEq)]
struct Node {
    name: &'static str,
    shape: Shape,
    calls: u64,
    busy: Duration,
    /// Floating-point operations that the spans declare; `bytes` are the bytes of memory that they declare.
    flop: u64,
    bytes: u64,
    children: Vec<Node>,
}

/// Adds `node` to the node of the same name and shape in `nodes`, or appends it.
fn absorb(nodes: &mut Vec<Node>, node: Node) {
    let Some(known) = nodes.iter_mut().find(|known| known.name == node.name && known.shape == node.shape) else {
        return nodes.push(node);
    };
    known.calls += node.calls;
    known.busy += node.busy;
    known.flop += node.flop;
    known.bytes += node.bytes;
    for child in node.children {
        absorb(&mut known.children, child);
    }
}

impl Visit for Node {
    fn record_u64(&mut self, field: &Field, value: u64) {
        match field.name() {
            "flop" => self.flop += value,
            "bytes" => self.bytes += value,
            _ => {
                if let Some(free) = self.shape.iter_mut().find(|number| number.is_none()) {
                    *free = Some(value);
                }
            }
        }
    }

    /// Ignores fields that are not numbers.
    fn record_debug(&mut self, _: &Field, _: &dyn std::fmt::Debug) {}
}

struct Spans {
    sender: Sender<Message>,
}

/// A span that is still open, with the sums of its closed children.
struct Open {
    entered: Instant,
    node: Node,
}

impl<S> Layer<S> for Spans
where
    S: Subscriber + for<'s> LookupSpan<'s>,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut node = Node { name: attributes.metadata().name(), calls: 1, ..Node::default() };
        attributes.record(&mut node);
        span.extensions_mut().insert(Open { entered: Instant::now(), node });
    }

    fn on_enter(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            open.entered = Instant::now();
        }
    }

    fn on_exit(&self, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        if let Some(open) = span.extensions_mut().get_mut::<Open>() {
            open.node.busy += open.entered.elapsed();
        }
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(Open { node, .. }) = span.extensions_mut().remove::<Open>() else { return };
        match span.parent() {
            Some(parent) => {
                if let Some(open) = parent.extensions_mut().get_mut::<Open>() {
                    absorb(&mut open.node.children, node);
                }
            }
            // Sending fails only when the process ends and the collector is gone.
            None => drop(self.sender.send(Message::Root(node))),
        }
    }
}

/// Formats the spans of the time `wall` as a table: one line per span, the longest first, children indented below their
/// parent.
fn table(mut roots: Vec<Node>, wall: Duration) -> String {
    let step = roots.iter().find(|root| root.name == STEP);
    let (steps, busy) = step.map_or((0, Duration::ZERO), |step| (step.calls, step.busy));
    let (wall, of) = (wall.as_secs_f64(), busy.as_secs_f64());
    let mut text = format!("profile: {steps} steps took {of:.3} s of {wall:.3} s\n");
    let _ = writeln!(
        text,
        "{:<40} {:>8} {:>9} {:>8} {:>10} {:>8} {:>7}",
        "span", "calls", "s", "of steps", "us a call", "GFLOP/s", "GB/s"
    );
    lines(&mut text, &mut roots, 0, of);
    text
}

fn lines(text: &mut String, nodes: &mut [Node], depth: usize, of: f64) {
    nodes.sort_by_key(|node| std::cmp::Reverse(node.busy));
    for node in nodes {
        let inside: Duration = node.children.iter().map(|child| child.busy).sum();
        line(text, node, depth, of);
        if !node.children.is_empty() {
            lines(text, &mut node.children, depth + 1, of);
            let rest = Node { name: "in none of these", busy: node.busy.saturating_sub(inside), ..Node::default() };
            line(text, &rest, depth + 1, of);
        }
    }
}

fn line(text: &mut String, node: &Node, depth: usize, of: f64) {
    let seconds = node.busy.as_secs_f64();
    let numbers: Vec<String> = node.shape.iter().flatten().map(u64::to_string).collect();
    let label = format!("{:indent$}{} {}", "", node.name, numbers.join(" x "), indent = 2 * depth);
    let share = if of > 0.0 { format!("{:.1} %", 100.0 * seconds / of) } else { String::new() };
    let (calls, each) = match node.calls {
        0 => (String::new(), String::new()),
        calls => (calls.to_string(), format!("{:.1}", 1e6 * seconds / calls as f64)),
    };
    let rate = |amount: u64| if amount == 0 { String::new() } else { format!("{:.1}", amount as f64 / seconds / 1e9) };
    let (flop, bytes) = (rate(node.flop), rate(node.bytes));
    let line = format!("{label:<40} {calls:>8} {seconds:>9.3} {share:>8} {each:>10} {flop:>8} {bytes:>7}");
    let _ = writeln!(text, "{}", line.trim_end());
}

#[cfg(test)]
mod tests {
    use tracing::trace_span;
    use tracing_subscriber::layer::SubscriberExt;
    use tracing_subscriber::registry;

    use super::*;

    /// The lines of the report about what `run` does.
    fn reported(run: impl FnOnce()) -> Vec<String> {
        let (layer, profile) = profile().unwrap();
        tracing::subscriber::with_default(registry().with(layer), run);
        profile.report().lines().map(str::to_string).collect()
    }

    /// The columns after `label` in the report's line that starts with it.
    fn columns<'a>(report: &'a [String], label: &str) -> Vec<&'a str> {
        let is_it = |line: &&String| line.trim_start().starts_with(label);
        let line = report.iter().find(is_it).unwrap_or_else(|| panic!("no line {label:?} in {report:#?}"));
        line.trim_start()[label.len()..].split_whitespace().collect()
    }

    #[test]
    fn spans_are_summed_below_their_parents_by_name_and_shape() {
        let report = reported(|| {
            for _ in 0..3 {
                let _step = trace_span!("step").entered();
                for k in [4_u64, 5] {
                    let _operator = trace_span!("operator", n = 2_u64, k, flop = 1_000_000_000_u64).entered();
                    std::thread::sleep(Duration::from_millis(2));
                }
                let _named_alike = trace_span!("outer").entered();
                let _inner = trace_span!("operator", n = 2_u64, k = 4_u64).entered();
            }
        });
        assert!(report[0].starts_with("profile: 3 steps"), "{report:#?}");
        assert_eq!(columns(&report, "step")[..1], ["3"]);
        let alone = columns(&report, "operator 2 x 4");
        assert_eq!(alone[0], "3", "one below another parent is not counted here: {report:#?}");
        let (seconds, rate): (f64, f64) = (alone[1].parse().unwrap(), alone[5].parse().unwrap());
        assert!((0.006..1.0).contains(&seconds), "three of 2 ms: {seconds}");
        assert!((rate * seconds - 3.0).abs() < 0.5, "3 GFLOP in {seconds} s are not {rate} GFLOP/s");
        assert_eq!(columns(&report, "operator 2 x 5")[0], "3");
        let order: Vec<&str> = report[2..].iter().map(|line| line.trim_start()).collect();
        assert!(order[0].starts_with("step") && order[1].starts_with("operator 2 x"), "{report:#?}");
        assert!(report.iter().any(|line| line.starts_with("    operator 2 x 4")), "{report:#?}");
        assert!(order[order.len() - 1].starts_with("in none of these"), "{report:#?}");
    }

    #[test]
    fn the_shares_of_a_span_and_of_what_is_in_none_add_up() {
        let report = reported(|| {
            let _step = trace_span!("step").entered();
            trace_span!("inside").in_scope(|| std::thread::sleep(Duration::from_millis(30)));
            std::thread::sleep(Duration::from_millis(10));
        });
        let share = |label: &str, at: usize| columns(&report, label)[at].parse::<f64>().unwrap();
        assert_eq!(share("step", 2), 100.0);
        let (inside, rest) = (share("inside", 2), share("in none of these", 1));
        assert!((inside + rest - 100.0).abs() < 0.2 && inside > rest && rest > 5.0, "{inside} % and {rest} %");
    }

    #[test]
    fn a_report_starts_anew_and_other_crates_spans_are_left_out() {
        let (layer, profile) = profile().unwrap();
        let subscriber = registry().with(layer);
        tracing::subscriber::with_default(subscriber, || {
            trace_span!("step").in_scope(|| trace_span!(target: "h2::codec", "step").in_scope(|| ()));
            tracing::info_span!("request").in_scope(|| ());
            let first = profile.report();
            assert_eq!(first.lines().count(), 3, "{first}");
            assert!(first.starts_with("profile: 1 steps"), "{first}");
            assert!(profile.report().starts_with("profile: 0 steps"));
        });
    }
}
