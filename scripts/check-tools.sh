#!/bin/sh
# Says which tool is missing, and how to get it: check-tools.sh python|cargo. PYTHON and CARGO name others than the usual.
fail() { echo "make: $*" >&2; exit 1; }
python=${PYTHON:-python3} cargo=${CARGO:-cargo}
case ${1:?usage: $0 python|cargo} in
python)
    command -v "$python" >/dev/null || fail "no $python: install Python 3.10 or newer, or say make PYTHON=..."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version) is too old: 3.10 or newer is needed; say make PYTHON=..."
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python has no venv: install it (Debian, Ubuntu: apt-get install python3-venv)"
    ;;
cargo) command -v "$cargo" >/dev/null || fail "no $cargo: install Rust (rustup), or say make CARGO=..." ;;
esac
