//! Ties, extremes of every option, and rows without a distribution.

use super::*;

#[test]
fn ties_go_to_the_lowest_id() {
    let logits = vec![1.0; 300];
    let kept = |params: Options| {
        let mut scratch = new_scratch();
        let score = |token| {
            let task = SamplingTask { target: Some(token), ..task(&params, 0, 0) };
            answer(&logits, &task, &mut scratch).processed
        };
        (0..300).map(score).filter(|lp| *lp > f32::NEG_INFINITY).collect::<Vec<_>>()
    };
    let d = Options::default;
    for (n, params) in [
        (1, Options { temperature: 0.0, ..d() }),
        (3, Options { top_k: 3, ..d() }),
        (150, Options { top_p: 0.5, ..d() }),
        (300, Options { min_p: 1.0, ..d() }),
    ] {
        assert_eq!(kept(params), vec![-(n as f32).ln() + 0.0; n]);
    }
}

#[test]
fn extremes_of_every_option() {
    let logits = [0.5f32, 3.0, f32::NEG_INFINITY, 2.999, -4.0];
    let mut scratch = new_scratch();
    let mut run = |params: Options| answer(&logits, &task(&params, 9, 4), &mut scratch);
    let d = Options::default;
    let sure = [
        Options { temperature: 0.0, top_k: 3, top_p: 0.2, ..d() },
        Options { temperature: 1e-6, ..d() },
        Options { temperature: f32::MIN_POSITIVE / 8.0, ..d() },
        Options { top_k: 1, ..d() },
        Options { top_p: 1e-9, ..d() },
        Options { top_p: f32::MIN_POSITIVE, temperature: 1e-4, ..d() },
        Options { min_p: 1.0, ..d() },
        Options { allowed: Some(vec![1]), ..d() },
        Options { allowed: Some(vec![1]), temperature: 1e30, top_k: 4, min_p: 0.5, ..d() },
    ];
    for params in sure {
        let answer = run(params.clone());
        assert_eq!((answer.token, answer.processed), (1, 0.0), "{params:?}");
    }
    for temperature in [1e6, f32::MAX] {
        let answer = run(Options { temperature, ..d() });
        assert!((answer.processed + 4f32.ln()).abs() < 1e-5 && answer.token != 2, "{temperature}: {answer:?}");
    }
    let one_part_in_a_million = run(Options { top_p: 1.0 - f32::EPSILON, ..d() });
    assert!((one_part_in_a_million.processed - one_part_in_a_million.raw).abs() < 1e-6);
}

#[test]
fn rows_without_a_distribution_have_defined_answers() {
    let mut scratch = new_scratch();
    let d = Options::default;
    let mut run = |logits: &[f32], params: Options| answer(logits, &task(&params, 9, 4), &mut scratch);
    // If every allowed token is masked, the answer is the lowest allowed one.
    let masked = Options { allowed: Some(vec![1, 2]), eos: vec![1, 2], ..d() };
    let answer = run(&[0.0, 0.0, 0.0, 0.0], masked);
    assert_eq!((answer.token, answer.processed), (1, 0.0));
    assert_eq!(answer.raw, -(4f32.ln()));
    let answer = run(&[f32::NEG_INFINITY; 5], Options { top_logprobs: 2, ..d() });
    assert_eq!((answer.token, answer.processed, answer.raw), (0, 0.0, f32::NEG_INFINITY));
    // With a mask, it is the lowest one that the mask, the list and the bans leave.
    let mask = Some(vec![0b11010]);
    for (allowed, eos, expected) in [(None, vec![], 1), (None, vec![1], 3), (Some(vec![0, 1, 4]), vec![1], 4)] {
        let masked = Options { allowed, eos, mask: mask.clone(), ..d() };
        let answer = run(&[f32::NEG_INFINITY; 5], masked);
        assert_eq!((answer.token, answer.processed), (expected, 0.0));
    }
    // The edits overflow to infinity.
    let overflow = Options { logit_bias: vec![(2, f32::MAX)], ..d() };
    let answer = run(&[0.0, f32::MAX, f32::MAX], overflow);
    assert_eq!((answer.token, answer.processed), (2, 0.0));
    // The rows have a NaN or `+inf`.
    for logits in [[0.0, f32::NAN, 2.0], [f32::NAN; 3], [0.0, f32::INFINITY, 1.0]] {
        for (_, params) in options() {
            let params = Options { allowed: None, logit_bias: vec![], top_logprobs: 3, ..params };
            let answer = run(&logits, params.clone());
            assert!(answer.raw.is_nan() && answer.processed.is_nan() && answer.token < 3, "{params:?}: {answer:?}");
        }
    }
    assert_eq!(run(&[0.0, f32::NAN, 2.0, f32::NAN], d()).token, 2);
}
