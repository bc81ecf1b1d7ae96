#!/usr/bin/env bash
# What `make cuda…` and `make gpu-check` build and run: cuda.sh COMMAND. The Makefile sets CARGO, PYTHON, CUDA (where the
# toolkit is), CUDA_TARGET (cargo's target directory), EMULATOR (where its libraries are), FEATURES and TRAINERS.
set -euo pipefail
cd "$(dirname "$0")/.."
emulator=$(realpath -m "$EMULATOR")
server=$(realpath -m "$CUDA_TARGET")/release/rollout-server
# `cuda` is the tests' own feature of both crates, and the name of a test of each.
cargo_test=("$CARGO" test --release --workspace --exclude cuda-emulator)
tests=(--test devices --test cuda)

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }

build_emulator() {
    say "Building the emulator of a GPU"
    emulator/build.sh "$emulator"
    # Code for one card is enough, as the emulator takes the PTX.
    export CUDA_CARDS=80
}

use_toolkit() {
    local environment
    environment=$(scripts/cuda-toolkit.sh "$CUDA")
    eval "$environment"
    export CARGO_TARGET_DIR=$CUDA_TARGET
}

build_emulated_server() {
    build_emulator
    use_toolkit
    "$CARGO" build --release --features cuda --bin rollout-server
}

# emulated DEVICES ARGUMENTS...: runs tests on the emulator, where each of them must run.
emulated() {
    LD_LIBRARY_PATH=$emulator CUEMU_DEVICES=$1 ROLLOUT_REQUIRE_GPU=1 "${cargo_test[@]}" "${@:2}"
}

case ${1:?usage: $0 COMMAND} in
build)
    use_toolkit
    "$CARGO" build --release --features "$FEATURES" --bin rollout-server
    ;;
test-binaries)
    build_emulator
    use_toolkit
    say "Building the tests of kernels and server"
    emulated 4 --features cuda --lib "${tests[@]}" --no-run
    ;;
test)
    build_emulator
    use_toolkit
    say "Kernels and server on the emulated GPU"
    emulated 4 --features cuda "${tests[@]}"
    emulated 4 --features cuda --lib -- cuda::
    CUEMU_SHARED=101376 emulated 4 --features cuda --test cuda -- linear:: attention::
    ;;
test-flash)
    build_emulator
    use_toolkit
    say "FlashAttention on the emulated GPU"
    emulated 2 --features flash-attn --test cuda -- flash::
    emulated 2 --features flash-attn --lib -- attention::flash
    ;;
# Both sides of the group are emulated, and torch's store is the real one.
test-trainers)
    build_emulated_server
    ROLLOUT_CUDA_SERVER=$server EMULATOR=$emulator "$TRAINERS/bin/python" -m pytest \
        clients/python/tests/trainers/test_trl_broadcast.py --server "$server"
    ;;
# The server alone finds the emulator: the trainers stay on the CPU.
test-integrations)
    build_emulated_server
    printf '#!/usr/bin/env bash\nLD_LIBRARY_PATH=%q CUEMU_DEVICES=2 exec %q --device cuda "$@"\n' \
        "$emulator" "$server" >"$emulator/rollout-server"
    chmod +x "$emulator/rollout-server"
    for name in swift verl; do
        say "$name with images against emulated GPUs"
        ".venv-$name/bin/python" -m pytest -p no:asyncio -k images "clients/python/tests/integrations/$name" \
            --server "$emulator/rollout-server"
    done
    ;;
check)
    use_toolkit
    "$PYTHON" scripts/cuda_check.py kernels/cu
    CUDA_CARDS=80 "$CARGO" clippy --workspace --release --features cuda --all-targets -- -D warnings
    ;;
gpu-check-binaries)
    say "Building the tests for NVIDIA GPUs: target/gpu-check"
    mkdir -p target/gpu-check
    use_toolkit
    "${cargo_test[@]}" --features "$FEATURES" --lib "${tests[@]}" \
        --no-run --message-format json-render-diagnostics >target/gpu-check/messages
    "$PYTHON" scripts/gpu_check.py collect target/gpu-check <target/gpu-check/messages
    # compute-sanitizer of the toolkit's version.
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --upgrade \
        --target target/gpu-check/sanitizer nvidia-cuda-sanitizer-api==13.0.85
    ;;
# On another machine with a card: copy the checkout, target/gpu-check and the libraries, run this command.
gpu-check)
    peer=()
    if [ -e "$TRAINERS/.installed" ]; then peer=(--peer-python "$TRAINERS/bin/python"); fi
    .venv/bin/python scripts/gpu_check.py run target/gpu-check --must-measure \
        --libraries "$CUDA/nvidia/cu13/lib" "${peer[@]}"
    ;;
*)
    echo "$0: no such command: $1" >&2
    exit 2
    ;;
esac
