//! Divergences of rows, and rows that go to the host and back.

use rollout_kernels::LogitsPair;

use crate::common::{Random, Rank, close, devices, reference, values_of};

#[test]
fn divergences_are_those_of_the_reference() {
    let reference = reference();
    for seed in 0..12 {
        let random = &mut Random::new(seed);
        let (rows, vocab) = (random.between(2, 80), random.between(1, 3000));
        let deviation = [0.01, 1.0, 4.0][random.below(3)];
        let logits = random.normals(rows * vocab, deviation);
        let pair = |random: &mut Random| LogitsPair {
            policy: random.below(rows),
            reference: random.below(rows),
            temperature: 0.5 + random.below(20) as f32 / 10.0,
        };
        let pairs: Vec<LogitsPair> = (0..random.between(1, 100)).map(|_| pair(random)).collect();
        let run =
            |rank: &Rank| rank.ops.divergences(&rank.tensor(&logits, rows, vocab), &pairs).unwrap().read().unwrap();
        let expected = run(&reference);
        for rank in devices() {
            for (found, expected) in run(&rank).iter().zip(&expected) {
                close(found.kl, expected.kl, 4e-6, rank.name());
                close(found.reverse_kl, expected.reverse_kl, 4e-6, rank.name());
            }
        }
    }
}

#[test]
fn rows_go_to_the_host_and_back() {
    for rank in devices().into_iter().chain([reference()]) {
        let random = &mut Random::new(7);
        let (rows, width) = (50, 40);
        let values = random.normals(rows * width, 1.0);
        let tensor = rank.tensor(&values, rows, width);
        let chosen: Vec<u32> = (0..30).map(|_| random.below(rows) as u32).collect();
        let read = rank.ops.read_rows(&tensor, &chosen).unwrap();
        let expected: Vec<f32> =
            chosen.iter().flat_map(|row| &values[*row as usize * width..][..width]).copied().collect();
        assert_eq!(read, expected, "{}", rank.name());
        let back = rank.zeros(60, width);
        rank.ops.write_rows(&read, &back.narrow(0, 20, chosen.len()).unwrap()).unwrap();
        let mut written = vec![0.0; 60 * width];
        written[20 * width..][..read.len()].copy_from_slice(&read);
        assert_eq!(values_of(&back), written, "{}", rank.name());
    }
}
