//! The operators that only vision towers have, on every device.

use rollout_kernels::Patches;

use super::common::{Random, Rank, close, devices, reference, values_of};
use super::panics;

/// The patches' rows, between others that must stay as they are.
fn cut(rank: &Rank, patches: &Patches<'_>) -> Vec<f32> {
    let (rows, width) = (patches.corners.len(), 3 * patches.frames * patches.side * patches.side);
    let out = rank.tensor(&vec![7.0; (rows + 2) * (width + 3)], rows + 2, width + 3);
    rank.ops.patches(patches, &out.narrow(0, 1, rows).unwrap().narrow(1, 0, width).unwrap()).unwrap();
    values_of(&out)
}

#[test]
fn patches_have_the_bits_of_the_reference() {
    let reference = reference();
    // The pixels of the last go to a GPU in two parts.
    let shapes = [(14, 2, 40), (14, 1, 1), (5, 3, 70), (1, 2, 9), (16, 2, 300), (16, 1, 1400)];
    for (seed, (side, frames, count)) in shapes.into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let (width, height) = (side + random.below(60), side + random.below(60));
        let rgb: Vec<u8> = (0..3 * width * height).map(|_| random.below(256) as u8).collect();
        let corner = |_| [random.below(height - side + 1) as u32, random.below(width - side + 1) as u32];
        let corners: Vec<[u32; 2]> = (0..count).map(corner).collect();
        let [mean, std] = [0.45_f32, 0.27].map(|x| [x * 255.0, x * 1.02 * 255.0, x * 0.97 * 255.0]);
        let patches = Patches { rgb: &rgb, width, side, frames, mean, std, corners: &corners };
        let expected = cut(&reference, &patches);
        for rank in devices() {
            assert!(cut(&rank, &patches) == expected, "{} seed {seed}", rank.name());
        }
    }
}

#[test]
fn patches_have_the_values_of_the_pictures_pixels_in_the_order_of_a_convolution() {
    // Rows of two pixels, whose values are 1 to 18.
    let rgb: Vec<u8> = (1..=18).collect();
    let (mean, std) = ([0.0, 1.0, 2.0], [1.0, 2.0, 0.5]);
    let patches = Patches { rgb: &rgb, width: 2, side: 2, frames: 2, mean, std, corners: &[[1, 0]] };
    let rank = reference();
    let out = rank.zeros(1, 24);
    rank.ops.patches(&patches, &out).unwrap();
    let plane = |channel: usize| [7, 10, 13, 16].map(|red| ((red + channel) as f32 - mean[channel]) / std[channel]);
    let expected: Vec<f32> = [0, 0, 1, 1, 2, 2].into_iter().flat_map(plane).collect();
    assert_eq!(values_of(&out), expected);
}

#[test]
fn patches_outside_the_picture_are_refused() {
    let rank = reference();
    let refused = |rgb: usize, corner: [u32; 2], rows: usize| {
        let (rgb, out) = (vec![0; rgb], rank.zeros(rows, 12));
        let (mean, std, corners) = ([0.0; 3], [1.0; 3], [corner]);
        let patches = Patches { rgb: &rgb, width: 4, side: 2, frames: 1, mean, std, corners: &corners };
        panics(|| rank.ops.patches(&patches, &out).unwrap())
    };
    assert_eq!(refused(36, [1, 2], 1), None);
    assert_eq!(refused(37, [0, 0], 1).as_deref(), Some("37 bytes are no rows of 4 pixels"));
    assert_eq!(refused(36, [2, 0], 1).as_deref(), Some("a patch of 2 pixels at row 2, column 0 of 3 x 4"));
    assert_eq!(refused(36, [0, 3], 1).as_deref(), Some("a patch of 2 pixels at row 0, column 3 of 3 x 4"));
    assert!(refused(36, [0, 0], 2).expect("another shape").contains("rows and width of patches"));
}

#[test]
fn rows_are_put_once_and_in_range() {
    let rank = reference();
    let put = |rows: &[u32]| panics(|| rank.ops.put_rows(&rank.zeros(2, 3), rows, &rank.zeros(4, 3)).unwrap());
    assert_eq!(put(&[3, 0]), None);
    assert_eq!(put(&[3, 3]).as_deref(), Some("row 3 is named twice"));
    assert_eq!(put(&[0, 4]).as_deref(), Some("row 4 of 4"));
}

#[test]
fn gelu_is_that_of_the_reference() {
    let reference = reference();
    for (seed, (rows, width)) in [(1, 1), (3, 35), (9, 1280), (2, 5120)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let mut x = random.normals(rows * (width + 5), 2.5);
        x.iter_mut().zip([f32::INFINITY, f32::NEG_INFINITY, 1e9, -1e9, 0.0]).skip(1).for_each(|(x, edge)| *x = edge);
        let run = |rank: &Rank| {
            let wide = rank.tensor(&x, rows, width + 5);
            rank.ops.gelu(&wide.narrow(1, 0, width).unwrap()).unwrap();
            values_of(&wide)
        };
        let expected = run(&reference);
        for rank in devices() {
            for ((x, found), expected) in x.iter().zip(run(&rank)).zip(&expected) {
                let is_close = (found - expected).abs() <= 1e-6 * expected.abs() + 1e-37;
                assert!(is_close || found == *expected, "{}: {found} of {x}, expected {expected}", rank.name());
            }
        }
    }
}

#[test]
fn the_references_gelu_has_the_values_of_a_precise_one() {
    // By mpmath, with 40 digits.
    let known = [
        (0.0009765625, 0.0004886617109460747),
        (0.125, 0.06871727810376412),
        (0.5, 0.34573123063700656),
        (1.0, 0.8413447460685429),
        (2.5, 2.4844758366855597),
        (2.875, 2.8691921047164053),
        (4.0, 3.9998733150326675),
        (9.0, 9.0),
        (-0.125, -0.056282721896235885),
        (-0.75, -0.16997051428265114),
        (-1.0, -0.15865525393145705),
        (-2.75, -0.008194348896400031),
        (-2.875, -0.005807895283594755),
        (-4.5, -1.5289529061285272e-5),
        (-7.0, -8.958687807200846e-12),
        (-12.0, -2.1317785344932147e-32),
    ];
    let rank = reference();
    let (x, expected): (Vec<f32>, Vec<f64>) = known.into_iter().unzip();
    let out = rank.tensor(&x, 1, x.len());
    rank.ops.gelu(&out).unwrap();
    assert_eq!(values_of(&out), expected.into_iter().map(|value| value as f32).collect::<Vec<_>>());
}

#[test]
fn layer_norms_and_scaled_sums_are_those_of_the_reference() {
    let reference = reference();
    for (seed, (rows, width)) in [(1, 1), (3, 35), (9, 1024), (2, 4096)].into_iter().enumerate() {
        let mut random = Random::new(seed as u64);
        let x: Vec<f32> = random.normals(rows * (width + 5), 2.0).into_iter().map(|x| x + 0.5).collect();
        let old = random.normals(rows * width, 1.0);
        let [weight, bias, scale] = [1.0, 1.0, 0.3].map(|deviation| random.normals(width, deviation));
        let run = |rank: &Rank| {
            let [weight, bias, scale] = [&weight, &bias, &scale].map(|values| rank.device.upload(values).unwrap());
            let wide = rank.tensor(&x, rows, width + 5);
            let (x, normed) = (wide.narrow(1, 0, width).unwrap(), rank.zeros(rows, width));
            rank.ops.layer_norm(&x, &weight, &bias, 1e-6, &normed).unwrap();
            let sum = rank.tensor(&old, rows, width);
            rank.ops.add_scaled(&x, &scale, &sum).unwrap();
            [values_of(&normed), values_of(&sum)].concat()
        };
        let expected = run(&reference);
        for rank in devices() {
            for (found, expected) in run(&rank).iter().zip(&expected) {
                close(*found, *expected, 4e-6, rank.name());
            }
        }
    }
}

#[test]
fn a_row_has_the_layer_norm_that_it_has_alone() {
    let mut random = Random::new(9);
    let (rows, width) = (37, 1024);
    let x = random.normals(rows * width, 1.0);
    let [weight, bias] = [1.0, 0.5].map(|deviation| random.normals(width, deviation));
    for rank in devices() {
        let [weight, bias] = [&weight, &bias].map(|values| rank.device.upload(values).unwrap());
        let norm = |x: &[f32]| {
            let rows = x.len() / width;
            let out = rank.zeros(rows, width);
            rank.ops.layer_norm(&rank.tensor(x, rows, width), &weight, &bias, 1e-6, &out).unwrap();
            values_of(&out)
        };
        let alone: Vec<f32> = x.chunks(width).flat_map(norm).collect();
        assert!(norm(&x) == alone, "{}", rank.name());
    }
}
