// Rotary embedding.

#include <stdint.h>

// Rotates each head of each row in place, each first half with the second; cos and sin are [positions, head_dim / 2].
// One block for each row.
extern "C" __global__ void rope(float *x, int64_t x_stride, int heads, int head_dim, const uint32_t *positions,
                                const float *cos, const float *sin) {
    int half = head_dim / 2;
    int64_t angles = static_cast<int64_t>(positions[blockIdx.x]) * half;
    for (int pair = threadIdx.x; pair < heads * half; pair += blockDim.x) {
        int i = pair % half;
        float *head = x + blockIdx.x * x_stride + pair / half * head_dim;
        float c = cos[angles + i], s = sin[angles + i], a = head[i], b = head[half + i];
        head[i] = a * c - b * s;
        head[half + i] = b * c + a * s;
    }
}
