// Rows of float32 activations that are gathered and scattered by their indices. One block for each row.

#include <cuda_bf16.h>
#include <stdint.h>

#include "weights.cuh"

namespace {

template <typename T>
__device__ void embed(const T *table, int first, int tokens, int stride, int run, int padded_run, const uint32_t *wanted,
                      float *out, int64_t out_stride, int width) {
    int64_t row = static_cast<int64_t>(wanted[blockIdx.x]) - first;
    bool is_here = row >= 0 && row < tokens;
    float *to = out + blockIdx.x * out_stride;
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        to[column] = is_here ? static_cast<float>(table[row * stride + place(column, run, padded_run)]) : 0.0f;
    }
}

}  // namespace

extern "C" __global__ void embed_bf16(const __nv_bfloat16 *table, int first, int tokens, int stride, int run,
                                      int padded_run, const uint32_t *wanted, float *out, int64_t out_stride,
                                      int width) {
    embed(table, first, tokens, stride, run, padded_run, wanted, out, out_stride, width);
}

extern "C" __global__ void embed_f32(const float *table, int first, int tokens, int stride, int run, int padded_run,
                                     const uint32_t *wanted, float *out, int64_t out_stride, int width) {
    embed(table, first, tokens, stride, run, padded_run, wanted, out, out_stride, width);
}

// out[i] = x[indices[i]]
extern "C" __global__ void select_rows(const float *x, int64_t x_stride, const uint32_t *indices, float *out,
                                       int64_t out_stride, int width) {
    const float *from = x + indices[blockIdx.x] * x_stride;
    float *to = out + blockIdx.x * out_stride;
    for (int column = threadIdx.x; column < width; column += blockDim.x) to[column] = from[column];
}

// out[indices[i]] += x[i] in the order of i, for `count` indices. One thread for each column.
extern "C" __global__ void add_rows(const float *x, int64_t x_stride, const uint32_t *indices, int count, float *out,
                                    int64_t out_stride, int width) {
    int column = blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= width) return;
    for (int i = 0; i < count; i++) out[indices[i] * out_stride + column] += x[i * x_stride + column];
}
