//! Jumps, calls, and special registers.

use super::device;
use super::kernel::run;

#[test]
fn loops_and_jump_tables() {
    let body = "
        and.b32 %r0, %t, 3;
        mov.u32 %r1, 0;
        mov.u32 %r2, 0;
        targets: .branchtargets ZERO, ONE, TWO, THREE;
        brx.idx.uni %r0, targets;
        THREE: add.u32 %r1, %r1, 1000;
        TWO: add.u32 %r1, %r1, 200;
        bra.uni COUNT;
        ONE: add.u32 %r1, %r1, 30;
        ZERO: add.u32 %r1, %r1, 4;
        COUNT:
        setp.ge.u32 %p0, %r2, %t;
        @%p0 bra STORE;
        add.u32 %r2, %r2, 1;
        add.u32 %r1, %r1, 10000;
        bra COUNT;
        STORE:
        st.global.u32 [%mine_out], %r1;";
    let expected = (0..40).map(|t| [4, 34, 200, 1200][t as usize % 4] + t * 10000);
    assert_eq!(run("", body, 40, &[], 40), expected.collect::<Vec<u64>>());
}

#[test]
fn functions_call_each_other() {
    let before = "
        .func (.param .align 8 .b8 result[16]) pair(.param .b64 first, .param .b64 second);
        .func (.param .b32 result) factorial(.param .b32 n) {
            .reg .b32 %r<8>; .reg .pred %p<2>;
            ld.param.b32 %r1, [n];
            mov.u32 %r2, 1;
            setp.lt.u32 %p1, %r1, 2;
            @%p1 bra DONE;
            sub.u32 %r3, %r1, 1;
            { .param .b32 argument; .param .b32 value;
              st.param.b32 [argument], %r3;
              call.uni (value), factorial, (argument);
              ld.param.b32 %r4, [value]; }
            mul.lo.u32 %r2, %r4, %r1;
            DONE:
            st.param.b32 [result], %r2;
            ret;
        }
        .func (.param .align 8 .b8 result[16]) pair(.param .b64 first, .param .b64 second) {
            .reg .b64 %d<3>;
            ld.param.b64 %d1, [first];
            ld.param.b64 %d2, [second];
            st.param.v2.b64 [result], {%d2, %d1};
            ret;
        }";
    let body = "
        { .param .b32 argument; .param .b32 value;
          and.b32 %r0, %t, 7;
          st.param.b32 [argument], %r0;
          call.uni (value), factorial, (argument);
          ld.param.b32 %r1, [value]; }
        cvt.u64.u32 %d0, %r1;
        { .param .b64 a; .param .b64 b; .param .align 8 .b8 value[16];
          st.param.b64 [a], %d0;
          st.param.b64 [b], 17;
          call.uni (value), pair, (a, b);
          ld.param.v2.b64 {%d1, %d2}, [value]; }
        mad.lo.u64 %d3, %d1, 1000000, %d2;
        st.global.u64 [%mine_out], %d3;";
    let factorial = |n: u64| (1..=n).product::<u64>();
    let expected = (0..16).map(|t| 17_000_000 + factorial(t % 8)).collect::<Vec<_>>();
    assert_eq!(run(before, body, 16, &[], 16), expected);
}

#[test]
fn threads_leave_at_different_times() {
    let body = "
        and.b32 %r0, %t, 1;
        setp.eq.u32 %p0, %r0, 1;
        @%p0 exit;
        st.global.u32 [%mine_out], 3;
        setp.gt.u32 %p1, %t, 10;
        @%p1 ret;
        bar.sync 0; // of those that are left
        st.global.u32 [%mine_out+4], 1;";
    let expected = (0..32).map(|t| if t % 2 == 1 { 0 } else { 3 | u64::from(t <= 10) << 32 });
    assert_eq!(run("", body, 32, &[], 32), expected.collect::<Vec<u64>>());
}

#[test]
fn special_registers() {
    let text = "
        .visible .entry test(.param .u64 out) {
            .reg .b64 %out, %d<8>; .reg .b32 %r<16>; .reg .pred %p<4>;
            ld.param.u64 %out, [out];
            mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ntid.x; mov.u32 %r3, %nctaid.x;
            mov.u32 %r4, %laneid; mov.u32 %r5, %warpid;
            mad.lo.u32 %r6, %r1, %r2, %r0;
            mad.wide.u32 %d0, %r6, 32, %out;
            mov.u64 %d1, %globaltimer;
            mov.u64 %d2, %clock64;
            griddepcontrol.wait;
            fence.acq_rel.gpu;
            membar.gl;
            nanosleep.u32 10;
            mov.u64 %d3, %globaltimer;
            setp.ge.u64 %p0, %d3, %d1;
            mov.u64 %d4, %clock64;
            setp.gt.and.u64 %p0, %d4, %d2, %p0;
            selp.b32 %r7, 1, 0, %p0;
            mov.u32 %r8, %lanemask_lt; mov.u32 %r9, %lanemask_ge;
            mov.u32 %r10, %dynamic_smem_size;
            st.global.v4.b32 [%d0], {%r3, %r4, %r5, %r7};
            st.global.v4.b32 [%d0+16], {%r8, %r9, %r10, WARP_SZ};
            ret;
        }";
    let out = device::upload(&[0; 2 * 64 * 4]);
    device::launch(text, 2, 64, 48, &[out]).expect("the kernel runs");
    for (thread, found) in device::download(out, 2 * 64 * 4).chunks(4).enumerate() {
        let (lane, warp) = (thread as u64 % 32, thread as u64 % 64 / 32);
        let below = (1u64 << lane) - 1;
        assert_eq!(found, [2 | lane << 32, warp | 1 << 32, below | (!below & 0xffff_ffff) << 32, 48 | 32 << 32]);
    }
}
