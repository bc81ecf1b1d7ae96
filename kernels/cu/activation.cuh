// Activation functions, as every kernel that needs one computes it.

#pragma once

// x * sigmoid(x)
__device__ inline float silu(float x) {
    return x / (1.0f + expf(-x));
}
