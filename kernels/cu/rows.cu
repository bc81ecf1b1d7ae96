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

__device__ void copy_row(const float *x, float *out, int width) {
    for (int column = threadIdx.x; column < width; column += blockDim.x) out[column] = x[column];
}

__device__ void add_row(const float *x, float *out, int width) {
    for (int column = threadIdx.x; column < width; column += blockDim.x) out[column] += x[column];
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
    copy_row(x + indices[blockIdx.x] * x_stride, out + blockIdx.x * out_stride, width);
}

// out[indices[i]] = x[i], for indices that are all different.
extern "C" __global__ void put_rows(const float *x, int64_t x_stride, const uint32_t *indices, float *out,
                                    int64_t out_stride, int width) {
    copy_row(x + blockIdx.x * x_stride, out + indices[blockIdx.x] * out_stride, width);
}

// out[indices[i]] += x[i], for indices that are all different.
extern "C" __global__ void add_rows(const float *x, int64_t x_stride, const uint32_t *indices, float *out,
                                    int64_t out_stride, int width) {
    add_row(x + blockIdx.x * x_stride, out + indices[blockIdx.x] * out_stride, width);
}

// out += x
extern "C" __global__ void add(const float *x, int64_t x_stride, float *out, int64_t out_stride, int width) {
    add_row(x + blockIdx.x * x_stride, out + blockIdx.x * out_stride, width);
}

// out += scale * x, with a factor for each column.
extern "C" __global__ void add_scaled(const float *x, int64_t x_stride, const float *scale, float *out,
                                      int64_t out_stride, int width) {
    const float *from = x + blockIdx.x * x_stride;
    float *to = out + blockIdx.x * out_stride;
    for (int column = threadIdx.x; column < width; column += blockDim.x) to[column] += scale[column] * from[column];
}
