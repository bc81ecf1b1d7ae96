//! The files and instruction sets that tests find on this machine.

use std::path::PathBuf;

use rollout_kernels::cpu::Isa;
use rollout_server::types::TokenId;
use safetensors::SafeTensors;

/// A file or directory of `tests/fixtures`; `ROLLOUT_FIXTURES` says where that is, where a test does not run in the
/// checkout that it was built in.
pub fn fixture(name: &str) -> PathBuf {
    path_of("ROLLOUT_FIXTURES", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures")).join(name)
}

/// Sequences of a fixture with experts, and the bytes of the experts that each of their tokens takes in transformers.
pub fn recorded_routing(model: &str) -> (Vec<Vec<TokenId>>, Vec<Vec<Vec<u8>>>) {
    let file = std::fs::read(fixture(model).join("reference.safetensors")).unwrap();
    let stored = SafeTensors::deserialize(&file).unwrap();
    let (tokens, routing) = (stored.tensor("tokens").unwrap(), stored.tensor("routing").unwrap());
    let (len, row) = (tokens.shape()[1], routing.shape()[2..].iter().product());
    let ids: Vec<TokenId> = tokens.data().as_chunks().0.iter().map(|id| u32::from_le_bytes(*id)).collect();
    let rows: Vec<Vec<u8>> = routing.data().chunks_exact(row).map(<[u8]>::to_vec).collect();
    (ids.chunks_exact(len).map(<[_]>::to_vec).collect(), rows.chunks_exact(len).map(<[_]>::to_vec).collect())
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
