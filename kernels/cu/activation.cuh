// Activation functions, as every kernel that needs one computes it.

#pragma once

// x * sigmoid(x). The sum is never made one with a product, so every kernel gets the same bits.
__device__ inline float silu(float x) {
    return x / __fadd_rn(1.0f, expf(-x));
}
