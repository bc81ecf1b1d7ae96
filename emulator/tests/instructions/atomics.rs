//! Atomic operations, by many threads on one word.

use super::kernel::run;
use super::random::Random;

const THREADS: u32 = 96;

fn words(seed: u64) -> Vec<u64> {
    let mut random = Random(seed);
    (0..THREADS).map(|_| random.bits()).collect()
}

/// The last value of one word, in global and in shared memory, that begins as `start` and to which each thread applies
/// `red` with its word.
fn reduced(name: &str, ty: &str, start: u64, input: &[u64]) -> [u64; 2] {
    let register = if ty.ends_with("64") { "%d0" } else { "%r1" };
    let body = format!(
        ".shared .align 8 .b8 word[8];
        setp.ne.u32 %p0, %t, 0;
        mov.u32 %r0, word;
        @!%p0 st.shared.u64 [%r0], {start:#x};
        @!%p0 st.global.u64 [%out], {start:#x};
        bar.sync 0;
        ld.global.u64 %d0, [%mine_in];
        cvt.u32.u64 %r1, %d0;
        red.relaxed.gpu.global.{name}.{ty} [%out], {register};
        red.shared.{name}.{ty} [%r0], {register};
        bar.sync 0;
        @!%p0 ld.shared.u64 %d1, [%r0];
        @!%p0 st.global.u64 [%out+8], %d1;"
    );
    let out = run("", &body, THREADS, input, 2);
    [out[0], out[1]]
}

#[test]
fn integers() {
    let input = words(71);
    let all = |f: fn(u64, u64) -> u64, start: u64| input.iter().fold(start, |a, &b| f(a, b));
    let low = |f: fn(u32, u32) -> u32, start: u32| u64::from(input.iter().fold(start, |a, &b| f(a, b as u32)));
    let cases: [(&str, &str, u64, u64); 11] = [
        ("add", "u32", 5, low(u32::wrapping_add, 5)),
        ("add", "u64", 5, all(u64::wrapping_add, 5)),
        ("min", "u32", 1 << 31, low(u32::min, 1 << 31)),
        ("max", "s32", 3, low(|a, b| (a as i32).max(b as i32) as u32, 3)),
        ("min", "s64", 3, all(|a, b| (a as i64).min(b as i64) as u64, 3)),
        ("max", "u64", 3, all(u64::max, 3)),
        ("and", "b32", 0xffff_ffff, low(|a, b| a & b, !0)),
        ("or", "b64", 0, all(|a, b| a | b, 0)),
        ("xor", "b32", 9, low(|a, b| a ^ b, 9)),
        ("inc", "u32", 7, low(|a, b| if a >= b { 0 } else { a + 1 }, 7)),
        ("dec", "u32", 50, low(|a, b| if a == 0 || a > b { b } else { a - 1 }, 50)),
    ];
    for (name, ty, start, expected) in cases {
        let order_matters = matches!(name, "inc" | "dec");
        let input = if order_matters { vec![0xffff_fff0; THREADS as usize] } else { input.clone() };
        let expected = match name {
            "inc" => 7 + u64::from(THREADS),
            // 50 steps to 0, one to the value of the instruction, and the rest from there.
            "dec" => 0xffff_fff0 - (u64::from(THREADS) - 51),
            _ => expected,
        };
        assert_eq!(reduced(name, ty, start, &input), [expected; 2], "{name}.{ty}");
    }
}

#[test]
fn floats() {
    // Small whole numbers: their sums are exact in every order.
    let small = (0..u64::from(THREADS)).map(|n| n % 3).collect::<Vec<_>>();
    let sum = THREADS as f32;
    let of = |f: fn(u64) -> u64| small.iter().map(|&n| f(n)).collect::<Vec<_>>();
    let f32_words = of(|n| (n as f32).to_bits().into());
    assert_eq!(reduced("add", "f32", 0, &f32_words), [u64::from(sum.to_bits()); 2]);
    let f64_words = of(|n| (n as f64).to_bits());
    assert_eq!(reduced("add", "f64", 0, &f64_words), [f64::from(sum).to_bits(); 2]);
    let bf16_of = |x: f32| u64::from(x.to_bits() >> 16);
    let pair = of(|n| u64::from((n as f32).to_bits() >> 16) * 0x1_0001);
    assert_eq!(reduced("add.noftz", "bf16x2", 0, &pair), [bf16_of(sum) * 0x1_0001; 2]);
    let pair = of(|n| u64::from(super::half::f16_of(n as f64)) * 0x1_0001);
    assert_eq!(reduced("add.noftz", "f16x2", 0, &pair), [u64::from(super::half::f16_of(sum.into())) * 0x1_0001; 2]);
}

#[test]
fn what_was_there_before() {
    let body = "
        atom.global.add.u32 %r0, [%out], 1;
        atom.acq_rel.gpu.global.exch.b64 %d0, [%out+8], %mine_in;
        mov.u32 %r1, %t;
        add.u32 %r2, %t, 1;
        RETRY:
        atom.global.cas.b32 %r3, [%out+16], %r1, %r2;
        setp.ne.u32 %p0, %r3, %r1;
        nanosleep.u32 20;
        @%p0 bra RETRY;
        setp.ne.u64 %p1, %d0, 0;
        @%p1 sub.u64 %d0, %d0, %in;
        mad.wide.u32 %d1, %t, 16, %out;
        cvt.u64.u32 %d2, %r0;
        st.global.v2.u64 [%d1+32], {%d2, %d0};";
    let out = run("", body, THREADS, &[0; THREADS as usize], 4 + 2 * THREADS as usize);
    let mut counted = out[4..].iter().step_by(2).copied().collect::<Vec<_>>();
    counted.sort_unstable();
    assert_eq!(counted, (0..u64::from(THREADS)).collect::<Vec<_>>(), "each addition saw another number");
    let mut left = out[4..].iter().skip(1).step_by(2).map(|address| address / 8).collect::<Vec<_>>();
    left.sort_unstable();
    let last = left.windows(2).filter(|pair| pair[0] == pair[1]).count();
    assert!(last <= 1, "each exchange took another thread's value");
    assert_eq!(out[2], u64::from(THREADS), "compare-and-swap in the order of the threads");
}
