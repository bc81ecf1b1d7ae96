// Activations of feed-forward layers.

#include <stdint.h>

#include "activation.cuh"

// out = silu(left half of gate_up) * right half. One block for each row.
extern "C" __global__ void silu_mul(const float *gate_up, int64_t gate_up_stride, float *out, int64_t out_stride,
                                    int width) {
    const float *gate = gate_up + blockIdx.x * gate_up_stride;
    float *to = out + blockIdx.x * out_stride;
    for (int i = threadIdx.x; i < width; i += blockDim.x) to[i] = silu(gate[i]) * gate[width + i];
}

// x = gelu(x). One block for each row.
extern "C" __global__ void gelu(float *x, int64_t x_stride, int width) {
    float *row = x + blockIdx.x * x_stride;
    for (int i = threadIdx.x; i < width; i += blockDim.x) row[i] = gelu_of(row[i]);
}
