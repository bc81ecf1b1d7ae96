#!/usr/bin/env bash
# Formatting, spelling and lints; the first failure ends it. Needs the environment .venv (`make setup`). CARGO names
# another cargo than the usual.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo=${CARGO:-cargo} bin=.venv/bin
python_sources=(clients benches tests docker examples scripts)

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

say Formatting
"$cargo" fmt --all --check
$bin/ruff format --check "${python_sources[@]}"
say Lints
$bin/ruff check "${python_sources[@]}"
git ls-files -z | xargs -0 $bin/codespell
"$cargo" clippy --workspace --release --all-targets -- -D warnings
RUSTDOCFLAGS='-D warnings' "$cargo" doc --workspace --release --no-deps --document-private-items
