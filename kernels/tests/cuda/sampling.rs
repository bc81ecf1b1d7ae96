//! Tokens and log-probabilities: those of the CPU for the same logits, to the last bit.

use std::fmt::Debug;

use candle_core::Tensor;
use rollout_kernels::{
    AttentionSequence, Distribution, LogitsPair, Padding, RowTasks, SamplingTask, StepInput, Support, TaskReturns,
    TokenLogprobs,
};

use crate::common::{self, Random, Rank, cuda};

const PLAIN: SamplingTask<'static> = SamplingTask {
    temperature: 1.0,
    top_k: 0,
    top_p: 1.0,
    min_p: 0.0,
    repetition_penalty: 1.0,
    presence_penalty: 0.0,
    frequency_penalty: 0.0,
    logit_bias: &[],
    allowed: None,
    mask: None,
    banned: [&[], &[], &[], &[]],
    history: None,
    seed: 0,
    output_index: 0,
    target: None,
    top_logprobs: 0,
    logprobs_of: &[],
    top_of: Distribution::Raw,
    returns: TaskReturns { entropy: false, support: None },
};

fn cpu() -> Rank {
    common::devices().swap_remove(0)
}

/// One row as models, tests and broken policies give it.
fn row(random: &mut Random, vocab: usize) -> Vec<f32> {
    let deviation = [0.01, 1.0, 2.5, 10.0, 60.0][random.below(5)];
    let mut row = random.normals(vocab, deviation);
    match random.below(12) {
        0 => row.iter_mut().for_each(|x| *x = (*x * 2.0).round() / 2.0),
        1 => row.fill(random.below(3) as f32 - 1.0),
        2 => row.iter_mut().step_by(2).for_each(|x| *x = f32::NEG_INFINITY),
        3 => row.iter_mut().skip(random.below(vocab)).for_each(|x| *x = f32::NEG_INFINITY),
        4 => row[random.below(vocab)] = [f32::NAN, f32::INFINITY][random.below(2)],
        5 => row.fill([f32::NEG_INFINITY, f32::NAN, -0.0, f32::MAX, f32::MIN][random.below(5)]),
        6 => row.iter_mut().for_each(|x| *x *= 1e37),
        7 => row.iter_mut().for_each(|x| *x = -x.abs()),
        8 => row[random.below(vocab)] += 50.0,
        _ => {}
    }
    row
}

fn task(random: &mut Random, vocab: usize) -> SamplingTask<'static> {
    let temperature = match random.below(4) {
        0 => [0.0, 1e-30, 1e-6, 1e-3, 1e3, 1e30][random.below(6)],
        1 => 0.3 + random.below(100) as f32 / 50.0,
        _ => 1.0,
    };
    let filtered = random.below(2) == 0;
    SamplingTask {
        temperature,
        top_k: if filtered { [0, 0, 1, 3, 50, vocab as u32 - 1, vocab as u32][random.below(7)] } else { 0 },
        top_p: if filtered { [1.0, 1e-4, 0.5, 0.8, 0.95, 0.999][random.below(6)] } else { 1.0 },
        min_p: if filtered { [0.0, 0.0, 0.05, 1e-30, 1.0][random.below(5)] } else { 0.0 },
        seed: random.next(),
        output_index: random.below(1000) as u32,
        target: (random.below(3) == 0).then(|| random.below(vocab) as u32),
        ..PLAIN
    }
}

/// Rows that have the tasks, in their order.
fn wanted(random: &mut Random, rows: usize, tasks: usize) -> Vec<RowTasks> {
    let mut ends: Vec<usize> = (1..rows).map(|_| random.below(tasks + 1)).chain([tasks]).collect();
    ends.sort_unstable();
    let starts = [0].into_iter().chain(ends.clone());
    starts.zip(&ends).enumerate().map(|(row, (start, &end))| RowTasks { row: row as u32, tasks: start..end }).collect()
}

fn answers(rank: &Rank, logits: &Tensor, wanted: &[RowTasks], tasks: &[SamplingTask<'_>]) -> Vec<TokenLogprobs> {
    let tokens = vec![0; wanted.len()];
    let step = rank.ops.prepare(StepInput { tokens: &tokens, logits: wanted, tasks, ..common::NOTHING }).unwrap();
    let sampled = rank.ops.sample(logits, &step, 0..wanted.len()).unwrap().read().unwrap();
    assert!(sampled.failed.is_empty());
    sampled.tokens
}

/// An answer, to be compared with another; all NaNs are equal.
fn bits(answer: &TokenLogprobs) -> impl PartialEq + Debug {
    let of = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    let top: Vec<_> = answer.top.iter().map(|(token, x)| (*token, of(*x))).collect();
    let returned = answer.returned.as_ref().map(|returned| {
        let Support { size, log_mass, ids } = returned.support.clone();
        (of(returned.raw_entropy), of(returned.entropy), size, of(log_mass), ids)
    });
    (answer.token, of(answer.raw), of(answer.processed), top, answer.rank, returned)
}

#[track_caller]
fn same(found: &[TokenLogprobs], expected: &[TokenLogprobs], tasks: &[SamplingTask<'_>], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for ((found, expected), task) in found.iter().zip(expected).zip(tasks) {
        assert_eq!(bits(found), bits(expected), "{what}: {found:?}, expected {expected:?} to {task:?}");
    }
}

/// The device's answers to random tasks on `rows` random rows.
fn check(seed: u64, rows: usize, vocab: usize) {
    let mut random = Random::new(seed);
    let logits: Vec<f32> = (0..rows).flat_map(|_| row(&mut random, vocab)).collect();
    let mut tasks: Vec<SamplingTask<'_>> = (0..2 * rows).map(|_| task(&mut random, vocab)).collect();
    for task in &mut tasks {
        match random.below(20) {
            0 => task.logit_bias = &[(1, 1.5)],
            1 => task.top_logprobs = 4,
            2 => task.logprobs_of = &[1, 0],
            3 => task.returns = TaskReturns { entropy: random.below(2) == 0, support: Some(8) },
            _ => {}
        }
    }
    let (wanted, cpu, gpu) = (wanted(&mut random, rows, tasks.len()), cpu(), cuda().unwrap());
    let on =
        |rank: &Rank, tasks: &[SamplingTask<'_>]| answers(rank, &rank.tensor(&logits, rows, vocab), &wanted, tasks);
    let found = on(&gpu, &tasks);
    same(&found, &on(&cpu, &tasks), &tasks, &format!("seed {seed}, vocabulary {vocab}"));
    let scored: Vec<_> =
        tasks.iter().zip(&found).map(|(task, found)| SamplingTask { target: Some(found.token), ..*task }).collect();
    same(&on(&gpu, &scored), &found, &scored, &format!("seed {seed}, vocabulary {vocab}, scored"));
}

#[test]
fn answers_are_those_of_the_cpu() {
    for (seed, vocab) in [2, 127, 128, 129, 300, 777, 1000, 3000].into_iter().cycle().take(24).enumerate() {
        check(seed as u64, 64, vocab);
    }
}

#[test]
fn answers_on_large_vocabularies_are_those_of_the_cpu() {
    for (seed, vocab) in [32_000, 50_257, 128_256, 151_936].into_iter().enumerate() {
        check(100 + seed as u64, 6, vocab);
    }
}

#[test]
fn a_row_has_the_same_answers_alone_and_in_a_view() {
    let (rank, rows, vocab, wide) = (cuda().unwrap(), 9, 500, 607);
    let mut random = Random::new(0);
    let logits: Vec<f32> = (0..rows).flat_map(|_| row(&mut random, wide)).collect();
    let tasks: Vec<_> = (0..3 * rows).map(|_| task(&mut random, vocab)).collect();
    let wanted = wanted(&mut random, rows, tasks.len());
    let logits = rank.tensor(&logits, rows, wide);
    let view = logits.narrow(1, 5, vocab).unwrap();
    let whole = answers(&rank, &view, &wanted, &tasks);
    for (row, of_row) in wanted.iter().enumerate() {
        let (first, tasks) = (of_row.tasks.start, &tasks[of_row.tasks.clone()]);
        let alone = [RowTasks { row: 0, tasks: 0..tasks.len() }];
        let found = answers(&rank, &view.narrow(0, row, 1).unwrap(), &alone, tasks);
        same(&found, &whole[first..first + tasks.len()], tasks, &format!("row {row}"));
    }
}

#[test]
fn answers_are_read_in_any_order_and_need_not_be_read() {
    let (rank, cpu, rows, vocab) = (cuda().unwrap(), cpu(), 4, 300);
    let mut random = Random::new(1);
    let logits: Vec<Vec<f32>> = (0..6).map(|_| random.normals(rows * vocab, 2.0)).collect();
    // The host answers these, of which few may be under way.
    let tasks: Vec<_> = (0..rows).map(|_| SamplingTask { top_logprobs: 2, ..task(&mut random, vocab) }).collect();
    let wanted: Vec<RowTasks> = (0..rows).map(|row| RowTasks { row: row as u32, tasks: row..row + 1 }).collect();
    let tokens = vec![0; rows];
    let step =
        rank.ops.prepare(StepInput { tokens: &tokens, logits: &wanted, tasks: &tasks, ..common::NOTHING }).unwrap();
    let tensors: Vec<_> = logits.iter().map(|logits| rank.tensor(logits, rows, vocab)).collect();
    let started: Vec<_> = tensors.iter().map(|logits| rank.ops.sample(logits, &step, 0..rows).unwrap()).collect();
    for (i, sampled) in started.into_iter().enumerate().rev().filter(|(i, _)| i % 2 == 0) {
        let expected = answers(&cpu, &cpu.tensor(&logits[i], rows, vocab), &wanted, &tasks);
        same(&sampled.read().unwrap().tokens, &expected, &tasks, &format!("call {i}"));
    }
}

#[test]
fn a_padded_step_of_any_number_of_axes_has_the_same_answers() {
    let (rank, vocab) = (cuda().unwrap(), 300);
    let mut random = Random::new(2);
    for (rows, axes) in [1, 2, 3, 5, 9].into_iter().flat_map(|rows| [1, 2, 3].map(|axes| (rows, axes))) {
        let logits = rank.tensor(&random.normals(rows * vocab, 2.0), rows, vocab);
        let tasks: Vec<_> = (0..rows).map(|_| task(&mut random, vocab)).collect();
        let wanted: Vec<RowTasks> = (0..rows).map(|row| RowTasks { row: row as u32, tasks: row..row + 1 }).collect();
        let (tokens, positions) = (vec![0; rows], vec![0; rows * axes]);
        let sequence =
            |first_row| AttentionSequence { first_row, rows: 1, start_position: 0, visible: None, block_table: &[0] };
        let sequences: Vec<_> = (0..rows).map(sequence).collect();
        let input = StepInput {
            tokens: &tokens,
            positions: &positions,
            axes,
            sequences: &sequences,
            logits: &wanted,
            tasks: &tasks,
            ..common::NOTHING
        };
        let step = rank.ops.prepare_padded(input, Padding { most_rows: 16, vocabulary: vocab, variant: None }).unwrap();
        assert!(rank.ops.samples_in_graph(&step), "{rows} rows, {axes} axes");
        let selected = rank.zeros(step.rows(), vocab);
        rank.ops.select_logits_rows(&logits, &step, 0..rows, &selected.narrow(0, 0, rows).unwrap()).unwrap();
        rank.ops.sample_in_graph(&selected, &step, 0..step.rows()).unwrap();
        let found = rank.ops.sampled(&step).unwrap().read().unwrap().tokens;
        same(&found, &answers(&rank, &logits, &wanted, &tasks), &tasks, &format!("{rows} rows, {axes} axes"));
    }
}

#[test]
fn divergences_are_those_of_the_cpu() {
    let (cuda, cpu) = (cuda().unwrap(), cpu());
    for (seed, vocab) in [(1, 1), (2, 100), (3, 127), (4, 128), (5, 5000), (6, 151_936)] {
        let random = &mut Random::new(seed);
        let rows = random.between(2, 70);
        let base = random.normals(vocab, 3.0);
        let distance = [0.0, 0.01, 1.0, 20.0][random.below(4)];
        let mut logits: Vec<f32> = (0..rows)
            .flat_map(|_| base.iter().map(|x| x + distance * random.normals(1, 1.0)[0]).collect::<Vec<_>>())
            .collect();
        logits[random.below(rows * vocab)] = [0.0, f32::NAN, f32::NEG_INFINITY][random.below(3)];
        let pairs: Vec<LogitsPair> = (0..random.between(1, 70))
            .map(|_| LogitsPair {
                policy: random.below(rows),
                reference: random.below(rows),
                temperature: [1.0, 0.3, 1.7][random.below(3)],
            })
            .collect();
        let [found, expected] = [&cuda, &cpu].map(|rank| {
            let answers = rank.ops.divergences(&rank.tensor(&logits, rows, vocab), &pairs).unwrap().read().unwrap();
            answers.iter().flat_map(|d| [d.kl.to_bits(), d.reverse_kl.to_bits()]).collect::<Vec<_>>()
        });
        assert_eq!(found, expected, "seed {seed}, vocabulary of {vocab}");
    }
}
