//! Compares the sampler with that of the reference device, which is naive on purpose: float64, full sorts, one step
//! after the other.

mod edges;
mod returns;

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

use super::*;
use crate::reference::distribution as reference;
use crate::sampling::TaskReturns;

/// The sampling options of a request.
#[derive(Clone, Debug)]
struct Options {
    temperature: f32,
    top_k: u32,
    top_p: f32,
    min_p: f32,
    repetition_penalty: f32,
    presence_penalty: f32,
    frequency_penalty: f32,
    logit_bias: Vec<(u32, f32)>,
    allowed: Option<Vec<u32>>,
    mask: Option<Vec<u32>>,
    eos: Vec<u32>,
    stop: Vec<u32>,
    top_logprobs: u32,
    top_of: Distribution,
    returns: TaskReturns,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            allowed: None,
            mask: None,
            eos: Vec::new(),
            stop: Vec::new(),
            top_logprobs: 0,
            top_of: Distribution::Raw,
            returns: TaskReturns::default(),
        }
    }
}

/// A sampling task without a history of tokens.
fn task(options: &Options, seed: u64, output_index: u32) -> SamplingTask<'_> {
    SamplingTask {
        temperature: options.temperature,
        top_k: options.top_k,
        top_p: options.top_p,
        min_p: options.min_p,
        repetition_penalty: options.repetition_penalty,
        presence_penalty: options.presence_penalty,
        frequency_penalty: options.frequency_penalty,
        logit_bias: &options.logit_bias,
        allowed: options.allowed.as_deref(),
        mask: options.mask.as_deref(),
        banned: [&options.eos, &options.stop, &[], &[]],
        history: None,
        seed,
        output_index,
        target: None,
        top_logprobs: options.top_logprobs,
        logprobs_of: &[],
        top_of: options.top_of,
        returns: options.returns,
    }
}

fn new_scratch() -> SamplerScratch {
    SamplerScratch::new(Isa::detect())
}

fn answer(logits: &[f32], task: &SamplingTask<'_>, scratch: &mut SamplerScratch) -> TokenLogprobs {
    let mut out = Vec::new();
    answer_row(logits, std::slice::from_ref(task), scratch, &mut out);
    out.pop().expect("one answer per task")
}

fn rng(seed: u64) -> ChaCha8Rng {
    println!("seed {seed}");
    ChaCha8Rng::seed_from_u64(seed)
}

/// Roughly normal logits with standard deviation `spread`.
fn random_row(rng: &mut ChaCha8Rng, vocab: usize, spread: f32) -> Vec<f32> {
    let mut unit = || (rng.next_u32() >> 8) as f32 / (1u64 << 24) as f32;
    (0..vocab).map(|_| ((0..12).map(|_| unit()).sum::<f32>() - 6.0) * spread).collect()
}

/// The model's own distribution.
fn softmax(logits: &[f32]) -> Vec<f64> {
    reference(logits, &task(&Options::default(), 0, 0))
}

/// Draws `draws` tokens and compares their counts, and the processed log-probability of each, with the reference.
fn check_distribution(name: &str, logits: &[f32], task: &SamplingTask<'_>, draws: u32) {
    let probs = reference(logits, task);
    let mut scratch = new_scratch();
    let mut counts = vec![0u32; logits.len()];
    let mut task = *task;
    for draw in 0..draws {
        (task.seed, task.output_index) = (u64::from(draw % 7), task.output_index + u32::from(draw % 7 == 0));
        let answer = answer(logits, &task, &mut scratch);
        counts[answer.token as usize] += 1;
        let exact = probs[answer.token as usize].ln();
        assert!((f64::from(answer.processed) - exact).abs() < 1e-5, "{name}: {answer:?}, exact {exact}");
    }
    // Rare tokens share one cell, since the chi-square statistic needs an expected count of at least five per cell.
    let (mut chi2, mut cells, mut rare) = (0.0, 0, (0.0, 0.0));
    for (&count, &q) in counts.iter().zip(&probs) {
        let (count, expected) = (f64::from(count), q * f64::from(draws));
        assert!(q > 0.0 || count == 0.0, "{name}: drew an excluded token");
        if expected < 5.0 {
            rare = (rare.0 + count, rare.1 + expected);
        } else {
            chi2 += (count - expected).powi(2) / expected;
            cells += 1;
        }
    }
    if rare.1 > 0.5 {
        chi2 += (rare.0 - rare.1).powi(2) / rare.1;
        cells += 1;
    }
    let freedom = f64::from(cells - 1);
    let limit = freedom + 4.0 * (2.0 * freedom).sqrt() + 8.0; // exceeded less than once in 10,000 for any number
    assert!(chi2 <= limit, "{name}: chi-square {chi2:.1} of {freedom} degrees of freedom, limit {limit:.1}");
}

/// Each option alone and several together, over `vocab` tokens of which 0..8 are likely.
fn options() -> Vec<(&'static str, Options)> {
    let d = Options::default;
    let stops = Options { eos: vec![2], ..d() };
    let penalties = Options { repetition_penalty: 1.7, presence_penalty: 0.4, frequency_penalty: 0.3, ..d() };
    vec![
        ("plain", d()),
        ("cool", Options { temperature: 0.6, ..d() }),
        ("hot", Options { temperature: 2.5, ..d() }),
        ("top-k", Options { top_k: 3, ..d() }),
        ("top-p", Options { top_p: 0.8, ..d() }),
        ("min-p", Options { min_p: 0.15, ..d() }),
        ("repetition", Options { repetition_penalty: 1.7, ..d() }),
        ("presence", Options { presence_penalty: 0.9, ..d() }),
        ("frequency", Options { frequency_penalty: -0.5, ..d() }),
        ("bias", Options { logit_bias: vec![(1, 2.0), (5, -3.0)], ..d() }),
        ("allowed", Options { allowed: Some(vec![0, 3, 4, 9]), ..d() }),
        ("banned", Options { stop: vec![0, 7, 4_000_000], ..stops }),
        ("all penalties", Options { temperature: 1.3, ..penalties.clone() }),
        ("all filters", Options { temperature: 0.8, top_k: 6, top_p: 0.9, min_p: 0.05, ..d() }),
        ("top-p in top-k", Options { temperature: 1.5, top_k: 5, top_p: 0.7, ..d() }),
        ("top-p in min-p", Options { temperature: 1.5, top_p: 0.7, min_p: 0.1, ..d() }),
        (
            "everything",
            Options {
                temperature: 0.9,
                top_k: 7,
                top_p: 0.95,
                min_p: 0.01,
                logit_bias: vec![(3, 1.5)],
                allowed: Some((0..11).collect()),
                eos: vec![2],
                ..penalties
            },
        ),
    ]
}

fn with_history(params: &Options) -> SamplingTask<'_> {
    SamplingTask { history: Some((&[0, 1, 1, 5], &[6, 1, 1, 3, 0])), ..task(params, 0, 0) }
}

#[test]
fn samples_follow_the_exact_distribution() {
    let mut rng = rng(1);
    let small = random_row(&mut rng, 12, 1.5);
    let mut large = random_row(&mut rng, 3 * VOCAB_BLOCK + 17, 1.5);
    for (i, &x) in small.iter().enumerate() {
        large[i * 33] = x + 6.0; // likely tokens in every block
    }
    for (name, params) in options() {
        check_distribution(name, &small, &with_history(&params), 20_000);
        check_distribution(name, &large, &with_history(&params), 20_000);
    }
}

#[test]
fn scores_are_the_exact_log_probabilities_and_sum_to_one() {
    let mut rng = rng(2);
    let mut scratch = new_scratch();
    for vocab in [12, VOCAB_BLOCK, 1000] {
        let logits = random_row(&mut rng, vocab, 2.0);
        let raw = softmax(&logits);
        for (name, params) in options() {
            let mut task = with_history(&params);
            let probs = reference(&logits, &task);
            let mut total = 0.0;
            for token in 0..logits.len() {
                task.target = Some(token as u32);
                let scored = answer(&logits, &task, &mut scratch);
                assert_eq!(scored.token, token as u32);
                assert!((f64::from(scored.raw) - raw[token].ln()).abs() < 1e-5);
                total += f64::from(scored.processed).exp();
                let exact = probs[token].ln();
                let close = (f64::from(scored.processed) - exact).abs() < 1e-5;
                assert!(close || f64::from(scored.processed) == exact, "{name}: {scored:?}, exact {exact}");
            }
            assert!((total - 1.0).abs() < 1e-5, "{name}: sums to {total}");
        }
    }
}

#[test]
fn sampling_and_scoring_give_the_same_bits_and_plain_processed_is_raw() {
    let mut rng = rng(3);
    let mut scratch = new_scratch();
    for index in 0..200 {
        let logits = random_row(&mut rng, 777, 3.0);
        for (name, params) in options() {
            let mut task = SamplingTask { seed: 5, output_index: index, ..with_history(&params) };
            let sampled = answer(&logits, &task, &mut scratch);
            assert_eq!(sampled, answer(&logits, &task, &mut new_scratch()), "{name}: depends on the scratch");
            task.target = Some(sampled.token);
            assert_eq!(sampled, answer(&logits, &task, &mut scratch), "{name}");
            if name == "plain" {
                assert_eq!(sampled.raw.to_bits(), sampled.processed.to_bits());
            }
        }
    }
}

#[test]
fn a_top_p_within_rounding_of_one_leaves_out_next_to_nothing() {
    let mut rng = rng(9);
    let mut scratch = new_scratch();
    for (vocab, spread) in [(12, 0.1), (512, 0.01), (512, 1.0), (700, 6.0), (3 * VOCAB_BLOCK, 0.3)] {
        for seed in 0..400 {
            let logits = random_row(&mut rng, vocab, spread);
            let params = Options { top_p: 1.0f32.next_down(), ..Default::default() };
            let sampled = answer(&logits, &task(&params, seed, 0), &mut scratch);
            let difference = (sampled.processed - sampled.raw).abs();
            assert!(difference < 1e-5, "vocabulary {vocab}, spread {spread}, seed {seed}: {sampled:?}");
        }
    }
}

#[test]
fn many_tasks_of_one_row_are_answered_as_each_alone() {
    let logits = random_row(&mut rng(4), 500, 2.0);
    let options = options();
    let tasks: Vec<SamplingTask<'_>> = options.iter().map(|(_, p)| with_history(p)).collect();
    let (mut scratch, mut together) = (new_scratch(), Vec::new());
    answer_row(&logits, &tasks, &mut scratch, &mut together);
    let alone: Vec<_> = tasks.iter().map(|t| answer(&logits, t, &mut scratch)).collect();
    assert_eq!(together, alone);
}

#[test]
fn large_vocabularies_agree_with_the_reference() {
    let mut rng = rng(5);
    let mut scratch = new_scratch();
    for (vocab, spread) in [(49_152, 2.5), (151_936, 1.0), (151_936, 4.0)] {
        let logits = random_row(&mut rng, vocab, spread);
        let d = Options::default();
        for params in [
            d.clone(),
            Options { temperature: 0.7, ..d.clone() },
            Options { top_k: 50, ..d.clone() },
            Options { top_k: 5000, top_p: 0.9, ..d.clone() },
            Options { top_p: 0.95, temperature: 0.6, ..d.clone() },
            Options { top_p: 0.3, temperature: 3.0, ..d.clone() },
            Options { min_p: 0.02, ..d.clone() },
        ] {
            let probs = reference(&logits, &task(&params, 0, 0));
            for index in 0..3 {
                let answer = answer(&logits, &task(&params, 11, index), &mut scratch);
                let u = uniform(11, index);
                let before: f64 = probs[..answer.token as usize].iter().sum();
                let q = probs[answer.token as usize];
                assert!(before <= u + 1e-6 && u < before + q + 1e-6, "{params:?}: {answer:?} is not the token at {u}");
                assert!(
                    (f64::from(answer.processed) - q.ln()).abs() < 1e-5,
                    "{params:?}: {answer:?}, exact {}",
                    q.ln()
                );
            }
        }
    }
}

/// Rows whose last kept token is found in each way: among the highest logits, in a bin, and in the bin of all the rest.
fn rows_to_filter(rng: &mut ChaCha8Rng) -> Vec<Vec<f32>> {
    let mut rows = Vec::new();
    for vocab in [12, 777, 5000, 40_000] {
        for spread in [0.3, 2.0] {
            let row = random_row(rng, vocab, spread);
            rows.push(row.iter().map(|x| (x * 4.0).round() / 4.0).collect()); // many ties
            let few_likely = |(i, x): (usize, &f32)| if i % 97 == 5 { x + 7.0 } else { *x };
            rows.push(row.iter().enumerate().map(few_likely).collect());
            rows.push(row.iter().enumerate().map(|(i, x)| if i % 3 == 1 { f32::NEG_INFINITY } else { *x }).collect());
            rows.push(row);
        }
    }
    rows
}

#[test]
fn filters_end_at_the_token_at_which_a_sort_ends() {
    let mut rng = rng(8);
    let (isa, mut sums, mut selection) = (Isa::detect(), Vec::new(), filter::Selection::default());
    let (mut maxima, mut sorted) = (Vec::new(), Vec::new());
    for logits in rows_to_filter(&mut rng) {
        for scale in [1.0, 1.7, 0.01, 40.0] {
            let (max, total) = logits::summarise(isa, &logits, scale, &mut maxima, &mut sums);
            let row = Row { logits: &logits, maxima: &maxima, max };
            logits::candidates(isa, &row, f32::NEG_INFINITY, scale, &mut sorted);
            sorted.sort_by(filter::descending);
            for (top_k, top_p) in [(1, 1.0), (50, 1.0), (300, 1.0), (3000, 1.0), (0, 0.05), (0, 0.5), (0, 0.95)]
                .into_iter()
                .chain([(0, 0.999), (0, 1.0 - f32::EPSILON), (50, 0.8), (3000, 0.3), (3000, 0.99)])
            {
                let params = Options { top_k, top_p, ..Options::default() };
                let name = format!("{params:?} at {scale} of {}", logits.len());
                let found =
                    filter::bound(isa, &row, &task(&params, 0, 0), scale, Some(total), &mut sums, &mut selection);
                let kept = if top_k == 0 { sorted.len() } else { sorted.len().min(top_k as usize) };
                let mass = |n: usize| sorted[..n].iter().map(|c| f64::from(c.weight)).sum::<f64>();
                let count = sorted.partition_point(|c| found.keeps(c.logit, c.id));
                if top_p == 1.0 {
                    assert!(count == kept || found == LogitBound::NONE, "{name}: {count} kept");
                    continue;
                }
                let (target, rounding) = (f64::from(top_p) * mass(kept), 1e-6 * mass(kept));
                assert!((1..=kept).contains(&count), "{name}: {count} kept");
                assert!(mass(count) >= target - rounding, "{name}: {count} kept are too few");
                assert!(count == 1 || mass(count - 1) < target + rounding, "{name}: {count} kept are too many");
            }
        }
    }
}

#[test]
fn top_logprobs_are_the_most_likely_tokens_of_the_raw_distribution_and_those_that_are_named() {
    let mut rng = rng(6);
    let mut scratch = new_scratch();
    for (vocab, k) in [(12, 1), (12, 5), (12, 12), (12, 100), (5000, 20), (5000, 100)] {
        let mut logits = random_row(&mut rng, vocab, 2.0);
        logits.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0); // many ties
        let params = Options { top_logprobs: k, temperature: 0.5, top_k: 2, ..Default::default() };
        let answer = answer(&logits, &SamplingTask { logprobs_of: &[7, 0], ..task(&params, 1, 1) }, &mut scratch);
        let mut order: Vec<usize> = (0..vocab).collect();
        order.sort_by(|&a, &b| logits[b].partial_cmp(&logits[a]).unwrap().then(a.cmp(&b)));
        order.truncate(k as usize);
        assert_eq!(answer.top.iter().map(|t| t.0 as usize).collect::<Vec<_>>(), [order, vec![7, 0]].concat());
        for &(token, raw) in &answer.top {
            let scored = SamplingTask { target: Some(token), ..task(&params, 1, 1) };
            let scored = self::answer(&logits, &scored, &mut scratch);
            assert_eq!(scored.raw, raw);
            assert_eq!(scored.rank as usize, 1 + logits.iter().filter(|x| **x > logits[token as usize]).count());
        }
    }
}

#[test]
fn processed_top_logprobs_are_of_the_tokens_that_may_be_drawn() {
    let mut rng = rng(7);
    let mut scratch = new_scratch();
    for (vocab, (name, options)) in [12, 700, 5000].into_iter().flat_map(|n| options().into_iter().map(move |o| (n, o)))
    {
        let mut logits = random_row(&mut rng, vocab, 2.0);
        logits.iter_mut().for_each(|x| *x = (*x * 4.0).round() / 4.0); // many ties
        let options = Options { top_logprobs: 7, top_of: Distribution::Processed, ..options };
        let task = task(&options, 1, 1);
        let mut score = |token| answer(&logits, &SamplingTask { target: Some(token), ..task }, &mut scratch);
        let scores: Vec<TokenLogprobs> = (0..vocab as u32).map(&mut score).collect();
        let mut possible: Vec<&TokenLogprobs> = scores.iter().filter(|s| s.processed > f32::NEG_INFINITY).collect();
        possible.sort_by(|a, b| b.processed.total_cmp(&a.processed).then(a.token.cmp(&b.token)));
        let expected: Vec<(u32, f32)> = possible.iter().take(7).map(|s| (s.token, s.processed)).collect();
        for score in scores.iter().step_by(1 + vocab / 50) {
            assert_eq!(score.top, expected, "{name}, {vocab} tokens");
            let above = possible.iter().filter(|other| other.processed > score.processed).count();
            assert_eq!(score.rank as usize, 1 + above, "{name}, {vocab} tokens, {score:?}");
        }
    }
}

#[test]
fn a_mask_is_a_list_of_allowed_tokens() {
    let mut rng = rng(8);
    let mut scratch = new_scratch();
    for (vocab, (name, options)) in [12, 700, 5000].into_iter().flat_map(|n| options().into_iter().map(move |o| (n, o)))
    {
        let logits = random_row(&mut rng, vocab, 2.0);
        // Words of none, of all and of some tokens; tokens beyond the words are left out.
        let mut mask: Vec<u32> =
            (0..vocab / 40 + 1).map(|_| [0, u32::MAX, rng.next_u32()][rng.next_u32() as usize % 3]).collect();
        mask[0] |= 1 << 3;
        let is_set = |token: &u32| mask.get(*token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1);
        let listed = options.allowed.clone().unwrap_or_else(|| (0..vocab as u32).collect());
        let both: Vec<u32> = listed.into_iter().filter(is_set).filter(|token| (*token as usize) < vocab).collect();
        if both.iter().all(|token| options.eos.contains(token) || options.stop.contains(token)) {
            continue; // nothing is left, which the scheduler sees to
        }
        let masked =
            Options { mask: Some(mask.clone()), top_logprobs: 5, top_of: Distribution::Processed, ..options.clone() };
        let allowed = Options { allowed: Some(both), mask: None, ..masked.clone() };
        for seed in 0..20 {
            let masked = answer(&logits, &task(&masked, seed, 1), &mut scratch);
            assert_eq!(masked, answer(&logits, &task(&allowed, seed, 1), &mut scratch), "{name}, {vocab} tokens");
        }
    }
}
