#!/usr/bin/env bash
# Builds the emulator and lays out a folder that stands in for the driver and NVIDIA's libraries, for LD_LIBRARY_PATH.
# Usage: build.sh FOLDER
set -euo pipefail
root=$(dirname "$(dirname "$(realpath "$0")")")
out=$(realpath -m "${1:?usage: $0 FOLDER}")
target=${CARGO_TARGET_DIR:-$root/target}
cargo build --release --locked --manifest-path "$root/Cargo.toml" --package cuda-emulator
mkdir -p "$out"
# Renamed over the old one, so that a program that runs keeps the library that it has.
cp "$target/release/libcuda.so" "$out/.libcuda.so.1.new"
mv "$out/.libcuda.so.1.new" "$out/libcuda.so.1"
for name in libcublas.so.13 libcublasLt.so.13 libcudart.so.13 libcurand.so.10 libnccl.so.2 libnvidia-ml.so.1; do
    ln -sf libcuda.so.1 "$out/$name"
done
