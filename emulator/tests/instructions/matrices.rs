//! Matrix instructions: fragments laid out as the PTX manual draws them.

use super::half::{bf16, f16};
use super::kernel::run;
use super::random::Random;

/// A random half of moderate size.
fn half(random: &mut Random, is_bf16: bool) -> u16 {
    let (exponent, fraction) = (random.below(12) as u16, random.bits() as u16);
    let sign = fraction & 0x8000;
    if is_bf16 {
        sign | (120 + exponent) << 7 | fraction & 0x7f
    } else {
        sign | (9 + exponent) << 10 | fraction & 0x3ff
    }
}

/// Element (row, column) of the 16 x 8 sums that register `n` of a lane holds.
fn place_of_sum(lane: usize, n: usize) -> (usize, usize) {
    (lane / 4 + n / 2 * 8, lane % 4 * 2 + n % 2)
}

/// Runs `mma` of one warp: operands a of 16 x k and b of k x 8 in registers, and 16 x 8 sums.
fn mma(name: &str, a: &[Vec<u64>], b: &[Vec<u64>], c: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let (of_a, of_b) = (a[0].len(), b[0].len());
    let mut input = Vec::new();
    for lane in 0..32 {
        let mut words = a[lane].clone();
        words.extend(&b[lane]);
        words.extend((0..4).map(|n| {
            let (row, column) = place_of_sum(lane, n);
            u64::from(c[row][column].to_bits())
        }));
        words.resize(10, 0);
        input.extend(words);
    }
    let names =
        |from: usize, count: usize| (from..from + count).map(|n| format!("%r{n}")).collect::<Vec<_>>().join(", ");
    let loads = (0..10).map(|n| format!("ld.global.u32 %r{n}, [%d0+{}];\n", n * 8)).collect::<String>();
    let body = format!(
        "mad.wide.u32 %d0, %t, 80, %in;
        {loads}
        mma.sync.aligned.{name} {{{}}}, {{{}}}, {{{}}}, {{{}}};
        mad.wide.u32 %d1, %t, 16, %out;
        st.global.v4.b32 [%d1], {{%r20, %r21, %r22, %r23}};",
        names(20, 4),
        names(0, of_a),
        names(of_a, of_b),
        names(of_a + of_b, 4)
    );
    let out = run("", &body, 32, &input, 64);
    let mut sums = vec![vec![0.0; 8]; 16];
    for lane in 0..32 {
        for n in 0..4 {
            let (row, column) = place_of_sum(lane, n);
            sums[row][column] = f32::from_bits((out[lane * 2 + n / 2] >> (n % 2 * 32)) as u32);
        }
    }
    sums
}

/// Float32 sums with k ascending; each product is exact in float32.
fn expected(a: &[Vec<f32>], b: &[Vec<f32>], c: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let sum = |row: usize, column: usize| (0..b.len()).fold(c[row][column], |sum, k| sum + a[row][k] * b[k][column]);
    (0..16).map(|row| (0..8).map(|column| sum(row, column)).collect()).collect()
}

fn random_sums(random: &mut Random) -> Vec<Vec<f32>> {
    (0..16).map(|_| (0..8).map(|_| random.below(4096) as f32 / 64.0 - 32.0).collect()).collect()
}

#[test]
fn mma_of_halves() {
    for (seed, is_bf16, k) in [(61, true, 16), (62, false, 16), (63, true, 8), (64, false, 8)] {
        let mut random = Random(seed);
        let mut matrix = |rows: usize, columns: usize| -> Vec<Vec<u16>> {
            (0..rows).map(|_| (0..columns).map(|_| half(&mut random, is_bf16)).collect()).collect()
        };
        let (a, b) = (matrix(16, k), matrix(k, 8));
        let c = random_sums(&mut random);
        let pack = |low: u16, high: u16| u64::from(low) | u64::from(high) << 16;
        // Register r of a: rows g and g + 8 in turn, then the next 8 columns. Register r of b: the next 8 rows.
        let a_of = |lane: usize, r: usize| {
            let (row, column) = (lane / 4 + r % 2 * 8, lane % 4 * 2 + r / 2 * 8);
            pack(a[row][column], a[row][column + 1])
        };
        let b_of = |lane: usize, r: usize| {
            let row = lane % 4 * 2 + r * 8;
            pack(b[row][lane / 4], b[row + 1][lane / 4])
        };
        let a_lanes = (0..32).map(|lane| (0..k / 4).map(|r| a_of(lane, r)).collect()).collect::<Vec<_>>();
        let b_lanes = (0..32).map(|lane| (0..k / 8).map(|r| b_of(lane, r)).collect()).collect::<Vec<_>>();
        let name = if is_bf16 { "bf16" } else { "f16" };
        let found = mma(&format!("m16n8k{k}.row.col.f32.{name}.{name}.f32"), &a_lanes, &b_lanes, &c);
        let value = |x: &u16| (if is_bf16 { bf16(*x) } else { f16(*x) }) as f32;
        let values = |m: &[Vec<u16>]| m.iter().map(|row| row.iter().map(value).collect()).collect::<Vec<Vec<f32>>>();
        assert_eq!(found, expected(&values(&a), &values(&b), &c), "seed {seed}, {name}, k = {k}");
    }
}

#[test]
fn mma_of_tf32() {
    for (seed, k) in [(65, 8), (66, 4)] {
        let mut random = Random(seed);
        let mut matrix = |rows: usize, columns: usize| -> Vec<Vec<f32>> {
            let mut value = || (random.below(1 << 20) as f32 / 1000.0 - 500.0) * 1.000_123;
            (0..rows).map(|_| (0..columns).map(|_| value()).collect()).collect()
        };
        let (a, b) = (matrix(16, k), matrix(k, 8));
        let c = random_sums(&mut random);
        let a_of = |lane: usize, r: usize| u64::from(a[lane / 4 + r % 2 * 8][lane % 4 + r / 2 * 4].to_bits());
        let b_of = |lane: usize, r: usize| u64::from(b[lane % 4 + r * 4][lane / 4].to_bits());
        let a_lanes = (0..32).map(|lane| (0..k / 2).map(|r| a_of(lane, r)).collect()).collect::<Vec<_>>();
        let b_lanes = (0..32).map(|lane| (0..k / 4).map(|r| b_of(lane, r)).collect()).collect::<Vec<_>>();
        let found = mma(&format!("m16n8k{k}.row.col.f32.tf32.tf32.f32"), &a_lanes, &b_lanes, &c);
        // The low 13 bits of a float32 do not take part.
        let cut = |x: &f32| f32::from_bits(x.to_bits() & !0x1fff);
        let cut = |m: &[Vec<f32>]| m.iter().map(|row| row.iter().map(cut).collect()).collect::<Vec<Vec<f32>>>();
        assert_eq!(found, expected(&cut(&a), &cut(&b), &c), "seed {seed}, k = {k}");
    }
}

/// Word `c` of row `r` of a matrix of 8 x 8 numbered halves, transposed or not: what lane 4 r + c holds of it.
fn fragment(matrix: u64, lane: u64, transposed: bool) -> u64 {
    let (row, column) = (lane / 4, lane % 4 * 2);
    let half = |row: u64, column: u64| matrix * 64 + if transposed { column * 8 + row } else { row * 8 + column };
    half(row, column) | half(row, column + 1) << 16
}

#[test]
fn ldmatrix_and_stmatrix() {
    // Four matrices of halves that are numbered in their order.
    let input = (0..64).map(|n| (0..4).map(|h| (n * 4 + h) << (16 * h)).sum()).collect::<Vec<u64>>();
    for (count, transposed) in [(1, false), (2, false), (4, false), (1, true), (2, true), (4, true)] {
        let trans = if transposed { ".trans" } else { "" };
        let registers = (10..10 + count).map(|n| format!("%r{n}")).collect::<Vec<_>>().join(", ");
        let stores =
            (0..count).map(|n| format!("st.global.u32 [%mine_out+{}], %r{};\n", n * 256, n + 10)).collect::<String>();
        let body = format!(
            ".shared .align 16 .b8 tile[512];
            .shared .align 16 .b8 copy[512];
            mov.u32 %r0, tile;
            mad.lo.u32 %r1, %t, 16, %r0;
            mad.wide.u32 %d0, %t, 16, %in;
            ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%d0];
            st.shared.v4.u32 [%r1], {{%r2, %r3, %r4, %r5}};
            bar.sync 0;
            ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%r1];
            {stores}
            mov.u32 %r6, copy;
            mad.lo.u32 %r6, %t, 16, %r6;
            stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [%r6], {{{registers}}};
            bar.sync 0;
            setp.ge.u32 %p0, %t, {};
            @%p0 bra DONE;
            ld.shared.v4.u32 {{%r2, %r3, %r4, %r5}}, [%r6];
            mad.wide.u32 %d1, %t, 16, %out;
            st.global.v4.u32 [%d1+1024], {{%r2, %r3, %r4, %r5}};
            DONE:",
            count * 8
        );
        let out = run("", &body, 32, &input, 192);
        for matrix in 0..count {
            for lane in 0..32 {
                let expected = fragment(matrix as u64, lane, transposed);
                assert_eq!(out[matrix * 32 + lane as usize], expected, "x{count}{trans}, matrix {matrix}, lane {lane}");
            }
        }
        assert_eq!(out[128..128 + count * 16], input[..count * 16], "stmatrix x{count}{trans}");
    }
}

#[test]
fn movmatrix() {
    let input = (0..32).map(|lane| fragment(0, lane, false)).collect::<Vec<_>>();
    let body = "
        ld.global.u32 %r0, [%mine_in];
        movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r0;
        st.global.u32 [%mine_out], %r1;";
    let expected = (0..32).map(|lane| fragment(0, lane, true)).collect::<Vec<_>>();
    assert_eq!(run("", body, 32, &input, 32), expected);
}

#[test]
fn a_warp_meets_once_for_instructions_in_a_row() {
    // The second product takes the first one's sums and a register that changes between; a guarded one follows, and a
    // store to shared memory between two loads of it.
    let body = "
        .shared .align 16 .b8 tile[512];
        mov.u32 %r0, tile;
        mad.lo.u32 %r1, %t, 16, %r0;
        mad.wide.u32 %d0, %t, 16, %in;
        ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%d0];
        st.shared.v4.u32 [%r1], {%r2, %r3, %r4, %r5};
        bar.sync 0;
        mov.f32 %f0, 0f00000000;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r10, %r11, %r12, %r13}, [%r1];
        xor.b32 %r6, %r1, 128;
        ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r14, %r15}, [%r6];
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r10, %r11, %r12, %r13},
            {%r14, %r15}, {%f0, %f0, %f0, %f0};
        mov.f32 %f0, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1, %f2, %f3, %f4}, {%r10, %r11, %r12, %r13},
            {%r14, %r15}, {%f1, %f2, %f3, %f0};
        add.f32 %f4, %f4, %f4;
        setp.lt.u32 %p0, %t, 32;
        @%p0 mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f5, %f6, %f7, %f8}, {%r10, %r11, %r12, %r13},
            {%r14, %r15}, {%f1, %f2, %f3, %f4};
        bar.warp.sync 0xffffffff;
        st.shared.u32 [%r1], 0;
        bar.warp.sync 0xffffffff;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r20}, [%r1];
        mad.wide.u32 %d1, %t, 24, %out;
        st.global.v2.f32 [%d1], {%f5, %f6};
        st.global.v2.f32 [%d1+8], {%f7, %f8};
        st.global.u32 [%d1+16], %r20;";
    let mut random = Random(67);
    let halves = (0..256).map(|_| half(&mut random, true)).collect::<Vec<_>>();
    let input = halves.chunks(4).map(|h| h.iter().rev().fold(0, |word, &h| word << 16 | u64::from(h)));
    let out = run("", body, 32, &input.collect::<Vec<_>>(), 96);
    // Element (row, column) of matrix m of the tile: rows of 8 halves, 8 rows for each matrix.
    let at = |m: usize, row: usize, column: usize| bf16(halves[m * 64 + row * 8 + column]) as f32;
    let a = |row: usize, k: usize| at(row / 8 + k / 8 * 2, row % 8, k % 8);
    // Lane l brings row l of the second load from address l ^ 8: matrices 1 and 0.
    let b = |k: usize, column: usize| at(1 - k / 8, column, k % 8);
    for lane in 0..32 {
        for n in 0..4 {
            let (row, column) = place_of_sum(lane, n);
            let product = |start: f32| (0..16).fold(start, |sum, k| sum + a(row, k) * b(k, column));
            let second = product(if n == 3 { 1.0 } else { product(0.0) });
            let third = product(if n == 3 { second + second } else { second });
            let found = f32::from_bits((out[lane * 3 + n / 2] >> (n % 2 * 32)) as u32);
            assert_eq!(found, third, "lane {lane}, element {n}");
        }
        // The store has cleared the first word of each row.
        let pair = lane / 4 * 8 + lane % 4 * 2;
        let kept = u64::from(halves[pair]) | u64::from(halves[pair + 1]) << 16;
        let expected = if lane % 4 == 0 { 0 } else { kept };
        assert_eq!(out[lane * 3 + 2], expected, "lane {lane}");
    }
}
