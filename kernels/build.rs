//! Compiles the CUDA kernels, cu/*.cu, to one fat binary each: machine code for the cards that are served, and PTX of
//! the oldest for later ones and for the emulator. Does nothing without the feature `cuda`.

#![expect(clippy::disallowed_methods, reason = "cargo tells a build script what it builds only in the environment")]

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Compute capabilities that get machine code of their own: A100, H100 and H200, B200, and workstation Blackwell.
const CARDS: [&str; 4] = ["80", "90", "100", "120"];

fn main() {
    println!("cargo:rerun-if-changed=cu");
    println!("cargo:rerun-if-env-changed=NVCC");
    println!("cargo:rerun-if-env-changed=CUDA_CARDS");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return;
    }
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets it"));
    let cards = env::var("CUDA_CARDS").unwrap_or_else(|_| CARDS.join(","));
    let mut sources: Vec<PathBuf> =
        std::fs::read_dir("cu").expect("kernels/cu").map(|e| e.expect("a file").path()).collect();
    sources.retain(|path| path.extension().is_some_and(|extension| extension == "cu"));
    sources.sort();
    for source in sources {
        compile(&source, &out, &cards);
    }
}

/// Compiles `source` for the comma-separated compute capabilities `cards`, the first of them as PTX too.
fn compile(source: &Path, out: &Path, cards: &str) {
    let nvcc = env::var("NVCC").unwrap_or_else(|_| "nvcc".into());
    let binary = out.join(source.file_stem().expect("a name")).with_extension("fatbin");
    let mut command = Command::new(&nvcc);
    // The emulator reads the PTX of the fat binary, which must not be compressed for that. Without `--fmad=false` ptxas
    // may fuse a product and a sum where the PTX has two instructions: a kernel that wants that says `fmaf`.
    command.args(["-O3", "-std=c++17", "-lineinfo", "-fatbin", "--compress-mode=none", "--fmad=false", "-Icu"]);
    for (i, card) in cards.split(',').enumerate() {
        let code = if i == 0 { format!("[sm_{card},compute_{card}]") } else { format!("sm_{card}") };
        command.arg(format!("-gencode=arch=compute_{card},code={code}"));
    }
    let status = command.arg("-o").arg(&binary).arg(source).status();
    let status = status.unwrap_or_else(|e| panic!("cannot run {nvcc}: {e}; `make cuda` lays out the toolkit"));
    assert!(status.success(), "{nvcc} failed on {}", source.display());
}
