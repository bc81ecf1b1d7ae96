// What comes before and after the products of linear layers.

#include <cuda_bf16.h>
#include <stdint.h>

#include "leaves.cuh"

using bf16 = __nv_bfloat16;

// Values that a thread packs.
constexpr int CHUNK = 8;

// Rounds a row of float32 to bfloat16 and pads its runs with zeros to `padded_run` values, which is a multiple of
// [`CHUNK`]. A thread works on one chunk.
__device__ __forceinline__ void pack_row(bf16* out, const float* x, int leaves, int run, int padded_run) {
    const int chunk = blockIdx.y * blockDim.x + threadIdx.x;
    if (chunk >= leaves * padded_run / CHUNK) return;
    const int leaf = chunk * CHUNK / padded_run, first = chunk * CHUNK % padded_run;
    const float* from = x + leaf * run + first;
    float values[CHUNK];
    if (first + CHUNK <= run && reinterpret_cast<uintptr_t>(from) % sizeof(float4) == 0) {
        reinterpret_cast<float4*>(values)[0] = reinterpret_cast<const float4*>(from)[0];
        reinterpret_cast<float4*>(values)[1] = reinterpret_cast<const float4*>(from)[1];
    } else {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) values[i] = first + i < run ? from[i] : 0.0f;
    }
    __nv_bfloat162 rounded[CHUNK / 2];
#pragma unroll
    for (int i = 0; i < CHUNK / 2; ++i) rounded[i] = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    const int64_t row = static_cast<int64_t>(blockIdx.x) * leaves * padded_run;
    *reinterpret_cast<uint4*>(out + row + chunk * CHUNK) = *reinterpret_cast<uint4*>(rounded);
}

// Packs rows. A block works on one row.
extern "C" __global__ void __launch_bounds__(256)
    pack_bf16(bf16* out, const float* x, int64_t x_stride, int leaves, int run, int padded_run) {
    pack_row(out, x + blockIdx.x * x_stride, leaves, run, padded_run);
}

// Packs the rows of pairs of rows and experts, of which there are `*count`: rows `rows[i]` of `x`, or row `i` if `rows`
// is null. A block works on one of the most pairs there can be.
extern "C" __global__ void __launch_bounds__(256)
    pack_pairs_bf16(bf16* out, const float* x, int64_t x_stride, int leaves, int run, int padded_run,
                    const uint32_t* rows, const uint32_t* count) {
    if (blockIdx.x >= *count) return;
    const uint32_t row = rows ? rows[blockIdx.x] : blockIdx.x;
    pack_row(out, x + row * x_stride, leaves, run, padded_run);
}

// As [`pack_pairs_bf16`] for float32 weights: copies the rows, which `rows` has.
extern "C" __global__ void gather_pairs(float* out, const float* x, int64_t x_stride, int width, const uint32_t* rows,
                                        const uint32_t* count) {
    if (blockIdx.x >= *count) return;
    const float* from = x + rows[blockIdx.x] * x_stride;
    float* to = out + static_cast<int64_t>(blockIdx.x) * width;
    for (int column = threadIdx.x; column < width; column += blockDim.x) to[column] = from[column];
}

// `out = parts added as a balanced tree + bias`: `parts` are `[count, m, n]`, of which a block works on one row and a
// thread on one column.
extern "C" __global__ void __launch_bounds__(256)
    add_parts(float* out, int64_t out_stride, const float* parts, int count, const float* bias, int n) {
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= n) return;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * n + column, part = static_cast<int64_t>(gridDim.x) * n;
    float sums[MAX_LEAVES];
#pragma unroll
    for (int i = 0; i < MAX_LEAVES; ++i) {
        if (i < count) sums[i] = parts[i * part + at];
    }
    const float sum = sum_leaves(sums, count);
    out[blockIdx.x * out_stride + column] = bias ? sum + bias[column] : sum;
}
