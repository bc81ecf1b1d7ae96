#!/usr/bin/env bash
# Builds the image from the committed docker/Dockerfile without a Docker engine, and tries it: docker/image_check.py
# starts it from its root file system, and beside it Prometheus, as docker/compose.yaml does. Run it as
# `make image-check`, as root on Debian.
#
# The two images that the Dockerfile begins with are made here, by debootstrap and of the Rust toolchain at hand, since
# no registry is asked. They are close to those of the registry, not the same: the stand-in for rust:1-slim-trixie also
# has this machine's certificates and cargo's configuration, so that a build behind a proxy finds its crates.
#
# Images, layers and what cargo builds are below $IMAGE_CHECK_DIR (target/image-check), about 5 GB, and removed at the
# end. With IMAGE_CHECK_KEEP=1 the base images, the crates and cargo's target directory stay there for the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly suite=trixie debian=debian:trixie-slim rust=rust:1-slim-trixie image=rollout-server
readonly python=${PYTHON:-.venv/bin/python}

fail() {
    echo "image-check: $*" >&2
    exit 1
}

# step TEXT COMMAND...: runs it and says how long it took; what it prints goes to $dir/log, and to here if it fails. The
# command is no condition of anything, so that it ends at its first error.
step() {
    local start=$SECONDS
    running=$1
    shift
    printf '==> %s\n' "$running"
    "$@" >>"$dir/log" 2>&1
    running=
    printf '    %d s\n' $((SECONDS - start))
}

# buildah with a storage of its own. Layers are overlays where the kernel mounts them, and copies elsewhere.
b() {
    TMPDIR=$dir/tmp buildah --root "$dir/storage" --runroot "$dir/run" --storage-driver "$driver" "$@"
}

has_image() {
    b inspect --type image "$1" >/dev/null 2>&1
}

overlays() {
    local try=$dir/tmp/overlay
    mkdir -p "$try"/{lower,upper,work,merged}
    mount -t overlay overlay -o "lowerdir=$try/lower,upperdir=$try/upper,workdir=$try/work" "$try/merged" 2>/dev/null \
        && umount "$try/merged"
}

# Debian's address, as this machine's apt has it.
mirror() {
    apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(COMPONENT)' 'Created-By: Packages' \
        | awk '$2 == "Debian" && $3 == "main" { print $1; exit }'
}

install_tools() {
    apt-get update
    apt-get install --yes --no-install-recommends buildah debootstrap iproute2 git
}

make_debian() {
    local root=$dir/root container mount
    rm -rf --one-file-system "$root"
    debootstrap --variant=minbase "$suite" "$root" "$(mirror)"
    # What the slim image leaves out.
    find "$root/usr/share/doc" -type f ! -name copyright -delete
    rm -rf "$root"/usr/share/{man,info,locale,lintian}/* "$root"/var/cache/apt/* "$root"/var/lib/apt/lists/*
    container=$(b from scratch)
    mount=$(b mount "$container")
    cp -a "$root/." "$mount"
    b config --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --cmd bash "$container"
    b commit --rm "$container" "$debian"
    rm -rf --one-file-system "$root"
}

make_rust() {
    local container mount toolchain cargo_home=${CARGO_HOME:-$HOME/.cargo} file
    toolchain=$(rustc --print sysroot)
    container=$(b from --pull-never "$debian")
    b run --isolation chroot "$container" -- bash -c \
        'apt-get update && apt-get install --yes --no-install-recommends ca-certificates gcc libc6-dev'
    mount=$(b mount "$container")
    mkdir -p "$mount"/usr/local/{cargo/bin,rustup/lib/rustlib}
    cp -a "$toolchain/bin" "$mount/usr/local/rustup/"
    cp -a "$toolchain"/lib/*.so* "$mount/usr/local/rustup/lib/"
    cp -a "$toolchain"/lib/rustlib/*-unknown-linux-* "$mount/usr/local/rustup/lib/rustlib/"
    ln -s /usr/local/rustup/bin/{cargo,rustc,rustdoc} "$mount/usr/local/cargo/bin/"
    cp /etc/ssl/certs/ca-certificates.crt "$mount/etc/ssl/certs/"
    for file in config.toml credentials.toml; do
        if [[ -f $cargo_home/$file ]]; then cp "$cargo_home/$file" "$mount/usr/local/cargo/"; fi
    done
    b config --env CARGO_HOME=/usr/local/cargo --env PATH=/usr/local/cargo/bin:/usr/bin:/bin "$container"
    b commit --rm "$container" "$rust"
}

# Of the commit's files, so that what is not committed does not help. To a target directory that was kept they are new
# (-m), whatever commit it was built from.
build() {
    if has_image "$image"; then b rmi --force "$image"; fi
    rm -rf "$dir/context"
    mkdir "$dir/context"
    git archive HEAD | tar -xm -C "$dir/context"
    b bud --isolation chroot --format docker --pull-never -f "$dir/context/docker/Dockerfile" -t "$image" "$dir/context"
    rm -rf "$dir/context"
}

# The program alone: the package would start a service.
get_prometheus() {
    apt-get update
    (cd "$dir/tmp" && apt-get download prometheus && dpkg -x prometheus_*.deb "$dir/prometheus" && rm prometheus_*.deb)
}

# Takes the image from the storage into a root file system, and beside it what the image says about its start.
unpack() {
    local container mount
    container=$(b from --pull-never "$image")
    mount=$(b mount "$container")
    b inspect --type image "$image" >"$dir/image.json"
    echo "$mount" >"$dir/mount"
}

clean() {
    local status=$?
    if [[ -n ${running:-} ]]; then
        tail -n 60 "$dir/log" >&2
        echo "image-check: failed: $running; the whole output is in $dir/log" >&2
    fi
    if [[ -n ${driver:-} ]]; then
        b rm --all >/dev/null 2>&1 || true
        if [[ -z ${IMAGE_CHECK_KEEP:-} ]]; then b rmi --all --force >/dev/null 2>&1 || true; fi
    fi
    if [[ -n ${IMAGE_CHECK_KEEP:-} ]]; then
        printf '==> Kept in %s for the next run: %s\n' "$dir" "$(du -sh "$dir" | cut -f1)"
    elif ((status == 0)); then
        rm -rf --one-file-system "$dir"
    else
        find "$dir" -mindepth 1 -maxdepth 1 ! -name log -exec rm -rf --one-file-system {} +
    fi
}

((EUID == 0)) || fail "needs root, for debootstrap and chroot"
command -v apt-get >/dev/null || fail "needs Debian or one of its relatives: debootstrap and buildah come from apt"
[[ -x $python ]] || fail "no $python: run make setup"
mkdir -p "${IMAGE_CHECK_DIR:-target/image-check}"
dir=$(realpath "${IMAGE_CHECK_DIR:-target/image-check}")
readonly dir
mkdir -p "$dir/tmp"
: >"$dir/log"
trap clean EXIT
if ! type -P buildah debootstrap ip git >/dev/null; then
    step "Installing buildah and debootstrap with apt-get" install_tools
fi
if overlays; then driver=overlay; else driver=vfs; fi
readonly driver

has_image "$debian" || step "Making a stand-in for $debian with debootstrap" make_debian
has_image "$rust" || step "Making a stand-in for $rust with $(rustc --version | cut -d' ' -f1,2)" make_rust
step "Building $(git rev-parse --short HEAD) with docker/Dockerfile (about ten minutes on two cores)" build
step "Unpacking the image" unpack
[[ -x $dir/prometheus/usr/bin/prometheus ]] || step "Getting Debian's Prometheus" get_prometheus
printf '    the image has %d MB\n' $(($(du -s --block-size=1M "$(cat "$dir/mount")" | cut -f1)))
# In a network of its own, so that its ports are free and nobody else reaches them.
unshare --net -- sh -c 'ip link set lo up && exec "$@"' sh \
    "$python" docker/image_check.py "$(cat "$dir/mount")" "$dir/image.json" "$dir/prometheus/usr/bin/prometheus"
