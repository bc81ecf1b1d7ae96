//! Pushes of a trainer that broadcasts its weights by NCCL, as TRL's synchronous trainers drive vLLM: the server is a
//! process of its own with a GPU for each rank, the trainer is rank 0 here, or a child that dies. On cards the trainer
//! has the GPU behind the server's, as NCCL takes no GPU twice.

mod server;
mod store;
mod trainer;

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use server::{Http, Server, refusal, until};
use trainer::{Tensors, Trainer, broadcasts, info, new_id, tensors};

use crate::common::{Engine, Push, StateDict, random_weights, with_fused_experts};
use crate::emulator::gpus;
use crate::require::require;
use crate::share_driver;

const MODEL: &str = "qwen2";
/// Small, so that the tensors of a push are several broadcasts.
const BUFFER: usize = 40_000;
/// The environment of the child that dies: the address of the server, and how many broadcasts it makes.
const CHILD: &str = "CUDA_BROADCAST_CHILD";

/// Weights by seeds, and what a FULL push of them over gRPC's way leaves on the processor.
struct Oracle(Engine);

impl Oracle {
    fn new(model: &str) -> Self {
        Self(Engine::start(model, &["--dtype", "bfloat16", "--kv-cache-bytes", "2MiB"]))
    }

    fn weights(&self, seed: u64) -> (StateDict, BTreeMap<String, String>) {
        let weights = random_weights(self.0.parameters(), seed);
        self.0.push(Push::full(&weights)).unwrap();
        let hex = |sum: [u8; 32]| sum.iter().map(|byte| format!("{byte:02x}")).collect();
        let sums = self.0.checksums().into_iter().map(|(name, sum)| (name, hex(sum))).collect();
        (weights, sums)
    }
}

fn version(http: &Http) -> u64 {
    http.get("/weight_info")["weight_version"].as_str().unwrap().parse().unwrap()
}

fn empty() -> Value {
    json!({})
}

#[test]
fn pushes_leave_the_weights_of_the_inline_way() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &[]));
    let http = &server.http;
    let config = http.get("/server_info?config_format=json");
    assert_eq!(config["vllm_config"]["weight_transfer_config"], json!({"backend": "nccl"}));
    // Packed in small and in default buffers, and tensor by tensor; a group is joined in place of the one before.
    for (seed, buffer, parts) in [(1, Some(BUFFER), 1), (2, Some(1 << 30), 3), (3, Some(0), 2), (4, None, 2)] {
        let trainer = Trainer::join(http, 1, buffer);
        let (weights, expected) = oracle.weights(seed);
        let old = http.seen();
        assert_ne!(old.0, expected);
        let mixed = tensors(&weights, |i| i % 3 == 0);
        http.done("/start_weight_update", &empty());
        let half = mixed.split_at(mixed.len() / 2);
        for part in [half.0.to_vec(), half.1.to_vec()] {
            assert_eq!(trainer.send(&part, &info(&part)).0, 200);
            assert_eq!(http.seen(), old, "nothing changes before the end");
        }
        http.done("/finish_weight_update", &json!({"weight_version": (10 * seed).to_string()}));
        assert!(http.checksums() == expected, "seed {seed}");
        assert_eq!(version(http), 10 * seed);
        assert_ne!(http.seen().1, old.1);
        // Another one in the same group, whose version is the next.
        let (weights, expected) = oracle.weights(seed + 100);
        trainer.update(&tensors(&weights, |_| true), parts, &empty());
        assert!(http.checksums() == expected, "seed {}", seed + 100);
        assert_eq!(version(http), 10 * seed + 1);
    }
}

#[test]
fn experts_come_to_all_ranks_in_one_tensor_or_each_alone() {
    require!(gpus(3));
    let _shared = share_driver();
    let model = "qwen3_moe";
    let (oracle, server) = (Oracle::new(model), Server::start(model, &["--tp", "2"]));
    let trainer = Trainer::join(&server.http, 2, Some(BUFFER));
    for (seed, is_fused) in [(1, true), (2, false)] {
        let (weights, expected) = oracle.weights(seed);
        let sent = if is_fused { with_fused_experts(&weights) } else { weights };
        trainer.update(&tensors(&sent, |i| i % 2 == 0), 2, &empty());
        assert!(server.http.checksums() == expected, "in one tensor: {is_fused}");
    }
}

#[test]
fn pushes_come_while_the_server_sleeps_and_after_it_has() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &[]));
    let http = &server.http;
    let trainer = Trainer::join(http, 1, Some(BUFFER));
    let mut sent = Vec::new();
    for seed in 1..4 {
        let (weights, expected) = oracle.weights(seed);
        let all = tensors(&weights, |_| true);
        match seed {
            1 => trainer.update(&all, 1, &empty()),
            2 => {
                http.done("/sleep?level=1", &empty());
                http.done("/wake_up?tags=weights", &empty());
                http.done("/start_weight_update", &empty());
                assert_eq!(trainer.send(&all, &empty()).0, 200, "the names of the last time");
                http.done("/finish_weight_update", &empty());
                http.done("/wake_up?tags=kv_cache", &empty());
            }
            _ => {
                http.done("/sleep?level=2", &empty());
                assert!(http.refused("/start_weight_update", &empty(), 409).contains("wake the weights first"));
                http.done("/wake_up?tags=weights", &empty());
                trainer.update(&all, 1, &empty());
                http.done("/wake_up?tags=kv_cache", &empty());
            }
        }
        assert!(http.checksums() == expected, "seed {seed}");
        sent.push(http.seen());
    }
    assert!(sent[0].1 != sent[1].1 && sent[1].1 != sent[2].1);
}

#[test]
fn every_rank_receives_the_weights() {
    require!(gpus(3));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &["--tp", "2"]));
    let http = &server.http;
    assert_eq!(http.get("/get_world_size")["world_size"], 2);
    let too_few = json!({"init_info": {"nccl_unique_id_b64": trainer::base64(&new_id().0), "rank_offset": 1,
        "world_size": 2}});
    assert!(http.refused("/init_weight_transfer_engine", &too_few, 400).contains("rank_offset"));
    for (seed, buffer) in [(1, Some(BUFFER)), (2, None)] {
        let (weights, expected) = oracle.weights(seed);
        Trainer::join(http, 2, buffer).update(&tensors(&weights, |i| i % 2 == 0), 2, &empty());
        assert!(http.checksums() == expected, "seed {seed}");
    }
}

#[test]
fn pushes_that_are_refused_change_nothing() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &[]));
    let http = &server.http;
    for path in ["/start_weight_update", "/finish_weight_update"] {
        assert!(http.refused(path, &empty(), 409).contains("POST /"), "{path}");
    }
    let trainer = Trainer::join(http, 1, Some(BUFFER));
    let (weights, expected) = oracle.weights(1);
    let good = tensors(&weights, |i| i % 2 == 0);
    let old = http.seen();

    let changed = |change: &dyn Fn(&mut Tensors)| {
        let mut tensors = good.clone();
        change(&mut tensors);
        tensors
    };
    for (tensors, word) in [
        (changed(&|t| t[3].0 = "model.no.such".into()), "model.no.such"),
        (changed(&|t| t[3].2.push(1)), "has shape"),
        (changed(&|t| t[1] = t[0].clone()), "declared twice"),
    ] {
        let message = trainer.refused(&tensors, 400);
        assert!(message.contains(word), "{message}");
        assert_eq!(http.seen(), old, "{message}");
    }
    // Values that no weight has: refused with the tensor, or at the end.
    let last = good.len() - 1;
    let infinite = changed(&|t| {
        let bytes = &mut t[last].3;
        let (from, value) = (bytes.len() - 2, half::bf16::INFINITY.to_bits().to_le_bytes());
        bytes[from..].copy_from_slice(&value);
    });
    http.done("/start_weight_update", &empty());
    let (status, _) = trainer.send(&infinite, &info(&infinite));
    let finish = http.refused("/finish_weight_update", &empty(), if status == 200 { 400 } else { 409 });
    assert!(status == 400 || finish.contains("finite"), "{status} {finish}");
    assert_eq!(http.seen(), old);

    // A push without all parameters; a version that was; orders out of turn.
    http.done("/start_weight_update", &empty());
    let some = good[1..].to_vec();
    assert_eq!(trainer.send(&some, &info(&some)).0, 200);
    assert!(http.refused("/finish_weight_update", &empty(), 400).contains("missing"));
    assert!(http.refused("/finish_weight_update", &empty(), 409).contains("/start_weight_update"));
    http.done("/start_weight_update", &empty());
    assert!(http.refused("/start_weight_update", &empty(), 409).contains("/finish_weight_update"));
    assert!(http.refused("/finish_weight_update", &json!({"weight_version": "v7"}), 400).contains("weight_version"));
    assert_eq!(trainer.send(&good, &info(&good)).0, 200);
    assert!(http.refused("/finish_weight_update", &json!({"weight_version": "0"}), 409).contains("not above"));
    assert_eq!(http.seen(), old);

    // What was refused was received to its end: the group is as good as before.
    trainer.update(&good, 1, &empty());
    assert!(http.checksums() == expected);
}

#[test]
fn a_refused_call_leaves_group_and_names_as_they_were() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &[]));
    let http = &server.http;
    let trainer = Trainer::join(http, 1, Some(BUFFER));
    let (weights, _) = oracle.weights(1);
    trainer.update(&tensors(&weights, |_| true), 1, &empty());
    let (weights, expected) = oracle.weights(2);
    let all = tensors(&weights, |_| true);
    // Places that a group cannot have, of which the second are those of this one in their last 32 bits.
    for (first, world) in [(0, 2), (1u64 + (1 << 32), 2u64 + (1 << 32)), (1, 1)] {
        let id = trainer::base64(&new_id().0);
        let init = json!({"nccl_unique_id_b64": id, "rank_offset": first, "world_size": world});
        let message = http.refused("/init_weight_transfer_engine", &json!({"init_info": init}), 400);
        assert!(message.contains("rank_offset") || message.contains("world_size"), "{message}");
    }
    // Names that were refused are not those of the last time.
    let mut other = all.clone();
    other[3].0 = "model.no.such".into();
    trainer.refused(&other, 400);
    http.done("/start_weight_update", &empty());
    let init = json!({"nccl_unique_id_b64": trainer::base64(&new_id().0), "rank_offset": 2, "world_size": 2});
    http.refused("/init_weight_transfer_engine", &json!({"init_info": init}), 400);
    assert_eq!(trainer.send(&all, &empty()).0, 200, "the push is open, its names are those of the last time");
    // A body that comes in chunks is read, too.
    let (status, answer) = http.post_in_chunks("/finish_weight_update", &json!({"weight_version": "70"}));
    assert_eq!((status, version(http)), (200, 70), "{answer}");
    assert!(http.checksums() == expected);
}

#[test]
fn others_see_who_sends_and_can_end_the_push() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &[]));
    let http = &server.http;
    let (weights, expected) = oracle.weights(1);
    let all = tensors(&weights, |_| true);
    let old = http.seen();
    // Between two calls, and while tensors are received: what is broadcast from then on is not the next push's.
    for is_receiving in [false, true] {
        let trainer = Trainer::join(http, 1, Some(BUFFER));
        http.done("/start_weight_update", &empty());
        let peer = server.update_peer();
        assert!(peer.starts_with("127.0.0.1:"), "{peer}");
        let call = is_receiving.then(|| http.post_later("/update_weights", json!({"update_info": info(&all)})));
        if is_receiving {
            let (bytes, dtype) = &broadcasts(&all, trainer.buffer)[0];
            trainer.broadcast(bytes, *dtype);
        }
        server.cancel_update();
        if let Some(call) = call {
            let message = refusal(call.join().unwrap(), 409);
            assert!(message.contains("CancelUpdate"), "{message}");
        }
        until(|| http.refused("/start_weight_update", &empty(), 409).contains("/init_weight_transfer_engine"));
    }
    assert_eq!(http.seen(), old);
    Trainer::join(http, 1, Some(BUFFER)).update(&all, 1, &empty());
    assert!(http.checksums() == expected);
}

#[test]
fn a_group_whose_bytes_were_not_received_is_left() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &[]));
    let http = &server.http;
    let (weights, expected) = oracle.weights(1);
    let good = tensors(&weights, |_| false);
    let old = http.seen();
    let mut huge = info(&good);
    huge["shapes"][0] = json!([1 << 20, 1 << 20]);
    let mut larger = info(&good);
    (larger["packed"], larger["packed_buffer_size_bytes"]) = (true.into(), (4u64 << 30).into());
    let (mut none, mut other) = (info(&good), info(&good));
    (none["shapes"][0], other["dtype_names"][0]) = (json!([0]), json!("float64"));
    let uneven = json!({"names": ["a"], "dtype_names": [], "shapes": [[1]]});
    // The last three are refused at the door, where the trainer broadcasts beside its call all the same.
    for (info, word) in [
        (huge, "at most"),
        (larger, "update_info.packed_buffer_size_bytes: 4294967296 is more than the 40000 of init_info"),
        (none, "cannot be broadcast"),
        (empty(), "names"),
        (other, "float64"),
        (uneven, "dtype_names"),
        (json!(7), "update_info"),
    ] {
        let _trainer = Trainer::join(http, 1, Some(BUFFER));
        http.done("/start_weight_update", &empty());
        let message = http.refused("/update_weights", &json!({"update_info": info}), 400);
        assert!(message.contains(word), "{message}");
        let left = http.refused("/start_weight_update", &empty(), 409);
        assert!(left.contains("/init_weight_transfer_engine"), "{left}");
    }
    // So it is with a call of which a part has come when its connection breaks.
    let trainer = Trainer::join(http, 1, Some(BUFFER));
    http.done("/start_weight_update", &empty());
    http.break_off("/update_weights", r#"{"update_info": {"names": ["#);
    until(|| http.refused("/start_weight_update", &empty(), 409).contains("/init_weight_transfer_engine"));
    drop(trainer);
    // The group is left without a push, too.
    let trainer = Trainer::join(http, 1, Some(BUFFER));
    http.refused("/update_weights", &json!({}), 400);
    assert!(http.refused("/start_weight_update", &empty(), 409).contains("/init_weight_transfer_engine"));
    // A trainer that starts anew ends what it has left open; so does one that leaves.
    drop(trainer);
    let trainer = Trainer::join(http, 1, None);
    http.done("/start_weight_update", &empty());
    http.done("/shutdown_weight_transfer_engine", &empty());
    drop(trainer);
    assert_eq!(http.seen(), old);
    Trainer::join(http, 1, None).update(&good, 1, &empty());
    assert!(http.checksums() == expected);
}

/// A child that joins, begins an update, makes some broadcasts and dies. It says when it is ready.
struct Dying {
    child: Child,
}

impl Dying {
    fn start(http: &Http, broadcasts: usize, calls: bool) -> Self {
        let mut child = crate::child("broadcast::a_trainer_that_dies")
            .env(CHILD, format!("{} {broadcasts} {calls}", http.0))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(lines.any(|line| line.unwrap().ends_with("ready")), "it has joined");
        Self { child }
    }
}

/// The child.
#[test]
#[ignore = "it dies"]
#[expect(clippy::disallowed_methods, reason = "a child gets its order")]
fn a_trainer_that_dies() {
    let given = std::env::var(CHILD).unwrap();
    let [http, count, calls] = given.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let http = Http(http.into());
    let trainer = Trainer::join(&http, 1, Some(BUFFER));
    http.done("/start_weight_update", &empty());
    let engine = Engine::start(MODEL, &["--dtype", "bfloat16", "--kv-cache-bytes", "2MiB"]);
    let all = tensors(&random_weights(engine.parameters(), 1), |_| true);
    if calls == "true" {
        let _ = http.post_later("/update_weights", json!({"update_info": info(&all)}));
    }
    println!("ready");
    for (bytes, dtype) in broadcasts(&all, trainer.buffer).iter().take(count.parse().unwrap()) {
        trainer.broadcast(bytes, *dtype);
    }
    // SAFETY: the process ends as a killed one does, without a word to anybody.
    unsafe { libc::_exit(0) };
}

#[test]
fn a_trainer_that_dies_changes_nothing() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &[]));
    let http = &server.http;
    let (weights, expected) = oracle.weights(1);
    let all = tensors(&weights, |_| true);
    let old = http.seen();
    assert!(broadcasts(&all, Some(BUFFER)).len() > 3);
    for count in [0, 1, 3] {
        // The call that waits for what it has broadcast is another's, and gets an answer.
        let mut dying = Dying::start(http, count, false);
        let message = refusal(http.post("/update_weights", &json!({"update_info": info(&all)})), 409);
        assert!(message.contains("broadcast of"), "{message}");
        dying.child.wait().unwrap();
        assert!(http.refused("/finish_weight_update", &empty(), 409).contains("/start_weight_update"));
        assert!(http.refused("/start_weight_update", &empty(), 409).contains("/init_weight_transfer_engine"));
        assert_eq!(http.seen(), old, "after {count} broadcasts");
        // The call dies with the trainer.
        Dying::start(http, count, true).child.wait().unwrap();
    }
    let trainer = Trainer::join(http, 1, Some(BUFFER));
    assert_eq!(http.seen(), old);
    trainer.update(&all, 1, &empty());
    assert!(http.checksums() == expected);
}

#[test]
fn a_call_of_a_trainer_that_has_left_takes_nothing_from_the_next() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &[]));
    let http = &server.http;
    let (weights, expected) = oracle.weights(1);
    let all = tensors(&weights, |_| true);
    // One call breaks before the next trainer's push, one within it.
    for begins_before in [false, true] {
        let former = Trainer::join(http, 1, Some(BUFFER));
        http.done("/start_weight_update", &empty());
        let call = http.begin("/update_weights");
        drop(former);
        let trainer = Trainer::join(http, 1, Some(BUFFER));
        if begins_before {
            http.done("/start_weight_update", &empty());
        }
        drop(call);
        // The server has noticed by then, in most runs.
        std::thread::sleep(Duration::from_millis(300));
        if begins_before {
            let message = http.refused("/start_weight_update", &empty(), 409);
            assert!(message.contains("under way"), "{message}");
            http.done("/shutdown_weight_transfer_engine", &empty());
        } else {
            trainer.update(&all, 1, &empty());
            assert!(http.checksums() == expected);
        }
    }
}

#[test]
fn a_trainer_that_stands_still_is_given_up() {
    require!(gpus(2));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &["--update-idle-seconds", "5"]));
    let http = &server.http;
    let (weights, expected) = oracle.weights(1);
    let all = tensors(&weights, |_| true);
    let old = http.seen();
    // It never comes to the group, whose id is good; it never serves its store.
    let init = json!({"nccl_unique_id_b64": trainer::base64(&new_id().0), "rank_offset": 1, "world_size": 2});
    let message = http.refused("/init_weight_transfer_engine", &json!({"init_info": init}), 408);
    assert!(message.contains("--update-idle-seconds"), "{message}");
    let init = json!({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2});
    http.refused("/init_weight_transfer_engine", &json!({"init_info": init}), 408);
    // It comes, announces tensors, and broadcasts the first of them alone.
    let trainer = Trainer::join(http, 1, Some(BUFFER));
    http.done("/start_weight_update", &empty());
    let call = http.post_later("/update_weights", json!({"update_info": info(&all)}));
    let (bytes, dtype) = &broadcasts(&all, trainer.buffer)[0];
    trainer.broadcast(bytes, *dtype);
    let message = refusal(call.join().unwrap(), 408);
    assert!(message.contains("--update-idle-seconds"), "{message}");
    assert_eq!(http.seen(), old);
    drop(trainer);
    // It begins a push and is silent then. What it has broadcast meanwhile is not the next push's.
    let trainer = Trainer::join(http, 1, Some(BUFFER));
    http.done("/start_weight_update", &empty());
    until(|| server.log().contains("the trainer has sent no command"));
    assert!(http.refused("/start_weight_update", &empty(), 409).contains("/init_weight_transfer_engine"));
    drop(trainer);
    Trainer::join(http, 1, Some(BUFFER)).update(&all, 1, &empty());
    assert!(http.checksums() == expected);
}

#[test]
fn the_store_of_a_trainer_is_found() {
    require!(gpus(3));
    let _shared = share_driver();
    let (oracle, server) = (Oracle::new(MODEL), Server::start(MODEL, &["--tp", "2"]));
    let http = &server.http;
    let (weights, expected) = oracle.weights(1);
    for wrong in [b"".to_vec(), b"cos\nsystem\n(S'true'\ntR.".to_vec(), new_id().0.to_vec()] {
        let (port, _) = store::serve(wrong);
        let init = json!({"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3});
        let message = http.refused("/init_weight_transfer_engine", &json!({"init_info": init}), 400);
        assert!(message.contains("no id"), "{message}");
    }
    let id = new_id();
    let (port, joined) = store::serve(store::pickle(&id.0));
    let init = json!({"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 3,
        "packed": true});
    let call = http.post_later("/init_weight_transfer_engine", json!({"init_info": init}));
    let trainer = Trainer::enter(http, id, 2, Some(1 << 30));
    assert_eq!(call.join().unwrap().0, 200);
    assert_eq!(joined.join().unwrap(), 2, "both ranks are counted");
    trainer.update(&tensors(&weights, |_| true), 1, &empty());
    assert!(http.checksums() == expected);
}
