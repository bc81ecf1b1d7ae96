#!/usr/bin/env bash
# Lays out a CUDA toolkit from NVIDIA's Python packages, with no GPU, driver or system toolkit, and prints the environment
# that builds with it: eval "$(scripts/cuda-toolkit.sh .cuda)". The second run only prints.
set -euo pipefail
prefix=$(realpath -m "${1:?usage: $0 DIRECTORY}")
here=$(dirname "$(realpath "$0")")
home=$prefix/nvidia/cu13
# NVIDIA's own package pins the parts that belong together. nvdisasm is for `make cuda-check`.
pins=("cuda-toolkit[nvcc,crt,nvvm,cccl,cudart,nvrtc,cublas,curand,profiler]==13.0.2" nvidia-nccl-cu13==2.28.9
    "nvidia-cuda-nvdisasm==13.2.51")
# What candle-flash-attn is compiled with: the commit that it names, which is this version.
cutlass=nvidia-cutlass==3.5.0.0 commit=7d49e6c7e2f8896c47f586706e67e1fb215529dc

if [ "$(cat "$prefix/.pins" 2>/dev/null)" != "${pins[*]} $cutlass" ]; then
    printf '\033[1m==> Installing the CUDA toolkit into %s (1.5 GB)\033[0m\n' "$1" >&2
    rm -rf "$prefix"
    ${PYTHON:-python3} -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
        --no-compile --upgrade --target "$prefix" "${pins[@]}" >&2
    ln -s ../../nccl/lib/libnccl.so.2 "$home/lib/"
    ln -s ../../nccl/include/nccl.h "$home/include/"
    ln -s lib "$home/lib64"
    # The packages have libNAME.so.N only; linkers look for libNAME.so.
    for library in "$home"/lib/lib*.so.*; do
        name=$(basename "$library")
        ln -sf "$name" "$home/lib/${name%%.so.*}.so"
    done
    # libcuda.so.1 comes with a driver. To link without one, a stub has every name of its header.
    mkdir "$home/lib/stubs"
    cat "$home"/include/cuda{,Profiler}.h | grep -oE '\bcu[A-Z][A-Za-z0-9_]*' | sort -u | sed 's/.*/void &(void) {}/' |
        gcc -shared -fPIC -w -x c -Wl,-soname,libcuda.so.1 -o "$home/lib/stubs/libcuda.so" -
    # A second home whose nvcc leaves out what nothing here calls: see scripts/nvcc.
    mkdir -p "$prefix/home/bin"
    ln -s "$here/nvcc" "$prefix/home/bin/nvcc"
    for part in include lib lib64 nvvm; do ln -s "$home/$part" "$prefix/home/$part"; done
    # Laid out as candle-flash-attn's build script keeps a clone of the repository, of which it looks at the commit alone.
    clone=$prefix/git/checkouts/cutlass-${commit:0:16}
    ${PYTHON:-python3} -m pip install --quiet --disable-pip-version-check --root-user-action=ignore \
        --no-compile --no-deps --target "$prefix/cutlass" "$cutlass" >&2
    mkdir -p "$clone/.git/objects" "$clone/.git/refs"
    ln -s "$prefix/cutlass/cutlass_library/source/include" "$clone/include"
    echo "$commit" >"$clone/.git/HEAD"
    echo "${pins[*]} $cutlass" >"$prefix/.pins"
fi
cat <<END
export CUDA_HOME=$prefix/home CUDA_PATH=$prefix/home REAL_NVCC=$home/bin/nvcc NVCC=$prefix/home/bin/nvcc
export NVDISASM=$home/bin/nvdisasm PATH=$prefix/home/bin:\$PATH
export LIBRARY_PATH=$home/lib:$home/lib/stubs\${LIBRARY_PATH:+:\$LIBRARY_PATH}
# candle's own kernels, of which the server starts none in a step; any later card takes their PTX.
export CUDAFORGE_HOME=$prefix CUDA_COMPUTE_CAP=80 CUDAFORGE_THREADS=\${CUDAFORGE_THREADS:-2}
END
