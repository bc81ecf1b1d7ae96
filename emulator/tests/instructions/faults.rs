//! Mistakes of kernels end them, with a message that says where. A device keeps its error, so each runs in a process.

use std::process::Command;

use super::device;
use super::kernel::module;

/// Kernels with one mistake each, and what the message must hold.
const MISTAKES: &[(&str, &str, u32, &[&str])] = &[
    ("past the end of an allocation", "st.global.u32 [%out+4096], 1;", 1, &["st.global.u32", "not allocated"]),
    ("not aligned", "st.global.u32 [%out+2], 1;", 1, &["st.global.u32", "not aligned"]),
    ("no address", "mov.u64 %d0, 4096; ld.u32 %r0, [%d0];", 1, &["ld.u32", "0x1000"]),
    ("past shared memory", "mov.u32 %r0, 4; st.shared.u32 [%r0], 1;", 1, &["st.shared.u32", "shared memory"]),
    ("no local memory", "mov.u64 %d0, 64; st.local.u32 [%d0], 1;", 1, &["st.local.u32", "local memory"]),
    ("a trap", "trap;", 1, &["trap"]),
    (
        "an assertion",
        "mov.u64 %d0, condition; cvta.global.u64 %d0, %d0;
        { .param .b64 message; .param .b64 file; .param .b32 line; .param .b64 function; .param .b64 size;
          st.param.b64 [message], %d0;
          call.uni __assertfail, (message, file, line, function, size); }",
        1,
        &["assertion `x < y`"],
    ),
    (
        "a barrier that was not initialised",
        ".shared .align 8 .b8 word[8]; mbarrier.arrive.shared.b64 %d0, [word];",
        1,
        &["mbarrier.arrive"],
    ),
    (
        "a phase that nobody completes",
        ".shared .align 8 .b8 word[8];
        mbarrier.init.shared.b64 [word], 2;
        WAIT: mbarrier.try_wait.parity.shared.b64 %p0, [word], 0;
        @!%p0 bra WAIT;",
        1,
        &["mbarrier.try_wait"],
    ),
    (
        "a matrix instruction of half a warp",
        ".shared .align 16 .b8 tile[512]; mov.u32 %r0, tile; mad.lo.u32 %r0, %t, 16, %r0;
        ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r0];",
        16,
        &["ldmatrix"],
    ),
    (
        "a barrier that some threads do not reach",
        "setp.lt.u32 %p0, %t, 32;
        @%p0 bra FIRST;
        bar.sync 1;
        bra DONE;
        FIRST: bar.sync 2;
        DONE:",
        64,
        &["bar.sync 1", "bar.sync 2"],
    ),
    (
        "one barrier of all at two places",
        "setp.lt.u32 %p0, %t, 32;
        @%p0 bra FIRST;
        bar.sync 0;
        bra DONE;
        FIRST: barrier.sync 0;
        DONE:",
        64,
        &["bar.sync 0", "barrier.sync 0"],
    ),
    (
        "lanes that meet at different instructions",
        "setp.lt.u32 %p0, %t, 16;
        @%p0 bra FIRST;
        shfl.sync.idx.b32 %r0, %t, 0, 31, 0xffffffff;
        bra DONE;
        FIRST: bar.warp.sync 0xffffffff;
        DONE:",
        32,
        &["shfl.sync", "bar.warp.sync"],
    ),
    (
        "a race",
        ".shared .align 4 .b8 word[4];
        st.shared.u32 [word], %t;
        ld.shared.u32 %r0, [word];",
        64,
        &["race", "st.shared.u32"],
    ),
];

/// Kernels that a check for races must let pass.
const ORDERED: &[(&str, u32)] = &[
    (
        ".shared .align 4 .b8 words[256];
        mov.u32 %r0, words;
        mad.lo.u32 %r1, %t, 4, %r0;
        st.shared.u32 [%r1], %t;
        bar.sync 0;
        xor.b32 %r2, %t, 40;
        mad.lo.u32 %r2, %r2, 4, %r0;
        ld.shared.u32 %r3, [%r2];",
        64,
    ),
    (
        ".shared .align 4 .b8 word[4];
        setp.eq.u32 %p0, %t, 0;
        @%p0 st.shared.u32 [word], 0;
        bar.sync 0;
        red.shared.add.u32 [word], 1;
        atom.shared.max.u32 %r0, [word], 2;
        ld.volatile.shared.u32 %r1, [word];",
        64,
    ),
    (
        ".shared .align 8 .b8 barrier[8]; .shared .align 4 .b8 word[4];
        setp.eq.u32 %p0, %t, 0;
        @%p0 mbarrier.init.shared.b64 [barrier], 64;
        @%p0 st.shared.u32 [word], 5;
        bar.sync 0;
        ld.shared.u32 %r0, [word];
        mbarrier.arrive.shared.b64 %d0, [barrier];
        WAIT: mbarrier.test_wait.shared.b64 %p1, [barrier], %d0;
        @!%p1 bra WAIT;
        @%p0 st.shared.u32 [word], 6;",
        64,
    ),
];

/// Runs the ignored test of this name in a process, and gives its standard error.
fn process(test: &str, case: usize) -> (bool, String) {
    let executable = std::env::current_exe().expect("the test's own executable");
    let output = Command::new(executable)
        .args(["--exact", "--ignored", "--nocapture", "--test-threads=1", test])
        .envs([("EMULATOR_TEST_CASE", case.to_string()), ("CUEMU_RACES", "1".into())])
        .output()
        .expect("the process starts");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[expect(clippy::disallowed_methods, reason = "a test's argument to its own process")]
fn case() -> usize {
    std::env::var("EMULATOR_TEST_CASE").ok().and_then(|n| n.parse().ok()).expect("the parent names a case")
}

/// The declarations of the kernels.
const BEFORE: &str = "
    .extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c, .param .b64 d, .param .b64 e);
    .global .align 1 .b8 condition[6] = {120, 32, 60, 32, 121, 0};";

fn start(body: &str, threads: u32) -> Result<(), i32> {
    device::launch(&module(BEFORE, body), 1, threads, 0, &[device::upload(&[0; 64]), device::upload(&[0; 64])])
}

#[test]
#[ignore = "the process of a test below"]
fn mistake() {
    let (_, body, threads, _) = MISTAKES[case()];
    start(body, threads).expect_err("the kernel fails");
}

#[test]
fn mistakes_are_found_and_placed() {
    for (case, (name, _, _, messages)) in MISTAKES.iter().enumerate() {
        let (failed_as_it_must, error) = process("faults::mistake", case);
        assert!(failed_as_it_must, "{name}: the kernel does not fail:\n{error}");
        for message in *messages {
            assert!(error.contains(message), "{name}: no «{message}» in the message:\n{error}");
        }
    }
}

#[test]
#[ignore = "the process of a test below"]
fn order() {
    let (body, threads) = ORDERED[case()];
    start(body, threads).expect("the kernel runs");
}

#[test]
fn ordered_accesses_are_no_races() {
    for (case, (body, _)) in ORDERED.iter().enumerate() {
        let (runs, error) = process("faults::order", case);
        assert!(runs, "{body}\n{error}");
    }
}

#[test]
#[ignore = "the process of a test below"]
fn print() {
    let before = r#"
        .extern .func (.param .b32 result) vprintf(.param .b64 format, .param .b64 arguments);
        .global .align 1 .b8 text[16] = {116, 61, 37, 100, 32, 120, 61, 37, 46, 51, 102, 10, 0};"#;
    let body = "
        .local .align 8 .b8 arguments[16];
        mov.u64 %d0, arguments;
        cvta.local.u64 %d1, %d0;
        st.local.u32 [%d0], %t;
        mov.f64 %d2, 0d3FF8000000000000;
        st.local.f64 [%d0+8], %d2;
        mov.u64 %d3, text;
        cvta.global.u64 %d4, %d3;
        { .param .b64 format; .param .b64 list; .param .b32 result;
          st.param.b64 [format], %d4;
          st.param.b64 [list], %d1;
          call.uni (result), vprintf, (format, list); }";
    let parameters = [device::upload(&[0]), device::upload(&[0])];
    device::launch(&module(before, body), 1, 2, 0, &parameters).expect("the kernel runs");
}

#[test]
fn printf_writes_to_the_standard_error() {
    let (runs, error) = process("faults::print", 0);
    assert!(runs && error.contains("t=0 x=1.500\nt=1 x=1.500\n"), "{error}");
}

#[test]
#[ignore = "the process of a test below"]
fn load() {
    let body = "mul.lo.u32 %r0, %t, 2;\nwgmma.fence.sync.aligned;";
    device::load(&module("", body)).expect_err("the module has an instruction that is not emulated");
}

#[test]
fn an_instruction_that_is_not_emulated_fails_at_load_by_name() {
    let (fails, error) = process("faults::load", 0);
    assert!(fails && error.contains("wgmma.fence.sync.aligned") && error.contains("PTX line"), "{error}");
}
