//! FULL pushes on the device of their weights: the bits and errors of pushes inline, by kernels. What goes to matrices
//! does not pass the host.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rollout_server::weights::Dtype;
use xxhash_rust::xxh3::xxh3_128;

use super::*;

/// How often this process has started the kernel that digests, and copied from a device to the host.
pub fn digests_and_copies_to_the_host() -> [u64; 2] {
    [c"launch:digest", c"cuMemcpyDtoHAsync_v2"].map(emulator::calls)
}

/// A push of float32 in another type.
pub fn in_dtype(push: &Push, dtype: Dtype) -> Push {
    let mut push = push.clone();
    for (entry, bytes) in &mut push.tensors {
        let values = bytes.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value));
        *bytes = match dtype {
            Dtype::F32 => continue,
            Dtype::F16 => values.flat_map(|x| half::f16::from_f32(x).to_le_bytes()).collect(),
            Dtype::Bf16 => values.flat_map(|x| half::bf16::from_f32(x).to_le_bytes()).collect(),
        };
        (entry.dtype, entry.digest) = (dtype, Some(xxh3_128(bytes).to_be_bytes()));
    }
    push
}

#[test]
fn what_goes_to_matrices_does_not_pass_the_host() {
    let _own = own_driver();
    for (served, misaligned) in [("bfloat16", Some(5)), ("float32", None)] {
        let start = || Engine::start("qwen2", &["--device", "cuda", "--dtype", served, "--kv-cache-bytes", "2MiB"]);
        let (inline, lent) = (start(), start());
        let mut trainer = Trainer::new();
        for (seed, dtype) in [Dtype::Bf16, Dtype::F16, Dtype::F32].into_iter().enumerate() {
            let mut given = in_dtype(&Push::full(&random_weights(inline.parameters(), 20 + seed as u64)), dtype);
            inline.push(given.clone()).expect("inline");
            lend(&mut trainer, &mut given, 3, 1, misaligned, 30 + seed as u64);
            let of_host = |(entry, bytes): &&(TensorEntry, Vec<u8>)| {
                entry.shape.len() == 1 || bytes.len() <= 240 || entry.offset % dtype.size() as u64 != 0
            };
            let of_host = given.tensors.iter().filter(of_host).count() as u64;
            assert!(of_host < given.tensors.len() as u64, "some are the device's");
            let before = emulator::is_there().then(digests_and_copies_to_the_host);
            push_lent(&lent, &given, Vec::new(), || {
                if let Some([digests, copies]) = before {
                    // The answers of the kernel, before and after the copies, are two copies.
                    let expected = [digests + 2, copies + of_host + 2];
                    assert_eq!(digests_and_copies_to_the_host(), expected, "{dtype:?} to {served}: {of_host} tensors");
                }
            })
            .expect("from device memory");
            assert!(seen(&lent) == seen(&inline), "{dtype:?} to {served}");
        }
    }
}

#[test]
fn what_the_device_finds_wrong_is_refused_by_the_tensors_name_and_changes_nothing() {
    let _own = own_driver();
    for ranks in [1, 2].into_iter().filter(|&ranks| gpus(ranks)) {
        let engine = start("llama", &["--tp", &ranks.to_string()]);
        let weights = Push::full(&random_weights(engine.parameters(), 24));
        let expected = seen(&engine);
        let mut rng = ChaCha8Rng::seed_from_u64(25);
        println!("places from seed 25");
        for dtype in [Dtype::Bf16, Dtype::F16, Dtype::F32] {
            let good = in_dtype(&weights, dtype);
            let matrices: Vec<usize> =
                (0..good.tensors.len()).filter(|&i| good.tensors[i].0.shape.len() == 2).collect();
            let victim = matrices[rng.random_range(0..matrices.len())];
            let (size, count) = (dtype.size(), good.tensors[victim].1.len() / dtype.size());
            let at = rng.random_range(0..count);
            let not_finite: &[u8] = match dtype {
                Dtype::Bf16 => &[0x80, 0xff],
                Dtype::F16 => &[0x00, 0x7c],
                Dtype::F32 => &[1, 0, 0x80, 0x7f],
            };
            let mut spoiled = good.clone();
            let (entry, bytes) = &mut spoiled.tensors[victim];
            bytes[at * size..(at + 1) * size].copy_from_slice(not_finite);
            entry.digest = Some(xxh3_128(bytes).to_be_bytes());
            let mut other_digest = good.clone();
            other_digest.tensors[victim].0.digest = Some([7; 16]);
            let place = format!("is not finite at element {at};");
            for (mut given, kind, says) in
                [(spoiled, "invalid_argument", &*place), (other_digest, "data_loss", "XXH3-128")]
            {
                let mut trainer = Trainer::new();
                lend(&mut trainer, &mut given, 2, ranks, None, 26);
                let before = emulator::is_there().then(digests_and_copies_to_the_host);
                let error = push(&engine, &given).expect_err(says);
                let (said, name) = (error.to_string(), &given.tensors[victim].0.name);
                assert!(error.kind() == kind && said.contains(says) && said.contains(name), "{kind}, {says}: {error}");
                assert!(before.is_none_or(|[before, _]| digests_and_copies_to_the_host()[0] > before), "by the device");
                assert!(seen(&engine) == expected, "{dtype:?}: {says}");
            }
        }
    }
}

#[test]
fn launches_that_fail_are_typed_errors_and_the_old_policy_serves_on() {
    let _own = own_driver();
    require!(emulated("launches fail"));
    let (engine, inline) = (start("llama", &[]), start("llama", &[]));
    let mut given = Push::full(&random_weights(engine.parameters(), 27));
    inline.push(given.clone()).expect("inline");
    let mut trainer = Trainer::new();
    lend(&mut trainer, &mut given, 3, 1, None, 28);
    let expected = seen(&engine);
    let places =
        [(c"launch:copy_f32_bf16", 0), (c"launch:copy_f32_bf16", 4), (c"launch:digest", 0), (c"launch:digest", 1)];
    for (call, after) in places {
        for (code, kind) in [(INVALID_VALUE, "data_loss"), (OUT_OF_MEMORY, "resource_exhausted")] {
            let before = unbalanced();
            emulator::fail(call, after, code);
            let error = push(&engine, &given).expect_err("a launch fails");
            assert_eq!(error.kind(), kind, "{call:?} at {after}: {error}");
            assert_eq!(unbalanced(), before, "{call:?} at {after}: what was opened is closed");
            assert!(seen(&engine) == expected, "{call:?} at {after}");
        }
    }
    push(&engine, &given).expect("goes well");
    assert!(seen(&engine) == seen(&inline));
}

#[test]
fn samples_go_on_while_tensors_are_copied_on_their_device() {
    let _own = own_driver();
    for ranks in [1, 2].into_iter().filter(|&ranks| gpus(ranks)) {
        let engine = start("llama", &["--tp", &ranks.to_string()]);
        let mut trainer = Trainer::new();
        let pushes = [40, 41].map(|seed| {
            let mut given = Push::full(&random_weights(engine.parameters(), seed));
            lend(&mut trainer, &mut given, 2, 1, None, seed);
            given
        });
        // The second is packed into the matrices that have served until the first.
        for given in pushes {
            let running = engine.send(Request::generate(random_prompts(42, 3, 5..9, 250), 1, 7, 40));
            push(&engine, &given).expect("from device memory");
            let reply = running.wait();
            assert!(reply.error.is_none(), "{:?}", reply.error);
            assert!(reply.bits().iter().all(|sample| sample.len() == 40));
        }
        let inline = start("llama", &[]);
        inline.push(Push::full(&random_weights(inline.parameters(), 41))).expect("inline");
        assert!(seen(&engine) == seen(&inline));
    }
}
