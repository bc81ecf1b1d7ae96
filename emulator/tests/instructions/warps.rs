//! Instructions that the threads of a warp or of a block execute together.

use super::kernel::run;
use super::random::Random;

fn random_words(seed: u64, count: usize) -> Vec<u64> {
    let mut random = Random(seed);
    (0..count).map(|_| random.bits() & 0xffff_ffff).collect()
}

/// The lane that a shuffle of a segment of `width` lanes reads, as CUDA C++ defines it; `None`: its own, out of range.
fn source(mode: &str, lane: u32, by: u32, width: u32) -> Option<u32> {
    let start = lane / width * width;
    let from = match mode {
        "up" => i64::from(lane) - i64::from(by),
        "down" => i64::from(lane) + i64::from(by),
        "bfly" => i64::from(lane ^ by),
        _ => i64::from(start + by % width),
    };
    // A butterfly may reach into the segments before, and no mode into those behind.
    let lowest = if mode == "bfly" { 0 } else { i64::from(start) };
    (lowest..i64::from(start + width)).contains(&from).then_some(from as u32)
}

#[test]
fn shuffles() {
    let input = random_words(51, 32);
    for mode in ["up", "down", "bfly", "idx"] {
        for (by, width) in [(0, 32), (1, 32), (3, 8), (4, 4), (5, 16), (16, 32), (31, 32)] {
            let clamp = if mode == "up" { 0 } else { 31 };
            let c = (32 - width) << 8 | clamp;
            let body = format!(
                "ld.global.u32 %r0, [%mine_in];
                shfl.sync.{mode}.b32 %r1|%p0, %r0, {by}, {c}, 0xffffffff;
                selp.b32 %r2, 1, 0, %p0;
                st.global.v2.u32 [%mine_out], {{%r1, %r2}};"
            );
            let expected = (0..32).map(|lane| match source(mode, lane, by, width) {
                Some(from) => input[from as usize] | 1 << 32,
                None => input[lane as usize],
            });
            let found = run("", &body, 32, &input, 32);
            assert_eq!(found, expected.collect::<Vec<_>>(), "{mode} by {by} in {width} lanes");
        }
    }
}

#[test]
fn shuffles_of_some_lanes() {
    // The upper half of the warp shuffles by itself, while the lower half has gone on.
    let body = "
        setp.lt.u32 %p0, %t, 16;
        mov.u32 %r1, 5;
        @%p0 bra DONE;
        shfl.sync.bfly.b32 %r1, %t, 1, 31, 0xffff0000;
        DONE:
        st.global.u32 [%mine_out], %r1;";
    let expected = (0..32).map(|lane| if lane < 16 { 5 } else { lane ^ 1 });
    assert_eq!(run("", body, 32, &[], 32), expected.collect::<Vec<u64>>());
}

#[test]
fn votes() {
    let input = random_words(52, 32);
    let body = "
        ld.global.u32 %r0, [%mine_in];
        and.b32 %r0, %r0, 1;
        setp.ne.u32 %p0, %r0, 0;
        vote.sync.ballot.b32 %r1, %p0, 0xffffffff;
        vote.sync.any.pred %p1, %p0, 0xffffffff;
        vote.sync.all.pred %p2, %p0, 0xffffffff;
        setp.lt.u32 %p3, %t, 40;
        vote.sync.all.pred %p4, %p3, 0xffffffff;
        vote.sync.uni.pred %p5, %p3, 0xffffffff;
        vote.sync.uni.pred %p6, %p0, 0xffffffff;
        selp.b32 %r2, 1, 0, %p1; selp.b32 %r3, 2, 0, %p2; selp.b32 %r4, 4, 0, %p4;
        selp.b32 %r5, 8, 0, %p5; selp.b32 %r6, 16, 0, %p6;
        add.u32 %r2, %r2, %r3; add.u32 %r2, %r2, %r4; add.u32 %r2, %r2, %r5; add.u32 %r2, %r2, %r6;
        st.global.v2.u32 [%mine_out], {%r1, %r2};";
    let ballot = input.iter().enumerate().map(|(lane, x)| (x & 1) << lane).sum::<u64>();
    assert_eq!(run("", body, 32, &input, 32), [ballot | (1 + 4 + 8) << 32; 32]);
}

#[test]
fn reductions_of_a_warp() {
    let input = random_words(53, 32);
    let signed = || input.iter().map(|&x| x as i32);
    let cases: [(&str, u64); 8] = [
        ("add.u32", input.iter().sum::<u64>() & 0xffff_ffff),
        ("and.b32", input.iter().fold(0xffff_ffff, |a, b| a & b)),
        ("or.b32", input.iter().fold(0, |a, b| a | b)),
        ("xor.b32", input.iter().fold(0, |a, b| a ^ b)),
        ("min.u32", *input.iter().min().expect("32 words")),
        ("max.u32", *input.iter().max().expect("32 words")),
        ("min.s32", u64::from(signed().min().expect("32 words") as u32)),
        ("max.s32", u64::from(signed().max().expect("32 words") as u32)),
    ];
    for (name, expected) in cases {
        let body = format!(
            "ld.global.u32 %r0, [%mine_in];
            redux.sync.{name} %r1, %r0, 0xffffffff;
            st.global.u32 [%mine_out], %r1;"
        );
        assert_eq!(run("", &body, 32, &input, 32), [expected; 32], "{name}");
    }
}

#[test]
fn matches_and_elections() {
    let input = (0..32).map(|lane| (lane * 7 % 5) | ((lane * 7 % 5) << 33)).collect::<Vec<u64>>();
    let body = "
        ld.global.u64 %d0, [%mine_in];
        match.any.sync.b64 %r0, %d0, 0xffffffff;
        cvt.u32.u64 %r1, %d0;
        match.all.sync.b32 %r2|%p0, %r1, 0xffffffff;
        mov.u32 %r3, 9;
        match.all.sync.b32 %r4|%p1, %r3, 0xffffffff;
        elect.sync %r5|%p2, 0xfffffff0;
        activemask.b32 %r6;
        shr.u32 %r6, %r6, %t;
        and.b32 %r6, %r6, 1;
        selp.b32 %r7, 2, 0, %p0; selp.b32 %r8, 4, 0, %p1;
        add.u32 %r6, %r6, %r7; add.u32 %r6, %r6, %r8;
        st.global.v2.u32 [%mine_out], {%r0, %r6};
        selp.b32 %r9, 1, 0, %p2;
        st.global.v2.u32 [%mine_out+256], {%r4, %r9};";
    // The lowest four lanes are not in the mask of the election, so they leave before.
    let body = body
        .replace("elect", "setp.lt.u32 %p3, %t, 4; @%p3 bra PAST;\nelect")
        .replace("activemask", "PAST:\nactivemask");
    let body = format!("setp.lt.u32 %p2, %t, 0;\n{body}");
    let out = run("", &body, 32, &input, 64);
    for (lane, &x) in input.iter().enumerate() {
        let same = input.iter().enumerate().map(|(l, &y)| u64::from(x == y) << l).sum::<u64>();
        assert_eq!(out[lane], same | (1 + 4) << 32, "lane {lane}");
        assert_eq!(out[32 + lane], 0xffff_ffff | u64::from(lane == 4) << 32, "lane {lane}");
    }
}

#[test]
fn barriers_that_count() {
    let input = random_words(54, 96);
    let body = "
        ld.global.u32 %r0, [%mine_in];
        and.b32 %r0, %r0, 1;
        setp.ne.u32 %p0, %r0, 0;
        bar.red.popc.u32 %r1, 0, %p0;
        bar.red.or.pred %p1, 0, %p0;
        barrier.cta.red.and.aligned.pred %p2, 0, %p0;
        selp.b32 %r2, 1, 0, %p1; selp.b32 %r3, 2, 0, %p2;
        add.u32 %r2, %r2, %r3;
        st.global.v2.u32 [%mine_out], {%r1, %r2};";
    let count = input.iter().map(|x| x & 1).sum::<u64>();
    assert_eq!(run("", body, 96, &input, 96), [count | 1 << 32; 96]);
}

#[test]
fn barriers_of_some_warps() {
    // Two warps hand a word to each other through barrier 3, which counts 64 threads; the third does not take part.
    let body = "
        .shared .align 8 .b8 words[512];
        setp.ge.u32 %p0, %t, 64;
        @%p0 bra DONE;
        mov.u32 %r0, words;
        mad.lo.u32 %r1, %t, 8, %r0;
        st.shared.u64 [%r1], %mine_in;
        barrier.sync 3, 64;
        xor.b32 %r2, %t, 32;
        mad.lo.u32 %r1, %r2, 8, %r0;
        ld.shared.u64 %d0, [%r1];
        sub.u64 %d0, %d0, %in;
        st.global.u64 [%mine_out], %d0;
        DONE:
        bar.warp.sync 0xffffffff;";
    let expected = (0..96).map(|t| if t < 64 { (t ^ 32) * 8 } else { 0 });
    assert_eq!(run("", body, 96, &[], 96), expected.collect::<Vec<u64>>());
}

#[test]
fn one_warp_arrives_and_another_waits() {
    // The first warp hands its words over without waiting, and leaves.
    let body = "
        .shared .align 8 .b8 words[256];
        mov.u32 %r0, words;
        setp.ge.u32 %p0, %t, 32;
        @%p0 bra TAKE;
        mad.lo.u32 %r1, %t, 8, %r0;
        st.shared.u64 [%r1], %mine_in;
        bar.arrive 1, 64;
        bra DONE;
        TAKE:
        bar.sync 1, 64;
        sub.u32 %r1, 63, %t;
        mad.lo.u32 %r1, %r1, 8, %r0;
        ld.shared.u64 %d0, [%r1];
        sub.u64 %d0, %d0, %in;
        st.global.u64 [%mine_out], %d0;
        DONE:";
    let expected = (0..64).map(|t| if t < 32 { 0 } else { (63 - t) * 8 });
    assert_eq!(run("", body, 64, &[], 64), expected.collect::<Vec<u64>>());
}
