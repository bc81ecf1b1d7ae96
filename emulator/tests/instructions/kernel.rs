//! Kernels of one block that read and write arrays of 64-bit words.

use super::device;

/// A module around a body, which has `%in`, `%out`, the thread's number `%t` and the addresses of its words `%mine_in`
/// and `%mine_out`, and registers of each width: `%h0` to `%h31`, `%r0`, `%d0`, `%f0` and `%p0` to `%p7`.
pub fn module(before: &str, body: &str) -> String {
    format!(
        "{before}
        .visible .entry test(.param .u64 in, .param .u64 out) {{
            .reg .b64 %in, %out, %mine_in, %mine_out, %d<32>;
            .reg .b32 %t, %r<32>;
            .reg .f32 %f<32>;
            .reg .b16 %h<32>;
            .reg .pred %p<8>;
            ld.param.u64 %in, [in];
            ld.param.u64 %out, [out];
            cvta.to.global.u64 %in, %in;
            cvta.to.global.u64 %out, %out;
            mov.u32 %t, %tid.x;
            mad.wide.u32 %mine_in, %t, 8, %in;
            mad.wide.u32 %mine_out, %t, 8, %out;
            {body}
            ret;
        }}"
    )
}

/// Runs a body in a block of threads, and gives so many words that it wrote.
pub fn run(before: &str, body: &str, threads: u32, input: &[u64], words: usize) -> Vec<u64> {
    let out = device::upload(&vec![0; words]);
    let input = device::upload(if input.is_empty() { &[0] } else { input });
    device::launch(&module(before, body), 1, threads, 0, &[input, out]).expect("the kernel runs");
    device::download(out, words)
}
