// Normalisation of rows. A sum has one order for each width: the threads of a group take every so many values, and
// their sums meet in a butterfly.

#include <stdint.h>

#include "warp.cuh"

namespace {

// Threads of a block that normalises a row.
constexpr int ROW_THREADS = 128;

// The sum over a block of ROW_THREADS, in every thread. Two calls have a barrier between them.
__device__ float row_sum(float x) {
    __shared__ float sums[ROW_THREADS / WARP];
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) sums[threadIdx.x / WARP] = x;
    __syncthreads();
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

__device__ float inverse_rms(float squares, int width, float eps) {
    return 1.0f / sqrtf(squares / width + eps);
}

}  // namespace

// out = x / rms(x) * weight. One block for each row.
extern "C" __global__ void rms_norm(const float *x, int64_t x_stride, const float *weight, float eps, float *out,
                                    int64_t out_stride, int width) {
    const float *from = x + blockIdx.x * x_stride;
    float *to = out + blockIdx.x * out_stride;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) squares = fmaf(from[i], from[i], squares);
    float factor = inverse_rms(row_sum(squares), width, eps);
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) to[i] = from[i] * factor * weight[i];
}

// residual += x (+ bias), then out = rms_norm(residual). One block for each row; `bias` may be null.
extern "C" __global__ void add_rms_norm(float *residual, int64_t residual_stride, const float *x, int64_t x_stride,
                                        const float *bias, const float *weight, float eps, float *out,
                                        int64_t out_stride, int width) {
    float *sum = residual + blockIdx.x * residual_stride;
    const float *term = x + blockIdx.x * x_stride;
    float *to = out + blockIdx.x * out_stride;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) {
        float value = sum[i] + (bias == nullptr ? term[i] : term[i] + bias[i]);
        sum[i] = value;
        squares = fmaf(value, value, squares);
    }
    float factor = inverse_rms(row_sum(squares), width, eps);
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) to[i] = sum[i] * factor * weight[i];
}

// Normalises each head of each row in place. One warp for each head of a row.
extern "C" __global__ void rms_norm_heads(float *x, int64_t x_stride, const float *weight, float eps, int heads,
                                          int head_dim, int rows) {
    int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (warp >= static_cast<int64_t>(rows) * heads) return;
    float *head = x + warp / heads * x_stride + warp % heads * head_dim;
    int lane = threadIdx.x % WARP;
    float squares = 0.0f;
    for (int i = lane; i < head_dim; i += WARP) squares = fmaf(head[i], head[i], squares);
    float factor = inverse_rms(warp_sum(squares), head_dim, eps);
    for (int i = lane; i < head_dim; i += WARP) head[i] = head[i] * factor * weight[i];
}

// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias. One block for each row.
extern "C" __global__ void layer_norm(const float *x, int64_t x_stride, const float *weight, const float *bias,
                                      float eps, float *out, int64_t out_stride, int width) {
    const float *from = x + blockIdx.x * x_stride;
    float *to = out + blockIdx.x * out_stride;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) sum += from[i];
    float mean = row_sum(sum) / width;
    __syncthreads();
    float squares = 0.0f;
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) {
        float apart = from[i] - mean;
        squares = fmaf(apart, apart, squares);
    }
    float factor = inverse_rms(row_sum(squares), width, eps);
    for (int i = threadIdx.x; i < width; i += ROW_THREADS) to[i] = fmaf((from[i] - mean) * factor, weight[i], bias[i]);
}
