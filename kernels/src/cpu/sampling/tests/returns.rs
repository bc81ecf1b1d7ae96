//! Entropies and supports, compared with the reference and with each other.

use super::*;
use crate::sampling::{Support, TokenReturns};

const ALL: TaskReturns = TaskReturns { entropy: true, support: Some(u32::MAX) };

fn returned(logits: &[f32], task: &SamplingTask<'_>) -> TokenReturns {
    *answer(logits, task, &mut new_scratch()).returned.expect("it was asked for")
}

fn entropy(probabilities: &[f64]) -> f64 {
    -probabilities.iter().filter(|p| **p > 0.0).map(|p| p * p.ln()).sum::<f64>()
}

#[test]
fn entropies_and_supports_are_those_of_the_exact_distribution() {
    let mut rng = rng(21);
    for vocab in [1, 12, 127, 128, 129, 700, 5000] {
        for (name, options) in options().into_iter().filter(|_| vocab > 8) {
            let mut logits = random_row(&mut rng, vocab, 2.0);
            logits.iter_mut().skip(9).step_by(7).for_each(|x| *x = f32::NEG_INFINITY);
            let task = SamplingTask { returns: ALL, ..task(&options, 3, 1) };
            let found = returned(&logits, &task);
            let exact = reference(&logits, &task);
            let near = |found: f32, exact: f64| {
                let context = || format!("{name}, {vocab} tokens: {found}, expected {exact}");
                assert!((f64::from(found) - exact).abs() < 2e-6 * exact.abs().max(1.0), "{}", context());
            };
            near(found.raw_entropy, entropy(&softmax(&logits)));
            near(found.entropy, entropy(&exact));
            let ids: Vec<u32> = (0..).zip(&exact).filter(|(_, p)| **p > 0.0).map(|(id, _)| id).collect();
            assert_eq!((found.support.size, &found.support.ids), (ids.len() as u32, &ids), "{name}, {vocab} tokens");
            if options.temperature > 0.0 {
                let heated = Options { temperature: options.temperature, ..Options::default() };
                let heated = reference(&logits, &super::task(&heated, 0, 0));
                near(found.support.log_mass, ids.iter().map(|id| heated[*id as usize]).sum::<f64>().ln());
            }
        }
    }
}

/// A trainer's use of a support: its logits, renormalised over the support's tokens, give the processed
/// log-probabilities; so does the log mass, subtracted from those over all tokens.
#[test]
fn logits_renormalised_over_the_support_give_the_processed_log_probabilities() {
    let mut rng = rng(22);
    let mut scratch = new_scratch();
    for round in 0..200u32 {
        let logits = random_row(&mut rng, [40, 300, 3000][round as usize % 3], 3.0);
        let options = Options {
            temperature: [1.0, 0.7, 1.6][rng.next_u32() as usize % 3],
            top_k: [0, 5, 200][rng.next_u32() as usize % 3],
            top_p: [1.0, 0.9, 0.99][rng.next_u32() as usize % 3],
            min_p: [0.0, 0.01][rng.next_u32() as usize % 2],
            allowed: (round % 5 == 0).then(|| (0..logits.len() as u32).step_by(3).collect()),
            ..Options::default()
        };
        let task = SamplingTask { returns: ALL, ..task(&options, u64::from(round), 0) };
        let answer = answer(&logits, &task, &mut scratch);
        let Support { ids, log_mass, .. } = answer.returned.clone().expect("it was asked for").support;
        let heated = |token: u32| f64::from(logits[token as usize]) / f64::from(options.temperature);
        let log_sum = |tokens: &mut dyn Iterator<Item = u32>| tokens.map(|token| heated(token).exp()).sum::<f64>().ln();
        let over_support = heated(answer.token) - log_sum(&mut ids.iter().copied());
        let over_all = heated(answer.token) - log_sum(&mut (0..logits.len() as u32)) - f64::from(log_mass);
        for renormalised in [over_support, over_all] {
            assert!(
                (renormalised - f64::from(answer.processed)).abs() < 1e-6,
                "{options:?}: {renormalised}, {answer:?}"
            );
        }
    }
}

#[test]
fn returns_change_nothing_else_and_are_the_same_for_all_instruction_sets() {
    let mut rng = rng(23);
    for (name, options) in options() {
        let logits = random_row(&mut rng, 3000, 2.0);
        let plain = task(&options, 5, 2);
        let asked = SamplingTask { returns: ALL, ..plain };
        let mut answers = Isa::available().into_iter().map(|isa| {
            let mut scratch = SamplerScratch::new(isa);
            let answered = answer(&logits, &asked, &mut scratch);
            let scored = SamplingTask { target: Some(answered.token), ..asked };
            assert_eq!(answered, answer(&logits, &scored, &mut scratch), "{name}: scored");
            answered
        });
        let first = answers.next().expect("one instruction set");
        answers.for_each(|other| assert_eq!(first, other, "{name}"));
        let without = TokenLogprobs { returned: None, ..first };
        assert_eq!(without, answer(&logits, &plain, &mut new_scratch()), "{name}");
    }
}

#[test]
fn a_support_of_more_tokens_than_the_limit_has_no_ids() {
    let logits = [0.0, 1.0, 2.0, 3.0];
    let of = |limit, options: &Options| {
        let returns = TaskReturns { entropy: false, support: Some(limit) };
        returned(&logits, &SamplingTask { returns, ..task(options, 1, 1) }).support
    };
    let all = Options::default();
    assert_eq!(of(4, &all), Support { size: 4, log_mass: 0.0, ids: vec![0, 1, 2, 3] });
    assert_eq!(of(3, &all), Support { size: 4, log_mass: 0.0, ids: vec![] });
    let two = Options { top_k: 2, ..Options::default() };
    assert_eq!(of(2, &two).ids, [2, 3]);
    assert_eq!((of(1, &two).size, of(1, &two).ids), (2, vec![]));
    let greedy = Options { temperature: 0.0, ..Options::default() };
    assert_eq!(of(1, &greedy), Support { size: 1, log_mass: 0.0, ids: vec![3] });
    assert_eq!(of(0, &greedy), Support { size: 1, log_mass: 0.0, ids: vec![] });
}

#[test]
fn rows_without_a_distribution_have_no_numbers() {
    let options = Options::default();
    let task = SamplingTask { returns: ALL, ..task(&options, 1, 1) };
    for broken in [[0.0, f32::NAN, 2.0], [f32::NAN; 3], [0.0, f32::INFINITY, 1.0]] {
        let TokenReturns { raw_entropy, entropy, support, .. } = returned(&broken, &task);
        assert!(raw_entropy.is_nan() && entropy.is_nan() && support.log_mass.is_nan(), "{broken:?}");
        assert_eq!(support.size, 1);
    }
    // No token has a probability, and the lowest id is taken.
    let TokenReturns { raw_entropy, entropy, support, .. } = returned(&[f32::NEG_INFINITY; 3], &task);
    assert!(raw_entropy.is_nan());
    assert_eq!((entropy, support), (0.0, Support { size: 1, log_mass: 0.0, ids: vec![0] }));
}
