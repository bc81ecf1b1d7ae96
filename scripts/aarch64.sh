#!/bin/sh
# Builds for aarch64 and runs the result under qemu-user: `test` the kernels' tests, `build` the server. Installs
# Debian's cross compiler and emulator if they are missing and we are root.
set -eu
target=aarch64-unknown-linux-gnu
packages="gcc-aarch64-linux-gnu g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static"
if ! command -v aarch64-linux-gnu-g++ qemu-aarch64-static >/dev/null; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "make: tests for aarch64 need Debian's packages $packages" >&2
        exit 1
    fi
    printf '\033[1m==> Installing the cross compiler and the emulator for aarch64\033[0m\n'
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages >/dev/null
fi
rustup target add "$target"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64-static -L /usr/aarch64-linux-gnu"
case $1 in
# The skipped test starts itself once more, which the emulator cannot.
test) exec "${CARGO:-cargo}" test --release --target "$target" --package rollout-kernels --lib -- --skip a_test_that_cannot_run ;;
build) exec "${CARGO:-cargo}" build --release --target "$target" --bin rollout-server ;;
esac
