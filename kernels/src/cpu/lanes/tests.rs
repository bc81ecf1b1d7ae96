use super::super::isa::{Isa, Kernel};
use super::super::math;
use super::super::testing::{Random, dot_pair};
use super::*;

struct Exp<'a>(&'a mut [f32; LANES]);
impl Kernel for Exp<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        *self.0 = L::from_array(self.0).exp().to_array();
    }
}

#[test]
fn exp_has_the_bits_of_the_scalar_function_on_every_isa() {
    for isa in Isa::all() {
        let special = [f32::NEG_INFINITY, f32::INFINITY, -87.3, -87.300_01, 88.7, 89.0, 0.0, -0.0];
        for start in -10_000..10_000_i32 {
            let x: [f32; LANES] = std::array::from_fn(|i| match start {
                0 => special[i % special.len()],
                _ => (start as f32 + i as f32 / 16.0) * 9.1e-3,
            });
            let mut y = x;
            isa.dispatch(Exp(&mut y));
            for i in 0..LANES {
                assert_eq!(y[i].to_bits(), math::exp(x[i]).to_bits(), "exp({}) on {}", x[i], isa.name());
            }
        }
    }
}

struct Exp2<'a>(&'a mut [f32; LANES]);
impl Kernel for Exp2<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self) {
        *self.0 = L::from_array(self.0).exp2().to_array();
    }
}

#[test]
fn exp2_is_within_two_ulp_of_libm_and_the_same_bits_on_every_isa() {
    let exp2 = |isa: Isa, mut x: [f32; LANES]| {
        isa.dispatch(Exp2(&mut x));
        x
    };
    let scalar = Isa::from_name("scalar").expect("always there");
    for start in -160_000..160_000_i32 {
        let x: [f32; LANES] = std::array::from_fn(|i| (start as f32 + i as f32 / 16.0) * 7.93e-4);
        let expected = exp2(scalar, x);
        for i in 0..LANES {
            let exact = f64::from(x[i]).exp2();
            let good = if x[i] < -126.5 { 0.0 } else { exact };
            let error = (f64::from(expected[i]) - good).abs();
            // The second term allows for the last place of denormal numbers, below 2^-126.
            assert!(error < 2.0e-7 * exact + 1e-45, "2^{} = {}, exact {exact}", x[i], expected[i]);
        }
        for isa in Isa::all() {
            assert_eq!(exp2(isa, x).map(f32::to_bits), expected.map(f32::to_bits), "{x:?} on {}", isa.name());
        }
    }
    for isa in Isa::all() {
        let one = |x: f32| exp2(isa, [x; LANES])[LANES - 1];
        assert_eq!([0.0, -0.0, 1.0, -3.0].map(one), [1.0, 1.0, 2.0, 0.125], "{}", isa.name());
        assert_eq!([f32::NEG_INFINITY, -1e30, -126.6].map(|x| one(x).to_bits()), [0; 3], "{}", isa.name());
        assert!(one(f32::NAN).is_nan(), "{}", isa.name());
    }
}

/// Runs every operation of the trait on one pair of vectors.
struct Everything<'a>(&'a [f32; LANES], &'a [f32; LANES], &'a [bf16; 2 * LANES]);
impl Kernel for Everything<'_> {
    type Output = Vec<[f32; LANES]>;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Self::Output {
        let (a, b) = (L::from_array(self.0), L::from_array(self.1));
        // SAFETY: the array has 32 elements.
        let (half, (even, odd)) = unsafe { (L::load_bf16(self.2.as_ptr()), L::load_pairs(self.2.as_ptr())) };
        let folds = L::splat(a.sum()).add(L::splat(a.largest()));
        let results = [a.add(b), a.sub(b), a.mul(b), a.div(b), a.mul_add(b, half), a.max(b), a.min(b)];
        let within = L::splat(a.within(-1.0, 0.7) as f32).add(L::splat(b.within(-0.5, f32::INFINITY) as f32));
        let small = b.mul(L::splat(1.5e-38)).flush_denormals();
        let others = [
            a.or_where_unset(0b1001_0110_1100_0111, 7.0),
            within,
            even,
            odd,
            half,
            folds,
            a.zero_where_below(b, 0.1),
            L::zero(),
            small,
            a.exp(),
            a.exp2(),
        ];
        results.iter().chain(&others).map(|v| v.to_array()).collect()
    }
}

#[test]
fn every_isa_has_the_bits_of_the_scalar_lanes() {
    let a = std::array::from_fn(|i| (i as f32 * 0.37 - 2.5).sin() * 3.0);
    let b = std::array::from_fn(|i| if i == 3 { f32::NAN } else { (i as f32 * 1.37).cos() });
    let pairs = std::array::from_fn(|i| bf16::from_f32((i as f32 * 0.7).sin()));
    let bits = |isa: Isa| -> Vec<Vec<u32>> {
        let all = isa.dispatch(Everything(&a, &b, &pairs));
        all.iter().map(|v| v.iter().map(|x| if x.is_nan() { 1 } else { x.to_bits() }).collect()).collect()
    };
    let scalar = Isa::from_name("scalar").expect("always there");
    for isa in Isa::all() {
        assert_eq!(bits(isa), bits(scalar), "{}", isa.name());
    }
}

/// Transposes 16 rows of bfloat16 pairs, and 16 rows of float32.
struct Transposed<'a>(&'a [f32]);
impl Kernel for Transposed<'_> {
    type Output = [Vec<u32>; 2];
    #[inline(always)]
    fn run<L: Lanes>(self) -> Self::Output {
        #[repr(C, align(64))]
        struct Lines([f32; LANES * LANES]);
        let (mut pairs, mut singles) = (Lines([0.0; LANES * LANES]), Lines([0.0; LANES * LANES]));
        let (mut rows, mut rounded) = ([L::zero(); LANES], [L::zero(); LANES]);
        for i in 0..LANES {
            let row = &self.0[i * 2 * LANES..][..2 * LANES];
            // SAFETY: the row has 32 elements.
            let loaded = unsafe { (L::load(row.as_ptr()), L::load_rounded_pairs(row.as_ptr())) };
            (rows[i], rounded[i]) = loaded;
        }
        for i in 0..LANES {
            // SAFETY: 256 aligned elements each.
            unsafe {
                L::transposed(&rounded)[i].stream(pairs.0.as_mut_ptr().add(LANES * i));
                L::transposed(&rows)[i].stream(singles.0.as_mut_ptr().add(LANES * i));
            }
        }
        L::fence();
        [pairs.0, singles.0].map(|lines| lines.iter().map(|x| x.to_bits()).collect())
    }
}

#[test]
fn lines_are_transposed_and_rounded_alike_on_every_isa() {
    let mut random = Random::new(9);
    for _ in 0..2000 {
        let values: Vec<f32> = (0..2 * LANES * LANES).map(|_| f32::from_bits(random.next() as u32)).collect();
        let cell = |line: usize, row: usize| &values[row * 2 * LANES + 2 * line..][..2];
        for isa in Isa::all() {
            let [pairs, singles] = isa.dispatch(Transposed(&values));
            for (line, row) in (0..LANES).flat_map(|line| (0..LANES).map(move |row| (line, row))) {
                let [low, high] = [0, 1].map(|i| u32::from(math::round_bf16(cell(line, row)[i]).to_bits()));
                assert_eq!(pairs[line * LANES + row], low | high << 16, "{}", isa.name());
                assert_eq!(singles[line * LANES + row], values[row * 2 * LANES + line].to_bits(), "{}", isa.name());
            }
        }
    }
}

/// Shuffles two vectors of 32 bfloat16 by every operation that reorders elements.
struct Shuffled<'a>(&'a [bf16; 2 * LANES], &'a [bf16; 2 * LANES]);
impl Kernel for Shuffled<'_> {
    type Output = [Vec<u32>; 6];
    #[inline(always)]
    fn run<L: Lanes>(self) -> Self::Output {
        // SAFETY: 32 elements each.
        let (a, b) = unsafe { (L::load(self.0.as_ptr().cast()), L::load(self.1.as_ptr().cast())) };
        let (low, high) = a.paired_with(b);
        // SAFETY: 16 elements from each address.
        let halves = unsafe { L::load_paired(self.0.as_ptr().add(3), self.1.as_ptr().add(16)) };
        let all = [a.paired_halves(), a.parted_pairs(), a.parted_pairs().paired_halves(), low, high, halves];
        all.map(|v| v.to_array().iter().map(|x| x.to_bits()).collect())
    }
}

#[test]
fn pairs_are_made_of_the_same_elements_on_every_isa() {
    let (a, b) = (std::array::from_fn(|i| i as u16), std::array::from_fn(|i| 100 + i as u16));
    let pairs = |first: &[u16], second: &[u16]| -> Vec<u32> {
        first.iter().zip(second).map(|(low, high)| u32::from(*low) | u32::from(*high) << 16).collect()
    };
    let (even, odd): (Vec<u16>, Vec<u16>) = (0..16).map(|i| (a[2 * i], a[2 * i + 1])).unzip();
    let parted = [even, odd].concat();
    let in_order = |all: &[u16]| {
        pairs(
            &all.iter().step_by(2).copied().collect::<Vec<_>>(),
            &all[1..].iter().step_by(2).copied().collect::<Vec<_>>(),
        )
    };
    let expected = [
        pairs(&a[..16], &a[16..]),
        in_order(&parted),
        in_order(&a),
        pairs(&a[..16], &b[..16]),
        pairs(&a[16..], &b[16..]),
        pairs(&a[3..19], &b[16..]),
    ];
    for isa in Isa::all() {
        let found = isa.dispatch(Shuffled(&a.map(bf16::from_bits), &b.map(bf16::from_bits)));
        assert_eq!(found, expected, "{}", isa.name());
    }
}

/// Rounds two vectors of float32 to one of bfloat16.
struct Rounded<'a>(&'a [f32; LANES], &'a [f32; LANES]);
impl Kernel for Rounded<'_> {
    type Output = [f32; LANES];
    const DOT_PAIRS: bool = true;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Self::Output {
        L::rounded_pairs(L::from_array(self.0), L::from_array(self.1)).to_array()
    }
}

#[test]
fn pairs_are_rounded_as_vcvtne2ps2bf16_does_on_every_isa() {
    let mut random = Random::new(31);
    for _ in 0..20_000 {
        let mut any = || -> [f32; LANES] { std::array::from_fn(|_| f32::from_bits(random.next() as u32)) };
        let (low, mut high) = (any(), any());
        high[0] = f32::from_bits(0x807f_ffff); // the largest denormal would round to a normal number
        let each: Vec<u16> = low
            .iter()
            .chain(&high)
            .map(|x| {
                let flushed = if x.abs() < f32::MIN_POSITIVE { 0.0_f32.copysign(*x) } else { *x };
                math::round_bf16(flushed).to_bits()
            })
            .collect();
        for isa in Isa::all() {
            let found = isa.dispatch(Rounded(&low, &high)).map(f32::to_bits);
            for i in 0..LANES {
                let expected = u32::from(each[2 * i]) | u32::from(each[2 * i + 1]) << 16;
                assert_eq!(found[i], expected, "{low:?} {high:?} on {}", isa.name());
            }
        }
    }
}

/// Adds to one vector of sums the dot products of a pair with 16 pairs.
struct Pairs<'a>(&'a [f32; LANES], [bf16; 2], &'a [bf16; 2 * LANES]);
impl Kernel for Pairs<'_> {
    type Output = [f32; LANES];
    const DOT_PAIRS: bool = true;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Self::Output {
        let Pairs(sums, x, w) = self;
        let x = u32::from(x[0].to_bits()) | u32::from(x[1].to_bits()) << 16;
        // SAFETY: the array has 32 elements.
        let w = unsafe { L::load(w.as_ptr().cast()) };
        L::from_array(sums).dot_pairs(L::splat(f32::from_bits(x)), w).to_array()
    }
}

/// A random number of one scale (kind 0), of many (1), of nearly all (2), or such that products and sums are near the
/// smallest normal number (3).
fn any_number(random: &mut Random, kind: usize) -> f32 {
    let bits = random.next();
    let (sign, mantissa) = ((bits as u32) & 0x8000_0000, (bits >> 8) as u32 & 0x007f_ffff);
    let exponent = match kind {
        0 => random.between(125, 127),
        1 => random.between(115, 140),
        2 => random.between(0, 190), // 0 is the exponent of denormals; above 190 products are infinite
        _ => random.between(60, 67),
    };
    f32::from_bits(sign | (exponent as u32) << 23 | mantissa)
}

#[test]
fn pairs_are_multiplied_as_vdpbf16ps_does_on_every_isa() {
    let mut random = Random::new(12);
    let (mut denormal, mut order) = (0, 0);
    for i in 0..40_000 {
        let kind = i % 4;
        let mut number = || bf16::from_f32(any_number(&mut random, kind));
        let (x, w) = ([number(), number()], std::array::from_fn(|_| number()));
        let sums: [f32; LANES] = std::array::from_fn(|_| match kind {
            3 => any_number(&mut random, 3) * any_number(&mut random, 3),
            _ => any_number(&mut random, kind),
        });
        let wide = |pair: [bf16; 2]| pair.map(bf16::to_f32);
        let pair = |lane: usize| wide([w[2 * lane], w[2 * lane + 1]]);
        let expected: [f32; LANES] = std::array::from_fn(|lane| dot_pair(sums[lane], wide(x), pair(lane)));
        for lane in 0..LANES {
            let ([first, second], [even, odd]) = (wide(x), pair(lane));
            let plain = first.mul_add(even, second.mul_add(odd, sums[lane]));
            denormal += usize::from(plain.to_bits() != expected[lane].to_bits());
            order += usize::from(second.mul_add(odd, first.mul_add(even, sums[lane])).to_bits() != plain.to_bits());
        }
        for isa in Isa::all() {
            let found = isa.dispatch(Pairs(&sums, x, &w));
            assert_eq!(found.map(f32::to_bits), expected.map(f32::to_bits), "{sums:?} + {x:?} {w:?} on {}", isa.name());
        }
    }
    println!("of 640,000 lanes, denormals decide {denormal}, and the order of the products {order}");
    assert!(denormal > 1000 && order > 1000, "nothing depends on what is tested");
}
