//! Freed memory goes back to the system, whichever thread took it, and what a push declares takes no more than is
//! counted for it. The measured process must have no other threads and must start as the server does, so this file has
//! a `main` of its own instead of the test harness.

use std::fmt::Write as _;
use std::sync::Arc;

use rollout_server::memory::{Traffic, resident_bytes, share_one_heap, trim};
use rollout_server::weights::{
    DeclaredPush, Dtype, ParamSpec, Parameters, ShardRule, Source, Sources, TensorEntry, UpdateHeader, UpdateKind,
};

const KEPT_BYTES: usize = 16 << 20;
const BLOCK_BYTES: usize = 64 << 10;

/// Bytes beside what is counted: the test's own, and what the allocator keeps at the end of the heap.
const SLACK_BYTES: u64 = 4 << 20;

fn main() {
    share_one_heap();
    what_a_thread_has_taken_goes_back();
    let config = |entry: &dyn Fn(usize) -> String, count: usize| {
        let table = (0..count).map(|i| format!("{}: 8", entry(i))).collect::<Vec<_>>().join(",");
        format!(r#"{{"peft_type": "LORA", "rank_pattern": {{{table}}}, "alpha_pattern": {{{table}}}}}"#)
    };
    // A compiled expression for each key took 924 MiB.
    let names = config(&|i| format!(r#""layers.{i}.self_attn.q_proj""#), 4096);
    let expressions = config(&|i| format!(r#"".*layers\\.{i}\\..*q_proj""#), 500);
    let classes = config(&|i| format!(r#""(\\W\\w){{0}}x{i}""#), 400);
    let too_many = config(&|i| format!(r#"".*p{i}[jk]""#), 4096);
    let lists = format!(r#"{{"peft_type": "LORA", "x": [{}0]}}"#, "[0],".repeat(200_000));
    for (what, text) in [
        ("4,096 + 4,096 names", names),
        ("500 + 500 expressions", expressions),
        ("400 + 400 expressions with classes", classes),
        ("4,096 + 4,096 expressions", too_many),
        ("lists", lists),
    ] {
        measured(what, Source::Inline, &text, Sources::default());
    }
    let dir = tempfile::tempdir().expect("a directory");
    let sources = || Sources::new(Some(dir.path().into()));
    std::fs::write(dir.path().join("adapter_config.json"), r#"{"peft_type": "LORA"}"#).expect("written");
    for (what, name) in [("short names", ""), ("names of PEFT", ".lora_A.weight")] {
        let prefix = if name.is_empty() { "" } else { "base_model.model." };
        let mut header = String::from("{");
        for i in 0.. {
            let (start, end) = (2 * i, 2 * i + 2);
            write!(header, r#""{prefix}{i:x}{name}":{{"dtype":"F16","shape":[1],"data_offsets":[{start},{end}]}},"#)
                .expect("written");
            if header.len() > (4 << 20) - 200 {
                header.pop();
                header.push('}');
                let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; end]].concat();
                std::fs::write(dir.path().join("adapter_model.safetensors"), bytes).expect("written");
                break;
            }
        }
        measured(&format!("a header of 4 MiB with {what}"), Source::Directory(".".into()), "", sources());
    }
}

/// Opens a LORA push, and compares what that takes at most with what is counted for it.
fn measured(what: &str, source: Source, config: &str, sources: Sources) {
    let module = "model.layers.7.self_attn.q_proj";
    let parameters = ParamSpec::new(format!("{module}.weight"), [4, 4], ShardRule::Replicated);
    let parameters = Arc::new(Parameters::new(vec![parameters], Dtype::F32, 1, false));
    let factor = |part: &str, shape: [usize; 2]| TensorEntry {
        name: format!("base_model.model.{module}.lora_{part}.weight"),
        dtype: Dtype::F32,
        shape: shape.into(),
        digest: Some([0; 16]),
        payload: None,
        offset: 0,
        allocation: None,
    };
    let is_inline = source == Source::Inline;
    let tensors = if is_inline { vec![factor("A", [8, 4]), factor("B", [4, 8])] } else { Vec::new() };
    let traffic = Traffic::new(1 << 40);
    let sources = sources.with_traffic(traffic.clone());
    let header = UpdateHeader { adapter_config: config.into(), source, ..UpdateHeader::new(UpdateKind::Lora) };
    let header = Arc::new(header);
    trim();
    let before = resident_bytes();
    std::fs::write("/proc/self/clear_refs", "5").expect("the peak is reset");
    let opened = DeclaredPush::open(header, tensors, parameters, &sources).map(drop).map_err(|error| error.to_string());
    let (taken, counted) = (peak_bytes().saturating_sub(before), traffic.take_high_water());
    trim();
    let left = resident_bytes().saturating_sub(before);
    println!("{what}: {taken} bytes were taken, {counted} counted, {left} are left: {opened:.100?}");
    assert!(taken <= counted + SLACK_BYTES, "{what}: {taken} bytes were taken and {counted} counted");
    assert!(left <= SLACK_BYTES, "{what}: {left} bytes did not go back");
}

/// The most that was resident since the peak was reset.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

fn what_a_thread_has_taken_goes_back() {
    // Freeing a large block raises the amount that glibc keeps at the end of a heap, as in a server that has been
    // serving.
    drop(std::hint::black_box(vec![1_u8; KEPT_BYTES]));
    let before = resident_bytes();
    let held = std::thread::spawn(|| {
        let blocks: Vec<Vec<u8>> = (0..KEPT_BYTES / BLOCK_BYTES).map(|_| vec![1; BLOCK_BYTES]).collect();
        let held = resident_bytes();
        drop(blocks);
        held
    });
    let held = held.join().expect("the thread ends") - before;
    trim();
    let left = resident_bytes().saturating_sub(before);
    println!("a thread took {held} bytes; after it freed them {left} are left");
    assert!(held > KEPT_BYTES as u64 * 9 / 10, "{held} bytes were taken");
    if cfg!(target_env = "gnu") {
        assert!(left < KEPT_BYTES as u64 / 8, "{left} of {held} bytes did not go back");
    }
}
