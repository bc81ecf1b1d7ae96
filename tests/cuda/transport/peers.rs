//! FULL pushes to several ranks: each takes what it holds of a tensor to its own device, out of the memory of the one
//! that the tensor lies on. The bits and errors are those of pushes inline and of one rank, and nothing that goes to
//! matrices passes the host.

use clap::Parser;
use rollout_server::config::Config;
use rollout_server::memory::MemoryUse;
use rollout_server::observe::Observer;
use rollout_server::startup;
use rollout_server::weights::Dtype;

use super::on_device::{digests_and_copies_to_the_host, in_dtype};
use super::*;
use crate::large;

/// A copy from the memory of one device to that of another.
const PEER_COPY: &std::ffi::CStr = c"cuMemcpy3DPeerAsync";

/// What each device has for what comes to it.
const ARRIVING_BYTES: u64 = 8 << 20;

fn start_on(model: &str, ranks: usize, dtype: &str) -> Engine {
    Engine::start(
        model,
        &["--device", "cuda", "--dtype", dtype, "--kv-cache-bytes", "2MiB", "--tp", &ranks.to_string()],
    )
}

#[test]
fn ranks_take_their_parts_from_device_to_device() {
    let _own = own_driver();
    for (model, served) in [("qwen2", "bfloat16"), ("llama-tied", "float32")] {
        let inline = start_on(model, 1, served);
        let pushes: Vec<Push> = [Dtype::Bf16, Dtype::F16, Dtype::F32]
            .into_iter()
            .zip(50..)
            .map(|(dtype, seed)| in_dtype(&Push::full(&random_weights(inline.parameters(), seed)), dtype))
            .collect();
        let expected: Vec<Seen> = pushes
            .iter()
            .map(|push| {
                inline.push(push.clone()).expect("inline");
                seen(&inline)
            })
            .collect();
        for (ranks, devices) in [(1, 1), (2, 1), (2, 2), (4, 1), (4, 3)] {
            if !gpus(ranks) {
                continue;
            }
            let [inline, lent] = [(); 2].map(|()| start_on(model, ranks, served));
            let mut trainer = Trainer::new();
            for (push, expected) in pushes.iter().zip(&expected) {
                inline.push(push.clone()).expect("inline");
                let mut given = push.clone();
                lend(&mut trainer, &mut given, 3, devices, None, 60);
                let of_host = |(entry, bytes): &&(TensorEntry, Vec<u8>)| entry.shape.len() == 1 || bytes.len() <= 240;
                let of_host = given.tensors.iter().filter(of_host).count() as u64;
                let copied = || [c"cuMemcpyHtoDAsync_v2", PEER_COPY].map(emulator::calls);
                let before = emulator::is_there().then(|| (digests_and_copies_to_the_host(), copied()));
                push_lent(&lent, &given, Vec::new(), || {
                    let Some(([digests, to_host], [from_host, peers])) = before else { return };
                    // Of each device on which tensors lie the kernel is asked before and after the copies: it reads a
                    // list, and its answers come to the host. Norms and biases come there too, and go no further.
                    let asked = 2 * devices as u64;
                    assert_eq!(digests_and_copies_to_the_host(), [digests + asked, to_host + of_host + asked]);
                    let [from_host_now, peers_now] = copied();
                    assert_eq!(from_host_now, from_host + asked, "no weights from the host");
                    assert_eq!(peers_now > peers, ranks > 1, "between devices");
                })
                .expect("from device memory");
                let seen = seen(&lent);
                assert!(seen == self::seen(&inline), "{model}: {ranks} ranks, {devices} devices: as inline");
                assert!(seen == *expected, "{model}: {ranks} ranks, {devices} devices: as one rank");
            }
        }
    }
}

#[test]
fn a_large_tensor_comes_in_parts_for_which_there_is_room_in_the_ledger() {
    let _own = own_driver();
    require!(gpus(2));
    // Each rank's half of the embedding is 10 MiB of float32.
    let checkpoint = large::checkpoint(40_960);
    let model = checkpoint.path().to_str().unwrap();
    let [inline, lent] = [(); 2].map(|()| {
        let (observer, recorder) = Observer::new();
        let base = ["rollout-server", "--model", model, "--tp", "2"];
        let config = Config::try_parse_from(base.iter().chain(&FLAGS)).unwrap();
        Engine { started: Some(startup::start(&config, observer, recorder).unwrap()) }
    });
    let staging = || {
        let entries = lent.status().memory.entries;
        entries.iter().find(|entry| entry.0 == MemoryUse::UpdateStaging).map_or(0, |entry| entry.1)
    };
    let mut trainer = Trainer::new();
    let mut given = Push::full(&random_weights(inline.parameters(), 61));
    inline.push(given.clone()).expect("inline");
    let shadow: u64 = inline.parameters().iter().map(|spec| inline.parameters().bytes_on_ranks(spec).unwrap()).sum();
    lend(&mut trainer, &mut given, 1, 1, None, 62);
    let matrices = given.tensors.iter().filter(|(entry, _)| entry.shape.len() == 2).count() as u64;
    let before = emulator::is_there().then(|| emulator::calls(PEER_COPY));
    push_lent(&lent, &given, Vec::new(), || {
        assert_eq!(staging(), shadow + 2 * ARRIVING_BYTES, "both ranks have room for what comes");
        if let Some(before) = before {
            assert_eq!(emulator::calls(PEER_COPY), before + matrices + 1, "the other rank's part of each, one in two");
        }
    })
    .expect("from device memory");
    assert!(seen(&lent) == seen(&inline));
    assert_eq!(staging(), 0);
}

#[test]
fn copies_between_devices_that_fail_are_typed_errors_and_the_old_policy_serves_on() {
    let _own = own_driver();
    require!(emulated("calls of the driver fail"));
    require!(gpus(2));
    let [engine, inline] = [(); 2].map(|()| start("llama", &["--tp", "2"]));
    let mut given = Push::full(&random_weights(engine.parameters(), 63));
    inline.push(given.clone()).expect("inline");
    let mut trainer = Trainer::new();
    lend(&mut trainer, &mut given, 3, 1, None, 64);
    let expected = seen(&engine);
    let fail = |call: &std::ffi::CStr, after: u64, code: i32, kind: &str| {
        let before = unbalanced();
        emulator::fail(call, after, code);
        let error = push(&engine, &given).expect_err("a call fails");
        assert_eq!(error.kind(), kind, "{call:?} at {after}: {error}");
        assert_eq!(unbalanced(), before, "{call:?} at {after}: what was opened is closed");
        assert!(seen(&engine) == expected, "{call:?} at {after}");
    };
    for after in [0, 4] {
        for call in [PEER_COPY, c"launch:copy_f32_bf16"] {
            fail(call, after, INVALID_VALUE, "data_loss");
            fail(call, after, OUT_OF_MEMORY, "resource_exhausted");
        }
    }
    // Each allocation fails in its turn: that of the digests, and the other device's of what comes to it.
    let without_spare_pages = || {
        engine.sleep(SleepLevel::One, DrainMode::Wait).expect("sleeps");
        engine.wake(true, true).expect("wakes");
    };
    for after in 0.. {
        without_spare_pages();
        let before = emulator::calls(c"cuMemCreate");
        emulator::fail(c"cuMemCreate", after, OUT_OF_MEMORY);
        let pushed = push(&engine, &given);
        let taken = emulator::calls(c"cuMemCreate") - before;
        emulator::fail(c"cuMemCreate", 0, 0);
        let Err(error) = pushed else {
            println!("{taken} allocations");
            assert!(taken == after && after >= 2, "on both devices: {taken} of {after}");
            break;
        };
        assert_eq!(error.kind(), "resource_exhausted", "allocation {after}: {error}");
        assert!(seen(&engine) == expected, "allocation {after}");
    }
    assert!(seen(&engine) == seen(&inline));
}

#[test]
fn what_changes_while_it_is_copied_is_lost() {
    let _own = own_driver();
    for ranks in [1, 2].into_iter().filter(|&ranks| gpus(ranks)) {
        let engine = start("llama", &["--tp", &ranks.to_string()]);
        let expected = seen(&engine);
        let mut trainer = Trainer::new();
        let mut given = Push::full(&random_weights(engine.parameters(), 65));
        // On the last device.
        let last = ranks - 1;
        lend(&mut trainer, &mut given, ranks, ranks, None, 66);
        let is_victim = |(entry, _): &&(TensorEntry, Vec<u8>)| entry.shape.len() == 2;
        let (victim, _) = given.tensors.iter().rfind(is_victim).expect("a matrix");
        let (name, offset) = (victim.name.clone(), victim.offset);
        given.tensors.iter_mut().for_each(|(entry, _)| entry.digest = None);
        trainer.ask(&format!("change {last} {last} {offset}"));
        let error = push(&engine, &given).expect_err("one of its tensors changes");
        let said = error.to_string();
        assert!(error.kind() == "data_loss" && said.contains(&name) && said.contains("has changed"), "{error}");
        assert!(seen(&engine) == expected, "{ranks} ranks");
    }
}
