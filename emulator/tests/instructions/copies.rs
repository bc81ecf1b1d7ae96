//! Asynchronous copies and mbarriers.

use super::kernel::run;
use super::random::Random;

fn words(seed: u64, count: usize) -> Vec<u64> {
    let mut random = Random(seed);
    (0..count).map(|_| random.bits()).collect()
}

#[test]
fn copies_of_each_size() {
    for (bytes, cache) in [(4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")] {
        let body = format!(
            ".shared .align 16 .b8 tile[512];
            mov.u32 %r0, tile;
            mul.lo.u32 %r1, %t, {bytes};
            add.u32 %r0, %r0, %r1;
            cvt.u64.u32 %d0, %r1;
            add.u64 %d1, %in, %d0;
            add.u64 %d2, %out, %d0;
            cp.async.{cache}.shared.global.L2::128B [%r0], [%d1], {bytes};
            cp.async.commit_group;
            cp.async.wait_group 0;
            ld.shared.u32 %r2, [%r0];
            st.global.u32 [%d2], %r2;
            ld.shared.u32 %r2, [%r0+{last}];
            st.global.u32 [%d2+{last}], %r2;",
            last = bytes - 4
        );
        let input = words(81, 32 * bytes / 8);
        let mut expected = input.clone();
        if bytes == 16 {
            // Of each copy the first and the last word are read.
            for pair in expected.chunks_mut(2) {
                (pair[0], pair[1]) = (pair[0] & 0xffff_ffff, pair[1] & !0xffff_ffff);
            }
        }
        assert_eq!(run("", &body, 32, &input, 32 * bytes / 8), expected, "{bytes} bytes, .{cache}");
    }
}

#[test]
fn the_rest_of_a_short_copy_is_zero() {
    let body = "
        .shared .align 16 .b8 tile[512];
        mov.u32 %r0, tile;
        mad.lo.u32 %r0, %t, 16, %r0;
        mad.wide.u32 %d0, %t, 16, %in;
        and.b32 %r1, %t, 15;
        setp.ge.u32 %p0, %t, 16;
        @!%p0 cp.async.cg.shared.global [%r0], [%d0], 16, %r1;
        setp.eq.u32 %p1, %r1, 3;
        @%p0 cp.async.ca.shared.global [%r0], [%d0], 16, %p1;
        cp.async.wait_all;
        ld.shared.v2.u64 {%d1, %d2}, [%r0];
        mad.wide.u32 %d3, %t, 16, %out;
        st.global.v2.u64 [%d3], {%d1, %d2};";
    let input = words(82, 64);
    let bytes = input.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    let valid = |thread: usize| match thread {
        0..16 => thread,
        19 => 0, // the predicate says that the source is ignored
        _ => 16,
    };
    let copied = bytes.chunks(16).enumerate().flat_map(|(thread, copy)| {
        copy.iter().enumerate().map(move |(at, byte)| if at < valid(thread) { *byte } else { 0 })
    });
    let copied = copied.collect::<Vec<_>>();
    let expected = copied.chunks(8).map(|word| u64::from_le_bytes(word.try_into().expect("8 bytes")));
    assert_eq!(run("", body, 32, &input, 64), expected.collect::<Vec<_>>());
}

#[test]
fn copies_arrive_no_sooner_than_waited_for() {
    let body = "
        .shared .align 16 .b8 tile[64];
        mov.u32 %r0, tile;
        mov.u64 %d5, 7;
        st.shared.v2.u64 [%r0], {%d5, %d5};
        cp.async.ca.shared.global [%r0], [%in], 8;
        cp.async.commit_group;
        cp.async.ca.shared.global [%r0+8], [%in+8], 8;
        cp.async.commit_group;
        ld.shared.v2.u64 {%d0, %d1}, [%r0];
        cp.async.wait_group 1;
        ld.shared.v2.u64 {%d2, %d3}, [%r0];
        cp.async.wait_group 0;
        ld.shared.u64 %d4, [%r0+8];
        st.global.v2.u64 [%out], {%d0, %d1};
        st.global.v2.u64 [%out+16], {%d2, %d3};
        st.global.u64 [%out+32], %d4;";
    assert_eq!(run("", body, 1, &[1, 2], 5), [7, 7, 1, 7, 2]);
}

#[test]
fn mbarrier_phases_by_parity() {
    // In each of four rounds every thread writes a word, arrives, waits for the phase, and reads its neighbour's word.
    let body = "
        .shared .align 8 .b8 barrier[8];
        .shared .align 8 .b8 words[512];
        mov.u32 %r0, barrier;
        mov.u32 %r1, words;
        setp.ne.u32 %p0, %t, 0;
        @!%p0 mbarrier.init.shared::cta.b64 [%r0], 64;
        bar.sync 0;
        mad.lo.u32 %r2, %t, 8, %r1;
        xor.b32 %r3, %t, 33;
        mad.lo.u32 %r3, %r3, 8, %r1;
        mov.u32 %r4, 0;
        mov.u64 %d0, 0;
        ROUND:
        add.u32 %r5, %r4, %t;
        st.shared.u32 [%r2], %r5;
        mbarrier.arrive.release.cta.shared::cta.b64 _, [%r0];
        {
            .reg .pred %done;
            WAIT:
            mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %done, [%r0], %r4;
            @%done bra DONE;
            bra WAIT;
            DONE:
        }
        ld.shared.u32 %r6, [%r3];
        cvt.u64.u32 %d1, %r6;
        add.u64 %d0, %d0, %d1;
        {
            .reg .b64 %state; .reg .pred %done;
            mbarrier.arrive.shared.b64 %state, [%r0];
            WAIT:
            mbarrier.test_wait.shared.b64 %done, [%r0], %state;
            @!%done bra WAIT;
        }
        add.u32 %r4, %r4, 2;
        setp.lt.u32 %p1, %r4, 8;
        @%p1 bra ROUND;
        st.global.u64 [%mine_out], %d0;";
    let expected = (0..64u64).map(|t| 4 * (t ^ 33) + 2 + 4 + 6);
    assert_eq!(run("", body, 64, &[], 64), expected.collect::<Vec<_>>());
}

#[test]
fn mbarrier_bytes_and_copies() {
    // Thread 0 expects 128 bytes, which thread 32 says have come; the other warp's copies arrive by themselves.
    let body = "
        .shared .align 8 .b8 barriers[16];
        .shared .align 8 .b8 tile[512];
        mov.u32 %r0, barriers;
        mov.u32 %r1, tile;
        mad.lo.u32 %r1, %t, 8, %r1;
        setp.ne.u32 %p0, %t, 0;
        setp.ne.u32 %p1, %t, 32;
        mov.u32 %r2, 64;
        @!%p0 mbarrier.init.shared.b64 [%r0], 1;
        @!%p0 mbarrier.init.shared.b64 [%r0+8], %r2;
        bar.sync 0;
        cp.async.ca.shared.global [%r1], [%mine_in], 8;
        cp.async.mbarrier.arrive.noinc.shared.b64 [%r0+8];
        @!%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r0], 128;
        @!%p1 mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r0], 128;
        WAIT:
        mbarrier.try_wait.parity.shared.b64 %p2, [%r0], 0;
        @!%p2 bra WAIT;
        AGAIN:
        mbarrier.try_wait.parity.shared.b64 %p2, [%r0+8], 0, 1000;
        @!%p2 bra AGAIN;
        xor.b32 %r3, %t, 63;
        mov.u32 %r1, tile;
        mad.lo.u32 %r1, %r3, 8, %r1;
        ld.shared.u64 %d0, [%r1];
        st.global.u64 [%mine_out], %d0;
        bar.sync 0;
        @!%p0 mbarrier.inval.shared.b64 [%r0];";
    let input = words(83, 64);
    let expected = input.iter().rev().copied().collect::<Vec<_>>();
    assert_eq!(run("", body, 64, &input, 64), expected);
}
