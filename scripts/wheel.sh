#!/usr/bin/env bash
# Builds the packages that pip installs, of the client and of the server: wheel.sh TOOLS OUT. TOOLS is the folder of the
# commands python, maturin and zig, OUT what gets the packages; it is emptied first.
set -euo pipefail
cd "$(dirname "$0")/.."
tools=$(realpath "${1:?usage: $0 TOOLS OUT}") out=$(realpath -m "${2:?usage: $0 TOOLS OUT}")
rm -rf "$out"
"$tools/python" -m build --outdir "$out" clients/python
export PATH="$tools:$PATH" CARGO_TARGET_DIR=$PWD/target
cd packaging/server
maturin build --sdist --zig --compatibility manylinux_2_28 --out "$out"
