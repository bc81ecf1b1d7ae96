//! Loads and stores of all spaces.

use super::device;
use super::kernel::run;
use super::random::Random;

fn words(seed: u64, count: usize) -> Vec<u64> {
    let mut random = Random(seed);
    (0..count).map(|_| random.bits()).collect()
}

#[test]
fn vectors_and_hints() {
    let body = "
        shl.b32 %r0, %t, 4;
        cvt.u64.u32 %d0, %r0;
        add.u64 %d1, %in, %d0;
        add.u64 %d2, %out, %d0;
        ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%r1, %r2, %r3, %r4}, [%d1];
        st.global.cs.v4.b32 [%d2], {%r4, %r3, %r2, %r1};
        createpolicy.fractional.L2::evict_first.b64 %d3, 1.0;
        ld.global.L1::evict_last.L2::cache_hint.v2.b64 {%d4, %d5}, [%d1+256], %d3;
        st.global.v2.f64 [%d2+256], {%d5, %d4};
        prefetch.global.L2 [%d1];";
    let input = words(41, 64);
    let output = run("", body, 16, &input, 64);
    for (n, (pair, found)) in input.chunks(2).zip(output.chunks(2)).enumerate() {
        let expected = match n < 16 {
            true => [pair[1].rotate_left(32), pair[0].rotate_left(32)],
            false => [pair[1], pair[0]],
        };
        assert_eq!(found, expected, "pair {n}");
    }
}

#[test]
fn bytes_are_extended_as_their_type_says() {
    let body = "
        ld.global.s8 %r0, [%mine_in];
        ld.global.u8 %r1, [%mine_in+1];
        ld.global.s16 %r2, [%mine_in+2];
        ld.volatile.global.u16 %r3, [%mine_in+4];
        xor.b32 %r0, %r0, %r1; xor.b32 %r0, %r0, %r2; xor.b32 %r0, %r0, %r3;
        st.relaxed.gpu.global.u32 [%mine_out], %r0;
        st.global.u8 [%mine_out+5], %r0;";
    let input = words(42, 32);
    let expected = input.iter().map(|&x| {
        let extended =
            [x as i8 as u32, u32::from((x >> 8) as u8), (x >> 16) as i16 as u32, u32::from((x >> 32) as u16)];
        let word = u64::from(extended.iter().fold(0, |a, b| a ^ b));
        word | (word & 0xff) << 40
    });
    assert_eq!(run("", body, 32, &input, 32), expected.collect::<Vec<_>>());
}

#[test]
fn shared_memory_by_its_own_and_by_generic_addresses() {
    let before = ".extern .shared .align 16 .b8 dynamic[];";
    let body = "
        .shared .align 8 .b8 first[256];
        .shared .align 8 .b8 second[256];
        mov.u32 %r0, second;
        mad.lo.u32 %r1, %t, 8, %r0;
        ld.global.u64 %d0, [%mine_in];
        st.shared.u64 [%r1], %d0;
        bar.sync 0;
        sub.u32 %r2, 31, %t;
        mov.u32 %r3, first;
        mad.lo.u32 %r4, %r2, 8, %r0;
        cvt.u64.u32 %d1, %r4;
        cvta.shared.u64 %d2, %d1;
        isspacep.shared %p0, %d2;
        isspacep.global %p1, %mine_in;
        @%p0 ld.u64 %d3, [%d2];
        @%p1 st.global.u64 [%mine_out], %d3;
        mov.u32 %r5, dynamic;
        cvta.to.shared.u64 %d4, %d2;
        cvt.u32.u64 %r6, %d4;
        sub.u32 %r6, %r6, %r4;
        add.u32 %r6, %r6, %r5;
        st.global.u32 [%mine_out+256], %r6;";
    let input = words(43, 32);
    let out = run(before, body, 32, &input, 64);
    assert_eq!(out[..32], input.iter().rev().copied().collect::<Vec<_>>());
    assert!(out[32..].iter().all(|&address| address == 512), "dynamic shared memory follows the static one");
}

#[test]
fn local_memory_is_the_threads_own() {
    let body = "
        .local .align 16 .b8 stack[64];
        mov.u64 %d0, stack;
        cvta.local.u64 %d1, %d0;
        ld.global.u64 %d2, [%mine_in];
        st.local.v2.u64 [%d0+16], {%d2, %mine_in};
        bar.sync 0;
        ld.u64 %d3, [%d1+16];
        st.global.u64 [%mine_out], %d3;";
    let input = words(44, 64);
    assert_eq!(run("", body, 64, &input, 64), input);
}

#[test]
fn variables_of_the_module() {
    let before = "
        .global .align 8 .b8 bytes[8] = {1, 2, 255, 4};
        .const .align 4 .u32 table[3] = {10, 20, 0xffffffff};
        .global .f64 fraction = 0d3FF8000000000000;";
    let body = "
        mov.u64 %d0, bytes;
        cvta.global.u64 %d0, %d0;
        ld.u64 %d1, [%d0];
        st.global.u64 [%out], %d1;
        ld.const.u32 %r0, [table+8];
        st.global.u32 [%out+8], %r0;
        ld.global.u64 %d2, [fraction];
        st.global.u64 [%out+16], %d2;";
    assert_eq!(run(before, body, 1, &[], 3), [0x04ff_0201, 0xffff_ffff, 1.5f64.to_bits()]);
}

#[test]
fn parameters_of_many_bytes() {
    let text = "
        .visible .entry test(.param .u64 out, .param .u32 small, .param .align 8 .b8 large[24]) {
            .reg .b64 %d<4>; .reg .b32 %r<4>;
            ld.param.u64 %d0, [out];
            ld.param.u32 %r0, [small];
            ld.param.v2.b32 {%r1, %r2}, [large+8];
            st.global.u32 [%d0], %r0;
            st.global.v2.b32 [%d0+8], {%r2, %r1};
            ret;
        }";
    let out = device::upload(&[0; 2]);
    // The driver reads each parameter at its own address: the large one goes on in the words that follow it.
    device::launch(text, 1, 1, 0, &[out, 7, 1, 0x2_0000_0003, 4]).expect("the kernel runs");
    assert_eq!(device::download(out, 2), [7, 0x3_0000_0002]);
}

#[test]
fn what_was_not_written_is_not_a_number() {
    let body = "
        .shared .align 4 .b8 fresh[128];
        .local .align 4 .b8 stack[16];
        .reg .f32 %never;
        mov.u32 %r0, fresh;
        ld.shared.f32 %f0, [%r0+64];
        mov.u64 %d0, stack;
        ld.local.f32 %f1, [%d0+4];
        testp.notanumber.f32 %p0, %f0;
        testp.notanumber.f32 %p1, %f1;
        testp.notanumber.f32 %p2, %never;
        and.pred %p0, %p0, %p1;
        and.pred %p0, %p0, %p2;
        selp.b64 %d1, 1, 0, %p0;
        st.global.u64 [%out], %d1;";
    assert_eq!(run("", body, 1, &[], 1), [1]);
}

#[test]
fn parameters_of_an_entry_have_generic_addresses_that_functions_read() {
    let before = "
        .func (.param .b64 result) follow(.param .b64 at) {
            .reg .b64 %d<3>;
            ld.param.b64 %d1, [at];
            ld.u64 %d2, [%d1];
            st.param.b64 [result], %d2;
            ret;
        }";
    let body = "
        mov.b64 %d0, in;
        cvta.param.u64 %d1, %d0;
        { .param .b64 at; .param .b64 followed;
          st.param.b64 [at], %d1;
          call.uni (followed), follow, (at);
          ld.param.b64 %d2, [followed]; }
        sub.u64 %d2, %d2, %in;
        add.u64 %d2, %d2, 7;
        st.global.u64 [%mine_out], %d2;";
    assert_eq!(run(before, body, 3, &[0], 3), [7; 3]);
}
