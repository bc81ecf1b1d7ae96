//! The files and instruction sets that tests find on this machine.

use std::path::PathBuf;

use rollout_kernels::cpu::Isa;

/// A file or directory of `tests/fixtures`; `ROLLOUT_FIXTURES` says where that is, where a test does not run in the
/// checkout that it was built in.
pub fn fixture(name: &str) -> PathBuf {
    path_of("ROLLOUT_FIXTURES", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name)
}

/// The path that a variable of the environment names, or `built` if it is not set.
#[expect(clippy::disallowed_methods, reason = "the tests may run on another machine than that which built them")]
pub fn path_of(variable: &str, built: &str) -> PathBuf {
    std::env::var_os(variable).map_or_else(|| built.into(), PathBuf::from)
}

/// One instruction set for each order of sums, the fastest that has it. Results on any other have the bits of one of
/// these, as `parity::instruction_sets_give_the_same_bits` shows, and the kernels' tests try each set.
pub fn orders() -> Vec<&'static str> {
    let (rounding, plain): (Vec<_>, Vec<_>) = kernels().into_iter().partition(|kernel| rounds_activations(kernel));
    plain.into_iter().take(1).chain(rounding).collect()
}

/// Whether an instruction set rounds activations where weights are bfloat16. In float32 its results are the others'.
pub fn rounds_activations(kernel: &str) -> bool {
    let kernel = kernel.strip_suffix("_emulated").unwrap_or(kernel);
    ["avx512_bf16", "amx"].contains(&kernel)
}

/// Instruction sets on which results are checked, the fastest first: all that this processor has, and by emulation
/// those that it lacks whose results differ from the others'.
pub fn kernels() -> Vec<&'static str> {
    let mut names: Vec<_> = Isa::available().into_iter().map(Isa::name).collect();
    for (kernel, emulated) in [("avx512_bf16", "avx512_bf16_emulated"), ("amx", "amx_emulated")] {
        if !names.contains(&kernel) {
            names.push(emulated);
        }
    }
    println!("instruction sets: {names:?}");
    names
}
