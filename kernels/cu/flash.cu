// Rows on their way to and from candle-flash-attn, which takes and gives bfloat16. What it takes and gives of a row lies
// in the row of float32 results that is to be: the queries in its first half, the results in its second. A block for
// each row.

#include <cuda_bf16.h>
#include <stdint.h>

// Rounds queries to nearest even.
extern "C" __global__ void narrow_queries(float *out, int64_t out_stride, const float *q, int64_t q_stride, int width) {
    __nv_bfloat16 *to = reinterpret_cast<__nv_bfloat16 *>(out + blockIdx.x * out_stride);
    for (int column = threadIdx.x; column < width; column += blockDim.x) {
        to[column] = __float2bfloat16_rn(q[blockIdx.x * q_stride + column]);
    }
}

// Widens results in place: what is written of some columns ends before the results of later columns begin.
extern "C" __global__ void widen_results(float *out, int64_t out_stride, int width) {
    float *row = out + blockIdx.x * out_stride;
    const __nv_bfloat16 *from = reinterpret_cast<const __nv_bfloat16 *>(row) + width;
    for (int first = 0; first < width; first += blockDim.x) {
        const int column = first + threadIdx.x;
        const float value = column < width ? __bfloat162float(from[column]) : 0.0f;
        __syncthreads();
        if (column < width) row[column] = value;
    }
}
