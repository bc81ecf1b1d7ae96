// Rotary embedding.

#include <stdint.h>

// Rotates the first rotary_dim elements of each head of each row in place, their first half with the second; positions
// are [rows, axes], cos and sin [positions, rotary_dim / 2]. Two bits of axes0 to axes3 for each frequency are the axis
// of its position, 32 frequencies a word (`packed` in src/cuda/rope.rs). One block for each row.
extern "C" __global__ void rope(float *x, int64_t x_stride, int heads, int head_dim, int rotary_dim,
                                const uint32_t *positions, int axes, const float *cos, const float *sin,
                                uint64_t axes0, uint64_t axes1, uint64_t axes2, uint64_t axes3) {
    int half = rotary_dim / 2;
    positions += static_cast<int64_t>(blockIdx.x) * axes;
    uint32_t first = positions[0], second = axes > 1 ? positions[1] : 0, third = axes > 2 ? positions[2] : 0;
    for (int pair = threadIdx.x; pair < heads * half; pair += blockDim.x) {
        int i = pair % half;
        uint64_t word = i < 64 ? (i < 32 ? axes0 : axes1) : (i < 96 ? axes2 : axes3);
        int axis = (word >> (2 * (i % 32))) & 3;
        int64_t angle = static_cast<int64_t>(axis == 0 ? first : axis == 1 ? second : third) * half + i;
        float *head = x + blockIdx.x * x_stride + pair / half * head_dim;
        float c = cos[angle], s = sin[angle], a = head[i], b = head[half + i];
        head[i] = a * c - b * s;
        head[half + i] = b * c + a * s;
    }
}
