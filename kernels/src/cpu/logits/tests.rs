use super::*;

/// Rows of several lengths, each with ties, `-inf` and a wide range.
fn rows() -> Vec<Vec<f32>> {
    let mut state = 0x5EED_u64;
    println!("seed {state:#x}");
    let mut next = move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 1000, 4096, 49_152]
        .into_iter()
        .map(|n| {
            let row = (0..n).map(|i| if i % 7 == 3 { f32::NEG_INFINITY } else { (next() * 40.0).round() / 2.0 - 12.0 });
            row.collect()
        })
        .collect()
}

#[test]
fn maximum_of_row_and_blocks() {
    let mut maxima = vec![1.0];
    for row in rows() {
        let max = block_max(&row, &mut maxima);
        assert_eq!(max, row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let exact: Vec<f32> = row.chunks(BLOCK).map(|b| b.iter().copied().fold(f32::NEG_INFINITY, f32::max)).collect();
        assert_eq!(maxima, exact);
    }
    assert_eq!(block_max(&[f32::NAN, -3.0, f32::NAN], &mut maxima), -3.0);
    assert_eq!(block_max(&[f32::NAN], &mut maxima), f32::NEG_INFINITY);
}

#[test]
fn sum_of_exponentials_is_close_to_float64_and_the_same_bits_on_every_instruction_set() {
    let (mut sums, mut portable) = (Vec::new(), Vec::new());
    for row in rows() {
        let max = block_max(&row, &mut Vec::new());
        for scale in [1.0, 0.25, 3.0, 1e4] {
            let sum = block_sum_exp(&row, max, scale, &mut sums);
            let exact: f64 = row.iter().map(|&x| (f64::from(x - max) * f64::from(scale)).exp()).sum();
            assert!((sum / exact - 1.0).abs() < 1e-6, "{} tokens, scale {scale}: {sum}, exact {exact}", row.len());
            portable.clear();
            assert_eq!(sum, block_sum_exp_body(&row, max, scale, &mut portable));
            assert_eq!(sums, portable);
        }
    }
}

#[test]
fn inverse_cdf_inverts_the_running_sum() {
    let mut sums = Vec::new();
    for row in rows() {
        let max = block_max(&row, &mut Vec::new());
        let total = block_sum_exp(&row, max, 0.5, &mut sums);
        for i in 0..=200 {
            let target = (f64::from(i) / 200.0 * total).min(total.next_down());
            let token = inverse_cdf(&row, max, 0.5, &sums, target);
            let weight = |x: f32| f64::from(math::exp((x - max) * 0.5));
            let before: f64 = row[..token].iter().map(|&x| weight(x)).sum();
            let tolerance = total * 1e-6;
            assert!(weight(row[token]) > 0.0);
            assert!(before <= target + tolerance && target < before + weight(row[token]) + tolerance);
            assert_eq!(token, inverse_cdf_body(&row, max, 0.5, &sums, target));
        }
    }
}

#[test]
fn candidates_are_all_tokens_at_or_above_the_floor() {
    let (mut maxima, mut out) = (Vec::new(), Vec::new());
    for row in rows() {
        let max = block_max(&row, &mut maxima);
        for floor in [f32::NEG_INFINITY, -12.0, 0.5, max, max.next_up()] {
            candidates(&row, &maxima, floor, max, 2.0, &mut out);
            let naive: Vec<Candidate> = (0..row.len())
                .filter(|&i| row[i] >= floor)
                .map(|i| Candidate { logit: row[i], weight: math::exp((row[i] - max) * 2.0), id: i as u32 })
                .collect();
            assert_eq!(out, naive);
        }
    }
    block_max(&[f32::NAN, 1.0], &mut maxima);
    candidates(&[f32::NAN, 1.0], &maxima, f32::NEG_INFINITY, 1.0, 1.0, &mut out);
    assert_eq!(out.iter().map(|c| c.id).collect::<Vec<_>>(), [1]);
}
