//! What observers are told of the server itself, beside what the engine publishes.

use super::gate::Gate;
use crate::memory::{open_files_limit, resident_bytes};
use crate::observe::ServerFacts;

/// All metrics in Prometheus' text format. The engine is not asked.
pub(super) fn metrics(gate: &Gate) -> String {
    let observer = &gate.observer;
    let context = gate.look().ok();
    let info = context.as_ref().map_or_else(Vec::new, |context| {
        let info = &context.info;
        vec![
            ("model", info.model.clone()),
            ("architecture", info.architecture.clone()),
            ("dtype", info.dtype.clone()),
            ("device", info.device.clone()),
            ("kernel", info.kernel.clone()),
            ("tensor_parallel_size", info.tensor_parallel_size.to_string()),
        ]
    });
    observer.metrics.render(
        &observer.timeline,
        &ServerFacts {
            info,
            panics: gate.panics.count(),
            log_lines_dropped: observer.logs.as_ref().map_or(0, |logs| logs.dropped()),
            resident_bytes: resident_bytes(),
            traffic_bytes: context.map_or(0, |context| context.traffic.used()),
            open_files: open_files(),
            max_open_files: open_files_limit(),
            started_unix_seconds: observer.timeline.origin_unix() as f64 / 1e9,
        },
    )
}

/// File descriptors that the process has open, where the system tells.
fn open_files() -> Option<u64> {
    std::fs::read_dir("/proc/self/fd").ok().map(|entries| entries.count() as u64)
}
